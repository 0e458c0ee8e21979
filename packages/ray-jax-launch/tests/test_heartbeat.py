"""The progress that a worker tells the watchdog, with real times."""

import time
from types import SimpleNamespace

import pytest

from ray_jax_launch._control.control_actor import LocalControl
from ray_jax_launch._control.heartbeat import Heartbeat


def test_the_time_of_other_work_is_not_that_of_a_step():
    """Each step is followed by a validation that takes thirty times as long."""
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    try:
        for step in range(1, 7):
            time.sleep(0.01)
            heartbeat.add(step)
            assert heartbeat.read()[:3] == (step, step, True)
            assert heartbeat.watch(False)
            time.sleep(0.3)
            assert not heartbeat.read().is_training
            assert not heartbeat.watch(True)
        assert heartbeat.read().num_calls == 12
        assert 0 < heartbeat.read().usual_s < 0.15
    finally:
        heartbeat.end()
    assert heartbeat.read().has_ended


def test_the_first_step_counts_as_ten_and_a_step_counts_when_it_is_computed():
    """The first step takes long to compile. Its loss is on the device before that of the second one."""
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    try:
        assert heartbeat.read()[:5] == (0, -1, False, 0.0, False)
        time.sleep(0.5)
        ready = {8}
        for step in (7, 8):
            heartbeat.add(step, SimpleNamespace(is_ready=lambda step=step: step in ready))
        assert heartbeat.read()[:3] == (0, -1, True)
        assert heartbeat.read().usual_s == pytest.approx(0.05, abs=0.03)
        ready.add(7)
        assert heartbeat.read()[:2] == (2, 8)
    finally:
        heartbeat.end()
