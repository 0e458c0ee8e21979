"""Ends of a group of workers, as the driver sees them: its errors, its restarts, and what it releases. Without Ray."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray.exceptions import ActorDiedError
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.train import ControllerError, FailureConfig, PreemptionError, RunConfig, TrainingFailedError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.preemption import PreemptionInfo

from ray_jax_launch import JaxTrainer, TrainingFailed
from ray_jax_launch._control.control_actor import LocalControl
from ray_jax_launch._control.interrupt import Interrupt
from ray_jax_launch._lost_cluster import ClusterLostError
from ray_jax_launch._train import backend, run_group, run_plan
from ray_jax_launch._train.failures import note_traceback

SNAPSHOT = "checkpoint_manager_snapshot.json"


class Group:
    """Starts of a group. Each ends with the next of its ends: an error, an action, or a value."""

    def __init__(self) -> None:
        self.control = LocalControl()
        self.hang_timeout_s: float | None = None
        self.ends: list[Any] = []
        self.num_starts = 0
        self.placement_groups = {"another launch's"}
        self.removed: list[set[str]] = []
        self.ended: list[Any] = []

    def start_control(self, hang_timeout_s: float | None) -> LocalControl:
        self.hang_timeout_s = hang_timeout_s
        return self.control

    def fit(self, trainer: Any, control: Any) -> Any:
        self.num_starts += 1
        self.placement_groups.add(f"start {self.num_starts}")
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end() if callable(end) else end

    def remove(self, groups: set[str]) -> None:
        self.removed.append(groups)
        self.placement_groups -= groups


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    outcome = ray.train.Result(
        metrics={"loss": 1.0, "step": 3}, checkpoint=None, error=None, path="/a", best_checkpoints=[]
    )
    monkeypatch.setattr(run_plan, "connect", lambda hardware: None)
    monkeypatch.setattr(run_plan, "is_started_here", lambda: False)
    monkeypatch.setattr(run_plan, "check_resources", lambda hardware, **given: None)
    for name, value in {
        "is_silent": lambda: False,
        "start_control_actor": group.start_control,
        "placement_groups": lambda: {*group.placement_groups},
        "remove_placement_groups": group.remove,
        "end_actor": group.ended.append,
        "log_folder": lambda of_failure=False: "/logs/kept" if of_failure else "/logs",
        "_make_trainer": lambda launch, control: SimpleNamespace(outcome=outcome),
        "_fit": group.fit,
    }.items():
        monkeypatch.setattr(run_group, name, value)
    monkeypatch.setattr(backend, "is_started_here", lambda: False)
    return group


@pytest.fixture
def fit(group: Group, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs a group of three workers with these ends, and checks what it releases."""

    def fit(*ends: Any, max_failures: int = 0, hardware: str = "cpu:3", **given: Any) -> Any:
        group.ends, before = [*ends], signal.getsignal(signal.SIGTERM)
        failures = FailureConfig(max_failures=max_failures)
        run_config = RunConfig(name="run", storage_path=str(tmp_path), failure_config=failures)
        try:
            return JaxTrainer(lambda: None, hardware=hardware, run_config=run_config, **given).fit()
        finally:
            assert group.ended == [group.control]
            assert signal.getsignal(signal.SIGTERM) is before
            assert group.ends == []

    return fit


def raised(error: Exception) -> Exception:
    """Return an error as a worker sends it."""
    note_traceback(type(error), error, None)
    return error


@pytest.mark.parametrize(
    ("error", "rank", "details"),
    [
        (WorkerGroupError("", {2: raised(KeyError("no such thing"))}), 2, "no such thing"),
        (PreemptionError(PreemptionInfo(None, {"a node": [0]})), None, "[0]"),
        (ControllerError(WorkerGroupStartupTimeoutError(3)), None, "3"),
        (ActorDiedError(), None, "actor"),
    ],
    ids=["worker", "preempted", "not started", "controller"],
)
def test_the_logs_of_a_failed_group_are_kept_and_its_error_is_rays_too(
    fit: Callable[..., Any], error: Exception, rank: int | None, details: str
) -> None:
    with pytest.raises(TrainingFailed) as failed:
        fit(error)
    assert isinstance(failed.value, TrainingFailedError)
    assert (failed.value.rank, failed.value.log_folder) == (rank, "/logs/kept")
    assert details in failed.value.details
    assert ("controller died" in str(failed.value)) == isinstance(error, ActorDiedError)


def test_a_lost_cluster_is_a_failure_without_a_rank(fit: Callable[..., Any]) -> None:
    with pytest.raises(TrainingFailed, match="the cluster is gone") as failed:
        fit(ClusterLostError("the cluster is gone", None, "", ""))
    assert isinstance(failed.value, TrainingFailedError)
    assert (failed.value.rank, failed.value.log_folder) == (None, "/logs/kept")


