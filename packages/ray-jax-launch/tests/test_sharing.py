"""Checks and waits before a loop begins: a shared folder, enough resources. Real nodes on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
import ray.cloudpickle

from ray_jax_launch import LaunchError, check_resources, cpu, launch, parse_hardware

pytestmark = [pytest.mark.slow, pytest.mark.fault]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def add_node_elsewhere(nodes, tmp_path):
    """Return a function that adds a node of one CPU with its own mount namespace, where a folder is empty."""
    started = []

    def add(hidden: Path) -> None:
        probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", str(hidden)], capture_output=True)
        if probe.returncode:
            pytest.skip(f"needs Linux and the right to mount: {probe.stderr.decode().strip()}")
        command = f"{sys.executable} -m ray.scripts.scripts start --address={nodes.address} --num-cpus=1"
        with (tmp_path / "node.log").open("w") as log:
            script = f"mount -t tmpfs none {hidden} && exec {command} --block"
            process = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=log, stderr=log)
        started.append(process)
        deadline = time.monotonic() + 60
        while sum(node["Alive"] for node in ray.nodes()) < 2 + len(nodes.worker_nodes):
            assert process.poll() is None, (tmp_path / "node.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)

    yield add
    for process in started:
        process.terminate()
        process.wait()


def note_start(config):
    Path(config["marker"]).touch()


def test_a_folder_that_nodes_do_not_share_is_rejected_before_the_loop_begins(
    nodes, add_node_elsewhere, tmp_path, record_property
):
    record_property("fault", "two nodes, and a storage path that they do not share")
    record_property("lost", "nothing: rejected before the first step")
    storage, marker = tmp_path / "storage", tmp_path / "began"
    storage.mkdir()
    nodes.add_node(num_cpus=1)
    add_node_elsewhere(storage)
    with pytest.raises(LaunchError, match=r"storage_path must be a folder that all nodes share, got .*/storage, which"):
        launch(note_start, {"marker": str(marker)}, hardware=cpu(2), storage_path=storage, name="run")
    assert list(storage.iterdir()) == []


@pytest.mark.parametrize("hardware", ["cpu:1", "cpu:1-2"])
def test_a_launch_waits_for_a_node_that_comes_later(nodes, tmp_path, caplog, record_property, hardware):
    record_property("fault", "the cluster has no node for the worker; one comes twenty seconds later")
    record_property("lost", "nothing")
    marker = tmp_path / "began"
    given = {"hardware": hardware, "storage_path": tmp_path, "name": "run"}
    with pytest.raises(LaunchError, match=rf"must have 1 CPUs for {hardware}, got 0\. Ask for fewer"):
        launch(note_start, {"marker": str(marker)}, **given)
    given["wait_for_resources_s"] = 60
    thread = threading.Thread(target=launch, args=(note_start, {"marker": str(marker)}), kwargs=given)
    thread.start()
    time.sleep(20)
    nodes.add_node(num_cpus=1)  # by the main thread: it handles signals
    thread.join()
    assert marker.exists()
    assert f"waiting up to 60 s for more nodes: The Ray cluster must have 1 CPUs for {hardware}, got 0" in caplog.text


def count_steps(config):
    """Count until a stop is requested."""
    from ray_jax_launch import log_metrics, stop_requested

    for step in range(1, 100_000):
        log_metrics({"step": step})
        if stop_requested(step):
            return
        time.sleep(0.05)


@pytest.mark.parametrize("lost_s", [4, 20])
def test_ctrl_c_ends_a_launch_that_has_lost_its_node(nodes, tmp_path, caplog, record_property, lost_s):
    """No worker is left that could save, and none can start."""
    record_property("fault", f"the only node of the workers is lost, and {lost_s} s later comes a Ctrl-C")
    record_property("lost", "steps since the last checkpoint")
    node = nodes.add_node(num_cpus=1)
    interrupted_s, has_begun = [], threading.Event()

    def lose_the_node():
        has_begun.wait()
        (raylet,) = (info.process for info in node.all_processes["raylet"])
        raylet.kill()
        raylet.wait()  # Ray's workers end with their raylet, but not while it is a zombie
        time.sleep(lost_s)
        interrupted_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def note(rank, metrics):
        if metrics["step"] == 20:
            has_begun.set()

    thread = threading.Thread(target=lose_the_node)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(count_steps, {}, hardware=cpu(1), storage_path=tmp_path, name="run", on_metrics=note)
    thread.join()
    assert time.monotonic() - interrupted_s[0] < 40
    assert "interrupted: the workers stop at once; saved checkpoints stay" in caplog.text


@ray.remote(num_cpus=1)
def occupy():
    """Be another job on the cluster."""
    time.sleep(600)


def test_an_elastic_group_says_that_it_waits_for_a_node_that_is_busy(nodes, tmp_path, caplog, record_property):
    record_property("fault", "all nodes of an elastic run are busy; one becomes free twenty seconds later")
    record_property("lost", "nothing")
    nodes.add_node(num_cpus=1)
    occupant = occupy.remote()
    while ray.available_resources().get("CPU", 0) > 0:
        time.sleep(0.1)
    marker = tmp_path / "began"
    given = {"hardware": "cpu:1-2", "storage_path": tmp_path, "name": "run"}
    thread = threading.Thread(target=launch, args=(note_start, {"marker": str(marker)}), kwargs=given)
    thread.start()
    deadline = time.monotonic() + 90
    while "waiting up to 240 s for more" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert not marker.exists()
    ray.cancel(occupant, force=True)
    thread.join()
    assert marker.exists()


def test_tpu_hosts_of_one_cpu_need_another_node_for_ray_data(nodes, record_property):
    record_property("fault", "TPU hosts whose only CPU the worker takes, and no node for Ray Data")
    record_property("lost", "nothing: rejected before the start")
    for _ in range(4):
        nodes.add_node(num_cpus=1, resources={"TPU": 4})
    hardware = parse_hardware("tpu:v6e:4x4")
    check_resources(hardware)
    with pytest.raises(LaunchError, match=r"must have 5 CPUs, 4 for the workers of tpu:v6e:4x4 and 1 for .* got 4"):
        check_resources(hardware, data_cpus=1)


DRIVER = """
import sys, time
from ray_jax_launch import connect, cpu
import ray
connect(cpu(1))

@ray.remote
def busy():
    time.sleep(600)

ref = busy.remote()
time.sleep(3)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_processes_of_a_killed_driver_end_within_30_s(tmp_path, record_property):
    record_property("fault", "SIGKILL of the command: its cluster's processes")
    environment = dict(os.environ)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    before = _session_members(driver.pid)
    assert len(before) > 8
    driver.kill()
    driver.wait()
    driver.stdout.close()
    killed = time.monotonic()
    while left := _session_members(driver.pid):
        assert time.monotonic() - killed < 30, left
        time.sleep(0.5)
    record_property("lost", "steps since the last checkpoint")
    record_property("recovery_s", round(time.monotonic() - killed, 1))


def _session_members(session: int) -> list[str]:
    """Return the command lines of a session's processes, without zombies."""
    members = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                members.append((path / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return members
