"""The trees that are saved and restored, in the form that Orbax takes on every kind of storage."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ray_jax_launch._errors import MismatchedCheckpointError

# Kinds of NumPy arrays that hold no numbers: objects, texts, bytes, records.
_NO_NUMBERS = "OUSV"


def to_save(items: Mapping[str, Any]) -> dict[str, Any]:
    """The items that have leaves: their random keys as data, their NumPy scalars as arrays.

    Raises:
        ValueError: one cannot be saved, and the message names the leaf; or there is nothing to save.
    """
    trees: dict[str, Any] = {}
    for name, tree in items.items():
        _check_is_tree(name, tree)
        if jax.tree.leaves(tree):
            trees[name] = jax.tree_util.tree_map_with_path(
                lambda path, x, name=name: _savable(f"{name}{jax.tree_util.keystr(path)}", x), tree
            )
    if not trees:
        raise ValueError(f"expected an array or a number to save, got none in the items {list(items)}")
    return trees


def to_restore(like: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What to ask Orbax for, to get items as in `like`. Of an item, every leaf is to be asked for, in its shape.

    Args:
        like: trees of arrays, or of `jax.ShapeDtypeStruct`s. Those without leaves need not have been saved.
        saved: Orbax's metadata of the leaves of each item.

    Raises:
        MismatchedCheckpointError: that is not what was saved; the message names the leaf.
    """
    for name, tree in like.items():
        _check_is_tree(name, tree)
    trees = {name: jax.tree.map(_data_of, tree) for name, tree in like.items() if jax.tree.leaves(tree)}
    saved_shapes, shapes = _shapes({name: saved[name] for name in like if name in saved}), _shapes(trees)
    for path in sorted(saved_shapes.keys() | shapes.keys()):
        if saved_shapes.get(path) != shapes.get(path):
            was = f"saved with shape {saved_shapes[path]}" if path in saved_shapes else "not saved"
            now = f"wanted with shape {shapes[path]}" if path in shapes else "not wanted"
            raise MismatchedCheckpointError(
                f"the checkpoint must hold the arrays that are to be restored, got {path}: {was}, {now}. Restore into "
                "the model that wrote it, or read another checkpoint"
            )
    return trees


def as_wanted(like: Any, restored: Any) -> Any:
    """What Orbax restored, with random keys where `like` has them."""
    leaves, structure = jax.tree.flatten(restored)
    wanted = jax.tree.leaves(like)
    return structure.unflatten(
        [
            jax.random.wrap_key_data(x, impl=_taken_apart(y)[1]) if _is_key(y) else x
            for x, y in zip(leaves, wanted, strict=True)
        ]
    )


def _check_is_tree(name: str, tree: Any) -> None:
    if tree is not None and jax.tree_util.all_leaves([tree]):
        raise ValueError(
            f"expected a tree of arrays as the item {name}, got a single {type(tree).__name__}: put it into a dict"
        )


def _savable(where: str, x: Any) -> Any:
    x = _data_of(x)
    if not isinstance(x, jax.Array | np.ndarray | int | float) or (
        isinstance(x, np.ndarray) and x.dtype.kind in _NO_NUMBERS
    ):
        raise ValueError(
            f"expected arrays and numbers to save, got {x!r} at {where}: what is neither can be part of the metadata"
        )
    if np.size(x) == 0:
        raise ValueError(f"expected arrays with something in them, got one of shape {np.shape(x)} at {where}")
    return _shared(where, x) if jax.process_count() > 1 and isinstance(x, jax.Array) else x


def _shared(where: str, x: jax.Array) -> jax.Array:
    """An array of several processes, in a form that Orbax can save."""
    if x.is_fully_addressable:
        raise ValueError(
            f"expected arrays that all processes share, got one of this process alone at {where}: "
            "make it by a jitted function with out_shardings, or by jax.make_array_from_process_local_data"
        )
    try:
        _ = x.addressable_shards
    except ValueError:  # jax 0.10.2, of what device_put replicated over the processes
        return jax.jit(lambda x: x)(x)
    return x


def _data_of(x: Any) -> Any:
    """A leaf, or what it is made of: Orbax knows random keys on one kind of storage alone, and no NumPy scalars."""
    if _is_key(x):
        return jax.random.key_data(x) if isinstance(x, jax.Array) else _taken_apart(x)[0]
    return np.asarray(x) if isinstance(x, np.generic) else x


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _taken_apart(key: Any) -> tuple[jax.ShapeDtypeStruct, Any]:
    """Of random keys, or of their shape and type: the same of their data, and the generator they are for."""
    impls: list[Any] = []

    def take_apart(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(take_apart, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding), impls[0]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """By the names of the leaves."""
    leaves = ocp.tree.to_flat_dict(tree).items()
    return {".".join(map(str, path)): tuple(getattr(x, "shape", ())) for path, x in leaves}
