"""The control actor: stop requests on their way to the workers, metrics on their way to the driver."""

import logging
from functools import partial

from ray_jax_launch._train.control_actor import ControlActor, StopRequest

INTERRUPT, PREEMPTION, RESIZE = StopRequest("interrupt"), StopRequest("preemption"), StopRequest("resize")


def test_all_ranks_stop_at_the_latest_step_that_no_rank_has_passed():
    control = ControlActor()
    poll = partial(control.poll, "group", 3, request=None)
    assert [poll(rank, next_step=None) for rank in range(3)] == [(None, None)] * 3
    assert control.request_stop("interrupt")
    assert [poll(rank, next_step=None) for rank in range(3)] == [(INTERRUPT, None)] * 3
    assert poll(0, next_step=7) == (INTERRUPT, None)
    assert poll(1, next_step=9) == (INTERRUPT, None)
    assert poll(2, next_step=8) == (INTERRUPT, 9)
    assert poll(0, next_step=7) == (INTERRUPT, 9)


def test_a_rank_that_dies_before_it_answers_leaves_the_step_open():
    control = ControlActor()
    control.request_stop("interrupt")
    for _ in range(3):
        assert control.poll("group", 2, 0, request=None, next_step=4) == (INTERRUPT, None)


def test_an_interrupt_reaches_a_group_that_starts_later():
    control = ControlActor()
    assert not control.request_stop("interrupt")  # no worker polls yet
    assert control.poll("group", 1, 0, request=None, next_step=None) == (INTERRUPT, None)


def test_a_preemption_stops_every_rank_of_its_own_group():
    control = ControlActor()
    assert control.poll("first", 2, 0, request=PREEMPTION, next_step=None) == (PREEMPTION, None)
    assert control.poll("first", 2, 1, request=None, next_step=None) == (PREEMPTION, None)
    assert control.poll("second", 2, 0, request=None, next_step=None) == (None, None)


def test_an_interrupt_after_a_preemption_does_not_change_the_reason():
    control = ControlActor()
    control.poll("group", 2, 0, request=PREEMPTION, next_step=None)
    assert control.request_stop("interrupt")
    assert control.poll("group", 2, 1, request=None, next_step=None) == (PREEMPTION, None)


def test_metrics_of_all_ranks_are_collected_once():
    control = ControlActor()
    control.record(0, {"step": 1})
    control.record(1, {"step": 1})
    control.log("a warning")
    control.log("a line", logging.INFO)
    lines = [(logging.WARNING, "a warning"), (logging.INFO, "a line")]
    first, second = control.collect(), control.collect()
    assert (first.metrics, first.lines) == ([(0, {"step": 1}), (1, {"step": 1})], lines)
    assert (second.metrics, second.lines) == ([], [])


def test_of_metrics_that_nobody_collects_the_newest_10_000_are_kept():
    control = ControlActor()
    for step in range(10_003):
        control.record(0, {"step": step})
    assert control.collect().metrics == [(0, {"step": step}) for step in range(3, 10_003)]


def test_the_latest_metrics_are_those_of_rank_0():
    control = ControlActor()
    control.record(0, {"step": 1, "loss": 2.0})
    control.report({"val_loss": 3.0}, has_checkpoint=False)
    control.record(0, {"step": 2})
    control.record(1, {"step": 100, "rank": 1})
    assert control.state().latest == {"step": 2, "loss": 2.0, "val_loss": 3.0}


def test_a_resize_stops_the_newest_group_and_not_the_next_one():
    control = ControlActor()
    control.request_resize()  # no worker polls yet
    for group in ("first", "second"):
        assert control.poll(group, 1, 0, request=None, next_step=None) == (None, None)
    control.request_resize()
    assert control.poll("first", 1, 0, request=None, next_step=None) == (None, None)
    assert control.poll("second", 1, 0, request=None, next_step=None) == (RESIZE, None)
    assert control.poll("third", 1, 0, request=None, next_step=None) == (None, None)


def test_ranks_agree_through_an_actor_that_has_died_between_their_polls():
    before, after = ControlActor(), ControlActor()
    before.poll("group", 2, 0, request=None, next_step=None)
    before.request_resize()
    assert before.poll("group", 2, 0, request=None, next_step=None) == (RESIZE, None)
    assert after.poll("group", 2, 0, request=RESIZE, next_step=4) == (RESIZE, None)
    assert after.poll("group", 2, 1, request=None, next_step=None) == (RESIZE, None)
    assert after.poll("group", 2, 1, request=RESIZE, next_step=5) == (RESIZE, 5)
    # The rank that knows the step polls on, for a rank that does not know it yet.
    third = ControlActor()
    assert third.poll("group", 2, 0, request=RESIZE, next_step=4) == (RESIZE, None)
    assert third.poll("group", 2, 1, request=RESIZE, next_step=5) == (RESIZE, 5)


def test_an_actor_that_has_died_gets_back_what_it_knew():
    before, after = ControlActor(), ControlActor()
    before.save("/run", 10)
    before.finish("done")
    before.request_stop("interrupt")
    before.record(0, {"step": 10, "loss": 2.0})
    after.save("/run", 20)
    after.record(0, {"step": 20})
    after.resume(before.state())
    state = after.state()
    assert state.saved == ("/run", 20)
    assert state.finished == ("done",)
    assert state.request == INTERRUPT
    assert state.latest == {"step": 20, "loss": 2.0}
    assert after.collect().actor != before.collect().actor


def test_failures_are_counted_from_the_newest_checkpoint_on():
    control = ControlActor()
    assert [control.count_failure() for _ in range(2)] == [1, 2]
    control.save("/run", 10)
    assert [control.count_failure() for _ in range(3)] == [1, 2, 3]
    control.save("/run", 10)  # the checkpoint that the workers continue from
    assert control.count_failure() == 4
    control.report({"loss": 1.0}, has_checkpoint=False)
    assert control.count_failure() == 5
    control.report({"loss": 1.0}, has_checkpoint=True)
    assert control.count_failure() == 1
