"""Real launches on a real cluster: each takes Ray some tens of seconds to start and stop."""

import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import ray.cloudpickle
import ray.data
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get

from ray_jax_launch import (
    LaunchError,
    Restarting,
    TrainingFailed,
    auto,
    check_resources,
    connect,
    cpu,
    gpu,
    latest_step,
    launch,
    parse_hardware,
)
from ray_jax_launch._control.control_actor import answer, start_control_actor

pytestmark = pytest.mark.usefixtures("cluster")

# Workers cannot import this file: their functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def scramble(config):
    """Compute with integers that wrap around, on arrays sharded over the ranks, and save into the run's folder.

    At the first start rank 1 is killed after step 5 of 8.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from ray import train

    from ray_jax_launch import Checkpoints, log_metrics, stop_requested

    shard = train.get_dataset_shard("rows")
    assert shard is not None
    rows = [int(row["id"]) for row in shard.iter_rows()]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(lambda x: x * 1664525 + 1013904223 + x.sum(dtype=jnp.uint32), out_shardings=sharding)
    x = jax.jit(lambda: jnp.arange(8, dtype=jnp.uint32), out_shardings=sharding)()
    marker = Path(config["marker"])
    with Checkpoints() as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:
            x = checkpoints.restore(start, {"state": {"x": x}})["state"]["x"]
        for number in range(start + 1, 9):
            x = step(x)
            log_metrics({"step": number, "start": start, "rank": jax.process_index()})
            assert not stop_requested(number)
            if number % 2 == 0:
                checkpoints.save(number, {"state": {"x": x}}, metadata={})
                checkpoints.wait()
            if number == 5 and not marker.exists():
                multihost_utils.sync_global_devices("both have logged the step")
            if number == 5 and jax.process_index() == 1 and not marker.exists():
                marker.write_text("died")
                os.kill(os.getpid(), signal.SIGKILL)  # from outside any Python handler
    train.report({"reported": 7})
    return {
        "processes": jax.process_count(),
        "local_devices": jax.local_device_count(),
        "platform": jax.default_backend(),
        "rank": jax.process_index(),
        "rows": rows,
        "x": jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(x).tolist(),
        "factor": config["factor"],
    }


def rows_of_rank(rank, world_size):
    """Rank 0 of 2 gets 0, 1, 2 and rank 1 gets 0, ..., 5."""
    return ray.data.range(3 * (rank + 1))


def test_a_cluster_starts_no_process_that_has_nothing_to_do() -> None:
    names = {Path(word).name for process in psutil.Process().children() for word in process.cmdline()}
    assert {"gcs_server", "raylet"} <= names
    assert not {"dashboard.py", "log_monitor.py", "monitor.py"} & names


@pytest.mark.slow
def test_a_run_in_object_storage_ends_with_the_same_numbers_after_a_worker_is_killed(s3, tmp_path, caplog):
    marker = tmp_path / "marker"
    logged, events = [], []

    def note_and_fail(rank, metrics):
        logged.append((rank, metrics["start"], metrics["step"]))
        if metrics["step"] == 1:
            raise OSError("the disk is full")

    with caplog.at_level(logging.WARNING, "ray_jax_launch"):
        result = launch(
            scramble,
            {"factor": 2, "marker": str(marker)},
            hardware=cpu(2),
            storage_path=s3,
            name=tmp_path.name,
            datasets={"rows": rows_of_rank},
            on_metrics=note_and_fail,
            on_event=events.append,
            max_failures=1,
        )
    *failed_to_note, failure = [record.message for record in caplog.records if record.name == "ray_jax_launch"]
    assert set(failed_to_note) == {"on_metrics failed; it is called again all the same"}
    what = "worker 1 died, or no longer answers; the workers start again"
    assert events == [Restarting("failure", "worker 1 died, or no longer answers", 1)]
    assert failure == f"{what} (failure 1 of at most 1 without a new checkpoint)"
    x = np.arange(8, dtype=np.uint32)
    for _ in range(8):
        x = x * np.uint32(1664525) + np.uint32(1013904223) + x.sum(dtype=np.uint32)
    assert marker.exists()
    assert result.return_value == {
        "processes": 2,
        "local_devices": 1,
        "platform": "cpu",
        "rank": 0,
        "rows": [0, 1, 2],
        "x": x.tolist(),
        "factor": 2,
    }
    # Each rank's metrics are in order: steps 1 to 5, and after the restart from step 5.
    assert [entry for entry in logged if entry[0] == 0] == [
        *((0, 0, step) for step in range(1, 6)), *((0, 4, step) for step in range(5, 9))
    ]  # fmt: skip
    assert result.metrics == {"step": 8, "start": 4, "rank": 0, "reported": 7}
    assert result.path == f"{s3}/{tmp_path.name}"
    assert latest_step(f"{result.path}/checkpoints") == 8
    assert Path(result.log_folder).is_dir()


def test_metrics_that_a_worker_logs_quickly_keep_their_order():
    control = start_control_actor()
    for number in range(1000):
        control.record.remote(0, {"step": number})
    logged, deadline = [], time.monotonic() + 60
    while len(logged) < 1000 and time.monotonic() < deadline:
        logged += answer(control.collect.remote()).metrics
    assert logged == [(0, {"step": number}) for number in range(1000)]
    assert answer(control.state.remote()).latest == {"step": 999}
    ray.kill(control)


def fail_on_rank_1(config):
    import jax

    if jax.process_index() == 1:
        raise KeyError("no such thing")


def test_a_failure_names_the_rank_and_shows_its_traceback(tmp_path):
    with pytest.raises(TrainingFailed, match=re.escape("worker 1 of cpu:2 failed")) as failed:
        launch(fail_on_rank_1, {}, hardware=cpu(2), storage_path=tmp_path, name="run", max_failures=0)
    assert failed.value.rank == 1
    assert "KeyError: 'no such thing'" in failed.value.details
    assert "".join(traceback.format_exception(failed.value)).count("in fail_on_rank_1") == 1
    assert f"full logs: {failed.value.log_folder}" in str(failed.value)


def test_hardware_that_the_cluster_lacks_is_rejected_before_anything_starts(tmp_path):
    with pytest.raises(LaunchError, match=r"The Ray cluster must have 3 GPUs for gpu:3, got 0\."):
        launch(fail_on_rank_1, {}, hardware=gpu(3), storage_path=tmp_path, name="run")
    with pytest.raises(LaunchError, match=r"must have 16 TPUs for tpu:v6e:4x4, got 0"):
        check_resources(parse_hardware("tpu:v6e:4x4"))
    assert [*tmp_path.rglob("*")] == []


def test_missing_nodes_are_requested_from_the_autoscaler_only_while_they_are_waited_for(monkeypatch):
    def requested():
        return json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"[]")

    seen = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: seen.append(requested()) or time.sleep(0.05))
    monkeypatch.setattr("ray_jax_launch._cluster.time", clock)
    with pytest.raises(LaunchError, match="must have 200 CPUs for cpu:100, got 4"):
        check_resources(cpu(100), data_cpus=2, wait_for_resources_s=0.2, resources_per_worker={"CPU": 2})
    assert seen[0] == [{"CPU": 2}] * 100 + [{"CPU": 1}] * 2
    assert requested() == []


def test_without_accelerators_auto_is_one_cpu_worker():
    assert auto() == cpu(1)


def test_workers_have_the_priority_of_the_process_that_starts_the_cluster():
    assert ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()) == os.nice(0)


def test_a_cluster_without_a_dashboard_keeps_no_records_of_tasks():
    """Ray's control store would grow with them. Each process sends its records once a second."""
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        ray.get([ray.remote(num_cpus=0)(lambda: None).remote() for _ in range(10)])
        assert ray.timeline() == []


def test_connecting_twice_changes_nothing():
    connect()
    assert ray.is_initialized()
