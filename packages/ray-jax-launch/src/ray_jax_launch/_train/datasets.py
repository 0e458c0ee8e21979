"""Datasets that depend on a worker's rank."""

import time
from collections.abc import Callable
from typing import Any

import ray.data
from ray.train import DataConfig

from ray_jax_launch._ray_internals import DefaultAutoscalingCoordinator, ResourceRequestPriority

_RENEW_EVERY_S = 20

RankedDataset = Callable[[int, int], ray.data.Dataset]
"""Called as `(rank, world_size)`: makes the dataset of one worker."""


class RankedDataConfig(DataConfig):
    """Gives each worker the dataset that is made for its rank.

    Ray's default deals one dataset out among the workers (`streaming_split`), in an order that depends
    on which of them is faster. Here each rank has its own, and gets its rows in their order.
    """

    def configure(
        self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any
    ) -> list[dict[str, ray.data.DataIterator]]:
        """Make the iterators of all ranks. Called anew each time a worker group starts."""
        return [
            {name: _in_order(make(rank, world_size)) for name, make in datasets.items()} for rank in range(world_size)
        ]


def _in_order(dataset: ray.data.Dataset) -> ray.data.DataIterator:
    """Iterate in the dataset's own order, whichever of its blocks is ready first."""
    dataset.context.execution_options.preserve_order = True
    return dataset.iterator()


class DataReservation:
    """Keeps CPUs of the cluster from the workers of an elastic group, which would take all there are.

    The group is sized by what Ray's coordinator of autoscaling leaves it, and requests of equal priority are served in
    the order in which they came. Not thread-safe.

    Args:
        name: one of no other launch.
        num_cpus: how many to keep.
    """

    def __init__(self, name: str, num_cpus: int) -> None:
        self._coordinator = DefaultAutoscalingCoordinator(f"data-of-{name}")
        self._num_cpus = num_cpus
        self._renewed_s = float("-inf")

    def renew(self) -> None:
        """Keep the CPUs for another minute. May be called more often."""
        if time.monotonic() - self._renewed_s > _RENEW_EVERY_S:
            self._renewed_s = time.monotonic()
            self._coordinator.request_resources(
                [{"CPU": 1}] * self._num_cpus,
                expire_after_s=3 * _RENEW_EVERY_S,
                priority=ResourceRequestPriority.HIGH,
            )

    def cancel(self) -> None:
        """Keep them no longer."""
        self._coordinator.cancel_request()
