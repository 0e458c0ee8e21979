import dataclasses

import jax
import pytest

from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, estimate_memory, make_mesh

CONFIG = GPT2Config(vocab_size=512, seq_len=64, num_layers=4, num_heads=2, embed_dim=64)


def test_the_state_is_counted_to_the_byte():
    estimate = estimate_memory(CONFIG, global_batch_size=4)
    state = create_train_state(CONFIG, create_optimizer(OptimizerConfig(), 1000), jax.random.key(0))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # The estimate also has the batch, the key, the metrics, and alignment.
    assert held < estimate.state_bytes < held + 8192
    assert estimate.temporary_bytes > 0
    assert estimate.peak_bytes == estimate.state_bytes + estimate.temporary_bytes + estimate.code_bytes


def test_microbatches_share_the_memory_of_a_batch():
    config = GPT2Config(vocab_size=256, seq_len=64, num_layers=1, num_heads=2, embed_dim=32)
    at_once, in_microbatches = (
        estimate_memory(config, global_batch_size=32, grad_accum_steps=num_microbatches).temporary_bytes
        for num_microbatches in (1, 8)
    )
    assert at_once > 32 * 64 * 256 * 4  # the logits alone
    assert in_microbatches < at_once / 2


@pytest.mark.slow
def test_remat_and_a_mesh_take_less():
    plain = estimate_memory(CONFIG, global_batch_size=16)
    remat = estimate_memory(dataclasses.replace(CONFIG, remat="full", scan_layers=True), global_batch_size=16)
    assert remat.temporary_bytes < plain.temporary_bytes
    sharded = estimate_memory(CONFIG, global_batch_size=16, mesh=make_mesh(fsdp=8))
    assert sharded.state_bytes < plain.state_bytes / 4
