"""Next-token cross-entropy, computed in chunks of tokens.

Logits are by far the largest arrays of a step. At most `config.loss_chunk_tokens` rows of them exist on a device at
once. Training computes the gradient of a chunk together with its logits, so no logits are computed twice. On a
mesh each device has its own tokens and, on the axis `tensor`, its own shard of the vocabulary (Shoeybi et al.,
2019, arXiv:1909.08053, section 3).

Shapes: B batch, W = T + 1 tokens of a window, T predictions, C width, P padded vocabulary, K chunks of R positions
of each window, M = B * R tokens of a chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from nnx_gpt2._embedding import HEAD_SPEC, logits, lookup
from nnx_gpt2._errors import check_type
from nnx_gpt2._model import GPT2
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._sharding import BATCH_AXES, TENSOR_AXIS, axis_index, over_mesh, pmax, psum
from nnx_gpt2._token_ids import check_windows

_X_SPEC = PartitionSpec(BATCH_AXES)


def mean_loss(
    model: GPT2,
    windows: Integer[Array, "B W"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy over all predictions, in nats per token. Training minimises it.

    Args:
        model: the model.
        windows: token ids, of any integer type. W tokens have W - 1 predictions, each from the earlier tokens.
        segment_ids: segments of the W - 1 inputs; see `GPT2.__call__`.
        dropout_key: random key of the dropout. None disables dropout.

    Raises:
        ValueError: the windows are not integers of shape [batch, tokens], there are none, they have a single token, the
            segments have another shape than the inputs, or, outside jit, ids lie outside the vocabulary.
    """
    inputs = _head_inputs(model, windows, segment_ids, dropout_key)
    return _mean_head_loss(model.config, *inputs)


