"""GPT-2 pretraining: the application that composes owt-data, nnx-gpt2 and ray-jax-launch."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pretrain._cli import main
from pretrain._config import MeshConfig, ModelConfig, PrepareConfig, PretrainConfig, TrainConfig
from pretrain._presets import PRESETS

if TYPE_CHECKING:
    from pretrain._commands.load import TrainedModel, load_trained
    from pretrain._commands.train import TrainResult, train

__version__ = version("pretrain")

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

# These modules import Ray or jax, which take seconds. They are imported at the first use of a name.
_MODULES = {"TrainResult": "train", "TrainedModel": "load", "load_trained": "load", "train": "train"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pretrain._commands.{_MODULES[name]}"), name)
