"""The mesh, the sharding of parameters by name, the batch, and collectives.

Three axes. `data` splits the batch. `fsdp` splits the batch, the parameters and the optimizer state (Rajbhandari
et al., 2020, arXiv:1910.02054, stage 3). `tensor` splits the heads and the feed-forward units of each layer, and the
vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).

Shapes: B batch, b rows of this process, T position, P padded vocabulary, C width.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Integer, PyTree

from nnx_gpt2._errors import INT32_MAX, check_type, is_iterable, is_whole, kind, plain, require, shown, value_error
from nnx_gpt2._mesh_sizes import check_mesh
from nnx_gpt2._params import dotted_name
from nnx_gpt2._token_ids import check_batch, for_device

DATA_AXIS = "data"
FSDP_AXIS = "fsdp"
TENSOR_AXIS = "tensor"
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)

# Dimensions that an array of numpy can have.
_MOST_DIMS = 64

# The sharding of each parameter by the end of its name. All other parameters are replicated.
# A parameter that is stacked over layers has one more leading dimension, which is not split.
_RULES = {
    "wte.embedding": PartitionSpec(TENSOR_AXIS, FSDP_AXIS),
    "wpe.embedding": PartitionSpec(None, FSDP_AXIS),
    "attn.c_attn.kernel": PartitionSpec(FSDP_AXIS, None, TENSOR_AXIS),
    "attn.c_attn.bias": PartitionSpec(None, TENSOR_AXIS),
    "attn.c_proj.kernel": PartitionSpec(TENSOR_AXIS, FSDP_AXIS),
    "mlp.c_fc.kernel": PartitionSpec(FSDP_AXIS, TENSOR_AXIS),
    "mlp.c_fc.bias": PartitionSpec(TENSOR_AXIS),
    "mlp.c_proj.kernel": PartitionSpec(TENSOR_AXIS, FSDP_AXIS),
}


def make_mesh(*, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh with the axes `data`, `fsdp` and `tensor`.

    Devices lie in the mesh in the order of their processes. Process `r` of `n` therefore holds rows
    `[r * B/n, (r + 1) * B/n)` of a batch of `B` rows, on every platform and for every size of the axes.

    Args:
        fsdp: devices that share one copy of the parameters. They may belong to several processes.
        tensor: devices that share the work of each layer. They must belong to one process.
        devices: the devices, the same number from each process. None is all devices of all processes. `data` takes
            the devices beyond `fsdp * tensor`, and is the only axis that may span several TPU slices.

    Raises:
        ValueError: see `check_mesh`; or `devices` are no devices, none or not distinct, or processes have different
            numbers of them.
    """
    in_order: list[Any] = jax.devices() if devices is None else [*devices] if is_iterable(devices) else []
    are_devices = len({*map(id, in_order)}) == len(in_order) > 0 and all(hasattr(x, "process_index") for x in in_order)
    remedy = "Pass some of jax.devices()."
    require(are_devices, "devices", "be None, or at least 1 device of jax, each once", kind(devices), remedy)
    # The sort is stable: it keeps the order within a process.
    in_order = sorted(in_order, key=lambda device: device.process_index)
    counts = Counter(device.process_index for device in in_order)
    is_even = len(set(counts.values())) <= 1
    require(is_even, "devices", "be equally many in each process", f"{dict(counts)} by process", "Choose others.")
    check_mesh(
        fsdp=fsdp,
        tensor=tensor,
        num_devices=len(in_order),
        devices_per_process=next(iter(counts.values()), 0),
        devices_per_slice=_devices_per_slice(in_order),
    )
    fsdp, tensor = plain(fsdp), plain(tensor)
    shape = (len(in_order) // (fsdp * tensor), fsdp, tensor)
    if len(counts) == 1:
        # Any order keeps the rows of a single process in place. On a TPU host jax finds the fastest order.
        arranged = mesh_utils.create_device_mesh(shape, in_order, allow_split_physical_axes=True)
    else:
        # `jax.make_mesh` orders devices by a TPU's wiring, which mixes the rows of processes. It also rejects
        # several values of `slice_index`, which XLA assigns to the hosts of CPUs and GPUs.
        arranged = np.array(in_order, dtype=object).reshape(shape)
    return _mesh(arranged)


def _mesh(devices: np.ndarray) -> Mesh:
    """Return a mesh of devices in the shape of the axes `data`, `fsdp` and `tensor`."""
    return Mesh(devices, (*BATCH_AXES, TENSOR_AXIS), axis_types=(AxisType.Auto,) * 3)


def _devices_per_slice(devices: Sequence[Any]) -> int | None:
    """Return the number of consecutive devices that share a TPU slice, or None if all devices share one."""
    if not devices or devices[0].platform != "tpu":  # elsewhere `slice_index` numbers hosts on one network
        return None
    runs = [len([*run]) for _, run in itertools.groupby(getattr(device, "slice_index", 0) for device in devices)]
    return math.gcd(*runs) if len(runs) > 1 else None


def param_spec(name: str, num_dims: int) -> PartitionSpec:
    """Return the partition of a parameter, or of an array of the optimizer with the same name and shape.

    Args:
        name: the dotted name, such as `h.0.attn.c_attn.kernel`. It may have a prefix.
        num_dims: the number of dimensions. A parameter that is stacked over layers has one more.

    Raises:
        ValueError: an argument has another type.
    """
    check_type("name", name, str)
    num_dims = plain(num_dims)
    is_dims = is_whole(num_dims, 0, _MOST_DIMS)
    require(is_dims, "num_dims", f"be a whole number from 0 to {_MOST_DIMS}", shown(num_dims))
    for suffix, spec in _RULES.items():
        if name.endswith(suffix) and num_dims:
            return PartitionSpec(*[None] * (num_dims - len(spec)), *spec)
    return PartitionSpec()


def tree_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return the sharding of each leaf of a parameter tree or a training state."""
    check_axis_names(mesh)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = f"leaf {dotted_name(path)} of the tree" if path else "a leaf of the tree"
        require(hasattr(leaf, "ndim"), name, "be an array", kind(leaf))
        return NamedSharding(mesh, param_spec(dotted_name(path), leaf.ndim))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: the first dimension is split over the axes `data` and `fsdp`."""
    check_axis_names(mesh)
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that each device holds completely."""
    check_axis_names(mesh)
    return NamedSharding(mesh, PartitionSpec())


def check_axis_names(mesh: Any) -> None:
    """Check that a mesh has the axes of `make_mesh`.

    Raises:
        ValueError: it is no mesh, or has other axes.
    """
    is_mesh = isinstance(mesh, (Mesh, AbstractMesh))
    if not is_mesh or not {*BATCH_AXES, TENSOR_AXIS} <= {*mesh.axis_names}:
        found = f"the axes {mesh.axis_names}" if is_mesh else kind(mesh)
        raise value_error("mesh", "be a mesh with the axes data, fsdp and tensor", found, "Make it by make_mesh.")


def on_mesh(params: PyTree) -> tuple[PyTree, Mesh | None]:
    """Return parameters that lie on several devices and their mesh, or the same parameters and None.

    Parameters of a mesh with other axes move to a mesh of the same devices with the axes of `make_mesh`, each device
    with a copy.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)]
    meshes = [x.mesh for x in shardings if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh)]
    found = next((x for x in meshes if x.size > 1), None)
    if found is None or {*BATCH_AXES, TENSOR_AXIS} <= {*found.axis_names}:
        return params, found
    mesh = _mesh(found.devices.reshape(-1, 1, 1))
    return jax.device_put(params, replicated(mesh)), mesh