def token_losses(
    model: GPT2, windows: Integer[Array, "B W"], *, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Cross-entropy of each prediction, in nats. For evaluation: `mean_loss` is the one to differentiate.

    Raises:
        ValueError: see `mean_loss`.
    """
    inputs = _head_inputs(model, windows, segment_ids, None)
    split = over_mesh(partial(_losses_by_chunk, model.config), (_X_SPEC, HEAD_SPEC, _X_SPEC), _X_SPEC)
    return split(*inputs)


def _head_inputs(
    model: GPT2, windows: Array, segment_ids: Array | None, dropout_key: PRNGKeyArray | None
) -> tuple[Float[Array, "B T C"], Float[Array, "rows C"], Int[Array, "B T"]]:
    check_type("model", model, GPT2)
    check_windows(windows, model.config.vocab_size)
    windows = windows.astype(jnp.int32)
    inputs_BT, targets_BT = windows[:, :-1], windows[:, 1:]
    wte_BTC, head_PC = lookup(model.wte.embedding[...], inputs_BT, model.config.dtype)
    x_MC = model.final_activations(inputs_BT, wte_BTC=wte_BTC, segment_ids=segment_ids, dropout_key=dropout_key)
    return x_MC.reshape(*inputs_BT.shape, -1), head_PC, targets_BT


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean_head_loss(config: GPT2Config, x_BTC: Array, head_PC: Array, targets_BT: Array) -> Array:
    split = over_mesh(partial(_losses_by_chunk, config), (_X_SPEC, HEAD_SPEC, _X_SPEC), _X_SPEC)
    return split(x_BTC, head_PC, targets_BT).mean()


def _mean_head_loss_fwd(
    config: GPT2Config, x_BTC: Array, head_PC: Array, targets_BT: Array
) -> tuple[Array, tuple[Array, Array]]:
    split = over_mesh(
        partial(_loss_and_grads_by_chunk, config, 1 / targets_BT.size),
        (_X_SPEC, HEAD_SPEC, _X_SPEC),
        (PartitionSpec(), _X_SPEC, HEAD_SPEC),
    )
    loss, dx_BTC, dhead_PC = split(x_BTC, head_PC, targets_BT)
    return loss, (dx_BTC, dhead_PC)


def _mean_head_loss_bwd(config: GPT2Config, grads: tuple[Array, Array], scale: Array) -> tuple[Array, Array, None]:
    dx_BTC, dhead_PC = (grad * scale.astype(grad.dtype) for grad in grads)
    return dx_BTC, dhead_PC, None


_mean_head_loss.defvjp(_mean_head_loss_fwd, _mean_head_loss_bwd)


def _losses_by_chunk(config: GPT2Config, x_BTC: Array, head_PC: Array, targets_BT: Array) -> Float[Array, "B T"]:
    """Return the loss of each prediction of this device's rows."""
    head_PC = head_PC.astype(x_BTC.dtype)
    x_KBRC, targets_KBR = _chunks(config, x_BTC), _chunks(config, targets_BT)

    def chunk(rest: tuple[Array, Array]) -> Array:
        x_BRC, targets_BR = rest
        _, losses_M, _, _ = _chunk_losses(config, x_BRC.reshape(-1, x_BRC.shape[-1]), head_PC, targets_BR.reshape(-1))
        return losses_M.reshape(targets_BR.shape)

    losses_KBR = jax.lax.map(chunk, (x_KBRC, targets_KBR))
    return losses_KBR.swapaxes(0, 1).reshape(len(x_BTC), -1)[:, : x_BTC.shape[1]]


def _loss_and_grads_by_chunk(
    config: GPT2Config, weight: float, x_BTC: Array, head_PC: Array, targets_BT: Array
) -> tuple[Array, Array, Array]:
    """Return the weighted sum of all devices' losses, and the gradients of this device's rows.

    The gradient of the head is not summed over devices: `lookup` adds its own gradient first.
    """
    cast_PC = head_PC.astype(x_BTC.dtype)
    x_KBRC, targets_KBR = _chunks(config, x_BTC), _chunks(config, targets_BT)
    num_positions, chunk_positions = x_BTC.shape[1], x_KBRC.shape[2]

    def chunk(totals: tuple[Array, Array], rest: tuple[Any, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        loss, dhead_PC = totals
        k, x_BRC, targets_BR = rest
        is_real_R = k * chunk_positions + jnp.arange(chunk_positions) < num_positions  # the last chunk may be padded
        weights_M = jnp.broadcast_to(weight * is_real_R, targets_BR.shape).reshape(-1)
        x_MC = x_BRC.reshape(-1, x_BRC.shape[-1])
        exp_MP, losses_M, sums_M, is_target_MP = _chunk_losses(config, x_MC, cast_PC, targets_BR.reshape(-1))
        # The gradient of the logits: the probability, less one for the target.
        probs_MP = exp_MP * (weights_M / sums_M)[:, None]
        dlogits_MP = (probs_MP - jnp.where(is_target_MP, weights_M[:, None], 0)).astype(x_MC.dtype)
        dx_MC = psum(jnp.einsum("MP,PC->MC", dlogits_MP, cast_PC), TENSOR_AXIS)
        dhead_PC += jnp.einsum("MP,MC->PC", dlogits_MP, x_MC, preferred_element_type=dhead_PC.dtype)
        return (loss + (losses_M * weights_M).sum(), dhead_PC), dx_MC.reshape(x_BRC.shape)

    zeros = (jnp.zeros((), head_PC.dtype), jnp.zeros_like(head_PC))
    if len(x_KBRC) == 1:
        (loss, dhead_PC), dx_BRC = chunk(zeros, (0, x_KBRC[0], targets_KBR[0]))
        dx_KBRC = dx_BRC[None]
    else:
        (loss, dhead_PC), dx_KBRC = jax.lax.scan(chunk, zeros, (jnp.arange(len(x_KBRC)), x_KBRC, targets_KBR))
    dx_BTC = dx_KBRC.swapaxes(0, 1).reshape(len(x_BTC), -1, x_BTC.shape[2])[:, :num_positions]
    return psum(loss, *BATCH_AXES), dx_BTC, dhead_PC


def _chunk_losses(
    config: GPT2Config, x_MC: Array, head_PC: Array, targets_M: Array
) -> tuple[Array, Array, Array, Array]:
    """Return the shifted exponentials of the logits, the losses, the sums of exponentials, and the target mask."""
    first = axis_index(TENSOR_AXIS) * len(head_PC)
    ids_P = first + jnp.arange(len(head_PC))
    logits_MP = logits(x_MC, head_PC)
    if config.padded_vocab_size > config.vocab_size:
        # Mask the padding instead of slicing it off: a slice would copy the largest array of the step.
        logits_MP = jnp.where((ids_P < config.vocab_size)[None], logits_MP, jnp.finfo(logits_MP.dtype).min)
    # The shift cancels. Without a gradient of its own, the losses can be differentiated over the axis `tensor` too.
    largest_M = pmax(jax.lax.stop_gradient(logits_MP).max(axis=1), TENSOR_AXIS)
    exp_MP = jnp.exp(logits_MP - largest_M[:, None])
    sums_M = psum(exp_MP.sum(axis=1), TENSOR_AXIS)
    is_target_MP = ids_P[None] == targets_M[:, None]
    target_logits_M = psum(jnp.where(is_target_MP, logits_MP, 0).sum(axis=1), TENSOR_AXIS)
    return exp_MP, largest_M + jnp.log(sums_M) - target_logits_M, sums_M, is_target_MP


def _chunks(config: GPT2Config, x_BT: Array) -> Array:
    """Split positions into chunks, `[B, T, ...]` to `[K, B, R, ...]`, padded by zeros. Rows stay on their devices."""
    batch_size, num_positions = x_BT.shape[:2]
    num_chunks = -(-num_positions // max(1, config.loss_chunk_tokens // batch_size))
    chunk_positions = -(-num_positions // num_chunks)
    padding = num_chunks * chunk_positions - num_positions
    x_BT = jnp.pad(x_BT, ((0, 0), (0, padding), *[(0, 0)] * (x_BT.ndim - 2)))
    return x_BT.reshape(batch_size, num_chunks, chunk_positions, *x_BT.shape[2:]).swapaxes(0, 1)
