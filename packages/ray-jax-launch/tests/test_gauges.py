"""Gauges of a training loop among Ray's metrics, which Ray exports if `ray[default]` is installed."""

import sys
import time
import urllib.request

import pytest
import ray
import ray.cloudpickle

from ray_jax_launch import connect, cpu, launch

pytestmark = pytest.mark.gauges

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def log_for_a_while(config):
    from ray_jax_launch import log_metrics

    for step in range(300):
        log_metrics({"step": step, "tokens/s": 1e6})
        time.sleep(0.1)


def test_logged_metrics_are_exported_to_prometheus(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")
    seen = {}

    def look(rank, metrics):
        if metrics["step"] % 20 == 0 and "ray_jax_tokens_s" not in seen:
            (node,) = ray.nodes()
            with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics") as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith("ray_jax_"):
                        name, _, rest = line.partition("{")
                        seen[name] = rest

    connect(cpu(1), dashboard=True)
    launch(log_for_a_while, {}, hardware=cpu(1), storage_path=tmp_path, name="a run", on_metrics=look)
    ray.shutdown()
    assert float(seen["ray_jax_tokens_s"].split()[-1]) == 1e6
    assert 0 <= float(seen["ray_jax_step"].split()[-1]) < 300
    for labels in seen.values():
        assert 'run="a run"' in labels
        assert 'rank="0"' in labels
