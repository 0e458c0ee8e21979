"""Each test has eight CPU devices. Implicit rank promotion raises."""

import gc
import os
from collections.abc import Iterator
from typing import Any

# Tests spend most of their time compiling. Fewer optimizations save two thirds of it, and these flags a third of the
# rest. The integration tests, the READMEs and the benchmarks run the same code fully optimized.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)

import jax
import pytest

from nnx_gpt2 import GPT2Config

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
# A trace makes millions of objects, few of them in cycles: the collections of Python's default take 7 % of the time.
gc.set_threshold(20_000, 20, 100)


def pytest_configure(config):
    # A process that reads a program while another one writes it compiles it too.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Cache compiled programs for all test processes: many tests compile the same few steps."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def tiny() -> GPT2Config:
    return GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the programs that a test compiles, or reads from the cache."""
    names = []

    def note(event: str, duration_secs: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)