def num_batch_shards(mesh: Mesh | None) -> int:
    """Return into how many parts a mesh splits a batch."""
    return 1 if mesh is None else mesh.shape[DATA_AXIS] * mesh.shape[FSDP_AXIS]


def put_batch(local_rows: Integer[np.ndarray, "b T"], mesh: Mesh) -> Integer[Array, "B T"]:
    """Make the global batch from the rows of each process, in the order of processes.

    Args:
        local_rows: the rows of this process. Each process has the same number of rows.
        mesh: the result of `make_mesh`.

    Raises:
        ValueError: the rows are not integers of shape [rows, tokens], 64-bit integers lie outside [0, 2**31), the axes
            `data` and `fsdp` do not divide the number of rows, or the mesh places rows of other processes on devices of
            this process.
    """
    check_batch(local_rows, "rows")
    local_rows = for_device(local_rows, INT32_MAX + 1, "rows")
    sharding = batch_sharding(mesh)
    rank, num_processes = _place_among_processes(mesh)
    first, num_rows = rank * len(local_rows), num_processes * len(local_rows)

    def rows_at(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(num_rows)
        end = first + len(local_rows)
        is_local = first <= start and stop <= end
        remedy = "Make the mesh by make_mesh."
        require(is_local, "mesh", f"place rows {first} to {end} on process {rank}", f"{start} to {stop}", remedy)
        return local_rows[start - first : stop - first]

    shape = (num_rows, *local_rows.shape[1:])
    return jax.make_array_from_callback(shape, sharding, rows_at)


@cache
def _place_among_processes(mesh: Mesh) -> tuple[int, int]:
    """Return the rank of this process among the processes of the mesh, and their number."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return processes.index(jax.process_index()), len(processes)


def under_mesh() -> bool:
    """Return whether the code that is being traced belongs to a step over a mesh of `make_mesh`."""
    return TENSOR_AXIS in get_abstract_mesh().axis_names


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """Shard an intermediate array over these axes. Without a mesh, do nothing."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes)) if under_mesh() else x


def over_mesh(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Map a function over the shards of its arrays. Without a mesh, return the function."""
    if not under_mesh():
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# Collectives inside `over_mesh`. They do nothing if the axis has one device or there is no mesh.


def _axes(*names: str) -> tuple[str, ...]:
    sizes = get_abstract_mesh().shape
    return tuple(name for name in names if sizes.get(name, 1) > 1)


def psum(x: Array, *names: str) -> Array:
    """Return the sum over these axes."""
    return jax.lax.psum(x, _axes(*names)) if _axes(*names) else x


def pmax(x: Array, name: str) -> Array:
    """Return the maximum over this axis."""
    return jax.lax.pmax(x, name) if _axes(name) else x


def axis_index(name: str) -> Any:
    """Return the index of this device on the axis."""
    return jax.lax.axis_index(name) if _axes(name) else 0


def gather_fsdp(table_PC: Array) -> Array:
    """Return all columns of a table whose columns are sharded over the axis `fsdp`."""
    return jax.lax.all_gather(table_PC, FSDP_AXIS, axis=1, tiled=True) if _axes(FSDP_AXIS) else table_PC


def reduce_scatter(grad_PC: Array) -> Array:
    """Return this device's columns of a table's gradient, summed over the batch axes.

    The columns are scattered first, which makes the sum over `data` smaller.
    """
    if _axes(FSDP_AXIS):
        grad_PC = jax.lax.psum_scatter(grad_PC, FSDP_AXIS, scatter_dimension=1, tiled=True)
    return psum(grad_PC, DATA_AXIS)
