"""Sizes of the mesh axes that a set of devices allows, in plain numbers. Imports no jax."""


def check_mesh(
    *, fsdp: int, tensor: int, num_devices: int, devices_per_process: int, devices_per_slice: int | None = None
) -> None:
    """Reject sizes of the mesh axes `fsdp` and `tensor` that `make_mesh` would reject.

    A launcher calls it before any device is there.

    Args:
        fsdp: devices that share one copy of the parameters.
        tensor: devices that share each layer's work.
        num_devices: devices of all processes.
        devices_per_process: devices of each process.
        devices_per_slice: devices of each TPU slice, where there are several slices.

    Raises:
        ValueError: the axes do not divide the devices, `tensor` spans processes, or `fsdp` or `tensor` spans slices.
    """
    if fsdp < 1 or tensor < 1 or not num_devices or num_devices % (fsdp * tensor):
        raise ValueError(
            f"mesh axes fsdp and tensor must be at least 1 and their product must divide the {num_devices} devices, "
            f"got {fsdp} and {tensor}. Choose other sizes, or another number of devices."
        )
    if devices_per_process % tensor:
        raise ValueError(
            f"mesh axis tensor must divide the {devices_per_process} devices of one process, got {tensor}. Choose a "
            "smaller size, or processes of more devices: a tensor group stays within one process."
        )
    if devices_per_slice is not None and devices_per_slice % (fsdp * tensor):
        raise ValueError(
            f"mesh axes fsdp and tensor must have a product that divides the {devices_per_slice} devices of one TPU "
            f"slice, got {fsdp} and {tensor}. Choose smaller sizes: only the data axis spans slices."
        )
