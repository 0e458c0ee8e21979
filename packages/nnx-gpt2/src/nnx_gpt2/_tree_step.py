"""Train and eval steps whose results do not depend on the number of devices, to the bit.

A batch is a fixed number of shards of equal shape. One program for a single device computes the gradient of a shard,
whichever device runs it. The gradients are added along a binary tree over the shards: first those of one device, then
those of pairs of devices, at once on both (recursive doubling). Addition commutes to the bit, so both devices of a pair
get the same sum, and the number of devices decides only where an addition happens.

On a CPU the bits also depend on the type of the processor, and on the number of threads of XLA's pool: a program for
one thread adds in another order than one for several. Set the environment variable `NPROC` to the number of threads, 2
or more, in all processes before jax starts. With `JAX_CPU_ENABLE_ASYNC_DISPATCH=0` a process computes that many shards
at the same time; otherwise they wait for each other.

Shapes: B batch, S shards, b = B / S windows of a shard, D devices, W = T + 1 tokens of a window, T predictions.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from nnx_gpt2._dropout import check_key
from nnx_gpt2._errors import check_type, is_whole, plain, require, shown
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._params import Params
from nnx_gpt2._sharding import DATA_AXIS, batch_sharding, check_axis_names, replicated
from nnx_gpt2._target import compiled_for_each
from nnx_gpt2._token_ids import check_batch, check_end_of_text
from nnx_gpt2._train_state import TrainState, abstract_train_state
from nnx_gpt2._train_step import (
    check_rows,
    check_state,
    checked_microbatches,
    is_donated,
    losses_of,
    make_gradient,
    updated,
)


class TreeTrainStep:
    """The train step with gradients that are added along a tree: `step(state, windows, key) -> (state, metrics)`.

    State and metrics are those of `make_train_step`, and so are the rules for a loss or a gradient that is not finite.
    The bits are the same on each number of devices. Each shard has its own dropout, with the key
    `fold_in(fold_in(key, state.step), shard)`.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        mesh: the devices, each with a copy of the state.
        num_shards: shards of a batch: a power of two that the number of devices divides.
        grad_accum_steps: number of equal microbatches of a shard, processed one after the other to save memory.
        end_of_text: the token that ends a document. If given, attention stays within documents.

    Raises:
        ValueError: an argument has another type, `num_shards` is no power of two, the number of devices does not divide
            it, devices share a copy of the state, `grad_accum_steps` is below 1, or `end_of_text` is no id of the
            model.
    """

    def __init__(
        self,
        config: GPT2Config,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        num_shards: int,
        grad_accum_steps: int = 1,
        end_of_text: int | None = None,
    ) -> None:
        self._like = abstract_train_state(config, optimizer, mesh)
        grad_accum_steps = checked_microbatches(grad_accum_steps)
        check_end_of_text(end_of_text, config.vocab_size)
        self._config, self._num_microbatches = config, grad_accum_steps
        self._shards = _Shards(mesh, num_shards)
        self._shard_gradient, self._update = _train_programs(
            config,
            optimizer,
            mesh,
            num_shards=self._shards.number,
            grad_accum_steps=grad_accum_steps,
            end_of_text=end_of_text,
            donates=is_donated(self._like, mesh),
        )

    def __call__(
        self, state: TrainState, windows: Integer[Array, "B W"], key: PRNGKeyArray
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run a step.

        Raises:
            ValueError: it gets no state, that of another optimizer, no random key, or a batch that is not integers of
                shape `[batch, tokens]`, or that shards and microbatches do not divide.
        """
        check_state(state, self._like)
        check_key(key)
        check_batch(windows, "windows")
        self._check_shape(windows)
        state = self._shards.on_mesh(state)
        of_devices = self._shards.map(self._shard_gradient, (state.params, state.step), windows, key)
        totals = self._shards.sum_devices([*map(_tree_sum, of_devices)])
        # Each device computes the update alone: the compiler sees the same program on each number of devices.
        updates = [self._update(*pair) for pair in zip(self._shards.copies(state), totals, strict=True)]
        return self._shards.joined_copies(updates)

    def lower(self, state: TrainState, windows: Any, key: Any) -> jax.stages.Lowered:
        """Lower the program of a shard, by far the largest one, to compile it before the first step.

        Args:
            state: a state, or its shapes.
            windows: a batch, or its shape.
            key: random key.
        """
        self._check_shape(windows)
        device = SingleDeviceSharding(self._shards.devices[0])
        like = [jax.ShapeDtypeStruct((windows.shape[0] // self._shards.number, windows.shape[1]), windows.dtype)]
        params, step, rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), (state.params, state.step, *like)
        )
        return self._shard_gradient.lower(params, step, rows, 0, key)

    def _check_shape(self, windows: Any) -> None:
        _check_shape(self._config, windows.shape, windows.dtype, self._shards.number, self._num_microbatches)


@lru_cache(maxsize=8)
def _train_programs(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    num_shards: int,
    grad_accum_steps: int,
    end_of_text: int | None,
    donates: bool,
) -> tuple[Any, Any]:
    """Return the jitted gradient of a shard and the jitted update, the same for the same arguments."""
    gradient = make_gradient(config, grad_accum_steps=grad_accum_steps, end_of_text=end_of_text, in_halves=False)

    def shard_gradient(
        params: Params,
        step: Int[Array, ""],
        windows: Integer[Array, "b W"],
        shard: Int[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, "1"], Params]:
        with compiled_for_each(mesh):
            loss, grads = gradient(params, windows, jax.random.fold_in(jax.random.fold_in(key, step), shard))
        return loss[None], grads

    def update(state: TrainState, total: tuple[Float[Array, "1"], Params]) -> tuple[TrainState, dict[str, jax.Array]]:
        with compiled_for_each(mesh):
            loss, grads = jax.tree.map(lambda x: x / num_shards, total)
            return updated(optimizer, state, loss[0], grads)

    return jax.jit(shard_gradient), jax.jit(update, donate_argnums=0 if donates else None)


def make_tree_eval_step(
    config: GPT2Config, mesh: Mesh, *, num_shards: int, end_of_text: int | None = None
) -> Callable[[Params, Integer[Array, "B W"]], Float[Array, "B T"]]:
    """Return the eval step of `make_eval_step` with bits that are the same on each number of devices.

    Args:
        config: the model's shape.
        mesh: the devices, each with a copy of the parameters.
        num_shards: shards of a batch: a power of two that the number of devices divides.
        end_of_text: the token that ends a document. If given, attention stays within documents.

    Raises:
        ValueError: see `TreeTrainStep`. The step raises ValueError if a batch is not integers of shape
            `[batch, tokens]`, or shards do not divide it.
    """
    check_type("config", config, GPT2Config)
    check_end_of_text(end_of_text, config.vocab_size)
    shards = _Shards(mesh, num_shards)
    shard_losses, concatenate, replicate = _eval_programs(config, mesh, end_of_text)

    def eval_step(params: Params, windows: Integer[Array, "B W"]) -> Float[Array, "B T"]:
        check_batch(windows, "windows")
        _check_shape(config, windows.shape, windows.dtype, shards.number, 1)
        of_devices = shards.map(shard_losses, (shards.on_mesh(params),), windows)
        return replicate(shards.on_all([concatenate([*losses]) for losses in of_devices]))

    return eval_step


@lru_cache(maxsize=32)
def _eval_programs(config: GPT2Config, mesh: Mesh, end_of_text: int | None) -> tuple[Any, Any, Any]:
    def shard_losses(params: Params, windows: Integer[Array, "b W"], shard: Int[Array, ""]) -> Float[Array, "b T"]:
        with compiled_for_each(mesh):
            return losses_of(config, params, windows, end_of_text)

    return jax.jit(shard_losses), jax.jit(jnp.concatenate), jax.jit(lambda x: x, out_shardings=replicated(mesh))


@lru_cache(maxsize=32)
def _check_shape(
    config: GPT2Config, shape: tuple[int, ...], dtype: Any, num_shards: int, num_microbatches: int
) -> None:
    """Check what is known of a batch without its values, as jit does: a device cannot raise an error."""

    def check(windows: Array) -> None:
        check_rows(config, windows, num_shards, num_microbatches)

    jax.eval_shape(check, jax.ShapeDtypeStruct(shape, dtype))


@partial(jax.jit, static_argnums=0)
def _split(num_parts: int, rows: Array) -> list[Array]:
    return jnp.split(rows, num_parts)


class _Shards:
    """The shards of a batch on a mesh, and the programs that run on each.

    Args:
        mesh: the devices, each with a copy of the parameters.
        num_shards: shards of a batch.

    Raises:
        ValueError: see `TreeTrainStep`.
    """

    def __init__(self, mesh: Mesh, num_shards: int) -> None:
        check_axis_names(mesh)
        self.number = plain(num_shards)
        is_power = is_whole(self.number, 1) and self.number & (self.number - 1) == 0
        require(is_power, "num_shards", "be a power of two", shown(num_shards))
        num_devices = mesh.shape[DATA_AXIS]
        require(mesh.size == num_devices, "mesh", "have copies of the parameters on all devices", dict(mesh.shape))
        remedy = "Use 1, 2, 4, ... devices, or raise num_shards."
        require(
            self.number % num_devices == 0, "num_shards", f"be a multiple of {num_devices} devices", self.number, remedy
        )
        self._mesh = mesh
        self._per_device = self.number // num_devices
        ranks = {device: rank for rank, device in enumerate(mesh.devices.flat)}
        self.devices = [*mesh.local_devices] or [*mesh.devices.flat][:1]  # none is here: a compiler is asked alone
        self._first_shards = [ranks[device] * self._per_device for device in self.devices]
        self._split = partial(_split, self._per_device)
        # One device has one queue of programs, unless several threads call them.
        is_threaded = self.devices[0].platform == "cpu" and len(self.devices) == 1
        num_threads = min(self._per_device, _num_threads()) if is_threaded else 1
        self._map: Any = ThreadPoolExecutor(num_threads).map if num_threads > 1 else map

    def map(
        self, program: Callable[..., Any], copied: tuple[Any, ...], windows: Integer[Array, "B W"], *rest: Any
    ) -> list[Iterable[Any]]:
        """Run a program on each shard of this process's devices, and return the results of each device in order.

        Args:
            program: called with the device's copies, the windows of the shard, its number, and `rest`.
            copied: trees of arrays of which each device has a copy.
            windows: the batch.
            rest: further arguments.
        """
        rows = self.copies(jax.device_put(windows, batch_sharding(self._mesh)))
        return [
            self._map(
                lambda shard, part, copies=copies: program(*copies, part, shard, *rest),
                range(first, first + self._per_device),
                self._split(rows_of_device),
            )
            for first, rows_of_device, copies in zip(self._first_shards, rows, self.copies(copied), strict=True)
        ]

    def on_mesh(self, tree: Any) -> Any:
        """Return a tree of arrays of which each device has a copy: the same arrays, if they lie so."""
        devices = {*self._mesh.devices.flat}
        shardings = [x.sharding for x in jax.tree.leaves(tree)]
        if all(x.device_set == devices and x.is_fully_replicated for x in shardings):
            return tree  # `device_put` would take milliseconds to find this out
        return jax.device_put(tree, replicated(self._mesh))

    def on_all(self, parts: list[Any]) -> Any:
        """Join trees of arrays, one per device of this process, to arrays of all devices along their first axis."""
        sharding = NamedSharding(self._mesh, PartitionSpec(DATA_AXIS))

        def join(*xs: Array) -> Array:
            shape = (self._mesh.size * xs[0].shape[0], *xs[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, [*xs])

        return jax.tree.map(join, *parts)

    def sum_devices(self, totals: list[Any]) -> list[Any]:
        """Return the sum over all devices of a tree of arrays, on each device of this process."""
        return totals if self._mesh.size == 1 else self.copies(_sum_by_doubling(self._mesh)(self.on_all(totals)))

    def copies(self, tree: Any) -> list[Any]:
        """Return the copy, or the shard, of each array on each device of this process."""
        if len(self.devices) == 1:
            return [jax.tree.map(lambda x: x.addressable_data(0), tree)]
        found = [{shard.device: shard.data for shard in x.addressable_shards} for x in jax.tree.leaves(tree)]
        structure = jax.tree.structure(tree)
        return [structure.unflatten([of_device[device] for of_device in found]) for device in self.devices]

    def joined_copies(self, copies: list[Any]) -> Any:
        """Return trees of equal arrays, one per device of this process, as arrays of which each device has a copy."""
        if self._mesh.size == 1:
            return copies[0]
        return jax.tree.map(
            lambda *xs: jax.make_array_from_single_device_arrays(xs[0].shape, replicated(self._mesh), [*xs]), *copies
        )


@lru_cache(maxsize=32)
def _sum_by_doubling(mesh: Mesh) -> jax.stages.Wrapped:
    num_devices = mesh.size

    def add(x: Array) -> Array:
        distance = 1
        while distance < num_devices:
            pairs = [(rank, rank ^ distance) for rank in range(num_devices)]
            x = x + jax.lax.ppermute(x, DATA_AXIS, pairs)
            distance *= 2
        return x

    def add_all(tree: Any) -> Any:
        return jax.tree.map(add, tree)

    return jax.jit(
        jax.shard_map(add_all, mesh=mesh, in_specs=PartitionSpec(DATA_AXIS), out_specs=PartitionSpec(), check_vma=False)
    )


def _tree_sum(parts: Iterable[Any]) -> Any:
    """Return the sum of 2^n trees of arrays. Neighbors are added first, as soon as both are there."""
    sums = list[tuple[int, Any]]()
    for part in parts:
        total, size = part, 1
        while sums and sums[-1][0] == size:
            total, size = _add(sums.pop()[1], total), 2 * size
        sums.append((size, total))
    return sums[0][1]


@jax.jit
def _add(x: Any, y: Any) -> Any:
    return jax.tree.map(jnp.add, x, y)


def _num_threads() -> int:
    """Return the number of threads of XLA's pool."""
    if (given := os.environ.get("NPROC", "")).isdecimal():
        return int(given)
    affinity: Any = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(affinity(0)) if affinity else os.cpu_count() or 1
