"""Every use of the private modules of Ray Train and Ray Data, each with what Ray 2.60's public API lacks."""

import contextlib
import copy
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem
from ray.actor import ActorHandle

# How often an executor of Ray Data calls the actors of Ray Data, which has no option for this.
from ray.data._internal.block_batching.iter_batches import BatchIterator

# Reserves CPUs for the tasks of Ray Data. `ray.autoscaler.sdk.request_resources` is one request for all of a cluster,
# and Ray Train does not take it into account when it sizes an elastic group.
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import (
    ResourceRequestPriority as ResourceRequestPriority,
)
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    DefaultAutoscalingCoordinator as DefaultAutoscalingCoordinator,
)
from ray.data._internal.cluster_autoscaler.rate_based_cluster_autoscaler import RateBasedClusterAutoscaler
from ray.data._internal.execution.resource_manager import ResourceManager
from ray.data._internal.execution.streaming_executor import StreamingExecutor
from ray.train import Checkpoint, CheckpointUploadMode, DataConfig, Result, RunConfig, ScalingConfig

# Ray Train starts their actors in any case, each a process that takes seconds to start.
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

# Names of the list of a run's reported checkpoints, which Ray reads at a start, and of a file that Ray leaves behind.
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, VALIDATE_STORAGE_MARKER_FILENAME

# A failed rendezvous has no public exception, and Ray Train retries after no other exception of a start.
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError as WorkerGroupStartupFailedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError as WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.controller import TrainController as RayTrainController

# `FailureConfig` counts failures. It cannot tell permanent failures from others.
from ray.train.v2._internal.execution.failure_handling import FailureDecision as FailureDecision
from ray.train.v2._internal.execution.failure_handling import FailurePolicy as FailurePolicy
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.scaling_policy.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils
from ray.train.v2._internal.execution.training_report import _TrainingReport

# Gives a loop its argument by the same rules as Ray's trainer, which has this only as a private method.
from ray.train.v2._internal.util import construct_train_func as construct_train_func

# The trainer waits for its controller in C++, and therefore without end if its cluster is lost.
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import _JaxBackend

from ray_jax_launch._errors import LaunchError

_logger = logging.getLogger("ray_jax_launch")
# The executors of all workers together call each actor of Ray Data this often.
_DATA_CALLS_PER_S = 20
# A request of an executor expires after 180 s.
_MAX_REQUEST_GAP_S = 90.0
SNAPSHOT_NAME, STORAGE_MARKER_NAME = CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, VALIDATE_STORAGE_MARKER_FILENAME

# It knows TPU slices. Ray has no public name for it: `JaxConfig` takes no other backend.
JaxBackend = _JaxBackend


def preemption_noticed() -> Callable[[], bool]:
    """Return a function, for any thread, that returns whether a node of this worker's group is about to be preempted.

    `ray.train.get_preemption_info` is a barrier of all ranks. Call this in the thread of the training loop: Ray finds a
    worker's context by its thread.
    """
    context = get_train_context().preemption_context
    return lambda: context.preemption_info is not None


def limit_data_calls(num_executors: int) -> None:
    """Let an executor of Ray Data in this process call Ray's actors less often if there are many such processes.

    By default each executor asks for its resources every second, requests them every ten seconds and sends two kinds of
    metrics every five seconds, to one Python actor each.

    Args:
        num_executors: the number of processes with an executor.
    """
    every_s = num_executors / _DATA_CALLS_PER_S
    ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = max(1.0, every_s)  # pyright: ignore[reportAttributeAccessIssue]
    StreamingExecutor.UPDATE_METRICS_INTERVAL_S = BatchIterator.UPDATE_METRICS_INTERVAL_S = max(5.0, 2 * every_s)
    defaults: Any = RateBasedClusterAutoscaler.__init__.__kwdefaults__
    defaults["min_gap_between_autoscaling_requests_s"] = min(max(10.0, every_s), _MAX_REQUEST_GAP_S)


def datasets_to_split(config: DataConfig) -> Any:
    """Return the names of the datasets that a config splits. Ray's actor of datasets reads this private attribute."""
    return config._datasets_to_split


def keeping_order(config: DataConfig, datasets: Mapping[str, Any]) -> DataConfig:
    """Return a copy of a config that keeps the order of each dataset whose own options ask for it.

    Ray replaces all options of a dataset by those of the config, or of the process, and so loses `preserve_order`.
    """
    kept, resolve = copy.copy(config), config._resolve_execution_options

    def resolve_with_order(dataset_name: str) -> Any:
        options = resolve(dataset_name)
        options.preserve_order |= datasets[dataset_name].context.execution_options.preserve_order
        return options

    kept._resolve_execution_options = resolve_with_order
    return kept


def write_file(filesystem: FileSystem, path: str, text: str) -> None:
    """Write a file which a reader sees complete or not at all. In object storage every object is written this way."""
    storage = filesystem
    while isinstance(storage, SubTreeFileSystem):
        storage = storage.base_fs
    temporary = f"{path}.new" if isinstance(storage, LocalFileSystem) else path
    with filesystem.open_output_stream(temporary) as file:
        file.write(text.encode())
    if temporary != path:
        filesystem.move(temporary, path)


