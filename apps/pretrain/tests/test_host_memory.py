"""Freed memory stays in the process. Shown by the page faults of real train steps in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, statistics, sys
import jax, numpy as np
from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, make_train_step
from pretrain._training.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
config = GPT2Config(vocab_size=257, seq_len=64, num_layers=4, num_heads=4, embed_dim=128, dtype="float32")
optimizer = create_optimizer(OptimizerConfig(), 100)
state = create_train_state(config, optimizer, jax.random.key(0))
step = make_train_step(config, optimizer)
windows = np.zeros((12, 65), np.uint16)
counts = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state, metrics = step(state, windows, jax.random.key(0))
    float(metrics["loss"])
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(counts[10:])))
"""


def page_faults(mode, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {"JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-c", SCRIPT, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def test_the_pages_of_temporary_arrays_are_used_again():
    returned = page_faults("return")
    assert returned > 1000
    assert page_faults("keep") < returned / 10


def test_the_users_own_tunables_are_kept():
    assert page_faults("keep", GLIBC_TUNABLES="glibc.malloc.arena_max=2") > 1000
