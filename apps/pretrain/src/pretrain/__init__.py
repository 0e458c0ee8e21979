"""GPT-2 pretraining: the application that composes owt-data, nnx-gpt2 and ray-jax-launch."""

from importlib.metadata import version

from pretrain._cli import main
from pretrain._config import PretrainConfig, TrainConfig
from pretrain._presets import PRESETS

__version__ = version("pretrain")

__all__ = ["PRESETS", "PretrainConfig", "TrainConfig", "main"]
