"""Ray Datasets of the workers: one per rank, or one that Ray splits. CPUs reserved for the tasks of Ray Data."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray.data
from ray.train import DataConfig

from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._lost_cluster import is_lost
from ray_jax_launch._numbers import check_type
from ray_jax_launch._ray_internals.ray_train import (
    DefaultAutoscalingCoordinator,
    ResourceRequestPriority,
    datasets_to_split,
    keeping_order,
)

_RENEW_EVERY_S = 20

RankedDataset = Callable[[int, int], ray.data.Dataset]
"""Function that makes the dataset of one worker, called with `(rank, world_size)`."""


class RankedDataConfig(DataConfig):
    """Gives each worker the dataset that a `RankedDataset` makes for its rank, in the dataset's order.

    Ray Datasets are given to Ray's config. It splits a dataset among the workers (`streaming_split`), in an order that
    depends on the speed of tasks and workers, unless the dataset asks for its own order by
    `dataset.context.execution_options.preserve_order`, as those of `token_windows` do.

    Args:
        base: config for the Ray Datasets; Ray's default if None.

    Raises:
        LaunchError: it is something else.
    """

    def __init__(self, base: DataConfig | None = None) -> None:
        check_type("base", base, DataConfig | None, "a DataConfig or None")
        self._base = DataConfig() if base is None else base
        super().__init__(datasets_to_split=datasets_to_split(self._base))

    def configure(
        self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any
    ) -> list[dict[str, ray.data.DataIterator]]:
        """Return the iterators of all ranks. Called each time a group of workers starts."""
        ranked: dict[str, Any] = {name: make for name, make in datasets.items() if callable(make)}
        given = {name: dataset for name, dataset in datasets.items() if name not in ranked}
        base = keeping_order(self._base, given)
        split = base.configure(given, world_size, *args, **kwargs) if given else [{}] * world_size
        return [
            {**split[rank], **{name: in_order(make(rank, world_size)) for name, make in ranked.items()}}
            for rank in range(world_size)
        ]


def check_datasets(datasets: Any) -> None:
    """Check the datasets of a trainer.

    Raises:
        LaunchError: they are not Ray Datasets or functions by name.
    """
    constraint = "Ray Datasets or functions by name"
    check_type("datasets", datasets, Mapping | None, constraint, "Put it into a dict, such as {'train': ...}")
    for name, dataset in (datasets or {}).items():
        if not callable(dataset) and not isinstance(dataset, ray.data.Dataset):
            raise LaunchError(
                f"datasets must be {constraint}, got {shown(dataset)} for {shown(name)}. Make it a Dataset, such as "
                "ray.data.from_items(...), or a function that returns one."
            )


def for_group(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the datasets as Ray Train takes them: it calls each callable when a group of workers starts.

    Args:
        datasets: by name, Ray Datasets, functions of no argument that return one, and functions of the rank and the
            number of workers (`RankedDataset`), which `RankedDataConfig` calls.
    """
    return {name: _constant(given) if _is_ranked(given) else given for name, given in datasets.items()}


def for_one(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the datasets of the only worker. See `for_group`."""

    def shard(given: Any) -> Any:
        if _is_ranked(given):
            return in_order(given(0, 1))
        return given() if callable(given) else given

    return {name: shard(given) for name, given in datasets.items()}


def _is_ranked(dataset: Any) -> bool:
    if not callable(dataset):
        return False
    required = [
        parameter
        for parameter in inspect.signature(dataset).parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return bool(required)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def in_order(dataset: ray.data.Dataset) -> ray.data.DataIterator:
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


@contextlib.contextmanager
def reserving(hardware: Hardware, name: str, num_cpus: int) -> Iterator[Callable[[], None]]:
    """Reserve CPUs for Ray Data while the block runs. Yields a function to call every few seconds."""
    if not hardware.is_elastic or not num_cpus:
        yield lambda: None
        return
    reservation = DataReservation(name, num_cpus)
    reservation.renew()
    try:
        yield reservation.renew
    finally:
        if not is_lost():
            reservation.cancel()
