"""The memory of a step by the compiler of its devices, and the largest microbatch that fits them."""

import dataclasses
from collections.abc import Sequence

import jax

from nnx_gpt2 import MemoryEstimate, estimate_memory, make_mesh
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, one_line
from pretrain._resolve.devices import data_devices, with_microbatches
from pretrain._resolve.target_devices import Target, extra_of, find_target
from ray_jax_launch import Hardware

_OPTION = "--train.micro-batch-size"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The memory of a step with its microbatches."""

    config: PretrainConfig
    """The configuration with these microbatches."""

    estimate: MemoryEstimate | None
    """The memory of each device; None if the compiler rejects the step."""

    rejection: str = ""
    """Why the compiler rejects the step; empty if it does not."""


def step_memory(config: PretrainConfig, mesh: jax.sharding.Mesh) -> StepMemory:
    """Compile the step of a configuration whose microbatches are known."""
    train = config.train
    try:
        found = estimate_memory(
            config.model,
            global_batch_size=train.global_batch_size,
            optimizer=config.optimizer,
            grad_accum_steps=train.grad_accum_steps,
            mesh=mesh,
            num_shards=train.num_shards,
            # A mask has the same size for any token.
            end_of_text=0 if train.mask_documents else None,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return StepMemory(
            config=config, estimate=None, rejection=one_line(str(error).partition("RESOURCE_EXHAUSTED: ")[2])
        )
    return StepMemory(config=config, estimate=found)


def largest_microbatch(
    config: PretrainConfig, mesh: jax.sharding.Mesh, target: Target, num_devices: Sequence[int]
) -> StepMemory:
    """Find the largest microbatch that fits, by some compilations; if none fits, the one that needs the least memory.

    Args:
        config: the configuration. The size of its microbatch does not count.
        mesh: the fewest devices that the run may have.
        target: these devices.
        num_devices: the numbers of data-parallel devices that the run may have.

    Raises:
        UsageError: the compiler of the devices is not installed, or they cannot share the batch.
    """
    if target.facts is not None:
        raise UsageError(
            f"{_OPTION} must be a number without the compiler of the devices, which comes with uv run --extra "
            f"{extra_of(target)} on Linux, got auto."
        )

    def tried(size: int) -> StepMemory:
        train = dataclasses.replace(config.train, micro_batch_size=size)
        return step_memory(with_microbatches(dataclasses.replace(config, train=train), num_devices), mesh)

    share = max(1, config.train.global_batch_size // min(num_devices))
    # The whole share first: it needs no sum of gradients beside the gradient.
    least = tried(share)
    if target.has(least.estimate):
        return least
    sizes, largest = [size for size in range(1, share) if share % size == 0], None
    while sizes:  # those above the largest that fits, and below the smallest that does not
        middle = len(sizes) // 2
        found = tried(sizes[middle])
        fits = target.has(found.estimate)
        largest = found if fits else largest
        if found.estimate and (least.estimate is None or found.estimate.peak_bytes < least.estimate.peak_bytes):
            least = found
        sizes = sizes[middle + 1 :] if fits else sizes[:middle]
    return largest or least


def find_fitting_size(config: PretrainConfig, hardware: Hardware) -> int:
    """Return the size of the largest microbatch that fits the hardware, of an elastic group at its smallest.

    Raises:
        UsageError: none fits, or the devices or their compiler are not here.
    """
    target = find_target(hardware, only_here=False)
    mesh = make_mesh(devices=target.devices, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    found = largest_microbatch(config, mesh, target, data_devices(config, hardware))
    size = found.config.train.micro_batch_size
    assert isinstance(size, int), "it is a number that was tried"
    if not target.has(found.estimate):
        needed = f"{found.estimate.peak_bytes / 2**30:,.2f} GiB" if found.estimate else f"a failure: {found.rejection}"
        raise UsageError(
            f"a step must fit the {target.usable_bytes / 2**30:,.1f} GiB of each device, got {needed} with the "
            f"microbatch {size}. Take a smaller model, or more devices with --mesh.fsdp."
        )
    return size
