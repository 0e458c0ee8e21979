"""Ray Train's scaling config of a hardware preset, and the hardware of a scaling config."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ray.train import ScalingConfig
from ray.util.tpu import get_tpu_worker_resources

from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._hardware import Hardware, check_hardware, local
from ray_jax_launch._numbers import check_choice, check_resources_per_worker, check_type

_logger = logging.getLogger("ray_jax_launch")

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

LabelSelector = Mapping[str, str] | Sequence[Mapping[str, str]]


def scaling_config(
    hardware: Hardware,
    *,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str | None = None,
    label_selector: LabelSelector | None = None,
) -> ScalingConfig:
    """Return Ray Train's scaling config for this hardware.

    Args:
        hardware: see `parse_hardware`.
        resources_per_worker: Ray resources of each worker, in addition to or instead of those of the hardware, such as
            `{"CPU": 4}` or `{"memory": 8e9}`.
        placement_strategy: PACK (Ray's default), SPREAD, STRICT_PACK or STRICT_SPREAD.
        label_selector: labels of the nodes to use, for all workers or one per worker.

    Raises:
        LaunchError: Ray rejects an argument.
    """
    check_hardware(hardware)
    if placement_strategy is not None:
        check_choice("placement_strategy", placement_strategy, _STRATEGIES)
    if label_selector is not None:
        _check_labels(label_selector)
    check_resources_per_worker(resources_per_worker)
    num_workers = (hardware.min_workers, hardware.num_workers) if hardware.is_elastic else hardware.num_workers
    chosen: dict[str, Any] = {"num_workers": num_workers}
    if hardware.kind == "local":
        chosen["num_workers"] = 0
        # Ray asks for bug reports on local mode each time that it makes such a config.
        logging.getLogger("ray.train.v2.api.config").setLevel(logging.WARNING)
    resources: dict[str, float] | None = {"CPU": 1}
    if hardware.kind == "gpu":
        chosen |= {"use_gpu": True, "accelerator_type": hardware.accelerator_type}
        resources = {"CPU": 1, "GPU": hardware.devices_per_worker}
    if hardware.kind == "tpu":
        chosen |= {"use_tpu": True, "accelerator_type": hardware.accelerator_type, "topology": hardware.topology}
        resources = None  # Ray knows them
    if placement_strategy is not None:
        chosen["placement_strategy"] = placement_strategy
    if label_selector is not None:
        chosen["label_selector"] = label_selector
    try:
        config = ScalingConfig(resources_per_worker=resources, **chosen)
        if resources_per_worker is not None:
            wanted = {**_given_resources(config), **resources_per_worker}
            config = ScalingConfig(resources_per_worker=wanted, **chosen)
    except (TypeError, ValueError) as error:
        given = {
            "resources_per_worker": resources_per_worker,
            "placement_strategy": placement_strategy,
            "label_selector": label_selector,
        }
        given = {name: value for name, value in given.items() if value is not None} or {"hardware": str(hardware)}
        reason = str(error).splitlines()[0].rstrip(".")
        raise LaunchError(
            f"{' and '.join(given)} must be valid for {hardware}, got {shown(given)} ({reason})."
        ) from error
    return config


def _check_labels(given: Any) -> None:
    """Check the labels of the nodes to use.

    Raises:
        LaunchError: they are not texts by name, or a list of those.
    """
    check_type("label_selector", given, Mapping | list | tuple, "a dict, or a list of dicts")
    for labels in [given] if isinstance(given, Mapping) else given:
        is_selector = isinstance(labels, Mapping) and all(isinstance(x, str) for x in (*labels, *labels.values()))
        if not is_selector:
            raise LaunchError(
                f'label_selector must have texts by name, got {shown(labels)}. Write them as in {{"market-type": '
                '"spot"}.'
            )


def hardware_of(scaling: ScalingConfig) -> Hardware:
    """Return the hardware of a scaling config. A worker without GPU or TPU is a CPU worker of one device."""
    if scaling.max_workers == 0:
        return local()
    resources = resources_of(scaling)
    given: dict[str, Any] = {"num_workers": scaling.max_workers, "min_workers": max(1, scaling.min_workers)}
    if scaling.use_gpu:
        given["accelerator_type"] = scaling.accelerator_type
        return Hardware(kind="gpu", devices_per_worker=max(1, int(resources.get("GPU", 1))), **given)
    if not scaling.use_tpu:
        return Hardware(kind="cpu", devices_per_worker=1, **given)
    if scaling.topology and scaling.accelerator_type:
        given["workers_per_slice"], _ = get_tpu_worker_resources(
            scaling.topology, scaling.accelerator_type, resources_per_worker=_given_resources(scaling), num_slices=1
        )
    return Hardware(
        kind="tpu",
        devices_per_worker=max(1, int(resources.get("TPU", 1))),
        accelerator_type=scaling.accelerator_type,
        topology=scaling.topology,
        **given,
    )


def share_cpus(scaling: ScalingConfig, num_cpus: float, data_cpus: int) -> ScalingConfig:
    """Return the config with a part of a CPU for each worker, if one machine has too few for workers and Ray Data.

    Ray's CPUs are numbers: workers and tasks share the real CPUs of the machine in any case. Ray makes a cluster of as
    many CPUs as the machine has if a script uses Ray Data before it makes a trainer.

    Args:
        scaling: the config.
        num_cpus: Ray's CPUs of the machine.
        data_cpus: the CPUs for Ray Data.
    """
    num_workers = scaling.max_workers
    spare = (num_cpus - data_cpus) / num_workers
    if scaling.use_tpu or resources_of(scaling).get("CPU") != 1 or not 0 < spare < 1:
        return scaling
    share = math.floor(100 * spare) / 100
    _logger.info("each worker takes %g of a CPU, which leaves %d for the tasks of Ray Data", share, data_cpus)
    return dataclasses.replace(scaling, resources_per_worker={**_given_resources(scaling), "CPU": share})


def resources_of(scaling: ScalingConfig) -> dict[str, float]:
    """Return the Ray resources of one worker of a group."""
    return {name: amount / scaling.max_workers for name, amount in scaling.total_resources.items() if amount}


def _given_resources(scaling: ScalingConfig) -> dict[str, float]:
    given: Any = scaling.resources_per_worker  # Ray declares the types of its tuner too
    return given or {}
