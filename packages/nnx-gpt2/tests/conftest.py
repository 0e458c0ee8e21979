"""Each test has eight CPU devices. Implicit rank promotion raises."""

import os
import tempfile

# Tests spend most of their time compiling. Fewer optimizations save two thirds of it, and no fusion emitters a quarter
# of the rest. The application's tests, the READMEs and the benchmarks run the same code fully optimized.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false"

import jax
import pytest

from nnx_gpt2 import GPT2Config

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session", autouse=True)
def compiled_once():
    """Cache compiled programs for this session: many tests compile the same few steps."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        yield


@pytest.fixture
def tiny() -> GPT2Config:
    return GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
