import subprocess
import sys

import nnx_gpt2


def test_public_names_are_sorted_and_load():
    assert nnx_gpt2.__all__ == sorted(
        nnx_gpt2.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    for name in nnx_gpt2.__all__:
        assert getattr(nnx_gpt2, name) is not None
    assert set(nnx_gpt2._MODULE_OF) <= set(nnx_gpt2.__all__)


def test_unknown_names_are_refused():
    assert not hasattr(nnx_gpt2, "GPT3")


def test_importing_it_imports_no_jax():
    code = "import sys, nnx_gpt2; nnx_gpt2.GPT2Config(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
