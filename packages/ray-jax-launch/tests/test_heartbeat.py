"""The progress that a worker tells the watchdog, with real times."""

import time

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
        assert 0 < heartbeat.read().usual_s < 0.15
    finally:
        heartbeat.end()
    assert heartbeat.read().has_ended