@pytest.mark.parametrize("died", [ActorDiedError(), RayOutOfMemoryError("killed")], ids=["died", "memory"])
def test_each_dead_controller_leaves_no_placement_group_and_a_list_that_can_be_read(
    fit: Callable[..., Any], group: Group, tmp_path: Path, died: Exception
) -> None:
    def die_in_a_write() -> None:
        (tmp_path / "run" / SNAPSHOT).write_text("{")
        raise died

    def read() -> str:
        assert (tmp_path / "run" / SNAPSHOT).read_text() != "{"
        return "the end"

    (tmp_path / "run").mkdir()
    result = fit(die_in_a_write, die_in_a_write, read, max_failures=2)
    assert (result.return_value, result.log_folder) == ("the end", "/logs")
    assert group.removed == [{"start 1"}, {"start 2"}]
    assert group.placement_groups == {"another launch's", "start 3"}


def test_the_deaths_of_controllers_count_like_other_failures(fit: Callable[..., Any], group: Group) -> None:
    with pytest.raises(TrainingFailed, match="cpu:3"):
        fit(*[ActorDiedError() for _ in range(3)], max_failures=2)
    assert group.num_starts == 3


@pytest.mark.parametrize("error", [None, KeyError("a")])
def test_cpus_for_ray_data_are_reserved_and_silence_is_heard_while_a_group_runs(
    fit: Callable[..., Any],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception | None,
) -> None:
    calls: list[Any] = []
    heard: list[Any] = []

    @contextlib.contextmanager
    def reserving(*args: Any) -> Iterator[Any]:
        calls.append(args)
        try:
            yield "renew"
        finally:
            calls.append("released")

    @contextlib.contextmanager
    def forwarding(*args: Any, **given: Any) -> Iterator[None]:
        heard.append((args, given["renew"], given["on_silence"].__func__))
        yield

    monkeypatch.setattr(run_group, "reserving", reserving)
    monkeypatch.setattr(run_group, "forwarding", forwarding)
    functions = {"on_metrics": lambda rank, metrics: None, "on_event": lambda event: None}
    with pytest.raises(KeyError) if error is not None else contextlib.nullcontext():
        fit(error, hardware="cpu:1-3", data_cpus=7, hang_timeout_s=60.0, **functions)
    hardware, name, num_cpus = calls[0]
    assert (str(hardware), name, num_cpus) == ("cpu:1-3", f"{tmp_path}/run/run", 7)
    assert calls[1:] == ["released"]
    assert heard == [((group.control, *functions.values()), "renew", Interrupt.on_silence)]
    assert group.hang_timeout_s == 60.0


def stop_after(group: Group, action: Callable[[], Any]) -> Callable[[], Any]:
    """Return an end of a group that a signal has come to, after a worker has asked for a stop request."""

    def end() -> Any:
        group.control.poll.remote("group", 3, 0, request=None, next_step=None)
        signal.raise_signal(signal.SIGTERM)
        return action()

    return end


def die() -> None:
    raise ActorDiedError


def test_a_group_that_has_saved_because_of_a_signal_is_interrupted(fit: Callable[..., Any], group: Group) -> None:
    with pytest.raises(KeyboardInterrupt, match="to continue"):
        fit(stop_after(group, lambda: group.control.acknowledge.remote()))


def test_a_group_that_ends_by_itself_before_it_sees_a_signal_is_complete(fit: Callable[..., Any], group: Group) -> None:
    group.control.record.remote(0, {"step": 7})
    group.control.save.remote("/run/checkpoints", 7)
    result = fit(stop_after(group, lambda: "the end"))
    assert (result.return_value, result.metrics) == ("the end", {"loss": 1.0, "step": 7})
    assert (result.checkpoint.step, result.checkpoint.path) == (7, "/run/checkpoints/7")


def test_a_controller_that_dies_after_a_signal_is_not_started_again(fit: Callable[..., Any], group: Group) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(stop_after(group, die), max_failures=9)
    assert group.num_starts == 1


def test_a_signal_that_nobody_waits_for_is_an_interrupt(fit: Callable[..., Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(SystemExit(1))


@pytest.mark.parametrize("value", [None, 7])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            WorkerGroupError("", {2: raised(KeyError("no picture")), 5: raised(KeyError("another"))}),
            "worker 2 failed: KeyError: 'no picture'",
        ),
        (PreemptionError(PreemptionInfo(None, {"a node": [0]})), "the workers were preempted; this was after"),
    ],
    ids=["worker", "preempted"],
)
def test_a_group_that_fails_after_the_end_does_not_fail_the_run(
    caplog: pytest.LogCaptureFixture, value: int | None, error: Exception, message: str
) -> None:
    def fail() -> None:
        raise error

    control, trainer = LocalControl(), SimpleNamespace(fit=fail)
    with pytest.raises(type(error)):
        run_group._fit(trainer, control)  # pyright: ignore[reportArgumentType]
    control.finish.remote(value)
    assert run_group._fit(trainer, control) == value  # pyright: ignore[reportArgumentType]
    assert message in caplog.text
