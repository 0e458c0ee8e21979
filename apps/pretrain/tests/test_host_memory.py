"""Freed memory stays in the process. Shown by the page faults of a jitted function in processes of their own."""

import json
import os
import platform
import subprocess
import sys

import pytest

# The product takes 39 MiB. Up to 32 MiB, glibc learns to keep memory by itself.
SCRIPT = """
import resource, statistics
import jax, numpy as np
from pretrain._training.process import keep_freed_memory

@jax.jit
def step(x):
    return jax.numpy.tanh(x @ x.T) @ x

def page_faults():
    counts = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(x).block_until_ready()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts[10:])

x = np.ones((3200, 8), np.float32)
returned = page_faults()
keep_freed_memory()
print([returned, page_faults()])
"""


def page_faults(**variables):
    """The page faults of a step before and after `keep_freed_memory`."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {"JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-c", SCRIPT]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def test_the_pages_of_temporary_arrays_are_used_again():
    returned, kept = page_faults()
    assert returned > 1000
    assert kept < returned / 10


def test_the_users_own_tunables_are_kept():
    _, kept = page_faults(GLIBC_TUNABLES="glibc.malloc.arena_max=2")
    assert kept > 1000
