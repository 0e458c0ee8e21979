"""Conversion of the trees that are saved and restored to the types that Orbax supports on all storage."""

import itertools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ray_jax_launch._checkpoint.folder_store import METADATA
from ray_jax_launch._errors import LaunchError, MismatchedCheckpointError, shown
from ray_jax_launch._numbers import check_type

# What 64 bits hold, with and without a sign.
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
# NumPy's kinds of arrays without numbers: objects, strings, bytes, records, dates and times. Its characters of long
# doubles, which Orbax cannot write.
_NO_NUMBERS, _LONG_DOUBLES = "OUSVmM", "gG"


def to_save(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that have leaves, with random keys as their data, and NumPy scalars as arrays.

    Raises:
        ValueError: a leaf or the name of an item cannot be saved, two leaves have the same name, an item is not a tree,
            or no item has leaves.
    """
    check_items("items", items)
    trees: dict[str, Any] = {}
    for name, tree in items.items():
        is_name = isinstance(name, str) and re.fullmatch(r"[a-zA-Z][\w-]{0,99}", name, re.ASCII)
        if not is_name or name == METADATA:
            raise ValueError(
                "the name of an item must be a letter followed by letters, digits, - and _, and not "
                f"{METADATA}, got {shown(name)}. Rename the item."
            )
        if tree is not None and jax.tree_util.all_leaves([tree]):
            raise ValueError(
                f"item {name} must be a tree of arrays, got one {type(tree).__name__}. Put it into a dict."
            )
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        if leaves:
            _check_names(name, [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves])
            trees[name] = jax.tree_util.tree_map_with_path(
                lambda path, x, name=name: _savable(f"{name}{jax.tree_util.keystr(path)}", x), tree
            )
    if not trees:
        raise ValueError(f"items must hold an array or a number, got none in {list(items)}. Save at least one.")
    return trees


def _check_names(item: str, names: list[str]) -> None:
    """Check the names under which Orbax saves the leaves of an item. Of two equal ones, it would save one leaf.

    Raises:
        ValueError: a name is no UTF-8 text, or is the name of another leaf.
    """
    seen: set[str] = set()
    for name in names:
        is_text = not any("\ud800" <= character <= "\udfff" for character in name)
        if not is_text or name in seen:
            raise ValueError(
                f"the names of the arrays of item {item}, joined by dots, must be different UTF-8 texts, got "
                f"{shown(name)}{' twice' if is_text else ''}. Rename one."
            )
        seen.add(name)


def check_items(name: str, items: Any) -> None:
    """Check that a caller has passed trees by name.

    Raises:
        LaunchError: it is something else.
    """
    check_type(name, items, Mapping, "trees by name", 'Write them as in {"params": params}')


def to_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of metadata as they are read again. The caller may change its own while they are saved.

    Raises:
        LaunchError: they are no JSON object, or one that cannot be read again.
    """
    reason = f"a {type(metadata).__name__}"
    if isinstance(metadata, Mapping):
        try:
            copy = json.loads(json.dumps(dict(metadata)))
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error).split("; ", maxsplit=1)[0]
        else:
            if _has_text_keys(metadata):
                return copy
            reason = "a key that is no text"
    raise LaunchError(f"metadata must be a dict of JSON values, got one that is not ({reason}).")


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _has_text_keys(of_key) for key, of_key in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


