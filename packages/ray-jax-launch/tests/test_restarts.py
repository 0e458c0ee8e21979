"""Which failures of a loop are tried again, and which end the launch. Real launches on a cluster of this machine."""

import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle

from ray_jax_launch import DistributedConfig, LaunchError, TrainingFailed, cpu, launch
from ray_jax_launch._backend import _DistributedBackend

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.fault]

# Workers cannot import this file: what they run is sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class UnluckyBackend(_DistributedBackend):
    """At the first start another program takes the port that was free."""

    def choose_coordinator(self, worker_group: Any) -> str:
        taken = Path(os.environ["TAKEN_PORT"])
        if not taken.exists():
            return super().choose_coordinator(worker_group)
        port = taken.read_text()
        taken.unlink()
        return f"127.0.0.1:{port}"


@dataclass
class UnluckyConfig(DistributedConfig):
    @property
    def backend_cls(self):
        return UnluckyBackend


def fail_then_finish(config):
    """Rank 0 cannot read at first; then it finishes, and is killed while it does something that is not needed."""
    import jax
    from jax.experimental import multihost_utils

    from ray_jax_launch import mark_finished

    multihost_utils.sync_global_devices("joined")
    if jax.process_index() == 0:
        starts = Path(config["starts"])
        with starts.open("a") as file:
            file.write(f"{time.time()}\n")
        if len(starts.read_text().splitlines()) == 1:
            raise OSError("stale file handle")
        mark_finished("all that matters")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_taken_port_a_read_error_and_a_death_after_the_end_fail_no_run(
    tmp_path, caplog, monkeypatch, record_property
):
    record_property("fault", "port of the rendezvous taken; read error in the loop; SIGKILL after the last step")
    record_property("lost", "nothing")
    # The controller, which chooses the port, gets these variables from the driver.
    faults = {"TAKEN_PORT": str(tmp_path / "port")}
    monkeypatch.setattr("ray.train.v2.api.data_parallel_trainer.get_env_vars_to_propagate", lambda: dict(faults))
    with socket.socket() as taken, caplog.at_level(logging.WARNING, "ray_jax_launch"):
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        (tmp_path / "port").write_text(str(taken.getsockname()[1]))
        result = launch(
            fail_then_finish,
            {"starts": str(tmp_path / "starts")},
            hardware=cpu(2),
            storage_path=tmp_path,
            name="run",
            backend=UnluckyConfig(),
            max_failures=2,
        )
    assert result.return_value == "all that matters"
    assert len((tmp_path / "starts").read_text().splitlines()) == 2
    joining, reading, end = [record.message for record in caplog.records if record.name == "ray_jax_launch"]
    # Either the failure of rank 0 comes first, or the death of rank 1, which had joined the other program.
    assert joining.startswith("the workers could not start: jax.distributed.initialize: ")
    assert joining.endswith("; the workers start again (failure 1 of at most 2)")
    assert reading == "worker 0 failed: OSError: stale file handle; the workers start again (failure 2 of at most 2)"
    assert end.startswith("worker 0 died, or no longer answers; this was after the training had ended")


def fail_at_step_3(config):
    from ray_jax_launch import PermanentError, stop_requested

    with Path(config["starts"]).open("a") as file:
        file.write("start\n")
    for step in range(1, 4):
        assert not stop_requested(step)
    if config["error"] == "program":
        raise KeyError("no such thing")
    if config["error"] == "permanent":
        raise PermanentError("the loss is not finite")
    raise LaunchError("data must be on every node, got none. Copy it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "raised", "num_starts"),
    [
        ("program", TrainingFailed, 2),
        ("permanent", TrainingFailed, 1),
        ("input", LaunchError, 1),
    ],
)
def test_a_failure_that_would_happen_again_ends_the_launch(
    tmp_path, caplog, record_property, error, raised, num_starts
):
    record_property("fault", f"a loop fails in the same way at the same step ({error} error)")
    record_property("lost", "nothing: it ends, with its checkpoints")
    starts = tmp_path / "starts"
    with pytest.raises(raised) as failed, caplog.at_level(logging.WARNING, "ray_jax_launch"):
        launch(
            fail_at_step_3, {"starts": str(starts), "error": error}, hardware=cpu(1), storage_path=tmp_path, name="run"
        )
    assert len(starts.read_text().splitlines()) == num_starts
    if error == "input":
        assert str(failed.value) == "data must be on every node, got none. Copy it"
    if error == "program":
        again = caplog.records[-1].message
        assert again.endswith("the workers do not start again, because they failed in the same way before")