def _write_snapshot(self: CheckpointManager) -> None:
    storage = self._storage_context
    write_file(storage.storage_filesystem, storage.checkpoint_manager_snapshot_path, self._save_state())


class AtomicSnapshots(ControllerCallback):
    """Makes Ray Train's controller replace its list of checkpoints. Ray 2.60 writes it in place.

    A start fails if the list is half-written.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Replace the method in the controller's process, before the first report."""
        CheckpointManager._write_state_to_storage = _write_snapshot


class WaitingPolicy(ElasticScalingPolicy):
    """Ray's elastic policy for loops that save before the number of workers changes.

    Ray's own stops healthy workers at once when the cluster has room for more of them, and they lose what they have not
    saved. This one requests a stop, and the group starts again once its loop has saved and returned. If no loop calls
    `stop_requested`, the group keeps its size.

    It also says that it waits for nodes, and ends. Ray's own waits in silence, without limit. The group has the largest
    allowed number of workers for which there is room.

    Args:
        scaling_config: of an elastic group.
        allowed_counts: the numbers of workers that the group may have.
        on_wait: called with a line for the log when a wait for nodes begins.
        request_resize: called when the cluster has room for another number of workers, perhaps several times.
        wait_s: seconds to wait, at the start and each time that too few nodes are left.
    """

    _ASK_EVERY_S = 0.1  # Ray's controller asks again at once, and would use a whole CPU
    _QUIET_S = 10.0  # the coordinator of resources needs some seconds to answer

    def __init__(
        self,
        scaling_config: ScalingConfig,
        allowed_counts: Sequence[int],
        on_wait: Callable[[str], Any],
        request_resize: Callable[[], Any],
        wait_s: float,
    ) -> None:
        super().__init__(scaling_config)
        self._allowed_counts = allowed_counts
        self._on_wait = on_wait
        self._request_resize = request_resize
        self._wait_s = wait_s
        self._since_s: float | None = None
        self._has_logged = False

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible = super()._count_possible_workers(reserved_resources)
        return max((count for count in self._allowed_counts if count <= possible), default=0)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Request a stop where Ray would resize, and let the group run until then."""
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if not isinstance(decision, ResizeDecision):
            return decision
        self._request_resize()
        return NoopDecision()

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Return whether to start the group.

        Raises:
            TimeoutError: too few nodes have come.
        """
        decision = super().make_decision_for_non_running_worker_group()
        if not isinstance(decision, NoopDecision):
            self._since_s, self._has_logged = None, False
            return decision
        now = time.monotonic()
        self._since_s = now if self._since_s is None else self._since_s
        what = f"the cluster has too few free resources for {self.scaling_config.min_workers} workers"
        if now - self._since_s > self._wait_s:
            raise TimeoutError(f"{what}, and got no more within {self._wait_s:.0f} s")
        if now - self._since_s > self._QUIET_S and not self._has_logged:
            self._has_logged = True
            self._on_wait(f"{what}; waiting up to {self._wait_s:.0f} s for more")
        time.sleep(self._ASK_EVERY_S)
        return decision


class FixedPolicy(FixedScalingPolicy):
    """Ray's policy for a group of a fixed size, on a cluster of this machine alone.

    Ray starts an actor, its coordinator of resources, and waits for it. The actor tells the autoscaler what is wanted,
    and Ray Data what the group leaves. There is no autoscaler here. This policy tells the actor what the group has as
    soon as Ray Data has started it.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Make the client of the coordinator."""
        self._requester_id = f"train-{train_run_context.run_id}"
        self._coordinator_client = _ClientOfExisting(self._requester_id)


class _ClientOfExisting(TrainAutoscalingCoordinatorClient):
    """A client of the coordinator that does not start it."""

    def send_resource_request(self, scaling_config: Any, num_workers: int) -> None:
        """Tell the coordinator what the group has, if there is one. The controller calls this again."""
        if self._exists():
            super().send_resource_request(scaling_config, num_workers)

    def cancel_resource_request(self) -> None:
        """Tell the coordinator that the group has ended, if there is one."""
        if self._exists():
            super().cancel_resource_request()

    def _exists(self) -> bool:
        try:
            ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
        except ValueError:
            return False
        return True


class _NoShards:
    """The datasets of a run that has none."""

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """Raise the error of a name that is not among the datasets, as Ray does."""
        name = dataset_info.dataset_name
        raise KeyError(f"datasets must have {name!r}, got no datasets. Pass it by datasets=.")


class _NoDatasetsCallback(DatasetsCallback):
    """Ray's callback without its actor. It still gives the workers the driver's `ray.data.DataContext`."""

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Return what each worker's context gets."""
        return {"dataset_shard_provider": [_NoShards()] * len(workers)}


class TrainController(RayTrainController):
    """Ray's controller with environment variables of the driver.

    Ray passes them by `runtime_env`, and then starts another process in place of one that it has ready.
    """

    def __init__(self, variables: Mapping[str, str], **arguments: Any) -> None:
        os.environ.update(variables)
        super().__init__(**arguments)


