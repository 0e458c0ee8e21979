"""The plan of a launch: a frozen value that `launch` and `JaxTrainer` make and `run_plan` executes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray.data
from pyarrow.fs import FileSystem, LocalFileSystem
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig, ValidationConfig
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._control.control_actor import OnMetrics
from ray_jax_launch._control.events import OnEvent
from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._hardware import Hardware, parse_hardware
from ray_jax_launch._numbers import MAX_COUNT, check_number, check_type
from ray_jax_launch._ray_internals.ray_train import construct_train_func
from ray_jax_launch._run_folder import RunFolder
from ray_jax_launch._scaling import scaling_config as scaling_of
from ray_jax_launch._storage import StoragePath, check_run_name, open_uri
from ray_jax_launch._train.backend import check_env_vars
from ray_jax_launch._train.datasets import RankedDataset, check_datasets

# Workers tell every second how far they are.
_LEAST_HANG_TIMEOUT_S = 5

TrainLoop = Callable[[], Any] | Callable[[dict[str, Any]], Any]
AnyDataset = ray.data.Dataset | Callable[[], ray.data.Dataset] | RankedDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The loop of a launch, its workers, and its storage.

    Raises:
        LaunchError: a field is invalid.
    """

    train_loop: TrainLoop
    """Runs in each worker. Takes no argument, or `config`."""

    config: dict[str, Any] | None = None
    """Argument of the loop."""

    hardware: Hardware | Literal["auto"] | None = None
    """The workers; `auto` for the best hardware of the cluster. None if `scaling_config` gives them."""

    scaling_config: ScalingConfig | None = None
    """Ray's config of the workers, in place of `hardware`."""

    shape: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `ray_jax_launch.scaling_config` beside the hardware."""

    jax_config: JaxConfig | None = None
    """Joins the workers. None for the default of the hardware."""

    run_config: RunConfig
    """Name, storage and policies of the run, as the caller gave them."""

    datasets: Mapping[str, AnyDataset] | None = None
    """Datasets by name, for `ray.train.get_dataset_shard`."""

    dataset_config: DataConfig | None = None
    """Ray's config of how to split the Ray Datasets. None for its default."""

    validation_config: ValidationConfig | None = None
    """Ray's config of how to validate reported checkpoints. None if it does not."""

    data_cpus: int | None = None
    """CPUs for the tasks of Ray Data. None for `Hardware.data_cpus` with datasets, and 0 without."""

    wait_for_resources_s: float = 0.0
    """Seconds to wait for missing nodes."""

    hang_timeout_s: float | None = None
    """Seconds without a step after which workers that do not answer start again. None for any time."""

    on_metrics: OnMetrics | None = None
    """Gets the rank and the metrics of each `log_metrics`, in a thread of the driver."""

    on_event: OnEvent | None = None
    """Gets the events of the launch, in the same thread."""

    has_rays_path: bool = False
    """True if `Result.path` is a path in `Result.filesystem`, as Ray's; False if it is a `Path` or a URI."""

    def __post_init__(self) -> None:
        """Check every field once."""
        for name, given, wanted in (
            ("scaling_config", self.scaling_config, ScalingConfig),
            ("run_config", self.run_config, RunConfig),
            ("dataset_config", self.dataset_config, DataConfig),
            ("jax_config", self.jax_config, JaxConfig),
        ):
            if given is not None and not isinstance(given, wanted):
                kind = wanted.__name__
                raise LaunchError(
                    f"{name} must be a {kind}, got {shown(given)}. Make it a {kind}(...), or leave it out."
                )
        check_datasets(self.datasets)
        if self.data_cpus is not None:
            check_number("data_cpus", self.data_cpus, at_least=0, at_most=MAX_COUNT)
        for name, function in (("on_metrics", self.on_metrics), ("on_event", self.on_event)):
            if function is not None:
                check_type(name, function, Callable, "a function", "Leave it out, or give a function")
        if self.config is not None:
            check_type("the config of the loop", self.config, dict, "a dict", "Put the value into a dict")
        check_number("max_failures", self.failures.max_failures, at_least=-1)
        check_number("preemption_grace_s", self.failures.preemption_grace_s, at_least=0, whole=False)
        check_number("wait_for_resources_s", self.wait_for_resources_s, at_least=0, whole=False)
        if self.hang_timeout_s is not None:
            check_number(
                "hang_timeout_s", self.hang_timeout_s, at_least=_LEAST_HANG_TIMEOUT_S, whole=False,
                remedy="Leave it out to wait for any time",
            )  # fmt: skip
        check_run_name(self.run_name)
        check_env_vars(self.run_config.worker_runtime_env)
        self._check_workers()
        self._check_loop()

    @property
    def run_name(self) -> str:
        """Name of the run. Ray makes one if the caller gave none."""
        return self.run_config.name or ""

    @property
    def failures(self) -> FailureConfig:
        """Limits of restarts."""
        return self.run_config.failure_config or FailureConfig()

    def worker_loop(self) -> Callable[[], Any]:
        """Return the loop with its argument."""
        context: Any = (self.jax_config or JaxConfig()).train_func_context  # Ray declares an instance, not its class
        return construct_train_func(self.train_loop, self.config, context)

    def _check_workers(self) -> None:
        if self.hardware is not None and self.scaling_config is not None:
            raise LaunchError(
                f"hardware must be None with a scaling_config, got {str(self.hardware)!r} and {self.scaling_config}. "
                "Give one of the two."
            )
        if self.shape and self.scaling_config is not None:
            name, value = next(iter(self.shape.items()))
            raise LaunchError(
                f"{name} must be None with a scaling_config, got {shown(value)}. Put it into the scaling_config."
            )
        if isinstance(self.hardware, Hardware):
            scaling_of(self.hardware, **self.shape)

    def _check_loop(self) -> None:
        try:
            if inspect.iscoroutinefunction(self.train_loop):
                raise TypeError("It is async: nobody would await it.")
            self.worker_loop()
        except (TypeError, ValueError) as error:
            raise LaunchError(
                f"the training loop must be a function of no argument or one, got {self.train_loop}. {error}"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLaunch:
    """A plan on a connected cluster, with nothing left to choose."""

    plan: LaunchPlan
    """The choices of the caller."""

    hardware: Hardware
    """The workers, also where the plan says `auto` or has Ray's config."""

    scaling: ScalingConfig
    """Ray's config of the workers."""

    run_config: RunConfig
    """Ray's config of the run, with the workers' environment."""

    data_cpus: int
    """CPUs for the tasks of Ray Data."""

    folder: RunFolder | None
    """The run's folder. None if the storage is a filesystem of the user's own."""

    @property
    def result_path(self) -> StoragePath | None:
        """`Result.path`; None for Ray's own."""
        return None if self.plan.has_rays_path or self.folder is None else self.folder.path

    def open_storage(self) -> tuple[FileSystem, str]:
        """Open the filesystem of the run's folder, and return it with the path in it."""
        if self.folder is None:
            filesystem, root = (
                self.run_config.storage_filesystem,
                f"{self.run_config.storage_path}/{self.plan.run_name}",
            )
            assert filesystem is not None, "without a folder there is a filesystem"
        elif isinstance(self.folder.path, Path):
            filesystem, root = LocalFileSystem(), str(self.folder.path)
        else:
            filesystem, root = open_uri(self.folder.path)
        return filesystem, root.rstrip("/")


def read_hardware(given: Any) -> Hardware | Literal["auto"]:
    """Return a caller's hardware, or read its text.

    Raises:
        LaunchError: it is no hardware.
    """
    if isinstance(given, Hardware):
        return given
    if not isinstance(given, str):
        raise LaunchError(f"hardware must be a Hardware or its text, got {shown(given)}. Write it as in gpu:8.")
    return "auto" if given == "auto" else parse_hardware(given)
