"""Every test sees two CPU devices, and rank promotion that was not meant raises."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import pytest

from nnx_gpt2 import GPT2Config

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def tiny() -> GPT2Config:
    return GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
