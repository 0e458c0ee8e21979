"""GPT-2 pretraining: the application that composes owt-data, nnx-gpt2 and ray-jax-launch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain._cli import main
    from pretrain._commands.load import TrainedModel, load_trained
    from pretrain._commands.train import TrainResult, train
    from pretrain._config import MeshConfig, ModelConfig, PrepareConfig, PretrainConfig, TrainConfig
    from pretrain._presets import PRESETS

    __version__: str

__all__ = [
    "PRESETS",
    "MeshConfig",
    "ModelConfig",
    "PrepareConfig",
    "PretrainConfig",
    "TrainConfig",
    "TrainResult",
    "TrainedModel",
    "load_trained",
    "main",
    "train",
]

# Each name is imported at its first use: Ray and jax take seconds, and Ctrl-C must end the command during all imports.
_MODULES = {
    "PRESETS": "_presets",
    "MeshConfig": "_config",
    "ModelConfig": "_config",
    "PrepareConfig": "_config",
    "PretrainConfig": "_config",
    "TrainConfig": "_config",
    "TrainResult": "_commands.train",
    "TrainedModel": "_commands.load",
    "load_trained": "_commands.load",
    "main": "_cli",
    "train": "_commands.train",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pretrain")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pretrain.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
