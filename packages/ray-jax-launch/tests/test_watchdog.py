"""The decision of the watchdog, with a clock of the test. `test_hangs.py` hangs real workers."""

from collections.abc import Callable
from typing import Any

import pytest

from ray_jax_launch._control.watchdog import Beat, Watchdog


class Group:
    """Three workers with a timeout of a minute, whose steps take 0.4 s."""

    def __init__(self, timeout_s: float | None = 60.0, handles: tuple[Any, ...] = ("a", "b", "c")) -> None:
        self.now_s = 1000.0
        self.watchdog = Watchdog(timeout_s, lambda: self.now_s)
        self.handles = handles
        self.usual_s = 0.4
        self.usual_of: dict[int, float] = {}
        """Ranks whose usual time is another one."""
        self.every_s = 1
        self.are_last_ones_first = False
        self.group = "first"
        self.steps = [0] * len(handles)
        self.is_training = [True] * len(handles)
        self.must_end, self.num_calls = False, 0
        self.silent: set[int] = set()
        self.stackless: set[int] = set()
        """Ranks that go on to tell how far they are, and send no stack."""
        self.debugged: set[int] = set()
        self.stack: Callable[[int], str] = lambda rank: f"loop of {rank}\n"
        self.asked: list[int] = []

    def live(self, seconds: float, *, advancing: tuple[int, ...] = ()) -> tuple[float, Any] | None:
        """Let time pass, second by second. Return the seconds until a hang is noticed, and the hang.

        A worker tells how far it is every `every_s` seconds, and when it is asked.
        """
        asked = set[Any]()
        for second in range(1, int(seconds) + 1):
            for rank, handle in sorted(enumerate(self.handles), reverse=self.are_last_ones_first):
                self.steps[rank] += rank in advancing
                if rank in self.silent or ((int(self.now_s) - rank) % self.every_s and handle not in asked):
                    continue
                usual_s = self.usual_of.get(rank, self.usual_s)
                beat = Beat(
                    self.steps[rank], 500 + self.steps[rank], self.is_training[rank], usual_s,
                    must_end=self.must_end, num_calls=self.num_calls,
                )  # fmt: skip
                if self.watchdog.beat(self.group, len(self.handles), rank, beat, handle):
                    self.asked.append(rank)
                    if rank in self.stackless:
                        continue
                    in_debugger = rank in self.debugged
                    self.watchdog.add_stack(self.group, rank, self.stack(rank), is_in_debugger=in_debugger)
            self.now_s += 1.0
            if (hang := self.watchdog.look()) is not None:
                return second, hang
            asked = set(self.watchdog.to_ask())
        return None

    def end(self, *ranks: int) -> None:
        """Let the loops of these workers return."""
        self.silent |= {*ranks}
        for rank in ranks:
            beat = Beat(self.steps[rank], 500 + self.steps[rank], False, self.usual_s, has_ended=True, num_calls=1)
            self.watchdog.beat(self.group, len(self.handles), rank, beat, self.handles[rank])


def test_a_stopped_worker_ends_the_group_after_the_timeout_with_the_stacks_of_the_others():
    group = Group()
    assert group.live(30, advancing=(0, 1, 2)) is None
    group.silent = {1}
    noticed = group.live(300)
    assert noticed is not None
    seconds, hang = noticed
    assert 60 <= seconds <= 63
    assert hang.handles == ["a", "b", "c"]
    assert hang.lines == ["stack of worker 0:\nloop of 0", "stack of worker 2:\nloop of 2"]
    assert group.asked == [0, 2]
    cause = group.watchdog.end_group()
    assert cause.startswith("no step for 6")
    assert cause.endswith(" s after step 530 (usual: 0.4 s): worker 1 does not answer")
    assert group.watchdog.end_group() == ""


