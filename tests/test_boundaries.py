"""Who may import whom, seen in fresh interpreters with everything imported."""

import subprocess
import sys

import pytest

NEVER = {
    "nnx_gpt2": {"ray", "tiktoken", "datasets", "owt_data", "ray_jax_launch", "pretrain"},
    "owt_data": {"jax", "flax", "optax", "nnx_gpt2", "ray_jax_launch", "pretrain"},
    "ray_jax_launch": {"flax", "optax", "tiktoken", "datasets", "nnx_gpt2", "owt_data", "pretrain"},
}


@pytest.mark.parametrize("package", NEVER)
def test_a_package_loads_nothing_beyond_its_own(package):
    code = (
        f"import sys, {package}\n"
        f"for name in {package}.__all__: getattr({package}, name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert package in loaded
    assert NEVER[package].isdisjoint(loaded)


def test_a_driver_loads_no_jax():
    code = "import sys, pretrain._commands.train; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
