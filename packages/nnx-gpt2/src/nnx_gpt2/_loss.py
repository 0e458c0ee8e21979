"""Next-token cross-entropy, a part of the tokens at a time.

Logits are the largest arrays of a step by far: here at most `config.loss_chunk_tokens` rows of them exist at
once on a device. In training each part's gradient is formed while its logits are there, so that nothing is
computed twice. Over a mesh each device has its own tokens and, on the axis `tensor`, its own part of the
vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).

Shapes: B batch, W = T + 1 tokens of a window, T predictions of it, C width, P padded vocabulary; K parts of
S positions each.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from nnx_gpt2._model import GPT2
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._sharding import (
    BATCH_AXES,
    TENSOR_AXIS,
    axis_index,
    gather_fsdp,
    over_mesh,
    param_spec,
    pmax,
    psum,
    reduce_scatter,
)

_X_SPEC = PartitionSpec(BATCH_AXES)
_HEAD_SPEC = param_spec("wte.embedding", 2)


def mean_loss(
    model: GPT2,
    windows: Integer[Array, "B W"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy over all predictions, in nats per token: what training minimises.

    Args:
        model: the model.
        windows: token ids, of any integer type. W tokens hold W - 1 predictions, each from those before it.
        segment_ids: of the W - 1 inputs; see `GPT2`.
        dropout_key: trains with dropout when given.
    """
    x_BTC, targets_BT = _head_inputs(model, windows, segment_ids, dropout_key)
    return _mean_head_loss(model.config, x_BTC, model.wte.embedding[...], targets_BT)