def test_workers_that_all_answer_get_five_times_as_long():
    group = Group()
    assert group.live(30, advancing=(0, 1, 2)) is None
    group.stack = lambda rank: "reads" if rank == 1 else "waits in a collective"
    noticed = group.live(1000)
    assert noticed is not None
    assert 300 <= noticed[0] <= 303
    assert noticed[1].lines == ["stack of workers 0, 2:\nwaits in a collective", "stack of worker 1:\nreads"]
    assert group.watchdog.end_group().endswith("(usual: 0.4 s), although all workers answer")


def test_a_worker_that_answers_without_its_stack_is_waited_for_ten_seconds():
    group = Group()
    assert group.live(30, advancing=(0, 1, 2)) is None
    group.stackless = {1}
    noticed = group.live(1000)
    assert noticed is not None
    assert 309 <= noticed[0] <= 313
    assert noticed[1].handles == ["a", "b", "c"]
    assert noticed[1].lines == ["stack of worker 0:\nloop of 0", "stack of worker 2:\nloop of 2"]
    assert group.watchdog.end_group().endswith(": worker 1 does not answer")


def test_one_worker_that_advances_keeps_the_group():
    group = Group()
    group.silent = {1}
    group.live(1)  # the first beats
    group.silent = set()
    group.live(1, advancing=(0, 1, 2))
    group.silent = {1}
    assert group.live(1000, advancing=(2,)) is None


@pytest.mark.parametrize(("silent", "least_s"), [({0}, 20 * 12), (set(), 300)])
def test_the_limit_is_twenty_usual_steps_if_that_is_longer(silent, least_s):
    group = Group()
    group.usual_s = 12.0
    group.live(30, advancing=(0, 1, 2))
    group.silent = silent
    assert group.live(least_s - 1) is None
    assert group.live(5) is not None


def test_the_usual_time_is_that_of_the_slowest_worker():
    group = Group()
    group.usual_of = {1: 12.0}  # it has started again, and knows its first steps alone
    group.live(30, advancing=(0, 1, 2))
    group.silent = {0}
    assert group.live(20 * 12 - 1) is None
    assert group.live(5) is not None
    assert "(usual: 12 s)" in group.watchdog.end_group()


def test_steps_that_become_ten_times_slower_are_no_hang():
    group = Group()
    group.usual_s = 29.0
    for _ in range(4):
        assert group.live(1, advancing=(0, 1, 2)) is None
        assert group.live(289) is None


def test_work_that_is_no_step_takes_any_time_on_any_worker():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.is_training = [False, True, True]  # the first worker uploads, and the others wait for it
    assert group.live(10_000) is None
    group.is_training[0] = True
    assert group.live(299) is None  # the time counts from the end of this work
    assert group.live(5) is not None


def test_a_worker_that_is_stopped_before_it_says_that_it_trains_again_is_noticed_by_those_that_wait():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.is_training[1] = False
    group.live(1)
    group.silent = {1}
    noticed = group.live(100)
    assert noticed is not None
    assert group.watchdog.end_group().endswith(": worker 1 does not answer")


def test_a_worker_that_is_stopped_in_a_validation_is_noticed_after_five_times_as_long():
    group = Group(handles=("a",))
    group.live(30, advancing=(0,))
    group.is_training = [False]
    assert group.live(1000) is None
    group.silent = {0}
    noticed = group.live(1000)
    assert noticed is not None
    assert 299 <= noticed[0] <= 303


def test_workers_end_an_hour_after_the_last_return_at_most():
    """A worker that has returned is silent, and no hang."""
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.end(1)
    group.is_training[0] = False  # the third one says nothing about its work after the last step
    assert group.live(3000) is None
    group.end(2)
    assert group.live(3599) is None
    noticed = group.live(5)
    assert noticed is not None
    assert noticed[1].handles == ["a", "b", "c"]
    assert noticed[1].lines == ["stack of worker 0:\nloop of 0"]
    assert group.watchdog.end_group().endswith(" (usual: 0.4 s), although workers 1, 2 have returned")


