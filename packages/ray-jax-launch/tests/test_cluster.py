"""Start of a cluster, and the connection to one, up to the point where Ray starts. Waits for missing nodes."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import ray_constants, services, utils
from ray._private.node import Node
from ray.exceptions import AuthenticationError

from ray_jax_launch import Hardware, LaunchError, check_resources, connect, cpu, dashboard_url, gpu, parse_hardware
from ray_jax_launch import _cluster as cluster_module
from ray_jax_launch._cluster import is_silent
from ray_jax_launch._cluster_security import protect_token
from ray_jax_launch._ray_internals.ray_cluster import (
    free_agent_port,
    only_this_machine,
    own_processes,
    polling_often,
    signals_in_python,
    without_idle_processes,
)


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, temporary: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the arguments of each start of Ray, which fails with the error in `RAY_FAILS`."""
    found: list[dict[str, Any]] = []

    def fail(**given: Any) -> None:
        found.append(given | {"environment": dict(os.environ)})
        raise Exception(os.environ["RAY_FAILS"])

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_FAILS", "no ports")
    for name in ("RAY_ADDRESS", "RAY_worker_niceness", "RAY_DATA_DISABLE_PROGRESS_BARS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("hardware", "num_cpus", "machine"),
    [(None, 3, 2), (cpu(7), 9, 2), (cpu(7), 16, 16), (gpu(25, 4), 29, 2), (parse_hardware("cpu:1-40"), 42, None)],
    ids=str,
)
def test_a_cluster_has_cpus_for_the_workers_and_for_ray_data(
    starts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    hardware: Hardware | None,
    num_cpus: int,
    machine: int | None,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    with pytest.raises(LaunchError, match="Ray could not start on this machine: no ports"):
        connect(hardware)
    (start,) = starts
    assert start["num_cpus"] == num_cpus
    assert start["address"] == "local"
    assert start["include_dashboard"] is False
    assert start["log_to_driver"] is False
    assert start["_temp_dir"].startswith(os.environ["RAY_TMPDIR"])


@pytest.mark.parametrize(("given", "niceness"), [(None, "0"), ("7", "7")])
def test_a_start_that_fails_leaves_the_environment_but_for_the_defaults(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, given: str | None, niceness: str
) -> None:
    if given is not None:
        monkeypatch.setenv("RAY_worker_niceness", given)
    for _ in range(2):
        before, start = dict(os.environ), services.ConsolePopen
        with pytest.raises(LaunchError) as failed:
            connect(cpu(1))
        assert "RAY_worker_niceness" not in str(failed.value)
        assert services.ConsolePopen is start
        defaults = {"RAY_worker_niceness": niceness, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
        assert dict(os.environ) == before | defaults
        assert starts.pop()["environment"].items() >= defaults.items()
    monkeypatch.setenv("RAY_memory_usage_threshold", "2")
    with pytest.raises(LaunchError, match="Unset RAY_memory_usage_threshold, or set RAY_ADDRESS"):
        connect(cpu(1))


@pytest.mark.parametrize(("error", "num_starts"), [("Ray timed out during startup.", 3), ("no ports", 1)])
def test_only_a_slow_start_is_tried_again_and_a_second_one_takes_no_more_descriptors(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, error: str, num_starts: int
) -> None:
    monkeypatch.setenv("RAY_FAILS", error)
    monkeypatch.setattr(cluster_module, "lacks_dashboard", lambda: False)
    descriptors = []
    for dashboard in (False, True):
        with pytest.raises(LaunchError):
            connect(cpu(3), dashboard=dashboard)
        assert [(start["num_cpus"] >= 5, start["include_dashboard"]) for start in starts] == [
            (True, dashboard)
        ] * num_starts
        starts.clear()
        descriptors.append(num_descriptors())
    assert len({*descriptors}) == 1


def test_an_address_that_fails_again_takes_no_more_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "no address")
    descriptors = []
    for _ in range(3):
        with pytest.raises(LaunchError):
            connect()
        descriptors.append(num_descriptors())
    assert len({*descriptors}) == 1


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("ray://10.0.0.7", "10.0.0.7", 10001), ("ray://10.0.0.7:9", "10.0.0.7", 9), ("10.0.0.7:9", "10.0.0.7", 9)],
)
def test_the_port_that_is_asked_is_that_of_the_address(
    monkeypatch: pytest.MonkeyPatch, address: str, host: str, port: int
) -> None:
    asked, started = [], []
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(cluster_module, "check_answers", lambda *place: asked.append(place))
    monkeypatch.setattr(ray, "init", lambda **given: started.append(given["address"]))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "a job"))
    monkeypatch.setattr(cluster_module, "_silent_jobs", set())
    assert not is_silent()
    connect()
    assert (asked, started) == ([(host, port)], [address])
    assert is_silent()


