"""Next-token cross-entropy."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from nnx_gpt2._model import GPT2


def window_losses(
    model: GPT2, windows: Integer[Array, "B W"], *, dropout_key: PRNGKeyArray | None = None
) -> Float[Array, " B"]:
    """Mean cross-entropy of each window, in nats per token.

    A window of W = T + 1 tokens holds T predictions: of each token from those before it.

    Args:
        model: the model.
        windows: token ids, of any integer type.
        dropout_key: trains with dropout when given.
    """
    windows = windows.astype(jnp.int32)
    inputs_BT, targets_BT = windows[:, :-1], windows[:, 1:]
    logits_MP = model.padded_logits(model.hidden(inputs_BT, dropout_key=dropout_key)).astype(jnp.float32)
    # The padding's columns are masked, not cut off: a cut would copy the largest array of the step.
    is_token_P = jnp.arange(logits_MP.shape[1]) < model.config.vocab_size
    logits_MP = jnp.where(is_token_P[None], logits_MP, jnp.finfo(jnp.float32).min)
    losses_M = optax.softmax_cross_entropy_with_integer_labels(logits_MP, targets_BT.reshape(-1))
    return losses_M.reshape(targets_BT.shape).mean(axis=1)
