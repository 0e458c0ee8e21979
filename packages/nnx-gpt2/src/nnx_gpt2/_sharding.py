"""How arrays lie on devices: the mesh, the rules from parameter names to layouts, and the batch.

Three axes. `data` splits the batch; `fsdp` splits the batch too, and the parameters and the optimizer's
state with it (Rajbhandari et al., 2020, arXiv:1910.02054, stage 3); `tensor` splits each layer's heads and
hidden units and the vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Integer, PyTree

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

    Args:
        fsdp: devices that share one copy of the parameters.
        tensor: devices that share each layer's work. They must belong to one process.
        devices: the devices; all of every process when None. What `fsdp` and `tensor` leave becomes `data`.

    Raises:
        ValueError: the axes do not divide the devices, or `tensor` reaches beyond one process.
    """
    num_devices = jax.device_count() if devices is None else len(devices)
    if fsdp < 1 or tensor < 1 or not num_devices or num_devices % (fsdp * tensor):
        raise ValueError(
            f"expected fsdp and tensor, at least 1, whose product divides the {num_devices} devices, got {fsdp} "
            f"and {tensor}"
        )
    if devices is None and jax.local_device_count() % tensor:
        raise ValueError(
            f"expected tensor to divide the {jax.local_device_count()} devices of one process, got {tensor}"
        )
    shape = (num_devices // (fsdp * tensor), fsdp, tensor)
    return jax.make_mesh(shape, (*BATCH_AXES, TENSOR_AXIS), axis_types=(AxisType.Auto,) * 3, devices=devices)


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


def dotted_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its path's keys, attributes and indices joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def tree_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """The layout of every leaf of a tree of parameters, or of a whole training state."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, param_spec(dotted_name(path), leaf.ndim)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """A batch's first dimension split over the axes `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(local_rows: Integer[np.ndarray, "b T"], mesh: Mesh) -> Integer[Array, "B T"]:
    """The global batch, of which each process hands in its own rows, in the order of ranks.

    Raises:
        ValueError: the rows cannot be divided over this process's part of the batch axes.
    """
    num_parts = len(mesh.local_devices) // mesh.shape[TENSOR_AXIS]
    if len(local_rows) % num_parts:
        raise ValueError(
            f"expected a number of rows that {num_parts} parts (the data and fsdp axes of this process) divide, "
            f"got {len(local_rows)}: choose a batch size that they divide"
        )
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local_rows)


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
