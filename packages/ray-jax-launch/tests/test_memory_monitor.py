"""A node without free memory, where Ray's memory monitor kills the worker."""

import sys
import time

import psutil
import pytest
import ray
import ray.cloudpickle

from ray_jax_launch import OutOfMemoryError, cpu, launch

pytestmark = [pytest.mark.slow, pytest.mark.fault]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

_LIMIT_BYTES = 3 << 30


def take_more_and_more(config):
    import numpy as np

    blocks = []
    while len(blocks) < 60:
        blocks.append(np.ones(1 << 24))  # 128 MiB
        time.sleep(0.1)


def test_a_loop_that_fills_the_memory_of_its_node_twice_ends_the_launch(tmp_path, monkeypatch, caplog, record_property):
    record_property("fault", "a loop fills the memory of its node; Ray's memory monitor kills the worker")
    record_property("lost", "steps since the last checkpoint")
    memory = psutil.virtual_memory()
    if memory.available < 2 * _LIMIT_BYTES:
        pytest.skip(f"needs {2 * _LIMIT_BYTES} bytes of memory")
    # Variables of the raylet that this process starts.
    monkeypatch.setenv(
        "RAY_memory_usage_threshold", f"{(memory.total - memory.available + _LIMIT_BYTES) / memory.total:.3f}"
    )
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    try:
        with pytest.raises(OutOfMemoryError, match=r"worker 0 has too little memory .* node running low on"):
            launch(take_more_and_more, {}, hardware=cpu(1), storage_path=tmp_path, name="run", max_failures=5)
    finally:
        ray.shutdown()
    again, no_more = [record.message for record in caplog.records if record.name == "ray_jax_launch"]
    assert again.endswith("the workers start again (failure 1 of at most 5 without a new checkpoint)")
    assert no_more.endswith("the workers do not start again, because they failed in the same way before")
