"""The control actor: stop requests on their way to the workers, metrics on their way to the driver."""

import logging
from functools import partial

from ray_jax_launch._train.control_actor import ControlActor


def test_all_ranks_stop_at_the_latest_step_that_no_rank_has_passed():
    control = ControlActor()
    poll = partial(control.poll, "group", 3, is_preempted=False)
    assert [poll(rank, next_step=None) for rank in range(3)] == [(None, None)] * 3
    assert control.interrupt()
    assert [poll(rank, next_step=None) for rank in range(3)] == [("interrupt", None)] * 3
    assert poll(0, next_step=7) == ("interrupt", None)
    assert poll(1, next_step=9) == ("interrupt", None)
    assert poll(2, next_step=8) == ("interrupt", 9)
    assert poll(0, next_step=7) == ("interrupt", 9)


def test_a_rank_that_dies_before_it_answers_leaves_the_step_open():
    control = ControlActor()
    control.interrupt()
    for _ in range(3):
        assert control.poll("group", 2, 0, is_preempted=False, next_step=4) == ("interrupt", None)


def test_an_interrupt_reaches_a_group_that_starts_later():
    control = ControlActor()
    assert not control.interrupt()  # no worker polls yet
    assert control.poll("group", 1, 0, is_preempted=False, next_step=None) == ("interrupt", None)


def test_a_preemption_stops_every_rank_of_its_own_group():
    control = ControlActor()
    assert control.poll("first", 2, 0, is_preempted=True, next_step=None) == ("preemption", None)
    assert control.poll("first", 2, 1, is_preempted=False, next_step=None) == ("preemption", None)
    assert control.poll("second", 2, 0, is_preempted=False, next_step=None) == (None, None)


def test_an_interrupt_after_a_preemption_does_not_change_the_reason():
    control = ControlActor()
    control.poll("group", 2, 0, is_preempted=True, next_step=None)
    assert control.interrupt()
    assert control.poll("group", 2, 1, is_preempted=False, next_step=None) == ("preemption", None)


def test_metrics_of_all_ranks_are_collected_once():
    control = ControlActor()
    control.record(0, {"step": 1})
    control.record(1, {"step": 1})
    control.log("a warning")
    control.log("a line", logging.INFO)
    lines = [(logging.WARNING, "a warning"), (logging.INFO, "a line")]
    assert control.collect() == ([(0, {"step": 1}), (1, {"step": 1})], lines)
    assert control.collect() == ([], [])


def test_the_latest_metrics_are_those_of_rank_0():
    control = ControlActor()
    control.record(0, {"step": 1, "loss": 2.0})
    control.report({"val_loss": 3.0})
    control.record(0, {"step": 2})
    control.record(1, {"step": 100, "rank": 1})
    assert control.latest() == {"step": 2, "loss": 2.0, "val_loss": 3.0}
