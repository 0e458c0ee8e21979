"""Another process joins the cluster that this process has started."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from ray_jax_launch import LaunchError, connect, joining_variables

JOIN = """
import ray, ray_jax_launch
ray_jax_launch.connect()
print(ray.get_runtime_context().get_node_id())
"""


def test_a_process_joins_the_cluster_of_another_process() -> None:
    connect()
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN],
            env=os.environ | joining_variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split()[-1:] == [ray.get_runtime_context().get_node_id()], done.stderr
    finally:
        ray.shutdown()


def test_without_a_cluster_there_is_nothing_to_join() -> None:
    with pytest.raises(LaunchError, match=r"no Ray cluster is connected\. Call connect\(\) first\."):
        joining_variables()


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_a_cluster_on_the_loopback_address_is_joined_without_rays_look_at_the_address(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.7:6379"))
    monkeypatch.setattr("ray_jax_launch._cluster.is_started_here", lambda: is_ours)
    found = joining_variables()
    assert found.pop("RAY_ADDRESS") == "10.0.0.7:6379"
    assert [*found.values()] == ["0"] * is_ours
