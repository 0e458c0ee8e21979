"""One Ray Dataset per rank, and CPUs reserved for the tasks of Ray Data."""

import time
from collections.abc import Callable
from typing import Any

import ray.data
from ray.train import DataConfig

from ray_jax_launch._ray_internals import DefaultAutoscalingCoordinator, ResourceRequestPriority

_RENEW_EVERY_S = 20

RankedDataset = Callable[[int, int], ray.data.Dataset]
"""Function that makes the dataset of one worker, called with `(rank, world_size)`."""


class RankedDataConfig(DataConfig):
    """Gives each worker its own dataset, in the dataset's order.

    Ray's default splits one dataset among the workers (`streaming_split`), in an order that depends on their speed.
    """

    def configure(
        self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any
    ) -> list[dict[str, ray.data.DataIterator]]:
        """Return the iterators of all ranks. Called each time a group of workers starts."""
        return [
            {name: _in_order(make(rank, world_size)) for name, make in datasets.items()} for rank in range(world_size)
        ]


def _in_order(dataset: ray.data.Dataset) -> ray.data.DataIterator:
    """Return an iterator in the dataset's order, even if later blocks are ready first."""
    dataset.context.execution_options.preserve_order = True
    return dataset.iterator()


class DataReservation:
    """Reserves CPUs for Ray Data, because an elastic group of workers would take all CPUs of the cluster.

    Ray's autoscaling coordinator sizes the group by the resources that it has left, and serves requests of equal
    priority in order of arrival. Not thread-safe.

    Args:
        name: unique among launches.
        num_cpus: the number of CPUs.
    """

    def __init__(self, name: str, num_cpus: int) -> None:
        self._coordinator = DefaultAutoscalingCoordinator(f"data-of-{name}")
        self._num_cpus = num_cpus
        self._renewed_s = float("-inf")

    def renew(self) -> None:
        """Reserve the CPUs for another minute. May be called more often."""
        if time.monotonic() - self._renewed_s > _RENEW_EVERY_S:
            self._renewed_s = time.monotonic()
            self._coordinator.request_resources(
                [{"CPU": 1}] * self._num_cpus,
                expire_after_s=3 * _RENEW_EVERY_S,
                priority=ResourceRequestPriority.HIGH,
            )

    def cancel(self) -> None:
        """Release the CPUs."""
        self._coordinator.cancel_request()
