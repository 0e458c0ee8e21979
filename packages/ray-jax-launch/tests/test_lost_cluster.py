"""The loss of the cluster: the command ends in seconds with one sentence, and the same command continues."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ray_jax_launch import latest_step
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
@pytest.mark.parametrize(
    "victim",
    [
        "raylet/raylet",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gcs/gcs_server", "ray::RuntimeEnvAgent")),
    ],
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
    *before, last = (tmp_path / "log").read_text().splitlines()
    # Ray's C++ sometimes ends the driver first, when an agent has died.
    by_ray = f"|{re.escape(KILLED)}" if "Agent" in victim else ""
    assert re.fullmatch(rf"failed: the Ray cluster is gone: its .* \(full logs: .*\){by_ray}", last)
    # Ray's C++ may log what it has lost.
    assert [line for line in before if not re.match(r"starting|worker 0|\[.* E \d+ \d+\] \w+\.cc:", line)] == []
    subprocess.run([*command, "60"], env=environment, check=True, timeout=120)


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
            errors = driver.communicate("\n", timeout=60)[1]
            # Ray's C++ logs a line where there is no network.
            found.append((errors.count(KILLED), driver.returncode))
    assert found == [(1, -signal.SIGKILL), (0, 0)]
