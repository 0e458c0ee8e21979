"""Datasets of the workers, and CPUs that an elastic launch reserves for Ray Data."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.cloudpickle
import ray.data
from ray.actor import ActorHandle
from ray.train import DataConfig

from ray_jax_launch import RankedDataConfig, cpu, launch
from ray_jax_launch._ray_internals import ray_train
from ray_jax_launch._ray_internals.ray_train import limit_data_calls
from ray_jax_launch._train import datasets

# Workers cannot import this file: its functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Coordinator:
    """Ray's coordinator of resources, an actor that answers nothing: it records the requests."""

    def __init__(self, name, calls):
        self.calls = calls
        calls.append(name)

    def request_resources(self, resources, *, expire_after_s, priority):
        self.calls.append((resources, expire_after_s, priority.name))

    def cancel_request(self):
        self.calls.append("cancelled")


@pytest.fixture
def calls(monkeypatch):
    """Name, requests and cancellations of the coordinator."""
    calls = []
    monkeypatch.setattr(datasets, "DefaultAutoscalingCoordinator", lambda name: Coordinator(name, calls))
    return calls


def test_a_reservation_is_renewed_before_it_expires_and_released_by_any_end(calls, monkeypatch):
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(datasets, "time", clock)
    request = ([{"CPU": 1}] * 3, 60, "HIGH")

    def run():
        with datasets.reserving(cpu(4, min_workers=1), "run", 3) as renew:
            for waited_s, num_requests in ((0, 1), (19, 1), (21, 2), (22, 2), (42, 3)):
                clock.now_s = 1000.0 + waited_s
                renew()
                assert calls == ["data-of-run", *[request] * num_requests]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert calls[4:] == ["cancelled"]


@pytest.mark.parametrize(("hardware", "num_cpus"), [(cpu(4), 3), (cpu(4, min_workers=1), 0)], ids=["fixed", "no CPUs"])
def test_a_group_that_takes_no_cpus_of_ray_data_reserves_none(calls, hardware, num_cpus):
    with datasets.reserving(hardware, "run", num_cpus) as renew:
        renew()
    assert calls == []


@pytest.mark.usefixtures("cluster")
def test_rows_come_in_order_even_if_later_blocks_are_ready_first():
    def slow_at_first(batch):
        time.sleep(2.0 if batch["id"][0] == 0 else 0.0)
        return batch

    dataset = ray.data.range(6, override_num_blocks=3).map_batches(slow_at_first, batch_size=None)
    assert [row["id"] for row in datasets.in_order(dataset).iter_rows()] == [*range(6)]


@pytest.mark.usefixtures("cluster")
def test_ray_data_learns_what_the_workers_have_once_it_starts_and_until_they_end(tmp_path: Path) -> None:
    name = "AutoscalingCoordinator"

    def requesters(coordinator: Any) -> list[str]:
        return ray.get(coordinator.__ray_call__.remote(lambda actor: [*actor._ongoing_reqs]))

    def loop() -> None:
        with pytest.raises(ValueError, match=name):  # nobody has needed it so far, and its process takes seconds
            ray.get_actor(name, namespace=name)
        ray.data.range(3).take_all()
        coordinator = ray.get_actor(name, namespace=name)
        until_s = time.monotonic() + 60
        while not any(requester.startswith("train-") for requester in requesters(coordinator)):
            assert time.monotonic() < until_s
            time.sleep(0.1)

    with contextlib.suppress(ValueError):  # of an earlier test
        ray.kill(ray.get_actor(name, namespace=name))
    launch(loop, hardware=cpu(1), storage_path=tmp_path, name="run", data_cpus=1, max_failures=0)
    assert not any(requester.startswith("train-") for requester in requesters(ray.get_actor(name, namespace=name)))


# Ray's own config still sets the option that it deprecates.
@pytest.mark.filterwarnings("ignore:`ExecutionOptions.exclude_resources`")
@pytest.mark.usefixtures("cluster")
def test_a_dataset_that_asks_for_its_order_keeps_it_when_ray_splits_it():
    def slow_at_first(batch):
        time.sleep(2.0 if batch["id"][0] == 0 else 0.0)
        return batch

    dataset = ray.data.range(6, override_num_blocks=3).map_batches(slow_at_first, batch_size=None)
    dataset.context.execution_options.preserve_order = True
    for _ in range(2):  # for the first group of workers, and after a restart
        (split,) = RankedDataConfig().configure({"rows": dataset}, 1, None, None)
        assert [row["id"] for row in split["rows"].iter_rows()] == [*range(6)]


