"""Meshes over simulated devices: process `r` of `n` holds rows `[r * B/n, (r + 1) * B/n)`."""

import itertools
import math
import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from nnx_gpt2 import batch_sharding, check_mesh, make_mesh
from nnx_gpt2._sharding import _place_among_processes


@dataclass(frozen=True)
class Device:
    """A stand-in with the attributes of a jax device."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    device_kind: str
    platform: str = "tpu"


# By generation: its name in jax, the number of devices of a chip, and some slice topologies in chips.
GENERATIONS = {
    "v2": ("TPU v2", 2, ["2x2", "4x4", "8x8", "16x16"]),
    "v3": ("TPU v3", 2, ["2x2", "4x4", "8x8", "16x16"]),
    "v4": ("TPU v4", 1, ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"]),
    "v5e": ("TPU v5 lite", 1, ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]),
    "v5p": ("TPU v5p", 1, ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"]),
    "v6e": ("TPU v6 lite", 1, ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]),
    "v7x": ("TPU7x", 2, ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"]),
}
CASES = [
    (name, topology, num_slices)
    for name, (_, _, topologies) in GENERATIONS.items()
    for topology in topologies
    for num_slices in (1, 2, 3)
    if num_slices * math.prod(map(int, topology.split("x"))) <= 256
]


def tpu_devices(name, topology, num_slices=1):
    """Return devices in the order of `jax.devices()`: by slice and coordinates, not by process."""
    kind, num_cores, _ = GENERATIONS[name]
    x_size, y_size, z_size = [*map(int, topology.split("x")), 1][:3]
    is_one_host = name in ("v5e", "v6e") and x_size * y_size <= 8
    host_x, host_y = (x_size, y_size) if is_one_host else (2, 2)
    hosts_x, hosts_y = x_size // host_x, y_size // host_y
    devices = []
    for slice_index, z, y, x, core in itertools.product(
        range(num_slices), range(z_size), range(y_size), range(x_size), range(num_cores)
    ):
        host = ((slice_index * z_size + z) * hosts_y + y // host_y) * hosts_x + x // host_x
        devices.append(Device(len(devices), host, (x, y, z), core, slice_index, kind))
    return devices


def rows_by_process(mesh, num_rows):
    """Return the rows of a batch on the devices of each process."""
    rows = {}
    for device, (index, _) in batch_sharding(mesh).devices_indices_map((num_rows, 5)).items():
        rows.setdefault(device.process_index, set()).update(range(*index.indices(num_rows)))
    return rows


def sizes_up_to(number):
    return [1 << power for power in range(number.bit_length()) if 1 << power <= number]


@pytest.mark.parametrize(("name", "topology", "num_slices"), CASES)
def test_rows_are_in_the_order_of_processes(name, topology, num_slices):
    devices = tpu_devices(name, topology, num_slices)
    num_processes = 1 + max(device.process_index for device in devices)
    per_process, per_slice = len(devices) // num_processes, len(devices) // num_slices
    num_accepted = 0
    for fsdp, tensor in itertools.product(sizes_up_to(len(devices)), repeat=2):
        fits = len(devices) % (fsdp * tensor) == 0 and per_process % tensor == 0
        if not fits or (num_slices > 1 and per_slice % (fsdp * tensor)):
            with pytest.raises(ValueError, match=r"^mesh ax\w+ .* must .*, got .*\. Choose"):
                make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)
            continue
        mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)
        num_accepted += 1
        assert sorted(device.id for device in mesh.devices.flat) == [*range(len(devices))]
        num_rows = 2 * len(devices) // tensor
        local = num_rows // num_processes
        assert rows_by_process(mesh, num_rows) == {
            rank: set(range(rank * local, (rank + 1) * local)) for rank in range(num_processes)
        }
        for group in mesh.devices.reshape(-1, tensor):
            assert len({device.process_index for device in group}) == 1
        if num_slices > 1:
            for group in mesh.devices.reshape(-1, fsdp * tensor):
                assert len({device.slice_index for device in group}) == 1
    assert num_accepted >= min(per_process.bit_length(), per_slice.bit_length())


@pytest.mark.parametrize(("fsdp", "tensor"), [(2, 1), (4, 1), (8, 1), (16, 1), (1, 2), (1, 4), (2, 2), (2, 4), (8, 2)])
def test_two_by_two_hosts_of_a_v6e_slice_take_every_size(fsdp, tensor):
    mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=tpu_devices("v6e", "4x4"))
    assert [device.process_index for device in mesh.devices.flat] == [rank for rank in range(4) for _ in range(4)]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_hosts_that_are_not_tpus_have_one_slice_index_each(platform):
    devices = [Device(i, i // 2, (0, 0, 0), 0, i // 2, platform, platform) for i in range(6)]
    mesh = make_mesh(fsdp=3, tensor=2, devices=devices[::-1])
    assert [device.process_index for device in mesh.devices.flat] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 8}, "mesh axis tensor must divide the 4 devices of one process, got 8. Choose a smaller size, or"),
        (
            {"fsdp": 16, "tensor": 2},
            "mesh axes fsdp and tensor must have a product that divides the 16 devices of one TPU slice, got 16 and 2.",
        ),
        ({"fsdp": 64}, "and their product must divide the 32 devices, got 64 and 1. Choose other sizes, or another"),
    ],
)
def test_check_mesh_rejects_what_make_mesh_rejects(sizes, message):
    sizes = {"fsdp": 1, "tensor": 1} | sizes
    for check in (
        lambda: check_mesh(**sizes, num_devices=32, devices_per_process=4, devices_per_slice=16),
        lambda: make_mesh(**sizes, devices=tpu_devices("v6e", "4x4", 2)),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check()


def test_processes_of_unequal_size_are_rejected():
    devices = tpu_devices("v6e", "4x4")
    with pytest.raises(
        ValueError, match=re.escape("must be equally many in each process, got {0: 4, 1: 3} by process.")
    ):
        make_mesh(devices=sorted(devices, key=lambda device: device.process_index)[:7])


@pytest.mark.parametrize(
    ("runs", "largest"), [([4, 4, 4, 4], 4), ([2, 4, 2], 2), ([2, 1, 1, 2], 1), ([3, 2, 3], 1)], ids=str
)
def test_slices_with_alternating_processes_share_only_the_data_axis(runs, largest):
    """Two slices alternate after these numbers of devices: only groups within each run stay in a slice."""
    slices = [number % 2 for number, length in enumerate(runs) for _ in range(length)]
    devices = [Device(i, i, (i, 0, 0), 0, slice_index, "TPU v4") for i, slice_index in enumerate(slices)]
    assert make_mesh(fsdp=largest, devices=devices).shape["fsdp"] == largest
    message = f"divides the {largest} devices of one TPU slice, got {2 * largest} and 1."
    with pytest.raises(ValueError, match=re.escape(message)):
        make_mesh(fsdp=2 * largest, devices=devices)


def test_the_rank_in_a_mesh_counts_only_the_processes_of_the_mesh(monkeypatch):
    devices = [device for device in tpu_devices("v6e", "4x4") if device.process_index in (1, 3)]
    for process_index, place in ((1, (0, 2)), (3, (1, 2))):
        monkeypatch.setattr(jax, "process_index", lambda process_index=process_index: process_index)
        assert _place_among_processes.__wrapped__(make_mesh(devices=devices)) == place


def test_one_host_keeps_the_order_that_jax_finds_best():
    ring = make_mesh(devices=tpu_devices("v6e", "2x2")).devices.flat
    assert [device.coords[:2] for device in ring] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert math.prod(make_mesh(fsdp=2, tensor=2, devices=tpu_devices("v6e", "2x4")).devices.shape) == 8
    assert np.size(make_mesh(tensor=4, devices=tpu_devices("v7x", "2x2x1")).devices) == 8