class Trainer(JaxTrainer):
    """Ray's trainer with other policies, without Ray's handler of SIGINT and without actors that have nothing to do.

    Ray's handler stops the workers at once. No argument replaces the handler or a policy, or leaves out an actor.

    Attributes:
        policies: arguments of Ray Train's controller: `failure_policy`, and `scaling_policy` of an elastic group.
        on_start: called with Ray Train's controller, in the main thread alone.
        wait: returns the result of a call of the controller.
        outcome: what the controller returned, also if `fit` raises its error.
    """

    policies: dict[str, Any]
    on_start: Callable[[ActorHandle], None]
    wait: Callable[[Any], Any]
    outcome: Result

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        # Its actor stays forever if the controller dies early. The driver removes the placement groups of a dead
        # controller, and Ray those of a dead driver.
        callbacks = [one for one in callbacks if not isinstance(one, PlacementGroupCleanerCallback)]
        if self.datasets:
            return callbacks
        no_datasets = _NoDatasetsCallback(self.train_run_context, {})
        return [no_datasets if isinstance(one, DatasetsCallback) else one for one in callbacks]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        """Run the controller as Ray does, but wait for it by `wait`."""
        module: Any = data_parallel_trainer
        variables = module.get_env_vars_to_propagate()
        variables.setdefault(
            module.RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, module.DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE
        )
        here = {module.ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        make: Any = ray.remote(num_cpus=0, label_selector=here)(TrainController)
        controller = make.remote(variables, **arguments | self.policies)
        if threading.current_thread() is threading.main_thread():
            self.on_start(controller)
        self.wait(controller.run.remote())
        self.outcome = self.wait(controller.get_result.remote())
        return self.outcome


@contextlib.contextmanager
def _calling_pydantic() -> Iterator[None]:
    """Ignore warnings: Ray 2.60 reads and writes its list of checkpoints by deprecated methods of pydantic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class _LocalCheckpoints(CheckpointManager):
    _write_state_to_storage = _write_snapshot

    def _notify(self) -> None:
        """Do nothing: nobody waits in this process, which has no event loop."""


class LocalReports(LocalTrainFnUtils):
    """The functions of `ray.train` for a loop in this process. Ray's own keep no reported checkpoint.

    Args:
        run_config: of the run.
        datasets: by name for `ray.train.get_dataset_shard`.
        on_report: called with reported metrics.
    """

    def __init__(
        self, run_config: RunConfig, datasets: dict[str, Any], on_report: Callable[[dict[str, Any]], Any]
    ) -> None:
        name = run_config.name
        assert name is not None, "Ray has made one"
        super().__init__(name, datasets)
        self._storage = run_config.storage_context
        self._on_report = on_report
        assert run_config.checkpoint_config is not None, "Ray has made one"
        with _calling_pydantic():
            # Ray declares the config of its former version.
            self._manager = _LocalCheckpoints(run_config.checkpoint_config, self._storage)  # pyright: ignore[reportArgumentType]

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
        validation: Any = False,
    ) -> None:
        """Keep the checkpoint in the run's folder, as for a group.

        Raises:
            LaunchError: a validation is requested, or the folder to delete holds the run's folder.
        """
        if validation:
            raise LaunchError(
                f"validation must be False in local mode, got {validation}. Leave it out, or validate in the loop."
            )
        if checkpoint is not None:
            if delete_local_checkpoint_after_upload:
                self._check_deletable(Path(checkpoint.path))
            name = checkpoint_dir_name or self._storage.make_default_checkpoint_dir_name()
            kept = checkpoint
            if checkpoint_upload_fn is not None:
                kept = checkpoint_upload_fn(checkpoint, name)
            elif checkpoint_upload_mode is not CheckpointUploadMode.NO_UPLOAD:
                kept = self._storage.persist_current_checkpoint(checkpoint, name)
            if delete_local_checkpoint_after_upload and kept.path != checkpoint.path:
                shutil.rmtree(checkpoint.path)
            with _calling_pydantic():
                self._manager.register_checkpoint(_TrainingReport(kept, metrics, False))
        self._on_report(metrics)

    def _check_deletable(self, folder: Path) -> None:
        run = Path(self._storage.experiment_fs_path)
        if run.is_absolute() and run.resolve().is_relative_to(folder.resolve()):
            raise LaunchError(
                f"checkpoint must be a folder outside the run's, got {folder}, which holds the run {run}. Report "
                "another folder, or leave delete_local_checkpoint_after_upload out."
            )

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the newest reported checkpoint, also of an earlier start."""
        latest = self._manager.latest_checkpoint_result
        return None if latest is None else latest.checkpoint

    def result(self) -> Result:
        """Return the result, whose metrics are those of the newest checkpoint."""
        return Result._from_checkpoint_manager(self._manager, self._storage)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make these the functions of `ray.train` in this process while the block runs."""
        set_train_fn_utils(self)
        try:
            yield
        finally:
            set_train_fn_utils(None)
