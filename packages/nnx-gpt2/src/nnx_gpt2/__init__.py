"""GPT-2 in Flax NNX: the model, its loss, optimizer, steps, sharding and sampling.

Names load on first use, so that reading a configuration does not import jax.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from nnx_gpt2._config import (
    DType,
    GPT2Config,
    OptimizerConfig,
    gpt2,
    gpt2_large,
    gpt2_medium,
    gpt2_xl,
)

if TYPE_CHECKING:
    from nnx_gpt2._attention import causal_attention
    from nnx_gpt2._generate import generate
    from nnx_gpt2._loss import window_losses
    from nnx_gpt2._model import GPT2
    from nnx_gpt2._numbers import flops_per_token, num_params, peak_flops_per_s
    from nnx_gpt2._optimizer import create_optimizer, learning_rate_schedule
    from nnx_gpt2._sharding import batch_sharding, make_mesh, put_batch, replicated
    from nnx_gpt2._train import (
        TrainState,
        abstract_train_state,
        create_train_state,
        make_eval_step,
        make_train_step,
        merge,
    )

_MODULE_OF = {
    "causal_attention": "_attention",
    "generate": "_generate",
    "window_losses": "_loss",
    "GPT2": "_model",
    "flops_per_token": "_numbers",
    "num_params": "_numbers",
    "peak_flops_per_s": "_numbers",
    "create_optimizer": "_optimizer",
    "learning_rate_schedule": "_optimizer",
    "batch_sharding": "_sharding",
    "make_mesh": "_sharding",
    "put_batch": "_sharding",
    "replicated": "_sharding",
    "TrainState": "_train",
    "abstract_train_state": "_train",
    "create_train_state": "_train",
    "make_eval_step": "_train",
    "make_train_step": "_train",
    "merge": "_train",
}

__version__ = version("nnx-gpt2")

__all__ = [
    "GPT2",
    "DType",
    "GPT2Config",
    "OptimizerConfig",
    "TrainState",
    "abstract_train_state",
    "batch_sharding",
    "causal_attention",
    "create_optimizer",
    "create_train_state",
    "flops_per_token",
    "generate",
    "gpt2",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_xl",
    "learning_rate_schedule",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "merge",
    "num_params",
    "peak_flops_per_s",
    "put_batch",
    "replicated",
    "window_losses",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nnx_gpt2' has no attribute {name!r}")
    return getattr(import_module(f"nnx_gpt2.{_MODULE_OF[name]}"), name)
