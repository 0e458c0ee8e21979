"""Real launches on a real cluster: each takes Ray some tens of seconds to start and stop."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import ray.cloudpickle
import ray.data

from ray_jax_launch import LaunchError, TrainingFailed, auto, check_resources, connect, cpu, gpu, launch, parse_hardware

pytestmark = pytest.mark.usefixtures("cluster")

# Workers cannot import this file: what they run is sent to them whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sum_over_ranks(config):
    """Adds up, over all processes, what each read from its own dataset. In its first life rank 1 is killed."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from ray import train

    shard = train.get_dataset_shard("rows")
    assert shard is not None
    rows = [int(row["id"]) for row in shard.iter_rows()]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    local = np.array([sum(rows)], np.float32)
    parts = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), local)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(parts)
    train.report({"total": float(total)})
    marker = Path(config["marker"])
    if jax.process_index() == 1 and not marker.exists():
        marker.write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)  # from outside any Python handler
    return {
        "processes": jax.process_count(),
        "local_devices": jax.local_device_count(),
        "platform": jax.default_backend(),
        "rank": jax.process_index(),
        "rows": rows,
        "total": float(total),
        "factor": config["factor"],
    }


def rows_of_rank(rank, world_size):
    """Rank 0 of 2 gets 0, 1, 2 and rank 1 gets 0, ..., 5."""
    return ray.data.range(3 * (rank + 1))


def test_workers_compute_together_each_on_its_ranks_data_and_again_after_one_is_killed(tmp_path):
    marker = tmp_path / "marker"
    config = {"factor": 2, "marker": str(marker)}
    result = launch(
        sum_over_ranks,
        config,
        hardware=cpu(2),
        storage_path=tmp_path,
        name="run",
        datasets={"rows": rows_of_rank},
        max_failures=1,
    )
    assert marker.exists()
    assert result.return_value == {
        "processes": 2,
        "local_devices": 1,
        "platform": "cpu",
        "rank": 0,
        "rows": [0, 1, 2],
        "total": 3.0 + 15.0,
        "factor": 2,
    }


def fail_on_rank_1(config):
    import jax

    if jax.process_index() == 1:
        raise KeyError("no such thing")


def test_a_failure_names_the_rank_and_shows_its_traceback(tmp_path):
    with pytest.raises(TrainingFailed, match=re.escape("worker 1 of cpu:2 failed")) as failed:
        launch(fail_on_rank_1, {}, hardware=cpu(2), storage_path=tmp_path, name="run", max_failures=0)
    assert failed.value.rank == 1
    assert "KeyError: 'no such thing'" in failed.value.details
    assert "in fail_on_rank_1" in failed.value.details


def test_more_than_the_cluster_has_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(LaunchError, match="expected 3 GPUs in the Ray cluster, as gpu:3 needs, found 0"):
        launch(fail_on_rank_1, {}, hardware=gpu(3), storage_path=tmp_path, name="run")
    with pytest.raises(LaunchError, match=r"expected 16 TPUs .* as tpu:v6e:4x4 needs, found 0"):
        check_resources(parse_hardware("tpu:v6e:4x4"))
    assert list(tmp_path.iterdir()) == []


def test_without_accelerators_auto_is_one_cpu_worker():
    assert auto() == cpu(1)


def test_connecting_twice_changes_nothing():
    connect()
    assert ray.is_initialized()