def test_a_cluster_that_requires_a_token_is_told_from_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**given: Any) -> None:
        raise AuthenticationError("no token")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(cluster_module, "check_answers", lambda *place: None)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(LaunchError, match="RAY_AUTH_MODE=token"):
        connect()


@pytest.mark.parametrize(
    ("address", "url"),
    [(None, None), ("127.0.0.1:9", "http://127.0.0.1:9"), ("https://ray.here:9", "https://ray.here:9")],
)
def test_the_url_of_a_dashboard_has_a_scheme(
    monkeypatch: pytest.MonkeyPatch, address: str | None, url: str | None
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster_module, "dashboard_address", lambda: address)
    assert dashboard_url() == url


def test_a_start_without_a_folder_fails_in_the_same_way_again(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that was closed once may be another file's."""
    with pytest.raises(LaunchError, match="no ports"):
        connect(cpu(1))
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null")
    for _ in range(2):
        with pytest.raises(LaunchError, match="RAY_TMPDIR must be a folder"):
            connect(cpu(1))
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("num_workers", "needed", "held", "is_enough"),
    [
        (25, {"CPU": 0.56}, {"CPU": 15}, True),  # as floats, 25 * 0.56 + 1 is above 15
        (3, {"CPU": 1, "slots": 0.1}, {"CPU": 4, "slots": 0.3}, True),
        (60, {"CPU": 0.55}, {"CPU": 34}, True),
        (60, {"CPU": 0.55}, {"CPU": 33.9999}, False),
    ],
)
def test_shares_of_resources_are_added_exactly(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, needed: dict[str, float], held: dict[str, float], is_enough: bool
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": held}])
    with contextlib.nullcontext() if is_enough else pytest.raises(LaunchError, match="must have 34 CPUs, 33 for the"):
        check_resources(cpu(num_workers), resources_per_worker=needed, data_cpus=1)


@pytest.mark.parametrize("num_looks", [1, 3, 99])
def test_a_wait_for_nodes_ends_as_soon_as_they_have_come(monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
    requests, waits = [], []

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        waits.append(seconds)

    def find_nodes() -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 3.0, "GPU": 8.0 if len(waits) >= num_looks else 7.0}}]

    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s, sleep=sleep)
    monkeypatch.setattr(cluster_module, "time", clock)
    monkeypatch.setattr("ray.nodes", find_nodes)
    monkeypatch.setattr(cluster_module, "request_resources", lambda bundles: requests.append(bundles))
    if num_looks == 99:
        with pytest.raises(LaunchError, match="must have 8 GPUs for gpu:2x4, got 7"):
            check_resources(gpu(2, 4), wait_for_resources_s=9)
        assert 9 <= clock.now_s - 1000 < 10
    else:
        check_resources(gpu(2, 4), wait_for_resources_s=9)
        assert len(waits) == num_looks
    assert requests == [[{"CPU": 1, "GPU": 4}] * 2, []]


