"""Digests of the arrays of a tree, which do not depend on the mesh.

An array is cut into a grid of blocks that follows from its shape and its type. The digest of the array is the SHA-256
of a header and of the digests of its blocks, in the order of the grid. Each process hashes blocks of its own shards.
The processes exchange the digests of blocks, 32 bytes each.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from nnx_gpt2._errors import require
from nnx_gpt2._params import dotted_name

# Each side is halved this often if it can be: meshes of 2, 4 and 8 devices then split arrays between blocks. After
# that, the longest side that is even is halved until a block has at most this many bytes.
_HALVINGS, _BLOCK_BYTES = 3, 1 << 16
_DIGEST_BYTES = 32
_BLOCKS_PER_TASK = 64
# Arrays whose copies are in host memory at the same time.
_ARRAYS_AT_ONCE = 16

Bounds = tuple[tuple[int, int], ...]
"""The first and the last index, plus one, of a part of an array along each dimension."""


class _Tensor(NamedTuple):
    """An array, its grid, and the digests of its blocks."""

    header: str
    data: Any
    sides: tuple[int, ...]
    """Shape of a block."""
    block_digests: np.ndarray
    """`uint8[*grid, 32]`; zeros for blocks that other processes hash."""
    is_local: bool
    """True if all elements of the array are on devices of this process."""


def tensor_digests(tree: PyTree) -> dict[str, str]:
    """Return the SHA-256 of each array of a tree, by its dotted name, such as `h.0.attn.c_attn.kernel`.

    The name, the type, the shape and the little-endian bytes of an array decide its digest. The mesh, the sharding, the
    number of processes and the devices do not.

    A collective: if the tree has arrays on devices of several processes, every process must call this with the same
    tree, and gets the digests of all arrays. An array is gathered on each process only if the mesh does not split it at
    multiples of an eighth of its sides, as for `fsdp=3`; few such arrays at a time. This waits for the arrays, copies
    the shards of the devices to host memory, and uses all CPUs.

    Args:
        tree: arrays of jax or numpy, random keys and numbers.

    Returns:
        64 hexadecimal digits for each name, in the order of the tree.

    Raises:
        ValueError: two arrays have the same dotted name.

    >>> tensor_digests({"a": np.float32([1, 2])})
    {'a': 'c899fbd02dc1b1f6d56be8fc746f49359933567552a35825d2d23fba63d448ba'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    tensors = {dotted_name(path): _tensor(path, leaf) for path, leaf in leaves}
    is_unique = len(tensors) == len(leaves)
    require(is_unique, "the names of the arrays", "differ", f"{len(tensors)} names of {len(leaves)} arrays")
    with ThreadPoolExecutor() as threads:
        tasks: list[list[Future[None]]] = []
        for tensor in tensors.values():
            tasks.append([*_hash_blocks(tensor, threads)])
            wait(tasks[max(0, len(tasks) - _ARRAYS_AT_ONCE)])
        for task in itertools.chain.from_iterable(tasks):
            task.result()
    shared = [tensor.block_digests for tensor in tensors.values() if not tensor.is_local]
    if shared:
        _exchange(shared)
    return {
        name: hashlib.sha256(tensor.header.encode() + tensor.block_digests.tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def root_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of the digests of a tree: the SHA-256 of the sorted lines `NAME DIGEST`.

    Args:
        digests: the result of `tensor_digests`.

    >>> root_digest({"b": "22", "a": "11"}) == root_digest({"a": "11", "b": "22"})
    True
    """
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def _tensor(path: Any, leaf: Any) -> _Tensor:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    header = json.dumps([dotted_name(path), array.dtype.name, [*array.shape]]) + "\n"
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    sides = _block_sides(array.shape, array.dtype.itemsize)
    grid = tuple(size // side for size, side in zip(array.shape, sides, strict=True))
    is_local = getattr(array, "is_fully_addressable", True)
    return _Tensor(header, array, sides, np.zeros((*grid, _DIGEST_BYTES), np.uint8), is_local)


@functools.cache
def _block_sides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of the blocks of an array.

    >>> _block_sides((768, 3072), 4), _block_sides((50, 3), 4), _block_sides((), 4)
    ((96, 96), (25, 3), ())
    """
    sides = [max(1, size // math.gcd(size, 1 << _HALVINGS)) for size in shape]
    while math.prod(sides) * itemsize > _BLOCK_BYTES and any(side % 2 == 0 for side in sides):
        longest = max(side for side in sides if side % 2 == 0)
        sides[sides.index(longest)] //= 2
    return tuple(sides)


def _hash_blocks(tensor: _Tensor, threads: ThreadPoolExecutor) -> Iterator[Future[None]]:
    """Start to hash the blocks of this process. The processes that hold a part share its blocks."""
    grid = tensor.block_digests.shape[:-1]
    numbers = np.arange(math.prod(grid)).reshape(grid)
    for data, bounds, processes in _parts(tensor):
        blocks = tuple(
            slice(*(edge // side for edge in edges)) for edges, side in zip(bounds, tensor.sides, strict=True)
        )
        own = numbers[blocks].ravel()[processes.index(jax.process_index()) :: len(processes)]
        if len(own):
            host = np.asarray(data)
            for first in range(0, len(own), _BLOCKS_PER_TASK):
                yield threads.submit(_hash, host, bounds, tensor, own[first : first + _BLOCKS_PER_TASK])


def _hash(host: np.ndarray, bounds: Bounds, tensor: _Tensor, numbers: np.ndarray) -> None:
    """Hash some blocks of a part of an array."""
    if host.dtype.byteorder == ">":
        host = host.astype(host.dtype.newbyteorder("<"))
    # numpy finds no positions in a grid without dimensions: the grid gets one more.
    places = np.stack(np.unravel_index(numbers, (1, *tensor.block_digests.shape[:-1])), axis=1)[:, 1:]
    firsts = places * np.array(tensor.sides, int) - np.array([start for start, _ in bounds], int)
    found = []
    for first in firsts.tolist():
        block = host[tuple(slice(start, start + side) for start, side in zip(first, tensor.sides, strict=True))]
        # The type of bfloat16 has no buffer, and hashlib wants one.
        found.append(hashlib.sha256(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data).digest())
    digests = np.frombuffer(b"".join(found), np.uint8).reshape(-1, _DIGEST_BYTES)
    tensor.block_digests.reshape(-1, _DIGEST_BYTES)[numbers] = digests


def _parts(tensor: _Tensor) -> Iterable[tuple[Any, Bounds, Sequence[int]]]:
    """Return the parts of an array that this process has, with the processes that have them."""
    array = tensor.data
    whole = tuple((0, size) for size in array.shape)
    if not isinstance(array, jax.Array):
        return [(array, whole, [jax.process_index()])]
    places = _places(array.sharding, array.shape)
    if any(start % side for bounds in places for (start, _), side in zip(bounds, tensor.sides, strict=True)):
        host = np.asarray(array) if tensor.is_local else multihost_utils.process_allgather(array, tiled=True)
        return [(host, whole, sorted({device.process_index for device in array.sharding.device_set}))]
    own = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    return [(data, bounds, places[bounds]) for bounds, data in own.items()]


@functools.lru_cache(1024)
def _places(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Mapping[Bounds, Sequence[int]]:
    """Return the processes that hold each part of an array, in ascending order."""
    processes: dict[Bounds, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        processes.setdefault(_bounds(index, shape), set()).add(device.process_index)
    return {bounds: sorted(of_part) for bounds, of_part in processes.items()}


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _exchange(arrays: Sequence[np.ndarray]) -> None:
    """Add up arrays of digests over all processes, in place. Each block has its digest in one process."""
    own = np.concatenate([array.ravel() for array in arrays]).view(np.uint32)
    by_process, add_up = _sum_over_processes()
    shared = jax.make_array_from_process_local_data(by_process, own[None], (jax.process_count(), len(own)))
    complete = np.asarray(add_up(shared).addressable_data(0)).view(np.uint8)
    for array, content in zip(arrays, np.split(complete, np.cumsum([x.size for x in arrays])[:-1]), strict=True):
        array[...] = content.reshape(array.shape)


@functools.cache
def _sum_over_processes() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Return how an array with a row for each process lies on the devices, and the sum of the rows on each process."""
    one_of_each = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([one_of_each[process] for process in sorted(one_of_each)]), "process")
    add_up = jax.jit(
        lambda rows: rows.sum(axis=0, dtype=jnp.uint32), out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    return NamedSharding(mesh, PartitionSpec("process")), add_up