def test_a_group_that_does_not_end_after_the_return_of_all_loops_hangs():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.end(0, 1, 2)
    assert group.live(3599) is None
    noticed = group.live(5)
    assert noticed is not None
    assert (noticed[1].lines, noticed[1].handles) == ([], ["a", "b", "c"])
    assert group.watchdog.end_group().endswith("although workers 0, 1, 2 have returned")


def test_a_worker_that_is_stopped_after_another_has_returned_is_noticed_after_five_times_as_long():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.end(1)
    group.silent |= {2}
    noticed = group.live(1000)
    assert noticed is not None
    assert 299 <= noticed[0] <= 303
    assert group.watchdog.end_group().endswith(": worker 2 does not answer")


@pytest.mark.parametrize(("timeout_s", "least_s"), [(5.0, 3600), (60.0, 3600), (1000.0, 5000)])
def test_a_save_and_the_end_of_a_loop_take_an_hour_between_two_signs_of_life(timeout_s, least_s):
    group = Group(timeout_s)
    group.live(30, advancing=(0, 1, 2))
    group.is_training, group.must_end = [False] * 3, True
    for group.num_calls in (1, 2, 3):
        assert group.live(least_s - 1) is None
    noticed = group.live(5)
    assert noticed is not None
    assert group.watchdog.end_group().endswith("(usual: 0.4 s), although all workers answer")


@pytest.mark.parametrize(("step", "after"), [(-1, ""), (0, " after step 0 (usual: 0.4 s)")])
def test_a_restore_before_the_first_step_that_hangs_is_named_without_a_step(step, after):
    group = Group(handles=("a",))
    group.steps, group.is_training, group.must_end = [step - 500], [False], True
    assert group.live(4000) is not None
    assert group.watchdog.end_group() == f"no step for 3601 s{after}, although all workers answer"


def test_a_worker_without_a_first_step_is_no_hang():
    group = Group()
    group.silent = {2}  # it compiles, and has sent nothing
    assert group.live(10_000) is None


def test_time_in_which_the_machine_was_suspended_does_not_count():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    for _ in range(20):
        group.now_s += 8 * 3600.0  # the laptop sleeps
        assert group.live(10) is None
    group.live(1, advancing=(0,))
    group.silent = {1}
    noticed = group.live(100)
    assert noticed is not None
    assert noticed[0] >= 60


def test_a_debugger_restarts_nothing_and_is_told_once():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.debugged = {0}
    noticed = group.live(400)
    assert noticed is not None
    assert noticed[1].handles == []
    (line,) = noticed[1].lines
    assert line.endswith("(usual: 0.4 s): worker 0 is in a debugger; nothing is restarted")
    assert group.live(10_000) is None
    group.debugged = set()
    group.live(1, advancing=(0, 1, 2))
    noticed = group.live(400)
    assert noticed is not None
    assert noticed[1].handles == ["a", "b", "c"]


def test_a_worker_that_has_left_its_debugger_and_answers_no_more_is_killed():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.debugged = {0}
    assert group.live(400) is not None
    group.debugged = set()
    group.live(30, advancing=(0, 1, 2))
    group.silent = {0}
    noticed = group.live(100)
    assert noticed is not None
    assert noticed[1].handles == ["a", "b", "c"]
    assert group.watchdog.end_group().endswith("worker 0 does not answer")


def test_the_process_of_the_driver_is_told_once_and_goes_on():
    group = Group(handles=(None,))
    group.live(30, advancing=(0,))
    noticed = group.live(400)
    assert noticed is not None
    line, stack = noticed[1].lines
    assert (line[:12], stack, noticed[1].handles) == ("no step for ", "stack of worker 0:\nloop of 0", [])
    assert group.live(10_000) is None
    group.live(1, advancing=(0,))
    assert group.live(400) is not None


