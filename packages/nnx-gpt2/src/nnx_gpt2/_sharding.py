"""How arrays lie on devices. Data parallel: the batch is split, everything else is on every device."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Integer

DATA_AXIS = "data"


def make_mesh() -> Mesh:
    """All devices of all processes along one axis, `data`, whose shardings XLA infers."""
    return jax.make_mesh((jax.device_count(),), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """A batch's first dimension split over the devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(local_rows: Integer[np.ndarray, "b T"], mesh: Mesh) -> Integer[Array, "B T"]:
    """The global batch, of which each process hands in its own rows, in the order of ranks.

    Raises:
        ValueError: the rows cannot be divided over this process's devices.
    """
    num_devices = len(mesh.local_devices)
    if len(local_rows) % num_devices:
        raise ValueError(
            f"expected a number of rows that {num_devices} local devices divide, got {len(local_rows)}: "
            "choose a batch size that the device count divides"
        )
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local_rows)