@pytest.mark.usefixtures("cluster")
def test_the_executor_of_one_of_many_workers_calls_the_actors_of_ray_data_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, found, call = Counter[str](), list[int](), ActorHandle._actor_method_call

    def slowly(batch: Any) -> Any:  # a worker of Ray cannot import this module
        time.sleep(0.5)
        return batch

    def count(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        called[method_name] += 1
        return call(self, method_name, *args, **kwargs)

    monkeypatch.setattr(ActorHandle, "_actor_method_call", count)
    for num_workers in (1, 1000):
        called.clear()
        limit_data_calls(num_workers)
        rows = ray.data.range(24, override_num_blocks=24).map_batches(slowly, batch_size=None)
        assert len([*rows.iter_rows()]) == 24
        found.append(called["get_reserved_resources"] + called["update_execution_metrics"])
    limit_data_calls(1)
    few, many = found[1], found[0]
    assert few < many / 2


# Ray's own config still sets the option that it deprecates.
@pytest.mark.filterwarnings("ignore:`ExecutionOptions.exclude_resources`")
@pytest.mark.parametrize("of_config", [False, True])
def test_the_order_of_a_dataset_is_kept_if_its_own_options_or_the_config_ask_for_it(of_config: bool) -> None:
    options = ray.data.ExecutionOptions(preserve_order=of_config)
    rows = {name: Rows(3) for name in ("asks", "does not ask")}
    rows["asks"].context.execution_options.preserve_order = True
    config = DataConfig(execution_options=options)
    for _ in range(2):
        kept = ray_train.keeping_order(config, rows)
        found = {name: kept._resolve_execution_options(name).preserve_order for name in rows}
        assert found == {"asks": True, "does not ask": of_config}
    assert config._resolve_execution_options("asks").preserve_order == of_config  # the user's own is left as it is


@pytest.mark.parametrize(
    ("num_executors", "limits_s", "metrics_s", "request_s"),
    [(1, 1.0, 5.0, 10.0), (20, 1.0, 5.0, 10.0), (60, 3.0, 6.0, 10.0), (400, 20.0, 40.0, 20.0), (9000, 450, 900, 90.0)],
)
def test_executors_call_each_actor_20_times_a_second_and_renew_their_requests_before_they_expire(
    num_executors: int, limits_s: float, metrics_s: float, request_s: float
) -> None:
    """A request of Ray Data's autoscaler expires after 180 s."""
    try:
        limit_data_calls(num_executors)
        internals: Any = ray_train
        defaults = internals.RateBasedClusterAutoscaler.__init__.__kwdefaults__
        found = (
            internals.ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S,
            internals.StreamingExecutor.UPDATE_METRICS_INTERVAL_S,
            internals.BatchIterator.UPDATE_METRICS_INTERVAL_S,
            defaults["min_gap_between_autoscaling_requests_s"],
        )
        assert found == (limits_s, metrics_s, metrics_s, request_s)
    finally:
        limit_data_calls(1)


class Rows:
    """A dataset whose iterator is its size, and whether it keeps the order."""

    def __init__(self, size: int) -> None:
        self.size, self.context = size, SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def iterator(self) -> Any:
        return self.size, self.context.execution_options.preserve_order


class Splits(DataConfig):
    """A config that gives each rank its number beside the dataset."""

    def configure(self, datasets: dict[str, Any], world_size: int, *args: Any, **kwargs: Any) -> Any:
        return [{name: (rank, rows, args, kwargs) for name, rows in datasets.items()} for rank in range(world_size)]


def of_rank(rank: int, world_size: int) -> Any:
    return Rows(10 * world_size + rank)


def test_each_rank_gets_the_dataset_of_its_rank_beside_its_part_of_the_others() -> None:
    config = RankedDataConfig(Splits(datasets_to_split=["plain"]))
    found = config.configure({"ranked": of_rank, "plain": 7}, 3, "workers", node_ids="nodes")
    assert found == [
        {"ranked": (30 + rank, True), "plain": (rank, 7, ("workers",), {"node_ids": "nodes"})} for rank in range(3)
    ]
    assert config._datasets_to_split == ["plain"]
    assert RankedDataConfig().configure({"ranked": of_rank}, 2, None, None) == [
        {"ranked": (20, True)},
        {"ranked": (21, True)},
    ]


def test_a_dataset_of_the_only_worker_is_made_for_rank_0_of_1() -> None:
    rows = Rows(5)
    assert datasets.for_one({"ranked": of_rank, "plain": rows}) == {"ranked": (10, True), "plain": rows}


def all_optional(size: int = 3, **options: Any) -> Any:
    return size, options


@pytest.mark.parametrize(
    ("make", "is_ranked"),
    [
        (lambda: 5, False),
        (all_optional, False),
        (lambda **options: options, False),
        (lambda rank, world_size: 5, True),
        (lambda rank, world_size, name="a": 5, True),
        (lambda *place: place, True),
    ],
)
def test_a_function_with_required_arguments_makes_the_dataset_of_a_rank(
    make: Callable[..., Any], is_ranked: bool
) -> None:
    found = datasets.for_group({"rows": make, "plain": 7})
    assert found["plain"] == 7
    # Ray calls each function when a group starts.
    assert (found["rows"]() if is_ranked else found["rows"]) is make
    if not is_ranked:
        assert datasets.for_one({"rows": make}) == {"rows": make()}