def test_an_ended_group_is_no_hang_and_its_late_beats_change_nothing():
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    assert group.watchdog.end_group() == ""
    assert group.live(10_000) is None  # late beats, and no new group: it waits for nodes
    group.group = "second"
    assert group.live(30, advancing=(0, 1, 2)) is None
    group.silent = {0}
    assert group.live(100) is not None


@pytest.mark.parametrize("num_workers", [1, 5])
def test_a_group_that_starts_again_with_another_number_of_workers_is_watched(num_workers):
    """Nobody says that the first group has ended: the control actor may have died in between."""
    group = Group()
    group.live(30, advancing=(0, 1, 2))
    group.group, group.handles = "second", tuple("vwxyz"[:num_workers])
    group.steps, group.is_training = [0] * num_workers, [True] * num_workers
    assert group.live(30, advancing=tuple(range(num_workers))) is None
    group.silent = {0}
    noticed = group.live(100)
    assert noticed is not None
    assert noticed[1].handles == [*group.handles]
    late = Beat(99, 99, True, 0.4)
    assert not group.watchdog.beat("first", 3, 1, late, "b")  # it is told nothing, and asked for nothing
    assert group.watchdog.end_group().endswith(" after step 530 (usual: 0.4 s): worker 0 does not answer")


def test_many_different_stacks_are_cut():
    group = Group(handles=tuple(range(12)))
    group.are_last_ones_first = True
    group.live(30, advancing=tuple(range(12)))
    group.silent = set(range(9))
    noticed = group.live(100)
    assert noticed is not None
    assert noticed[1].lines == [f"stack of worker {rank}:\nloop of {rank}" for rank in (9, 10, 11)]
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7 and 1 more do not answer" in group.watchdog.end_group()
    group.group, group.silent = "second", set()
    group.live(30, advancing=tuple(range(12)))
    noticed = group.live(1000)
    assert noticed is not None
    assert noticed[1].lines[4:] == ["8 other stacks are in the logs of the workers"]


def test_a_large_group_tells_less_often_and_hangs_later_by_the_time_between():
    group = Group(handles=tuple(range(1000)))
    group.every_s = 50
    assert group.live(600, advancing=tuple(range(1000))) is None  # no timeout passes between two beats
    group.silent = {7}
    noticed = group.live(1000)
    assert noticed is not None
    assert 60 <= noticed[0] <= 60 + 50 + 3
    assert group.watchdog.end_group().endswith("worker 7 does not answer")
    # All others were asked for their stacks at once, and not in their turns.
    assert len(group.asked) == 999


def test_workers_of_a_large_group_that_all_answer_get_five_times_as_long():
    group = Group(handles=tuple(range(1000)))
    group.every_s = 50
    group.live(100, advancing=tuple(range(1000)))
    noticed = group.live(1000)
    assert noticed is not None
    assert 300 <= noticed[0] <= 300 + 50 + 3
    assert len(group.asked) == 1000


def test_a_long_validation_of_a_large_group_is_no_hang_and_a_stopped_worker_in_it_is():
    group = Group(handles=tuple(range(1000)))
    group.every_s = 50
    group.live(100, advancing=tuple(range(1000)))
    group.is_training = [False] * 1000
    assert group.live(2000) is None
    group.silent = {500}
    noticed = group.live(1000)
    assert noticed is not None
    assert noticed[0] <= 300 + 50 + 3


def test_work_of_a_very_large_group_takes_longer_than_five_timeouts_between_two_beats():
    """The beats of each of 1,000 workers are 50 s apart, twice as long as five timeouts."""
    group = Group(timeout_s=5, handles=tuple(range(1000)))
    group.every_s = 50
    group.live(100, advancing=tuple(range(1000)))
    group.is_training = [False] * 1000
    group.watchdog.to_ask = list  # no answer to a question comes before the next beat
    assert group.live(300) is None


def test_without_a_timeout_nothing_is_a_hang():
    group = Group(timeout_s=None)
    group.live(30, advancing=(0, 1, 2))
    group.silent = {0, 1, 2}
    assert group.live(100_000) is None
