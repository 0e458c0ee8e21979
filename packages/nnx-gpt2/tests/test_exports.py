import subprocess
import sys
from pathlib import Path

import pytest

import nnx_gpt2

PUBLISHED = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"
PUBLIC = vars(nnx_gpt2)["__all__"]  # made from the stub, which itself does not declare it


def test_public_names_are_sorted():
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_loads_and_is_listed(name):
    assert getattr(nnx_gpt2, name) is not None
    assert name in dir(nnx_gpt2)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="GPT3"):
        nnx_gpt2.GPT3  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue] - that is what is tested


def test_importing_it_and_its_configs_imports_no_jax():
    code = (
        "import sys, nnx_gpt2; nnx_gpt2.GPT2Config(); nnx_gpt2.OptimizerConfig().num_steps_before_decay(9);"
        f" nnx_gpt2.pretrained_config({str(PUBLISHED)!r}); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
