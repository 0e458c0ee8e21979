"""GPT-2 in Flax NNX: the model, its loss, optimizer, steps, sharding and sampling.

Names load on first use, so that reading a configuration does not import jax.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from nnx_gpt2._config import (
    AttentionBackend,
    DType,
    GPT2Config,
    OptimizerConfig,
    OptimizerName,
    RematPolicy,
    ScheduleName,
    check_mesh,
    gpt2,
    gpt2_large,
    gpt2_medium,
    gpt2_xl,
)

if TYPE_CHECKING:
    from nnx_gpt2._attention import causal_attention
    from nnx_gpt2._evaluate import (
        ChoiceEvaluation,
        Question,
        TokenEvaluation,
        evaluate_choices,
        evaluate_tokens,
        read_questions,
    )
    from nnx_gpt2._generate import generate
    from nnx_gpt2._loss import mean_loss, token_losses, window_losses
    from nnx_gpt2._memory import MemoryEstimate, estimate_memory
    from nnx_gpt2._model import GPT2
    from nnx_gpt2._numbers import flops_per_token, num_params, peak_flops_per_s
    from nnx_gpt2._optimizer import create_optimizer, learning_rate_schedule
    from nnx_gpt2._sharding import (
        batch_sharding,
        make_mesh,
        param_spec,
        put_batch,
        replicated,
        tree_shardings,
    )
    from nnx_gpt2._train import (
        TrainState,
        abstract_train_state,
        create_train_state,
        document_ids,
        make_eval_step,
        make_train_step,
        merge,
        split_params,
        stack_layers,
        unstack_layers,
    )

_MODULE_OF = {
    "causal_attention": "_attention",
    "ChoiceEvaluation": "_evaluate",
    "Question": "_evaluate",
    "TokenEvaluation": "_evaluate",
    "evaluate_choices": "_evaluate",
    "evaluate_tokens": "_evaluate",
    "read_questions": "_evaluate",
    "generate": "_generate",
    "mean_loss": "_loss",
    "token_losses": "_loss",
    "window_losses": "_loss",
    "MemoryEstimate": "_memory",
    "estimate_memory": "_memory",
    "GPT2": "_model",
    "flops_per_token": "_numbers",
    "num_params": "_numbers",
    "peak_flops_per_s": "_numbers",
    "create_optimizer": "_optimizer",
    "learning_rate_schedule": "_optimizer",
    "batch_sharding": "_sharding",
    "make_mesh": "_sharding",
    "param_spec": "_sharding",
    "put_batch": "_sharding",
    "replicated": "_sharding",
    "tree_shardings": "_sharding",
    "TrainState": "_train",
    "abstract_train_state": "_train",
    "create_train_state": "_train",
    "document_ids": "_train",
    "make_eval_step": "_train",
    "make_train_step": "_train",
    "merge": "_train",
    "split_params": "_train",
    "stack_layers": "_train",
    "unstack_layers": "_train",
}

try:
    __version__ = version("nnx-gpt2")
except PackageNotFoundError:  # the sources are on the path, uninstalled
    __version__ = "0+uninstalled"

__all__ = [
    "GPT2",
    "AttentionBackend",
    "ChoiceEvaluation",
    "DType",
    "GPT2Config",
    "MemoryEstimate",
    "OptimizerConfig",
    "OptimizerName",
    "Question",
    "RematPolicy",
    "ScheduleName",
    "TokenEvaluation",
    "TrainState",
    "abstract_train_state",
    "batch_sharding",
    "causal_attention",
    "check_mesh",
    "create_optimizer",
    "create_train_state",
    "document_ids",
    "estimate_memory",
    "evaluate_choices",
    "evaluate_tokens",
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
    "mean_loss",
    "merge",
    "num_params",
    "param_spec",
    "peak_flops_per_s",
    "put_batch",
    "read_questions",
    "replicated",
    "split_params",
    "stack_layers",
    "token_losses",
    "tree_shardings",
    "unstack_layers",
    "window_losses",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nnx_gpt2' has no attribute {name!r}")
    return getattr(import_module(f"nnx_gpt2.{_MODULE_OF[name]}"), name)
