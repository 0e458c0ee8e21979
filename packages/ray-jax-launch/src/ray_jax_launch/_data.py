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
    on which of them is faster. Here each rank has its own, in an order of its own choosing.
    """

    def configure(
        self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any
    ) -> list[dict[str, ray.data.DataIterator]]:
        """Make the iterators of all ranks. Called anew each time a worker group starts."""
        return [
            {name: make(rank, world_size).iterator() for name, make in datasets.items()} for rank in range(world_size)
        ]
