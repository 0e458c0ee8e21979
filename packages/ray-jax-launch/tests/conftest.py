"""Every test that computes here sees two CPU devices; workers see one."""

import os

import pytest
import ray

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"


@pytest.fixture(scope="session")
def cluster():
    """A Ray cluster on this machine, of four logical CPUs."""
    from ray_jax_launch import connect, cpu

    # The workers inherit the environment of the cluster; theirs is to have one device each.
    flags = os.environ.pop("XLA_FLAGS")
    connect(cpu(2))
    os.environ["XLA_FLAGS"] = flags
    yield
    ray.shutdown()