@pytest.mark.parametrize("before", [None, "7"])
def test_the_loopback_address_is_for_the_start_of_one_cluster(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", "kept")
    with contextlib.suppress(KeyError), only_this_machine():
        assert (os.environ[name], ray_constants.ENABLE_RAY_CLUSTER) == ("0", False)
        raise KeyError
    assert (os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER) == (before, "kept")


def test_ray_starts_its_next_cluster_as_it_did_before() -> None:
    def found() -> list[object]:
        return [
            services.get_node,
            services.start_raylet,
            utils.get_dashboard_dependency_error,
            Node.start_api_server,
            Node.start_log_monitor,
            Node.start_monitor,
        ]

    before = found()
    with contextlib.suppress(KeyError), polling_often(), free_agent_port(), without_idle_processes():
        assert not any(one is other for one, other in zip(found(), before, strict=True))
        raise KeyError
    assert found() == before


def test_signals_are_handled_in_python_for_the_start_of_one_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "kept")
    with contextlib.suppress(KeyError), signals_in_python():
        assert ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER is True
        raise KeyError
    assert ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER == "kept"


@pytest.mark.parametrize(("error", "is_killed"), [(Exception, True), (KeyboardInterrupt, False), (None, False)])
def test_processes_of_a_start_that_fails_are_killed(error: type[BaseException] | None, is_killed: bool) -> None:
    start, seen, processes = services.ConsolePopen, [], []

    def run() -> None:
        with own_processes(seen.append):
            command = ["sleep", "600"]
            processes.extend(services.ConsolePopen(command, stdout=subprocess.DEVNULL) for _ in range(2))
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert services.ConsolePopen is start
    assert seen == [process.pid for process in processes]
    for process in processes:
        assert psutil.pid_exists(process.pid) != is_killed  # also waited for: it is no zombie
        if not is_killed:
            assert os.getpgid(process.pid) == process.pid
            process.kill()
            process.wait()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "set, to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_token_is_made_once_and_closed_to_others_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ray").mkdir(mode=0o755)
    link, linked = os.link, list[Path]()

    def closed_link(new: Path, path: Path) -> None:
        assert (mode(new), len(new.read_text())) == (0o600, 64)
        linked.append(path)
        link(new, path)

    monkeypatch.setattr(os, "link", closed_link)
    protect_token()
    path = home / ".ray" / "auth_token"
    token = path.read_text()
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert linked == [path]
    path.chmod(0o644)
    path.parent.chmod(0o755)
    protect_token()
    assert path.read_text() == token
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert [*path.parent.iterdir()] == [path]
    path.unlink()
    protect_token()
    assert path.read_text() != token
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_of_two_first_starts_at_once_the_first_one_makes_the_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / ".ray" / "auth_token"

    def make(_: int) -> str:
        path.write_text("a" * 64)  # by the other process
        return "b" * 64

    monkeypatch.setattr("secrets.token_hex", make)
    protect_token()
    assert path.read_text() == "a" * 64
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("name", "value", "is_made"),
    [
        ("RAY_AUTH_MODE", "disabled", False),
        ("RAY_AUTH_MODE", "Token", True),
        ("RAY_AUTH_TOKEN", "mine", False),
        ("RAY_AUTH_TOKEN_PATH", "/mine", False),
        ("RAY_AUTH_TOKEN", "", True),
    ],
)
def test_a_token_of_the_user_is_used_in_place_of_a_new_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_made: bool
) -> None:
    monkeypatch.setenv(name, value)
    protect_token()
    assert (home / ".ray" / "auth_token").exists() == is_made
    assert os.environ[name] == value


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/proc/nothing")], ids=["file", "link"])
def test_where_the_home_cannot_be_written_the_token_is_in_the_environment(
    home: Path, make: Callable[[Path], None]
) -> None:
    make(home / ".ray")
    protect_token()
    assert re.fullmatch("[0-9a-f]{64}", os.environ["RAY_AUTH_TOKEN"])
