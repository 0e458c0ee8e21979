"""The loss of the cluster: the command ends in seconds with one sentence, and the same command continues."""

import concurrent.futures
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from ray_jax_launch import _lost_cluster as lost_cluster
from ray_jax_launch import latest_step
from ray_jax_launch._lost_cluster import ClusterLostError, ClusterWatch, end_actor, starting_ray, wait_for
from ray_jax_launch._reaper import KILLED

LAUNCH = """
import sys, time
from ray_jax_launch import TrainingFailed, cpu, launch

def count(config):
    import jax.numpy as jnp
    from ray_jax_launch import Checkpoints, stop_requested

    with Checkpoints() as checkpoints:
        step = checkpoints.latest_step() or 0
        while step < config["num_steps"]:
            step += 1
            time.sleep(0.02)
            if step % 20 == 0:
                checkpoints.save(step, {"state": {"step": jnp.int32(step)}}, metadata={})
            assert not stop_requested(step)
    return step

if __name__ == "__main__":
    num_steps = int(sys.argv[2])
    try:
        launch(count, {"num_steps": num_steps}, hardware=cpu(1), storage_path=sys.argv[1], name="run")
    except TrainingFailed as error:
        sys.exit(f"failed: {error}")
"""


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    ["raylet/raylet", "gcs/gcs_server", "ray::RuntimeEnvAgent"],
)
def test_a_launch_that_loses_its_cluster_ends_in_one_sentence_and_continues_later(tmp_path, victim, record_property):
    """A raylet ends, more slowly, after its agents."""
    record_property("fault", f"SIGKILL of {victim} of a launch on this machine")
    record_property("lost", "steps since the last checkpoint; the command ends, and the same command continues")
    script = tmp_path / "script.py"
    script.write_text(LAUNCH)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "XLA_FLAGS")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "100000"], stdout=log, stderr=log, env=environment)
    try:
        deadline_s = time.monotonic() + 120
        while (latest_step(tmp_path / "run" / "checkpoints") or 0) < 40:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        processes = psutil.Process(process.pid).children(recursive=True)
        next(one for one in processes if victim in " ".join(one.cmdline())).send_signal(signal.SIGKILL)
        assert process.wait(60) == 1
    finally:
        process.kill()
    _, alive = psutil.wait_procs([one for one in processes if is_alive(one)], timeout=60)
    assert [one for one in alive if is_alive(one)] == []
    # Ray's C++ may log what it has lost, also after the driver's last line.
    lines = (tmp_path / "log").read_text().splitlines()
    *before, last = (line for line in lines if not re.match(r"\[.* E \d+ \d+\] \w+\.cc:", line))
    # Ray's C++ sometimes ends the driver first, when an agent has died.
    by_ray = f"|{re.escape(KILLED)}" if "Agent" in victim else ""
    assert re.fullmatch(rf"failed: the Ray cluster is gone: its .* \(full logs: .*\){by_ray}", last)
    assert [line for line in before if not re.match(r"starting|worker 0", line)] == []
    subprocess.run([*command, "60"], env=environment, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_driver_of_a_cluster_that_stays_leaves_a_sentence(nodes, record_property):
    """Ray's C++ may end a driver too, without an exception."""
    record_property("fault", "SIGKILL of a command on a cluster that stays")
    record_property("lost", "steps since the last checkpoint")
    code = "from ray_jax_launch import connect; connect(); print('connected', flush=True); input()"
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    found = []
    for is_killed in (True, False):
        with subprocess.Popen(
            [sys.executable, "-c", code], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as driver:  # fmt: skip
            assert driver.stdout is not None
            assert driver.stdout.readline() == "connected\n"
            if is_killed:
                driver.kill()
            errors = driver.communicate("\n", timeout=300)[1]
            # Ray's C++ logs a line where there is no network.
            found.append((errors.count(KILLED), driver.returncode))
    assert found == [(1, -signal.SIGKILL), (0, 0)]


class Node:
    """Sockets of a node: those of its raylet and of its control store. They answer until they are closed."""

    def __init__(self, folder: Path, address: str, *, head: bool) -> None:
        self.head, self.raylet_socket_name = head, str(folder / "raylet")
        self.raylet = socket.socket(socket.AF_UNIX)
        self.raylet.bind(self.raylet_socket_name)
        self.raylet.listen()
        self.address, self.family = address, socket.AF_INET6 if ":" in address else socket.AF_INET
        self.store: socket.socket | None = None
        self.port = 0
        self.start_store()

    @property
    def gcs_address(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def start_store(self) -> None:
        self.store = socket.create_server((self.address, self.port), family=self.family)
        self.port = self.store.getsockname()[1]

    def end_store(self) -> None:
        assert self.store is not None
        self.store.close()


@pytest.fixture
def make_node(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the node that this process is connected to."""
    with contextlib.ExitStack() as stack:

        def make(*, head: bool, address: str = "127.0.0.1") -> Node:
            node = Node(temporary, address, head=head)
            stack.callback(node.end_store)
            stack.callback(node.raylet.close)
            monkeypatch.setattr(lost_cluster, "connected_node", lambda: node)
            return node

        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the watch reads."""
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(lost_cluster, "time", clock)
    return clock


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", id="IPv6")])
def test_a_cluster_that_answers_is_not_lost(make_node: Callable[..., Node], address: str) -> None:
    try:
        make_node(head=True, address=address)
    except OSError:
        pytest.skip("this machine has no IPv6")
    watch = ClusterWatch()
    assert [watch.loss() for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("head", [False, True])
def test_the_end_of_a_raylet_is_a_loss_at_once(make_node: Callable[..., Node], head: bool) -> None:
    make_node(head=head).raylet.close()
    assert ClusterWatch().loss() == "its raylet on this node has ended"


def test_the_control_store_of_this_machine_is_lost_at_once(make_node: Callable[..., Node]) -> None:
    node = make_node(head=True)
    node.end_store()
    assert ClusterWatch().loss() == f"its control store {node.gcs_address} does not answer"


def test_the_control_store_of_another_machine_may_start_again_within_30_s(
    make_node: Callable[..., Node], clock: SimpleNamespace
) -> None:
    node, watch = make_node(head=False), ClusterWatch()
    for waited_s in (7, 29.9):
        node.end_store()
        assert watch.loss() is None
        clock.now_s += waited_s
        assert watch.loss() is None
        node.start_store()
        assert watch.loss() is None
    node.end_store()
    clock.now_s += 9
    assert watch.loss() is None
    clock.now_s += 30.1
    assert watch.loss() == f"its control store {node.gcs_address} does not answer"


@pytest.mark.parametrize(("living", "is_lost"), [("here", False), ("there", True)])
def test_the_control_store_is_asked_for_this_node_only_after_a_death(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, living: str, is_lost: bool
) -> None:
    make_node(head=False)
    asked = []
    nodes = [{"NodeID": name, "Alive": name == living} for name in ("here", "there")]
    monkeypatch.setattr("ray.nodes", lambda: asked.append(1) or nodes)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    assert ClusterWatch().loss() is None
    assert asked == []
    assert (ClusterWatch().loss(is_suspected=True) is not None) == is_lost


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a loss does to this process, which only notes it."""
    done: list[str] = []
    monkeypatch.setattr(lost_cluster, "_is_lost", False)
    monkeypatch.setattr(lost_cluster, "abandon_cluster", lambda: done.append("abandoned"))
    monkeypatch.setattr(
        lost_cluster, "atexit", SimpleNamespace(register=lambda _, code: done.append(f"exit with {code}"))
    )
    return done


def called(value: Any) -> Any:
    """Return a call of an actor that has ended, with its value or its error."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return SimpleNamespace(future=lambda: future)


@pytest.mark.parametrize(("loss", "is_lost"), [(None, False), ("a raylet", True)])
@pytest.mark.parametrize(("error", "is_of_ray"), [(KeyError("a"), False), (ActorDiedError(), True)])
def test_a_call_that_fails_with_the_cluster_is_the_loss_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, abandoned: list[str], error: Exception, is_of_ray: bool, loss: str, is_lost: bool
) -> None:
    suspected: list[bool] = []

    def find_loss(self: ClusterWatch, *, is_suspected: bool = False) -> str | None:
        suspected.append(is_suspected)
        return loss

    monkeypatch.setattr(ClusterWatch, "loss", find_loss)
    for _ in range(2):
        with pytest.raises(ClusterLostError if is_lost else type(error)):
            wait_for(called(error))
    assert suspected == [is_of_ray] * 2
    assert lost_cluster.is_lost() == is_lost
    assert abandoned == (["abandoned", "exit with 1"] if is_lost else [])


def test_the_result_of_a_call_is_not_lost_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterWatch, "loss", lambda self, **_: "everything")
    assert wait_for(called(7)) == 7


def test_a_call_is_waited_for_while_the_cluster_answers(monkeypatch: pytest.MonkeyPatch, abandoned: list[str]) -> None:
    monkeypatch.setattr(lost_cluster, "_LOOK_EVERY_S", 0.01)
    looks = iter([None, None, "a raylet"])
    unfinished: Any = SimpleNamespace(future=concurrent.futures.Future)
    monkeypatch.setattr(ClusterWatch, "loss", lambda self, **_: next(looks))
    with pytest.raises(ClusterLostError, match="the Ray cluster is gone: a raylet"):
        wait_for(unfinished)
    assert [*looks] == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_no_actor_of_a_lost_cluster_is_killed(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(lost_cluster, "_is_lost", is_lost)
    monkeypatch.setattr(ray, "kill", killed.append)
    end_actor("an actor")  # pyright: ignore[reportArgumentType]
    assert killed == ([] if is_lost else ["an actor"])


def test_a_second_start_that_succeeds_ends_the_exit_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[tuple[Any, int]] = []

    def unregister(function: Any) -> None:
        exits[:] = [one for one in exits if one[0] != function]

    fake = SimpleNamespace(register=lambda *call: exits.append(call), unregister=unregister)
    monkeypatch.setattr(lost_cluster, "atexit", fake)
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), starting_ray():
            raise error
        assert [code for _, code in exits] == [130]
        with pytest.raises(KeyError), starting_ray():
            raise KeyError
        assert [code for _, code in exits] == [130]
        with starting_ray():
            pass
        assert exits == []
