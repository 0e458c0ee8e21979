"""The devices of a run: are they in the cluster, and can they form the mesh and share the batch in microbatches?"""

import dataclasses
import math
from collections.abc import Sequence

from rich.console import Console

import ray_jax_launch
from nnx_gpt2 import check_mesh
from pretrain._config import PretrainConfig
from pretrain._early_interrupt import keeping_handlers
from pretrain._errors import UsageError, alternatives
from pretrain._screen.printing import print_line, waiting
from pretrain._surroundings.environment import is_on, start_jax
from ray_jax_launch import Hardware, parse_hardware

# A TPU chip of these generations is two devices of jax. Other chips are one device.
_DEVICES_PER_CHIP: dict[str | None, int] = {"TPU-V2": 2, "TPU-V3": 2, "TPU-V7X": 2}


def given_hardware(config: PretrainConfig) -> Hardware | None:
    """Return the hardware that the configuration names, by `check_batch`, or None for `auto`.

    Raises:
        UsageError: the mesh, the attention kernel or the batch does not fit the devices.
    """
    if config.hardware == "auto":
        return None
    return check_batch(config, parse_hardware(config.hardware))


def connect(config: PretrainConfig, hardware: Hardware | None, console: Console) -> Hardware:
    """Connect to the cluster or start one, unless this process trains. Return the hardware, which the cluster has.

    Args:
        config: the configuration.
        hardware: the checked hardware; None takes the best of the cluster, and checks it.
        console: shows the start of Ray.

    Raises:
        LaunchError: the devices are not in the cluster, or Ray cannot start.
        UsageError: the mesh, the attention kernel or the batch does not fit the devices.
    """
    if hardware is not None and hardware.kind == "local":
        return hardware
    with waiting(console, "starting Ray"), keeping_handlers():
        ray_jax_launch.connect(hardware, dashboard=config.dashboard)
    if config.dashboard:
        print_line(console, f"dashboard: {ray_jax_launch.dashboard_url()}")
    if hardware is None:
        hardware = check_batch(config, ray_jax_launch.auto())
    ray_jax_launch.check_resources(
        hardware,
        # Tasks of Ray Data read the training windows, or tasks tokenize text.
        data_cpus=hardware.data_cpus,
        wait_for_resources_s=config.wait_for_resources_s,
    )
    return hardware