def to_restore(like: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees to request from Orbax. An item is restored with all its leaves.

    Args:
        like: trees of arrays or `jax.ShapeDtypeStruct`s. Trees without leaves need not have been saved.
        saved: Orbax's metadata of the leaves of each item.

    Raises:
        MismatchedCheckpointError: the leaves, their shapes or their kinds of numbers are not those that were saved.
    """
    trees = {name: jax.tree.map(_data_of, tree) for name, tree in like.items() if jax.tree.leaves(tree)}
    saved_leaves, leaves = _described({name: saved[name] for name in like if name in saved}), _described(trees)
    for path in sorted(saved_leaves.keys() | leaves.keys()):
        if saved_leaves.get(path) != leaves.get(path):
            was = f"saved {saved_leaves[path]}" if path in saved_leaves else "not saved"
            now = f"wanted {leaves[path]}" if path in leaves else "not wanted"
            raise MismatchedCheckpointError(
                f"the checkpoint must hold the arrays that are to be restored, got {path}: {was}, {now}. Restore into "
                "the model that wrote it, or read another checkpoint."
            )
    return trees


def needed_files(folder: Path, like: Mapping[str, Any], ranks: Collection[int]) -> set[str]:
    """Return the names of the files of the items that hold elements of some processes' shards.

    Args:
        folder: what Orbax keeps about the items, `items/<leaf>/.zarray` among them.
        like: trees of arrays or `jax.ShapeDtypeStruct`s. All of an array without a sharding is needed.
        ranks: of the processes.
    """
    trees = {name: jax.tree.map(_data_of, tree) for name, tree in like.items()}
    needed: set[str] = set()
    for path, x in ocp.tree.to_flat_dict(trees).items():
        leaf = f"items/{'.'.join(map(str, path))}"
        if not (folder / leaf / ".zarray").exists():  # `to_restore` will name it
            continue
        saved = json.loads((folder / leaf / ".zarray").read_bytes())
        shape, indices = saved["shape"], [tuple(slice(None) for _ in saved["shape"])]
        if (sharding := getattr(x, "sharding", None)) is not None:
            shape, of_devices = x.shape, sharding.devices_indices_map(x.shape)
            indices = [index for device, index in of_devices.items() if device.process_index in ranks]
        for chunks in {tuple(map(_chunks, index, shape, saved["chunks"])) for index in indices}:
            # The name is the position of the chunk, such as 1.0. The chunk of a scalar is named 0.
            needed |= {f"{leaf}/{'.'.join(map(str, chunk)) or 0}" for chunk in itertools.product(*chunks)}
    return needed


def _chunks(index: slice, size: int, chunk_size: int) -> range:
    """Return the chunks that a slice of a dimension touches."""
    start, stop, _ = index.indices(size)
    return range(start // chunk_size, -(-stop // chunk_size))


def as_wanted(like: Any, restored: Any) -> Any:
    """Return what Orbax restored, with random keys where `like` has them."""
    leaves, structure = jax.tree.flatten(restored)
    wanted = jax.tree.leaves(like)
    return structure.unflatten(
        [
            jax.random.wrap_key_data(x, impl=_split_key(y)[1]) if _is_key(y) else x
            for x, y in zip(leaves, wanted, strict=True)
        ]
    )


def _savable(where: str, x: Any) -> Any:
    x = _data_of(x)
    is_number = isinstance(x, jax.Array | int | float)
    if isinstance(x, np.ndarray):
        # NumPy's kind of bfloat16 is that of records.
        is_number = x.dtype.kind not in _NO_NUMBERS or jnp.issubdtype(x.dtype, np.number)
        is_number = is_number and x.dtype.char not in _LONG_DOUBLES
    if isinstance(x, int) and not _MIN_INT <= x <= _MAX_INT:
        raise ValueError(f"{where} must be a number of at most 64 bits, got {shown(x)}. Put it into the metadata.")
    if not is_number or np.size(x) == 0:
        raise ValueError(
            f"{where} must be a number, or an array of numbers that is not empty, got {shown(x)}. Leave it out, or "
            "put it into the metadata."
        )
    return _shared(where, x) if jax.process_count() > 1 and isinstance(x, jax.Array) else x


def _shared(where: str, x: jax.Array) -> jax.Array:
    """Return an array of several processes in a form that Orbax can save."""
    if x.is_fully_addressable:
        raise ValueError(
            f"{where} must be an array that all processes share, got one of this process alone. Make it by a jitted "
            "function with out_shardings, or by jax.make_array_from_process_local_data."
        )
    try:
        _ = x.addressable_shards
    except ValueError:  # jax 0.10.2, of what device_put replicated over the processes
        return jax.jit(lambda x: x)(x)
    return x


def _data_of(x: Any) -> Any:
    """Return a leaf as Orbax supports it: a random key as its data, a NumPy scalar as an array."""
    if _is_key(x):
        return jax.random.key_data(x) if isinstance(x, jax.Array) else _split_key(x)[0]
    return np.asarray(x) if isinstance(x, np.generic) else x


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _split_key(key: Any) -> tuple[jax.ShapeDtypeStruct, Any]:
    """Return shape and type of the data of random keys, and their generator."""
    impls: list[Any] = []

    def read_data(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(read_data, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding), impls[0]


def _described(tree: Any) -> dict[str, str]:
    """Return kinds of numbers and shapes of the leaves by their names.

    An array may be restored in another precision. A float that is restored as an integer would lose its fraction.
    """
    leaves = ocp.tree.to_flat_dict(tree).items()
    return {
        ".".join(map(str, path)): f"as {_kind(x)} with shape {tuple(getattr(x, 'shape', ()))}" for path, x in leaves
    }


def _kind(x: Any) -> str:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    kinds = {"floats": np.floating, "integers": np.integer, "complex numbers": np.complexfloating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "booleans")


def items_as_wanted(like: Mapping[str, Any], restored: Mapping[str, Any]) -> dict[str, Any]:
    """Return restored items with the types of the wanted ones."""
    return {name: as_wanted(tree, restored[name]) if name in restored else tree for name, tree in like.items()}
