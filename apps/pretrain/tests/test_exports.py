import subprocess
import sys

import pytest

import pretrain


def test_public_names_are_sorted_and_load():
    assert pretrain.__all__ == [
        "PRESETS", "MeshConfig", "ModelConfig", "PrepareConfig", "PretrainConfig", "TrainConfig", "TrainResult",
        "TrainedModel", "load_trained", "main", "train",
    ]  # fmt: skip
    for name in pretrain.__all__:
        assert getattr(pretrain, name) is not None


def test_completion_lists_the_public_names():
    assert dir(pretrain) == sorted([*pretrain.__all__, "__version__"])
    assert (
        subprocess.run(
            [sys.executable, "-c", "import pretrain; print('train' in dir(pretrain))"], capture_output=True, check=True
        ).stdout
        == b"True\n"
    )


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'pretrain' has no attribute 'launch'"):
        pretrain.launch  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue] - that is what is tested


def test_importing_it_imports_nothing_heavy():
    code = "import sys, pretrain; sys.exit(bool({'jax', 'ray', 'datasets', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
