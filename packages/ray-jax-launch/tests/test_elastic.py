"""Elastic groups: another number of workers, on a cluster of several nodes of this machine, and waits for nodes."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray.cloudpickle
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.scaling_policy.scaling_policy import NoopDecision, ResizeDecision

from ray_jax_launch import cpu, launch
from ray_jax_launch._ray_internals.ray_train import WaitingPolicy

# Workers cannot import this file: their functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def save_only_when_asked(config):
    """Count steps until the group has two workers, and then ten more. Save only after a stop request."""
    import jax

    from ray_jax_launch import Checkpoints, log_metrics, stop_requested

    with Checkpoints() as checkpoints:
        start = checkpoints.latest_step() or 0
        for step in range(start + 1, 10_000):
            time.sleep(0.05)
            log_metrics({"start": start, "step": step, "workers": jax.process_count()})
            if stop_requested(step):
                checkpoints.save(step, {"state": {"step": step}}, metadata={})
                return None
            if jax.process_count() == 2 and step == start + 10:
                return step


@pytest.mark.slow
@pytest.mark.fault
def test_an_elastic_group_saves_before_it_grows(nodes, tmp_path, caplog, record_property):
    record_property("fault", "a node joins an elastic run")
    record_property("lost", "nothing")
    nodes.add_node(num_cpus=1)
    seen, results, has_begun = [], [], threading.Event()

    def note(rank, metrics):
        if rank == 0:
            seen.append((metrics["workers"], metrics["start"], metrics["step"]))
            if metrics["step"] == 20:
                has_begun.set()

    def run():
        results.append(
            launch(
                save_only_when_asked,
                {},
                scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=2),
                storage_path=tmp_path,
                name="run",
                on_metrics=note,
                max_failures=0,
            )
        )

    running = threading.Thread(target=run)  # a node can be added in the main thread only
    running.start()
    assert has_begun.wait(120)
    nodes.add_node(num_cpus=1)
    running.join(180)
    assert not running.is_alive()
    last = max(step for workers, _, step in seen if workers == 1)
    assert {start for workers, start, _ in seen if workers == 2} == {last}
    assert last >= 20
    assert results[0].return_value == last + 10
    text = "the cluster has room for another number of workers; the workers start again, from where they were"
    assert text in [record.message for record in caplog.records]


def number_of_workers(config):
    import jax

    return jax.process_count()


@pytest.mark.slow
def test_a_group_starts_with_an_allowed_number_of_workers(nodes, tmp_path):
    for _ in range(3):
        nodes.add_node(num_cpus=1)
    allowed = cpu(4, min_workers=1).restricted_to([1, 2, 4])
    assert launch(number_of_workers, {}, hardware=allowed, storage_path=tmp_path).return_value == 2


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [([1, 2, 3, 4], [None, 1, 2, 3, 4, 4]), ([1, 2, 4], [None, 1, 2, 2, 4, 4]), ([2, 4], [None, None, 2, 2, 4, 4])],
)
def test_a_group_has_the_largest_allowed_number_of_workers_for_which_there_is_room(monkeypatch, allowed, expected):
    monkeypatch.setattr(ElasticScalingPolicy, "_maybe_send_resource_request", lambda self: None)
    bounds = (allowed[0], allowed[-1])
    requests = []
    for room, num_workers in enumerate(expected):
        free = {f"node {number}": {"CPU": 1.0} for number in range(room)}
        monkeypatch.setattr(ElasticScalingPolicy, "_get_reserved_resources", lambda self, free=free: free)
        config = ScalingConfig(num_workers=bounds, elastic_resize_monitor_interval_s=0)
        policy = WaitingPolicy(config, allowed, lambda line: None, lambda: requests.append(None), 240)
        started = policy.make_decision_for_non_running_worker_group()
        assert getattr(started, "num_workers", None) == num_workers
        # A group that runs is asked to stop only if it would get another allowed number.
        for running in allowed:
            requests.clear()
            policy = WaitingPolicy(config, allowed, lambda line: None, lambda: requests.append(None), 240)
            state: Any = SimpleNamespace(start_time=float("-inf"), num_workers=running)
            assert isinstance(policy.make_decision_for_running_worker_group(state, None), NoopDecision)
            assert len(requests) == (num_workers not in (None, running))


@pytest.mark.parametrize("wait_s", [240, 600])
def test_each_wait_for_nodes_has_its_own_line_and_limit(monkeypatch, wait_s):
    start, lines = ResizeDecision(1, {"CPU": 1}), []
    decision = wait = NoopDecision()
    method = "make_decision_for_non_running_worker_group"
    monkeypatch.setattr(ElasticScalingPolicy, method, lambda self: decision)
    pauses: list[float] = []
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s, sleep=pauses.append)
    monkeypatch.setattr("ray_jax_launch._ray_internals.ray_train.time", clock)
    policy = WaitingPolicy(ScalingConfig(num_workers=(1, 2)), [1, 2], lines.append, lambda: None, wait_s)
    what = "the cluster has too few free resources for 1 workers"
    for number, began_s in enumerate((0.0, 5000.0)):
        for waited_s, num_lines in ((0, 0), (9, 0), (11, 1), (wait_s - 1, 1)):
            clock.now_s = began_s + waited_s
            assert policy.make_decision_for_non_running_worker_group() == wait
            assert lines == [f"{what}; waiting up to {wait_s} s for more"] * (number + num_lines)
        decision = start
        assert policy.make_decision_for_non_running_worker_group() == start
        decision = wait
        assert pauses == [0.1] * 4 * (number + 1)  # Ray asks again at once
    clock.now_s = 9000.0
    policy.make_decision_for_non_running_worker_group()
    clock.now_s += wait_s + 1
    with pytest.raises(TimeoutError, match=f"{what}, and got no more within {wait_s} s"):
        policy.make_decision_for_non_running_worker_group()