def check_batch(config: PretrainConfig, hardware: Hardware) -> Hardware:
    """Check that the devices can form the mesh and run the kernels, and can share the batch, before the launch.

    Args:
        config: the configuration.
        hardware: the devices.

    Returns:
        the hardware. Elastic hardware has only those numbers of workers that fit the mesh and the batch.

    Raises:
        UsageError: the mesh, the attention kernel or the batch does not fit the devices, for any number of workers.
    """
    platform, per_worker = _devices_of_worker(hardware, config)
    if config.model.attention == "cudnn" and platform != "gpu":
        raise UsageError(f"model.attention must not be cudnn without a GPU, got {hardware} on {platform}. Choose auto.")
    if config.model.attention == "splash" and platform == "gpu":
        raise UsageError(
            f"model.attention must not be splash, a kernel for TPUs, on a GPU, got {hardware}. Choose auto."
        )
    if "float64" in (config.model.dtype, config.model.param_dtype) and not is_on("JAX_ENABLE_X64"):
        raise UsageError(
            "model.dtype and model.param_dtype must be bfloat16 or float32, got float64. Choose another, or set "
            "JAX_ENABLE_X64=1."
        )
    if config.train.num_shards is not None and platform == "cpu" and per_worker > 1:
        # XLA's pool has a thread for each device, and its size changes the last bits.
        raise UsageError(
            f"each worker must have one CPU device with train.num_shards, got {per_worker} of {hardware}. Give "
            "--hardware cpu:WORKERS, and leave JAX_NUM_CPU_DEVICES unset."
        )
    counts: list[int] = []
    reasons: list[UsageError] = []
    for num_workers in hardware.worker_counts:
        try:
            _check_mesh(config, hardware, num_workers, per_worker)
            number = [num_workers * per_worker // config.mesh.tensor]
            check_shares(with_microbatches(config, number), number)
        except UsageError as error:
            reasons.append(error)
            if num_workers * per_worker > config.train.global_batch_size * config.mesh.tensor:
                break  # more devices than sequences: no larger number fits
        else:
            counts.append(num_workers)
    if not counts and hardware.is_elastic:
        raise UsageError(
            f"--hardware must have a number of workers that fits the mesh and the batch, got {hardware}. With "
            f"{hardware.min_workers}: {reasons[0]}"
        )
    if not counts:
        raise reasons[0]
    hardware = hardware.restricted_to(counts)
    num_data_devices = data_devices(config, hardware)
    check_shares(with_microbatches(config, num_data_devices), num_data_devices)
    return hardware


def _check_mesh(config: PretrainConfig, hardware: Hardware, num_workers: int, per_worker: int) -> None:
    """Check that so many workers can form the mesh.

    Raises:
        UsageError: they cannot.
    """
    num_devices, tensor = num_workers * per_worker, config.mesh.tensor
    if hardware.kind in ("cpu", "gpu") and per_worker == 1 < tensor and num_devices % tensor == 0:
        whole = f"{hardware.kind}:{num_devices // tensor}x{tensor}"
        raise UsageError(
            f"--hardware must have workers of at least {tensor} devices for mesh.tensor {tensor}, got {hardware}. Give "
            f"--hardware {':'.join(filter(None, (whole, (hardware.accelerator_type or '').lower())))}."
        )
    num_slices = num_workers // hardware.workers_per_slice if hardware.kind == "tpu" else 1
    try:
        check_mesh(
            fsdp=config.mesh.fsdp,
            tensor=config.mesh.tensor,
            num_devices=num_devices,
            devices_per_process=per_worker,
            devices_per_slice=num_devices // num_slices if num_slices > 1 else None,
        )
    except ValueError as error:
        raise UsageError(f"--hardware {hardware}: {error}") from None


def _devices_of_worker(hardware: Hardware, config: PretrainConfig) -> tuple[str, int]:
    """Return the platform of the devices, and the number of jax's devices of each worker."""
    if hardware.kind != "local":
        return hardware.kind, devices_of_worker(hardware)
    # This process is the worker. Elsewhere, a driver that imports jax would lock the chips of a TPU host.
    import jax

    start_jax(with_fixed_threads=config.train.num_shards is not None)
    return jax.default_backend(), jax.local_device_count()


def devices_of_worker(hardware: Hardware) -> int:
    """Return the number of jax's devices of a worker that is a process of its own."""
    return hardware.devices_per_worker * _DEVICES_PER_CHIP.get(hardware.accelerator_type, 1)


def data_devices(config: PretrainConfig, hardware: Hardware) -> list[int]:
    """Return the numbers of data-parallel devices that a run may have."""
    _, per_worker = _devices_of_worker(hardware, config)
    return [num_workers * per_worker // config.mesh.tensor for num_workers in hardware.worker_counts]


def check_shares(config: PretrainConfig, num_data_devices: Sequence[int]) -> None:
    """Check that the devices can share the batch.

    Raises:
        UsageError: they cannot.
    """
    batch_size, num_microbatches = config.train.global_batch_size, config.train.grad_accum_steps
    if (num_shards := config.train.num_shards) is not None:
        for number in num_data_devices:
            if num_shards % number:
                powers = [2**n for n in range(num_shards.bit_length())]
                raise UsageError(
                    f"--hardware must have a number of devices that divides train.num_shards, {num_shards}, got "
                    f"{number}. Choose {alternatives(powers)}."
                )
    numbers, noun = _parts_of_batch(config, num_data_devices)
    for number in numbers:
        if batch_size % (number * num_microbatches):
            raise UsageError(
                f"train.global_batch_size must be divisible by {number * num_microbatches} ({number} {noun} x "
                f"{num_microbatches} accumulation steps), got {batch_size}. Change it, train.grad_accum_steps or "
                f"{'--hardware' if config.train.num_shards is None else 'train.num_shards'}."
            )


def _parts_of_batch(config: PretrainConfig, num_data_devices: Sequence[int]) -> tuple[Sequence[int], str]:
    """Return the numbers of parts whose gradients are computed alone, and what they are."""
    if config.train.num_shards is None:
        return num_data_devices, "data-parallel devices"
    return [config.train.num_shards], "shards"


def with_microbatches(config: PretrainConfig, num_devices: Sequence[int]) -> PretrainConfig:
    """Return the configuration with the `grad_accum_steps` that `micro_batch_size` gives; with `auto`, the fewest.

    Args:
        config: the configuration.
        num_devices: the numbers of data-parallel devices that the run may have.

    Raises:
        UsageError: the devices cannot have equal microbatches of at most this size.
    """
    size, batch_size = config.train.micro_batch_size, config.train.global_batch_size
    if size is None:
        return config
    size = batch_size if size == "auto" else size
    numbers, noun = _parts_of_batch(config, num_devices)
    fewest, common = min(numbers), math.lcm(*numbers)
    shown = f"{alternatives(numbers)} {noun}"
    if batch_size % common:
        raise UsageError(
            f"train.global_batch_size must be divisible by {common} for {shown}, got {batch_size}. Change it or "
            "--hardware."
        )
    if size * fewest < common:
        raise UsageError(
            f"train.micro_batch_size must be at least {common // fewest} for equal microbatches on {shown}, got "
            f"{size}. Raise it, or change --hardware."
        )
    at_least = -(-batch_size // (fewest * size))
    steps = next(steps for steps in range(at_least, batch_size + 1) if batch_size % (steps * common) == 0)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, grad_accum_steps=steps))
