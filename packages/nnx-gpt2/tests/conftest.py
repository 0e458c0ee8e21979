"""Every test sees eight CPU devices, and rank promotion that was not meant raises."""

import os
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import pytest

from nnx_gpt2 import GPT2Config

jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of a test's time is compiling, of which this saves two thirds. The application's tests, the READMEs and the
# benchmarks run what the whole compiler makes of the same code.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session", autouse=True)
def compiled_once():
    """Tests compile the same few steps again and again: keep them, for this session alone."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        yield


@pytest.fixture
def tiny() -> GPT2Config:
    return GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