def token_losses(
    model: GPT2, windows: Integer[Array, "B W"], *, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Cross-entropy of each prediction, in nats. For evaluation: gradients do not pass through it."""
    x_BTC, targets_BT = _head_inputs(model, windows, segment_ids, None)
    split = over_mesh(partial(_losses_by_part, model.config), (_X_SPEC, _HEAD_SPEC, _X_SPEC), _X_SPEC)
    return split(x_BTC, model.wte.embedding[...], targets_BT)


def _head_inputs(
    model: GPT2, windows: Array, segment_ids: Array | None, dropout_key: PRNGKeyArray | None
) -> tuple[Float[Array, "B T C"], Int[Array, "B T"]]:
    windows = windows.astype(jnp.int32)
    inputs_BT, targets_BT = windows[:, :-1], windows[:, 1:]
    x_MC = model.final_activations(inputs_BT, segment_ids=segment_ids, dropout_key=dropout_key)
    return x_MC.reshape(*inputs_BT.shape, -1), targets_BT


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean_head_loss(config: GPT2Config, x_BTC: Array, head_PC: Array, targets_BT: Array) -> Array:
    split = over_mesh(partial(_losses_by_part, config), (_X_SPEC, _HEAD_SPEC, _X_SPEC), _X_SPEC)
    return split(x_BTC, head_PC, targets_BT).mean()


def _mean_head_loss_fwd(
    config: GPT2Config, x_BTC: Array, head_PC: Array, targets_BT: Array
) -> tuple[Array, tuple[Array, Array]]:
    split = over_mesh(
        partial(_loss_and_grads_by_part, config, 1 / targets_BT.size),
        (_X_SPEC, _HEAD_SPEC, _X_SPEC),
        (PartitionSpec(), _X_SPEC, _HEAD_SPEC),
    )
    loss, dx_BTC, dhead_PC = split(x_BTC, head_PC, targets_BT)
    return loss, (dx_BTC, dhead_PC)


def _mean_head_loss_bwd(config: GPT2Config, grads: tuple[Array, Array], scale: Array) -> tuple[Array, Array, None]:
    dx_BTC, dhead_PC = (grad * scale.astype(grad.dtype) for grad in grads)
    return dx_BTC, dhead_PC, None


_mean_head_loss.defvjp(_mean_head_loss_fwd, _mean_head_loss_bwd)


def _losses_by_part(config: GPT2Config, x_BTC: Array, head_PC: Array, targets_BT: Array) -> Float[Array, "B T"]:
    """The loss of each prediction of this device's rows."""
    head_PC = gather_fsdp(head_PC.astype(x_BTC.dtype))
    x_KBSC, targets_KBS = _parts(config, x_BTC), _parts(config, targets_BT)

    def part(rest: tuple[Array, Array]) -> Array:
        x_BSC, targets_BS = rest
        _, losses_M, _, _ = _part_losses(config, x_BSC.reshape(-1, x_BSC.shape[-1]), head_PC, targets_BS.reshape(-1))
        return losses_M.reshape(targets_BS.shape)

    losses_KBS = jax.lax.map(part, (x_KBSC, targets_KBS))
    return losses_KBS.swapaxes(0, 1).reshape(len(x_BTC), -1)[:, : x_BTC.shape[1]]


def _loss_and_grads_by_part(
    config: GPT2Config, weight: float, x_BTC: Array, head_PC: Array, targets_BT: Array
) -> tuple[Array, Array, Array]:
    """The weighted sum of all devices' losses, and its gradients as to this device's rows and part of the head."""
    full_PC = gather_fsdp(head_PC.astype(x_BTC.dtype))
    x_KBSC, targets_KBS = _parts(config, x_BTC), _parts(config, targets_BT)
    num_positions, part_positions = x_BTC.shape[1], x_KBSC.shape[2]

    def part(totals: tuple[Array, Array], rest: tuple[Any, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        loss, dhead_PC = totals
        k, x_BSC, targets_BS = rest
        is_real_S = k * part_positions + jnp.arange(part_positions) < num_positions  # the last part may be padded
        weights_M = jnp.broadcast_to(weight * is_real_S, targets_BS.shape).reshape(-1)
        x_MC = x_BSC.reshape(-1, x_BSC.shape[-1])
        exp_MP, losses_M, sums_M, is_target_MP = _part_losses(config, x_MC, full_PC, targets_BS.reshape(-1))
        # The gradient as to the logits: probability, less one for the target.
        probs_MP = exp_MP * (weights_M / sums_M)[:, None]
        dlogits_MP = (probs_MP - jnp.where(is_target_MP, weights_M[:, None], 0)).astype(x_MC.dtype)
        dx_MC = psum(jnp.einsum("MP,PC->MC", dlogits_MP, full_PC), TENSOR_AXIS)
        dhead_PC += jnp.einsum("MP,MC->PC", dlogits_MP, x_MC, preferred_element_type=dhead_PC.dtype)
        return (loss + (losses_M * weights_M).sum(), dhead_PC), dx_MC.reshape(x_BSC.shape)

    accumulate = jnp.promote_types(x_BTC.dtype, jnp.float32)
    zeros = (jnp.zeros((), accumulate), jnp.zeros(full_PC.shape, accumulate))
    if len(x_KBSC) == 1:
        (loss, dhead_PC), dx_BSC = part(zeros, (0, x_KBSC[0], targets_KBS[0]))
        dx_KBSC = dx_BSC[None]
    else:
        (loss, dhead_PC), dx_KBSC = jax.lax.scan(part, zeros, (jnp.arange(len(x_KBSC)), x_KBSC, targets_KBS))
    dx_BTC = dx_KBSC.swapaxes(0, 1).reshape(len(x_BTC), -1, x_BTC.shape[2])[:, :num_positions]
    return psum(loss, *BATCH_AXES), dx_BTC, reduce_scatter(dhead_PC).astype(head_PC.dtype)


def _part_losses(
    config: GPT2Config, x_MC: Array, head_PC: Array, targets_M: Array
) -> tuple[Array, Array, Array, Array]:
    """Of some rows: shifted exponentials of the logits, losses, the exponentials' sums, and where the targets are."""
    first = axis_index(TENSOR_AXIS) * len(head_PC)
    ids_P = first + jnp.arange(len(head_PC))
    accumulate = jnp.promote_types(x_MC.dtype, jnp.float32)
    logits_MP = jnp.einsum("MC,PC->MP", x_MC, head_PC, preferred_element_type=accumulate)
    if config.padded_vocab_size > config.vocab_size:
        # The padding's columns are masked, not cut off: a cut would copy the largest array of the step.
        logits_MP = jnp.where((ids_P < config.vocab_size)[None], logits_MP, jnp.finfo(accumulate).min)
    largest_M = pmax(logits_MP.max(axis=1), TENSOR_AXIS)
    exp_MP = jnp.exp(logits_MP - largest_M[:, None])
    sums_M = psum(exp_MP.sum(axis=1), TENSOR_AXIS)
    is_target_MP = ids_P[None] == targets_M[:, None]
    target_logits_M = psum(jnp.where(is_target_MP, logits_MP, 0).sum(axis=1), TENSOR_AXIS)
    return exp_MP, largest_M + jnp.log(sums_M) - target_logits_M, sums_M, is_target_MP


def _parts(config: GPT2Config, x_BT: Array) -> Array:
    """Cut along positions, so that rows stay where they are: `[B, T, ...]` to `[K, B, S, ...]`, padded by zeros."""
    batch_size, num_positions = x_BT.shape[:2]
    num_parts = -(-num_positions // max(1, config.loss_chunk_tokens // batch_size))
    part_positions = -(-num_positions // num_parts)
    padding = num_parts * part_positions - num_positions
    x_BT = jnp.pad(x_BT, ((0, 0), (0, padding), *[(0, 0)] * (x_BT.ndim - 2)))
    return x_BT.reshape(batch_size, num_parts, part_positions, *x_BT.shape[2:]).swapaxes(0, 1)
