"""Datasets that depend on a worker's rank."""

from collections.abc import Callable
from typing import Any

import ray.data
from ray.train import DataConfig

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
