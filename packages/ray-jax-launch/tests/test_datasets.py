"""CPUs that an elastic launch reserves for Ray Data."""

import time
from types import SimpleNamespace

import pytest
import ray

from ray_jax_launch import cpu
from ray_jax_launch._train import datasets


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
