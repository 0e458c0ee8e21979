"""The one train step, and the eval step."""

import contextlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from nnx_gpt2._loss import mean_loss, token_losses
from nnx_gpt2._model import merge
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._params import Params
from nnx_gpt2._sharding import DATA_AXIS, FSDP_AXIS, replicated
from nnx_gpt2._train_state import TrainState, abstract_train_state


def make_train_step(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    grad_accum_steps: int = 1,
    end_of_text: int | None = None,
) -> jax.stages.Wrapped:
    """Compile one update: `step(state, windows, key) -> (state, metrics)`.

    The state that goes in is donated: its buffers become those of the state that comes out. The step's
    randomness is `fold_in(key, state.step)`, so the same `key` serves the whole run and a resumed run
    draws what the unbroken one would have. Metrics, left on the device: `loss` (nats per token) and
    `grad_norm` (before clipping), float32; `num_skipped` and `num_skipped_in_a_row`, int32. Where the loss or the
    gradient is not finite, parameters and optimizer stay what they were, and the step is counted as skipped. A batch
    with ids out of the vocabulary has no finite loss.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        mesh: the devices that the state lies on; without one, a single device.
        grad_accum_steps: number of equal parts that a batch is processed in, one after the other, to
            save memory; the batch size must be a multiple of it.
        end_of_text: the token that ends a document; where given, attention does not look across it.

    Raises:
        ValueError: the mesh does not divide the model, or `grad_accum_steps` is below 1. The step raises it for a batch
            that is no `[batch, tokens]` of whole numbers, or does not divide.
    """
    if not isinstance(grad_accum_steps, int) or grad_accum_steps < 1:
        raise ValueError(f"expected a whole number of at least 1 as grad_accum_steps, got {grad_accum_steps}")

    def loss_fn(params: Params, windows: Integer[Array, "b W"], key: PRNGKeyArray) -> Float[Array, ""]:
        segment_ids = _segment_ids(windows, end_of_text)
        dropout_key = key if config.dropout_rate > 0 else None
        return mean_loss(merge(config, params), windows, segment_ids=segment_ids, dropout_key=dropout_key)

    def accumulated(params: Params, windows: Integer[Array, "B W"], key: PRNGKeyArray) -> tuple[jax.Array, Params]:
        if grad_accum_steps == 1:
            return jax.value_and_grad(loss_fn)(params, windows, key)
        # Part i takes every k-th row: each device then keeps its own rows, and nothing moves.
        parts = windows.reshape(-1, grad_accum_steps, windows.shape[1]).swapaxes(0, 1)

        def add(total: Params, part: tuple[jax.Array, PRNGKeyArray]) -> tuple[Params, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *part)), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(jax.value_and_grad(loss_fn), params, parts[0], key))
        total, _ = jax.lax.scan(add, zeros, (parts, jax.random.split(key, grad_accum_steps)))
        return jax.tree.map(lambda x: x / grad_accum_steps, total)

    def train_step(
        state: TrainState, windows: Integer[Array, "B W"], key: PRNGKeyArray
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_windows(config, windows, mesh, grad_accum_steps)
        with _traced_over(mesh):
            loss, grads = accumulated(state.params, windows, jax.random.fold_in(key, state.step))
            loss = jnp.where(_are_tokens(config, windows).all(), loss, jnp.nan)  # the update is then skipped
            grad_norm = optax.tree.norm(grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
            params, opt_state = jax.tree.map(
                partial(jnp.where, is_finite), (params, opt_state), (state.params, state.opt_state)
            )
            skipped = {
                "num_skipped": state.num_skipped + ~is_finite,
                "num_skipped_in_a_row": jnp.where(is_finite, 0, state.num_skipped_in_a_row + 1),
            }
        state = TrainState(step=state.step + 1, **skipped, params=params, opt_state=opt_state)
        return state, {"loss": loss, "grad_norm": grad_norm, **skipped}

    compile_step = partial(jax.jit, train_step, donate_argnums=0, compiler_options=compiler_options())
    if mesh is None:
        return compile_step()
    shapes = abstract_train_state(config, optimizer, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return compile_step(out_shardings=(shardings, replicated(mesh)))


def _check_windows(config: GPT2Config, windows: Array, mesh: Mesh | None, num_parts: int) -> None:
    """What can be seen of a batch while jit traces: its shape and its type."""
    num_shares = 1 if mesh is None else mesh.shape[DATA_AXIS] * mesh.shape[FSDP_AXIS]
    if windows.ndim != 2 or not jnp.issubdtype(windows.dtype, jnp.integer) or windows.shape[1] < 2:
        raise ValueError(
            f"expected windows of token ids, whole numbers of shape [batch, {config.seq_len + 1}], got "
            f"{windows.dtype}{list(windows.shape)}"
        )
    if not windows.shape[0] or windows.shape[0] % (num_shares * num_parts):
        raise ValueError(
            f"expected a batch that {num_shares} devices, the data and fsdp axes, divide in {num_parts} parts each, "
            f"got {windows.shape[0]} windows: change the batch size or grad_accum_steps"
        )


def _are_tokens(config: GPT2Config, windows: Integer[Array, "B W"]) -> Bool[Array, "B 1"]:
    """Tell which windows have all of their ids in the vocabulary. A device cannot raise an error."""
    ids = windows.astype(jnp.int32)
    return ((ids >= 0) & (ids < config.vocab_size)).all(axis=1, keepdims=True)


@cache
def make_eval_step(
    config: GPT2Config, mesh: Mesh | None = None, *, end_of_text: int | None = None
) -> jax.stages.Wrapped:
    """Compile `step(params, windows) -> losses`: each prediction's loss in nats, without dropout.

    With a mesh, every process gets the losses of all rows of the global batch, in the order of its rows. The losses of
    a window with ids out of the vocabulary are not numbers. The step raises ValueError for a batch that is no
    `[batch, tokens]` of whole numbers, or that the devices do not divide.

    Args:
        config: the model's shape.
        mesh: the devices that the parameters lie on; without one, a single device.
        end_of_text: the token that ends a document; where given, attention does not look across it. Give what
            `make_train_step` was given, so that a model is evaluated as it was trained.
    """

    def eval_step(params: Params, windows: Integer[Array, "B W"]) -> Float[Array, "B T"]:
        _check_windows(config, windows, mesh, 1)
        with _traced_over(mesh):
            segment_ids = _segment_ids(windows, end_of_text)
            losses = token_losses(merge(config, params), windows, segment_ids=segment_ids)
            return jnp.where(_are_tokens(config, windows), losses, jnp.nan)

    options = compiler_options()
    if mesh is None:
        return jax.jit(eval_step, compiler_options=options)
    return jax.jit(eval_step, out_shardings=replicated(mesh), compiler_options=options)


def _segment_ids(windows: Integer[Array, "B W"], end_of_text: int | None) -> Int[Array, "B T"] | None:
    """The documents of a window's inputs, or None where attention is not limited to them."""
    return None if end_of_text is None else document_ids(windows[:, :-1], end_of_text)


def document_ids(tokens: Integer[Array, "B T"], end_of_text: int) -> Int[Array, "B T"]:
    """The number of the document that each token belongs to; the end-of-text token belongs to the one it ends."""
    ends = (tokens == end_of_text).astype(jnp.int32)
    return jnp.cumsum(ends, axis=1) - ends


@contextlib.contextmanager
def _traced_over(mesh: Mesh | None) -> Iterator[None]:
    """Let `constrain` and the loss see the mesh while jit traces a step."""
    if mesh is None:
        yield
    else:
        with use_abstract_mesh(mesh.abstract_mesh):
            yield


@cache
def compiler_options() -> dict[str, Any]:
    """What the compiler is told beyond its defaults: on CPU, to leave matrix products to Eigen.

    XLA's newer CPU library (YNN) takes a third longer for batches of small products, as attention has them,
    in jaxlib 0.10. A compiler that does not know the option is not given it.
    """
    if jax.default_backend() != "cpu":
        return {}
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options
