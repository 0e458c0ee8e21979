"""How arrays lie on devices: the mesh, the rules from parameter names to layouts, and the batch.

Three axes. `data` splits the batch; `fsdp` splits the batch too, and the parameters and the optimizer's
state with it (Rajbhandari et al., 2020, arXiv:1910.02054, stage 3); `tensor` splits each layer's heads and
hidden units and the vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Integer, PyTree

from nnx_gpt2._mesh_sizes import check_mesh
from nnx_gpt2._params import dotted_name

DATA_AXIS, FSDP_AXIS, TENSOR_AXIS = "data", "fsdp", "tensor"
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)

# The layout of each parameter by the last two or three parts of its name; all others are on every device.
# A parameter that is stacked over layers has one more dimension in front, which is not split.
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
    """A mesh with the axes `data`, `fsdp` and `tensor`, whose shardings XLA infers.

    Devices lie in the mesh in the order of their processes. Process `r` of `n` therefore holds rows
    `[r * B/n, (r + 1) * B/n)` of a batch of `B` rows, on every platform and for every size of the axes.

    Args:
        fsdp: devices that share one copy of the parameters. They may belong to several processes.
        tensor: devices that share each layer's work. They must belong to one process.
        devices: the devices, equally many of each process; all devices of all processes when None. What `fsdp` and
            `tensor` leave becomes `data`, the only axis that may span several TPU slices.

    Raises:
        ValueError: see `check_mesh`; or processes have different numbers of devices.
    """
    # A stable sort: within a process, the order stays.
    in_order = sorted(jax.devices() if devices is None else devices, key=lambda device: device.process_index)
    counts = Counter(device.process_index for device in in_order)
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"devices must be equally many in each process, got {dict(counts)} by process. Choose other devices."
        )
    check_mesh(
        fsdp=fsdp,
        tensor=tensor,
        num_devices=len(in_order),
        devices_per_process=next(iter(counts.values()), 0),
        devices_per_slice=_devices_per_slice(in_order),
    )
    shape = (len(in_order) // (fsdp * tensor), fsdp, tensor)
    if len(counts) == 1:
        # Within one process any order has the rows in place: on a TPU host, jax knows the best one.
        arranged = mesh_utils.create_device_mesh(shape, in_order, allow_split_physical_axes=True)
    else:
        # Not by `jax.make_mesh`: its order follows a TPU's wiring, and mixes the rows of processes. It also rejects
        # devices of several `slice_index`, which XLA gives to the hosts of CPUs and GPUs.
        arranged = np.array(in_order, dtype=object).reshape(shape)
    return Mesh(arranged, (*BATCH_AXES, TENSOR_AXIS), axis_types=(AxisType.Auto,) * 3)


def _devices_per_slice(devices: Sequence[Any]) -> int | None:
    """Number of consecutive devices that share a TPU slice, or None where all devices do."""
    if not devices or devices[0].platform != "tpu":  # elsewhere `slice_index` numbers hosts, whose network is the same
        return None
    runs = [len([*run]) for _, run in itertools.groupby(getattr(device, "slice_index", 0) for device in devices)]
    return math.gcd(*runs) if len(runs) > 1 else None


def param_spec(name: str, num_dims: int) -> PartitionSpec:
    """The layout of a parameter, or of an optimizer's array of the same name and shape.

    Args:
        name: its dotted name, such as `h.0.attn.c_attn.kernel`, with or without something before it.
        num_dims: its dimensions, which tell whether it is stacked over layers.
    """
    for suffix, spec in _RULES.items():
        if name.endswith(suffix) and num_dims:
            return PartitionSpec(*[None] * (num_dims - len(spec)), *spec)
    return PartitionSpec()


def tree_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """The layout of every leaf of a tree of parameters, or of a whole training state."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, param_spec(dotted_name(path), leaf.ndim)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """A batch's first dimension split over the axes `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The complete array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(local_rows: Integer[np.ndarray, "b T"], mesh: Mesh) -> Integer[Array, "B T"]:
    """The global batch, of which each process hands in its own rows, in the order of processes.

    Args:
        local_rows: this process's rows, as many as every other process has.
        mesh: of `make_mesh`.

    Raises:
        ValueError: the rows cannot be divided over this process's part of the batch axes, or the mesh places rows of
            other processes on this one's devices.
    """
    num_parts = max(len(mesh.local_devices) // mesh.shape[TENSOR_AXIS], 1)
    if len(local_rows) % num_parts:
        raise ValueError(
            f"the number of rows must be a multiple of {num_parts}, this process's part of the axes data and fsdp, "
            f"got {len(local_rows)}. Choose another batch size."
        )
    rank, num_processes = _place_among_processes(mesh)
    first, num_rows = rank * len(local_rows), num_processes * len(local_rows)

    def rows_at(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(num_rows)
        if start < first or stop > first + len(local_rows):
            raise ValueError(
                f"the mesh must place rows {first} to {first + len(local_rows)} on the devices of process {rank}, got "
                f"rows {start} to {stop}. Make it by make_mesh."
            )
        return local_rows[start - first : stop - first]

    shape = (num_rows, *local_rows.shape[1:])
    return jax.make_array_from_callback(shape, batch_sharding(mesh), rows_at)


@cache
def _place_among_processes(mesh: Mesh) -> tuple[int, int]:
    """The place of this process among those whose devices the mesh has, and their number."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return processes.index(jax.process_index()), len(processes)


def under_mesh() -> bool:
    """Whether the code being traced is part of a step over a mesh of `make_mesh`."""
    return TENSOR_AXIS in get_abstract_mesh().axis_names


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """Lay an intermediate array over these axes, where there is a mesh; otherwise do nothing."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes)) if under_mesh() else x


def over_mesh(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Let each device compute its own part of the arrays, where there is a mesh; otherwise the whole."""
    if not under_mesh():
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# What devices tell each other inside `over_mesh`: nothing where an axis has one device, or there is no mesh.


def _axes(*names: str) -> tuple[str, ...]:
    sizes = get_abstract_mesh().shape
    return tuple(name for name in names if sizes.get(name, 1) > 1)


def psum(x: Array, *names: str) -> Array:
    """The sum over these axes."""
    return jax.lax.psum(x, _axes(*names)) if _axes(*names) else x


def pmax(x: Array, name: str) -> Array:
    """The largest over this axis."""
    return jax.lax.pmax(x, name) if _axes(name) else x


def axis_index(name: str) -> Any:
    """Where this device stands on the axis."""
    return jax.lax.axis_index(name) if _axes(name) else 0


def gather_fsdp(table_PC: Array) -> Array:
    """All columns of a table, of which each device of the axis `fsdp` has some."""
    return jax.lax.all_gather(table_PC, FSDP_AXIS, axis=1, tiled=True) if _axes(FSDP_AXIS) else table_PC


def reduce_scatter(grad_PC: Array) -> Array:
    """The sum of a table's gradients over the batch axes, each device with its columns.

    Scattered first: what is summed over `data` then is a part of the table, not all of it.
    """
    if _axes(FSDP_AXIS):
        grad_PC = jax.lax.psum_scatter(grad_PC, FSDP_AXIS, scatter_dimension=1, tiled=True)
    return psum(grad_PC, DATA_AXIS)
