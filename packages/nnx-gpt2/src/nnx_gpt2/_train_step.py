"""The train step and the eval step.

Shapes: B batch, b microbatch, W = T + 1 tokens of a window, T predictions.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from nnx_gpt2._dropout import check_key
from nnx_gpt2._errors import INT32_MAX, check_type, is_whole, kind, plain, require, shown
from nnx_gpt2._loss import mean_loss, token_losses
from nnx_gpt2._model import merge
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._params import Params
from nnx_gpt2._sharding import check_axis_names, num_batch_shards, replicated
from nnx_gpt2._target import compiled_for, target_of
from nnx_gpt2._token_ids import check_batch, check_end_of_text, check_windows, have_known_ids
from nnx_gpt2._train_state import TrainState, abstract_train_state


@runtime_checkable
class TrainStep(jax.stages.Wrapped, Protocol):
    """A jitted train step, from `make_train_step`. It can also be traced, lowered and compiled."""

    def __call__(
        self, state: TrainState, windows: ArrayLike, key: PRNGKeyArray
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the state after a batch, int `[batch, seq_len + 1]`, and the metrics of the batch."""
        ...


@runtime_checkable
class EvalStep(jax.stages.Wrapped, Protocol):
    """A jitted eval step, from `make_eval_step`. It can also be traced, lowered and compiled."""

    def __call__(self, params: Params, windows: ArrayLike) -> jax.Array:
        """Return the losses of a batch, int `[batch, tokens]`: float `[batch, tokens - 1]`."""
        ...


# Size of the heaps of glibc's arenas: larger arrays are mapped again by each allocation.
_KEPT_BYTES = 64 << 20


def make_train_step(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    grad_accum_steps: int = 1,
    end_of_text: int | None = None,
) -> TrainStep:
    """Return the jitted train step, `step(state, windows, key) -> (state, metrics)`.

    The step donates its input state: the output state reuses the buffers. On a CPU it donates only a state with arrays
    above 64 MiB per device. The randomness of a step is `fold_in(key, state.step)`: pass the same `key` to each step of
    a run, and a resumed run draws the same numbers.

    The metrics stay on the device: `loss` (nats per token) and `grad_norm` (before clipping), float32; `num_skipped`
    and `num_skipped_in_a_row`, int32. If the loss or the gradient is not finite, the step is skipped: it keeps the
    parameters, their average and the moments of the optimizer, and counts itself as skipped. The loss of a batch with
    ids outside the vocabulary is NaN.

    The learning rate is a function of the step: a skipped step advances the schedules of optax in the optimizer state
    (`optax.ScaleByScheduleState`), which count from 0 as `state.step`. Adam's count for its bias correction is the
    number of updates of its moments, so a skipped step does not advance it.

    Equal arguments give the same step, which is compiled once: an optimizer of your own must be of pure functions.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        mesh: the devices of the state. None is a single device.
        grad_accum_steps: number of equal microbatches of a batch, processed one after the other to save memory.
        end_of_text: the token that ends a document. If given, attention stays within documents.

    Raises:
        ValueError: an argument has another type, the parameters are bfloat16 (see `GPT2Config.check_trainable`), the
            mesh does not divide the model, `grad_accum_steps` is below 1, or `end_of_text` is no id of the model. The
            step raises ValueError if it gets no state, that of another optimizer, no random key, or a batch that is not
            integers of shape `[batch, tokens]`, or that devices and microbatches do not divide. (What jit cannot take
            as an array, such as a text, is jax's TypeError. It cuts 64-bit ids of numpy to 32 bits: `put_batch` rejects
            those that do not fit.)
    """
    shapes = abstract_train_state(config, optimizer, mesh)
    grad_accum_steps = checked_microbatches(grad_accum_steps)
    check_end_of_text(end_of_text, config.vocab_size)
    return _make_train_step(
        config,
        optimizer,
        mesh,
        grad_accum_steps=grad_accum_steps,
        end_of_text=end_of_text,
        in_halves=_computes_halves(config, mesh),
        donates=is_donated(shapes, mesh),
    )


