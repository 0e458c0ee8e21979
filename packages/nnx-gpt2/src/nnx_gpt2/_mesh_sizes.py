"""Sizes of the mesh axes that a set of devices allows, in plain numbers. Imports no jax."""

from nnx_gpt2._errors import is_whole, plain, require, shown


def check_mesh(
    *, fsdp: int, tensor: int, num_devices: int, devices_per_process: int, devices_per_slice: int | None = None
) -> None:
    """Reject sizes of the mesh axes `fsdp` and `tensor` that `make_mesh` would reject.

    A launcher can call it before it has any devices.

    Args:
        fsdp: devices that share one copy of the parameters.
        tensor: devices that share the work of each layer.
        num_devices: devices of all processes.
        devices_per_process: devices of each process.
        devices_per_slice: devices of each TPU slice, if there are several slices.

    Raises:
        ValueError: a number is no whole number or below 1, the axes do not divide the devices, `tensor` spans
            processes, or `fsdp` or `tensor` spans slices.
    """
    fsdp = plain(fsdp)
    tensor = plain(tensor)
    num_devices = plain(num_devices)
    devices_per_process, devices_per_slice = plain(devices_per_process), plain(devices_per_slice)
    for name, number in (
        ("num_devices", num_devices),
        ("devices_per_process", devices_per_process),
        ("devices_per_slice", 1 if devices_per_slice is None else devices_per_slice),
    ):
        require(is_whole(number, 1), name, "be a whole number of at least 1", shown(number))
    require(
        is_whole(fsdp, 1) and is_whole(tensor, 1) and num_devices % (fsdp * tensor) == 0,
        "mesh axes fsdp and tensor",
        f"be at least 1 and their product must divide the {num_devices} devices",
        f"{shown(fsdp)} and {shown(tensor)}",
        "Choose other sizes, or another number of devices.",
    )
    require(
        devices_per_process % tensor == 0,
        "mesh axis tensor",
        f"divide the {devices_per_process} devices of one process",
        tensor,
        "Choose a smaller size, or processes of more devices: a tensor group stays within one process.",
    )
    require(
        devices_per_slice is None or devices_per_slice % (fsdp * tensor) == 0,
        "mesh axes fsdp and tensor",
        f"have a product that divides the {devices_per_slice} devices of one TPU slice",
        f"{fsdp} and {tensor}",
        "Choose smaller sizes: only the data axis spans slices.",
    )
