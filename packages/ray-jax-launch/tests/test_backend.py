"""Backends that join the workers, with a group of workers that only notes what it is asked for, and their settings."""

import contextlib
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from ray_jax_launch import DistributedConfig, Hardware, LaunchError, cpu, tpu
from ray_jax_launch._ray_internals.ray_train import JaxBackend, WorkerGroupStartupFailedError
from ray_jax_launch._train import backend
from ray_jax_launch._train.backend import TpuConfig, train_settings


class WorkerGroup:
    """A group whose workers do nothing. It notes its calls, and whether it was shut down."""

    def __init__(self, num_workers: int, error: Exception | None = None) -> None:
        self.num_workers, self.error = num_workers, error
        self.calls: list[tuple[Any, ...]] = []
        self.num_shutdowns = 0

    def __len__(self) -> int:
        return self.num_workers

    def execute_single(self, rank: int, function: Callable[..., Any]) -> str:
        self.calls.append((rank, function))
        return "10.0.0.7:9"

    def execute_single_async(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self.calls.append((rank, function, *args))
        if self.error is not None:
            raise self.error

    def execute_async(self, function: Callable[..., Any]) -> list[Any]:
        self.calls.append((function,))
        return [7] * self.num_workers

    def get_worker_group_state(self) -> Any:
        return self

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process wait for no worker."""
    monkeypatch.setattr(ray, "get", lambda called: called)


CONFIG = DistributedConfig(initialization_timeout_s=7, shutdown_timeout_s=9)


def test_rank_0_chooses_the_address_and_every_rank_joins_with_its_own_number() -> None:
    group = WorkerGroup(3)
    CONFIG.backend_cls().on_start(group, CONFIG)
    joined = [(rank, backend._initialize, "10.0.0.7:9", 3, rank, CONFIG) for rank in range(3)]
    assert group.calls == [(0, backend._free_address), *joined]
    assert group.num_shutdowns == 0


def test_the_end_of_a_group_waits_for_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(ray, "wait", lambda called, **given: waits.append((called, given)))
    group = WorkerGroup(3)
    CONFIG.backend_cls().on_shutdown(group, CONFIG)
    assert (group.calls, waits) == ([(backend._shutdown,)], [([7] * 3, {"timeout": 9})])


def test_a_worker_alone_is_not_joined() -> None:
    group = WorkerGroup(1)
    CONFIG.backend_cls().on_start(group, CONFIG)
    CONFIG.backend_cls().on_shutdown(group, CONFIG)
    assert group.calls == []


@pytest.mark.parametrize("config", [CONFIG, TpuConfig()], ids=["distributed", "TPU"])
@pytest.mark.parametrize(
    ("error", "is_restartable"),
    [(ActorDiedError(), True), (RayTaskError("f", "", ValueError("a taken port")), True), (KeyError("a"), False)],
    ids=["died", "failed", "another error"],
)
def test_workers_that_could_not_join_are_stopped_before_they_start_again(
    monkeypatch: pytest.MonkeyPatch, config: Any, error: Exception, is_restartable: bool
) -> None:
    def fail(self: Any, group: WorkerGroup, config: Any) -> None:
        raise error

    monkeypatch.setattr(JaxBackend, "on_start", fail)
    group = WorkerGroup(3, error)
    with pytest.raises(WorkerGroupStartupFailedError if is_restartable else KeyError) as failed:
        config.backend_cls().on_start(group, config)
    assert group.num_shutdowns == is_restartable
    if isinstance(error, RayTaskError):
        assert "a taken port" in str(failed.value)


def test_backends_of_tpus_are_those_of_ray_for_tpus() -> None:
    assert issubclass(TpuConfig().backend_cls, JaxBackend)
    assert TpuConfig().use_tpu


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7"])
def test_the_address_of_the_rendezvous_is_that_of_the_node_with_a_free_port(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: host)
    found, _, port = backend._free_address().rpartition(":")
    assert found == host
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port)))


@pytest.mark.parametrize(
    ("name", "least"), [("initialization_timeout_s", 1), ("heartbeat_timeout_s", 1), ("shutdown_timeout_s", 0)]
)
def test_the_smallest_and_largest_timeouts_of_jax_are_accepted(name: str, least: int) -> None:
    for value in (least, 2**31 - 1):
        fields: dict[str, Any] = {name: value}
        assert getattr(DistributedConfig(**fields), name) == value
    for value in (least - 1, 2**31):
        fields = {name: value}
        with pytest.raises(LaunchError, match=f"^{name} must be a whole number of at least {least}"):
            DistributedConfig(**fields)


INTERVAL, TIMEOUT = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


@pytest.mark.parametrize(
    ("hardware", "is_ours", "settings"),
    [
        (cpu(3), False, {INTERVAL: "0.5"}),
        (cpu(3), True, {INTERVAL: "0.5", WATCHER: "0"}),
        (cpu(16), False, {INTERVAL: "0.5"}),
        (cpu(40), False, {INTERVAL: "1.25"}),
        (cpu(1000), False, {INTERVAL: "2.0"}),
        (cpu(3, min_workers=1), False, {INTERVAL: "0.5", TIMEOUT: "15"}),
        (tpu("v6e", "4x4", 3, min_slices=1), True, {INTERVAL: "0.5", TIMEOUT: "15", WATCHER: "0"}),
    ],
    ids=["fixed", "this machine", "16 workers", "40 workers", "1,000 workers", "elastic", "elastic slices"],
)
@pytest.mark.parametrize("given", [{}, {INTERVAL: "7", TIMEOUT: "9", WATCHER: "1"}], ids=["ours", "the user's"])
def test_settings_of_ray_train_are_set_while_a_launch_runs_and_the_users_own_win(
    monkeypatch: pytest.MonkeyPatch, hardware: Hardware, is_ours: bool, settings: dict[str, str], given: dict[str, str]
) -> None:
    monkeypatch.setattr(backend, "is_started_here", lambda: is_ours)
    for name in (INTERVAL, TIMEOUT, WATCHER):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt), train_settings(hardware):
            assert dict(os.environ) == before | settings | given
            raise KeyboardInterrupt
        assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("nodes", "is_ours", "asked"),
    [
        ([("a", True, 0), ("b", False, 4), ("c", True, 1), ("d", True, 4)], False, ["c"]),
        ([("a", True, 4)], True, []),
        ([("a", True, 0), ("b", True, 0.5)], False, []),
    ],
)
def test_the_library_path_is_that_of_a_living_node_with_gpus(
    monkeypatch: pytest.MonkeyPatch, nodes: list[Any], is_ours: bool, asked: list[str]
) -> None:
    options: list[SimpleNamespace] = []

    def of_task(**given: Any) -> Any:
        options.append(SimpleNamespace(**given))
        return SimpleNamespace(remote=lambda: ("there", "there"))

    monkeypatch.setattr(backend, "is_started_here", lambda: is_ours)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "remote", lambda function: SimpleNamespace(options=of_task))
    monkeypatch.setattr(ray, "get", lambda called, timeout: called)
    found = [{"NodeID": name * 56, "Alive": alive, "Resources": {"GPU": gpus}} for name, alive, gpus in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setenv("LD_LIBRARY_PATH", "here")
    assert backend._library_paths_of_a_gpu_node() == (("there", "there") if asked else ("here", "here"))
    assert [(one.scheduling_strategy.node_id[0], one.num_cpus) for one in options] == [(name, 0) for name in asked]
