"""Imports of each package, observed in a fresh interpreter."""

import subprocess
import sys

import pytest

FORBIDDEN = {
    "nnx_gpt2": {"ray", "tiktoken", "datasets", "owt_data", "ray_jax_launch", "pretrain"},
    "owt_data": {"jax", "flax", "optax", "nnx_gpt2", "ray_jax_launch", "pretrain"},
    "ray_jax_launch": {"flax", "optax", "tiktoken", "datasets", "nnx_gpt2", "owt_data", "pretrain"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_loads_no_forbidden_package(package):
    code = (
        f"import sys, {package}\n"
        f"for name in {package}.__all__: getattr({package}, name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert package in loaded
    assert FORBIDDEN[package].isdisjoint(loaded)


def test_the_driver_does_not_load_jax():
    code = "import sys, pretrain._commands.train; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
