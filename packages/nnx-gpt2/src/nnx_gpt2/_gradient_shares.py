"""The share of each prediction of a batch in its gradient.

Shapes: B batch, n devices of the batch's axes, W = T + 1 tokens of a window, T predictions.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Integer

from nnx_gpt2._errors import INT32_MAX, check_type
from nnx_gpt2._loss import token_losses
from nnx_gpt2._model import merge
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._params import Params
from nnx_gpt2._sharding import check_axis_names, num_batch_shards, put_batch, replicated
from nnx_gpt2._target import compiled_for
from nnx_gpt2._token_ids import check_batch, check_end_of_text, for_device, have_known_ids
from nnx_gpt2._train_step import segments_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientShares:
    """The losses of a batch, and the share of each prediction in its gradient."""

    losses: Float32[np.ndarray, "B T"]
    """The loss of each prediction, in nats. NaN in a window with ids outside the vocabulary."""

    shares: Float32[np.ndarray, "B T"]
    """The share of each prediction in the squared norm of the gradient g of the batch: `<g_t, g> / <g, g>`, where g is
    the sum of all g_t. The shares of all predictions sum to 1; one that pulls against the others has a negative share.
    NaN in a window whose loss or gradient is not finite."""

    norms: Float32[np.ndarray, " B"]
    """The norm of the gradient of each window's mean loss. Not finite if the loss or the gradient is not."""

    norm: float
    """The norm of g: the mean of the gradients of the windows that are finite."""


def gradient_shares(
    config: GPT2Config,
    params: Params,
    windows: Integer[np.ndarray, "B W"],
    *,
    mesh: Mesh | None = None,
    end_of_text: int | None = None,
) -> GradientShares:
    """Compute the loss of each prediction of a batch, and its share in the gradient, without dropout.

    One window is computed at a time, twice: a batch needs no more memory than a window, and takes a few times as long
    as the steps of as many windows. Attention is the plain formula.

    Args:
        config: the model's shape.
        params: the parameters.
        windows: the batch. Each process has all of it.
        mesh: the devices of the parameters. None is a single device.
        end_of_text: the token that ends a document. If given, attention stays within documents.

    Raises:
        ValueError: an argument has another type, or the windows are not integers of shape `[batch, tokens]`.
    """
    check_type("config", config, GPT2Config)
    if mesh is not None:
        check_axis_names(mesh)
    check_end_of_text(end_of_text, config.vocab_size)
    check_batch(windows, "windows")
    windows = for_device(windows, INT32_MAX + 1, "windows")
    gradient, along = _programs(config, mesh, end_of_text)
    losses, norms = [], []
    total, num_finite = None, 0
    for window in windows:
        of_window, norm, grads = gradient(params, _repeated(window, mesh))
        losses.append(np.asarray(of_window))
        norms.append(float(norm))
        if np.isfinite(norms[-1]):
            total, num_finite = grads if total is None else _add(total, grads), num_finite + 1
    shares = np.full((len(windows), windows.shape[1] - 1), np.nan, np.float32)
    norm = 0.0
    if total is not None:
        squared = float(optax.tree.norm(total)) ** 2
        norm = squared**0.5 / num_finite
        for row, window in enumerate(windows):
            if np.isfinite(norms[row]):
                parts = np.asarray(along(params, _repeated(window, mesh), total))
                shares[row] = parts / (parts.size * squared) if squared else 0.0
    return GradientShares(losses=np.stack(losses), shares=shares, norms=np.asarray(norms, np.float32), norm=norm)


def _repeated(window: Integer[np.ndarray, " W"], mesh: Mesh | None) -> Any:
    """Return a batch with one copy of a window for each device: the mean over the copies is that of the window."""
    rows = np.tile(window, (num_batch_shards(mesh), 1))
    return rows if mesh is None else put_batch(rows[: len(rows) // jax.process_count()], mesh)


@jax.jit
def _add(total: Params, grads: Params) -> Params:
    return jax.tree.map(jnp.add, total, grads)


@cache
def _programs(config: GPT2Config, mesh: Mesh | None, end_of_text: int | None) -> tuple[Any, Any]:
    """Return two functions of a window: its losses and its gradient, and the slope of its losses along a direction."""
    # The kernels of the other backends have no gradient of their gradient.
    config = dataclasses.replace(config, attention="xla", dropout_rate=0.0)

    def losses_of(params: Params, rows: Integer[Array, "n W"]) -> Float[Array, " T"]:
        losses = token_losses(merge(config, params), rows, segment_ids=segments_of(rows, end_of_text))
        return jnp.where(have_known_ids(rows, config.vocab_size), losses, jnp.nan).mean(0)

    def gradient(params: Params, rows: Integer[Array, "n W"]) -> tuple[Array, Array, Params]:
        def mean(params: Params) -> tuple[Array, Array]:
            losses = losses_of(params, rows)
            return losses.mean(), losses

        with compiled_for(mesh):
            (loss, losses), grads = jax.value_and_grad(mean, has_aux=True)(params)
            norm = jnp.where(jnp.isfinite(loss), optax.tree.norm(grads), jnp.nan)
            return losses, norm, grads

    def along(params: Params, rows: Integer[Array, "n W"], direction: Params) -> Float[Array, " T"]:
        """Return the product of the gradient of each prediction's loss with the direction.

        The model's own gradients rule out forward differentiation. The pullback of the losses is linear in its
        argument, and its transpose is the derivative along a direction.
        """
        with compiled_for(mesh):
            losses, pullback = jax.vjp(lambda params: losses_of(params, rows), params)
            _, transposed = jax.vjp(lambda weights: pullback(weights)[0], jnp.zeros_like(losses))
            return transposed(direction)[0]

    if mesh is None:
        return jax.jit(gradient), jax.jit(along)
    everywhere = replicated(mesh)
    return jax.jit(gradient, out_shardings=(everywhere, everywhere, None)), jax.jit(along, out_shardings=everywhere)