@lru_cache(maxsize=8)
def _make_train_step(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    *,
    grad_accum_steps: int,
    end_of_text: int | None,
    in_halves: bool,
    donates: bool,
) -> TrainStep:
    """Return the same step for the same arguments: the next run compiles nothing."""
    shapes = abstract_train_state(config, optimizer, mesh)
    gradient = make_gradient(config, grad_accum_steps=grad_accum_steps, end_of_text=end_of_text, in_halves=in_halves)

    def train_step(
        state: TrainState, windows: Integer[Array, "B W"], key: PRNGKeyArray
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        check_state(state, shapes)
        check_key(key)
        check_rows(config, windows, num_batch_shards(mesh), grad_accum_steps)
        with compiled_for(mesh):
            loss, grads = gradient(state.params, windows, jax.random.fold_in(key, state.step))
            return updated(optimizer, state, loss, grads)

    donated = 0 if donates else None
    if mesh is None:
        return cast(TrainStep, jax.jit(train_step, donate_argnums=donated))
    out_shardings = jax.tree.map(lambda x: x.sharding, shapes), replicated(mesh)
    return cast(TrainStep, jax.jit(train_step, donate_argnums=donated, out_shardings=out_shardings))


def checked_microbatches(grad_accum_steps: int) -> int:
    """Return the number of microbatches as a number of Python.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    grad_accum_steps = plain(grad_accum_steps)
    require(is_whole(grad_accum_steps, 1), "grad_accum_steps", "be at least 1", shown(grad_accum_steps))
    return grad_accum_steps


def make_gradient(
    config: GPT2Config, *, grad_accum_steps: int, end_of_text: int | None, in_halves: bool
) -> Callable[[Params, Integer[Array, "B W"], PRNGKeyArray], tuple[Float[Array, ""], Params]]:
    """Return the function of parameters, windows and a random key to the mean loss and its gradient.

    The loss is NaN if ids lie outside the vocabulary.

    Args:
        config: the model's shape.
        grad_accum_steps: number of equal microbatches of a batch.
        end_of_text: the token that ends a document, or None.
        in_halves: compute the two halves of a batch at the same time: see `_computes_halves`.
    """

    def loss_fn(params: Params, windows: Integer[Array, "b W"], key: PRNGKeyArray) -> Float[Array, ""]:
        parts = jnp.split(windows, 2) if in_halves and len(windows) % 2 == 0 else [windows]
        # Together the parts have as many logits as one batch would have.
        part_config = dataclasses.replace(config, loss_chunk_tokens=max(1, config.loss_chunk_tokens // len(parts)))
        model = merge(part_config, params)
        dropout_key = key if config.dropout_rate > 0 else None
        losses = [
            mean_loss(model, part, segment_ids=segments_of(part, end_of_text), dropout_key=dropout_key)
            for part in parts
        ]
        return sum(losses[1:], losses[0]) / len(losses)

    def accumulated(params: Params, windows: Integer[Array, "B W"], key: PRNGKeyArray) -> tuple[jax.Array, Params]:
        if grad_accum_steps == 1:
            return jax.value_and_grad(loss_fn)(params, windows, key)
        # A microbatch takes every k-th row, which keeps each row on its device.
        microbatches = windows.reshape(-1, grad_accum_steps, windows.shape[1]).swapaxes(0, 1)

        def add(total: Params, microbatch: tuple[jax.Array, PRNGKeyArray]) -> tuple[Params, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *microbatch)), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(jax.value_and_grad(loss_fn), params, microbatches[0], key))
        total, _ = jax.lax.scan(add, zeros, (microbatches, jax.random.split(key, grad_accum_steps)))
        return jax.tree.map(lambda x: x / grad_accum_steps, total)

    def gradient(params: Params, windows: Integer[Array, "B W"], key: PRNGKeyArray) -> tuple[Float[Array, ""], Params]:
        loss, grads = accumulated(params, windows, key)
        return jnp.where(have_known_ids(windows, config.vocab_size).all(), loss, jnp.nan), grads

    return gradient


def updated(
    optimizer: optax.GradientTransformation, state: TrainState, loss: Float[Array, ""], grads: Params
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after a step, and the metrics of the step, from the loss and the gradient of its batch."""
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    params = jax.tree.map(partial(jnp.where, is_finite), params, state.params)
    opt_state = _kept_unless(is_finite, opt_state, state.opt_state)
    skipped = {
        "num_skipped": state.num_skipped + ~is_finite,
        "num_skipped_in_a_row": jnp.where(is_finite, 0, state.num_skipped_in_a_row + 1),
    }
    state = TrainState(step=state.step + 1, **skipped, params=params, opt_state=opt_state)
    return state, {"loss": loss.astype(jnp.float32), "grad_norm": grad_norm.astype(jnp.float32), **skipped}


def check_state(state: Any, shapes: TrainState) -> None:
    """Check that a state is one of a step.

    Raises:
        ValueError: it is none, or that of another optimizer.
    """
    check_type("state", state, TrainState)
    is_ours = jax.tree.structure(state.opt_state) == jax.tree.structure(shapes.opt_state)
    remedy = "Make the state by create_train_state."
    require(is_ours, "state.opt_state", "be a state of this step's optimizer", kind(state.opt_state), remedy)


def _kept_unless(is_update: Array, new: Any, old: Any) -> Any:
    """Return the new state of the optimizer, or the old one with the new counts of its schedules."""
    return jax.tree.map(
        lambda new, old: new if _counts_steps(new) else jnp.where(is_update, new, old), new, old, is_leaf=_counts_steps
    )


def _counts_steps(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def is_donated(shapes: TrainState, mesh: Mesh | None) -> bool:
    """Return whether the new state takes the memory of the old one: not for small arrays on a CPU.

    XLA's CPU backend copies the moments of a donated state before it writes the new ones. A new array costs less than a
    copy if glibc has kept its memory from an earlier step, which it does up to `_KEPT_BYTES`.
    """
    leaves = jax.tree.leaves(shapes)
    largest_bytes = max(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    is_large = target_of(mesh).platform != "cpu" or largest_bytes > _KEPT_BYTES
    config: Any = jax.config
    return is_large and not config.jax_debug_nans  # jax looks for a NaN by a second run with the same arguments


def _computes_halves(config: GPT2Config, mesh: Mesh | None) -> bool:
    """Return whether a device computes the two halves of a batch at the same time: on a CPU alone.

    XLA's CPU backend uses one thread for most operations of a small model. It runs independent operations at the same
    time, and those of two halves are independent up to the sum of the gradients. Other backends use the whole device
    for each operation. Several devices would send the gradients of each part, and dropout draws its numbers for a
    whole batch.
    """
    target = target_of(mesh)
    return target.platform == "cpu" and target.num_devices == 1 and config.dropout_rate == 0


def check_rows(config: GPT2Config, windows: Array, num_shards: int, num_microbatches: int) -> None:
    """Check what jit can see of a batch of windows: its type and its shape.

    Args:
        config: the model's shape.
        windows: the batch.
        num_shards: parts of equal size that the batch is split into: those of devices, or of the gradient.
        num_microbatches: of each part.

    Raises:
        ValueError: the windows are not integers of shape [batch, tokens], or have another number of rows.
    """
    check_windows(windows, config.vocab_size)
    check_batch_size(windows.shape[0], num_shards, num_microbatches)


def check_batch_size(batch_size: int, num_shards: int, num_microbatches: int) -> None:
    """Check that the rows of a batch can be shared: see `check_rows`."""
    require(
        batch_size % (num_shards * plain(num_microbatches)) == 0,
        "batch size",
        f"be a positive multiple of {num_shards} devices (the axes data and fsdp) x {num_microbatches} microbatches",
        batch_size,
        "Change it or grad_accum_steps.",
    )


def make_eval_step(config: GPT2Config, mesh: Mesh | None = None, *, end_of_text: int | None = None) -> EvalStep:
    """Return the jitted eval step, `step(params, windows) -> losses`: each prediction's loss in nats, without dropout.

    On a mesh each process gets the losses of all rows of the global batch, in the order of the rows. The losses of a
    window with ids outside the vocabulary are NaN. The step raises ValueError if a batch is not integers of shape
    `[batch, tokens]`, or the devices do not divide it.

    Args:
        config: the model's shape.
        mesh: the devices of the parameters. None is a single device.
        end_of_text: the token that ends a document. If given, attention stays within documents. Pass the same value
            as to `make_train_step`.

    Raises:
        ValueError: an argument has another type, or `end_of_text` is no id of the model.
    """
    check_type("config", config, GPT2Config)
    if mesh is not None:
        check_axis_names(mesh)
    check_end_of_text(end_of_text, config.vocab_size)
    return _make_eval_step(config, mesh, end_of_text)


@lru_cache(maxsize=32)
def _make_eval_step(config: GPT2Config, mesh: Mesh | None, end_of_text: int | None) -> EvalStep:
    def eval_step(params: Params, windows: Integer[Array, "B W"]) -> Float[Array, "B T"]:
        check_rows(config, windows, num_batch_shards(mesh), 1)
        with compiled_for(mesh):
            return losses_of(config, params, windows, end_of_text)

    return cast(EvalStep, jax.jit(eval_step) if mesh is None else jax.jit(eval_step, out_shardings=replicated(mesh)))


def losses_of(
    config: GPT2Config, params: Params, windows: Integer[Array, "B W"], end_of_text: int | None
) -> Float[Array, "B T"]:
    """Return each prediction's loss in nats, without dropout; NaN in a window with ids outside the vocabulary."""
    losses = token_losses(merge(config, params), windows, segment_ids=segments_of(windows, end_of_text))
    return jnp.where(have_known_ids(windows, config.vocab_size), losses, jnp.nan)


def segments_of(windows: Integer[Array, "B W"], end_of_text: int | None) -> Int[Array, "B T"] | None:
    """Return the documents of a window's inputs, or None if attention ignores documents."""
    return None if end_of_text is None else document_ids(windows[:, :-1], end_of_text)


def document_ids(tokens: Integer[Array, "B T"], end_of_text: int) -> Int[Array, "B T"]:
    """Return the index of each token's document. An end-of-text token belongs to the document that it ends.

    Raises:
        ValueError: the tokens are not integers of shape [batch, positions], there are none, or `end_of_text` is no id.
    """
    check_batch(tokens, "tokens")
    is_id = is_whole(end_of_text, 0, INT32_MAX)
    require(is_id, "end_of_text", f"be an id in [0, {INT32_MAX}]", shown(end_of_text))
    ends = (tokens == end_of_text).astype(jnp.int32)
    return jnp.cumsum(ends, axis=1) - ends
