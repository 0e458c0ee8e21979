import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from nnx_gpt2 import (
    GPT2Config,
    MemoryEstimate,
    OptimizerConfig,
    abstract_train_state,
    create_optimizer,
    create_train_state,
    estimate_memory,
    make_mesh,
    num_params,
)

CONFIG = GPT2Config(vocab_size=512, seq_len=64, num_layers=2, num_heads=2, embed_dim=64)
SMALL = GPT2Config(vocab_size=256, seq_len=64, num_layers=1, num_heads=2, embed_dim=32)


def test_the_state_is_counted_to_the_byte():
    estimate = estimate_memory(CONFIG, global_batch_size=4)
    state = create_train_state(CONFIG, create_optimizer(OptimizerConfig(), 1000), jax.random.key(0))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # The estimate also has the batch, the key, the metrics, and alignment.
    assert held < estimate.state_bytes < held + 8192
    assert estimate.temporary_bytes > 0


def test_the_peak_is_the_sum():
    assert MemoryEstimate(state_bytes=1, temporary_bytes=20, code_bytes=300).peak_bytes == 321


@pytest.mark.parametrize(("backend", "num_states"), [("cpu", 2), ("gpu", 1)])
def test_only_a_state_that_is_not_donated_exists_twice(monkeypatch, backend, num_states):
    """The other arrays of this step, mostly gradients, are smaller than a state."""
    device = SimpleNamespace(platform=backend)
    monkeypatch.setattr("nnx_gpt2._target.default_device", lambda: device)
    config = GPT2Config(vocab_size=128, seq_len=2, num_layers=1, num_heads=2, embed_dim=256)
    estimate = estimate_memory(config, global_batch_size=1)
    assert num_states < estimate.peak_bytes / estimate.state_bytes < num_states + 1


@pytest.mark.parametrize(
    ("options", "share"),
    [({"optimizer": OptimizerConfig(name="muon")}, 0.9), ({"mesh": make_mesh(fsdp=8)}, 0.25)],
    ids=["muon", "fsdp=8"],
)
def test_the_state_is_that_of_the_optimizer_and_the_mesh(options, share):
    plain, other = (estimate_memory(SMALL, global_batch_size=8, **changes).state_bytes for changes in ({}, options))
    assert other < share * plain


def test_microbatches_share_the_memory_of_a_batch():
    at_once, in_microbatches = (
        estimate_memory(SMALL, global_batch_size=32, grad_accum_steps=num_microbatches).temporary_bytes
        for num_microbatches in (1, 8)
    )
    assert at_once > 32 * 64 * 256 * 4  # the logits alone
    assert in_microbatches < at_once / 2


def test_gradients_wait_for_the_shards_of_one_device():
    estimates = [
        estimate_memory(SMALL, global_batch_size=8, num_shards=8, mesh=make_mesh(devices=jax.devices()[:number]))
        for number in (1, 2, 8)
    ]
    alone, of_two, of_eight = (estimate.temporary_bytes for estimate in estimates)
    gradients = 4 * num_params(SMALL)
    # Of eight shards four gradients are held, of four three, and of one that of the shard.
    assert alone - of_two == pytest.approx(gradients, rel=0.05)
    assert alone - of_eight == pytest.approx(3 * gradients, rel=0.05)
    # Each device has a state.
    state = abstract_train_state(SMALL, create_optimizer(OptimizerConfig(), 1000))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert [estimate.state_bytes for estimate in estimates] == [held] * 3


def test_the_new_state_of_a_tree_waits_for_the_gradients():
    """The other arrays of this step are smaller than a state."""
    config = GPT2Config(vocab_size=128, seq_len=2, num_layers=1, num_heads=2, embed_dim=256)
    estimate = estimate_memory(config, global_batch_size=1, num_shards=1)
    assert estimate.temporary_bytes >= estimate.state_bytes + 4 * num_params(config)


def test_a_shard_may_have_microbatches():
    at_once, in_microbatches = (
        estimate_memory(SMALL, global_batch_size=64, num_shards=2, grad_accum_steps=number).temporary_bytes
        for number in (1, 8)
    )
    assert in_microbatches < at_once / 2


STEPS = """
import re, sys
from pathlib import Path
import jax, numpy as np
from nnx_gpt2 import *

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

options, batch_size, num_microbatches = {arguments}
config, optimizer, key = GPT2Config(**options), create_optimizer(OptimizerConfig(), 1000), jax.random.key(0)
step = make_train_step(config, optimizer, grad_accum_steps=num_microbatches)
windows = np.zeros((batch_size, config.seq_len + 1), np.uint16)
compiled = step.lower(abstract_train_state(config, optimizer), windows, key).compile()
estimate = estimate_memory(config, global_batch_size=batch_size, grad_accum_steps=num_microbatches)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
state = create_train_state(config, optimizer, key)
for _ in range(3):
    state, metrics = compiled(state, windows, key)
    metrics["loss"].block_until_ready()
print((memory("VmHWM") - before) / estimate.peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("options", "batch_size", "num_microbatches"),
    [
        ({"vocab_size": 50257, "seq_len": 256, "num_layers": 6, "num_heads": 6, "embed_dim": 384}, 8, 1),
        (
            {"vocab_size": 257, "seq_len": 256, "num_layers": 6, "num_heads": 6, "embed_dim": 384, "dropout_rate": 0.1},
            64, 1,
        ),
        ({"vocab_size": 50257, "seq_len": 1024, "num_layers": 12, "num_heads": 12, "embed_dim": 768}, 4, 2),
    ],
    ids=["6x384", "6x384 with dropout", "124M in two microbatches"],
)  # fmt: skip
def test_a_running_process_needs_what_was_estimated(options, batch_size, num_microbatches):
    code = STEPS.replace("{arguments}", repr((options, batch_size, num_microbatches)))
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert 0.85 < float(done.stdout) < 1.15


@pytest.mark.slow
def test_remat_and_a_mesh_take_less():
    plain = estimate_memory(CONFIG, global_batch_size=16)
    remat = estimate_memory(dataclasses.replace(CONFIG, remat="full", scan_layers=True), global_batch_size=16)
    assert remat.temporary_bytes < plain.temporary_bytes
    sharded = estimate_memory(CONFIG, global_batch_size=16, mesh=make_mesh(fsdp=8))
    assert sharded.state_bytes < plain.state_bytes / 4


def test_documents_need_a_mask():
    plain, masked = (estimate_memory(SMALL, global_batch_size=32, end_of_text=end).temporary_bytes for end in (None, 3))
    assert plain < masked
