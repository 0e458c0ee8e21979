"""The driver's thread that collects metrics, events and log lines from the control actor, and passes them on."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ray.exceptions import RayError

from ray_jax_launch._control.control_actor import COLLECT_EVERY_S, Collected, ControlHandle, OnMetrics, answer
from ray_jax_launch._control.events import OnEvent
from ray_jax_launch._lost_cluster import ClusterWatch, is_lost

_logger = logging.getLogger("ray_jax_launch")


@contextlib.contextmanager
def forwarding(
    control: ControlHandle,
    on_metrics: OnMetrics | None,
    on_event: OnEvent | None = None,
    *,
    renew: Callable[[], None] = lambda: None,
    on_silence: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Forward metrics to `on_metrics`, events to `on_event` and lines to the log, every half second of the block.

    Before each collection, call `renew`. While no worker polls, call `on_silence` too. What comes before the end of the
    block is forwarded before its end.
    """
    stop = threading.Event()

    def forward() -> None:
        before: Collected | None = None
        stopping = False
        while not stopping:
            stopping = stop.wait(COLLECT_EVERY_S)
            renew()
            collected = _collect(control, before)
            if collected is None:
                return
            before = collected
            for rank, metrics in collected.metrics:
                _call("on_metrics", on_metrics, rank, metrics)
            for event in collected.events:
                _call("on_event", on_event, event)
            for level, line in collected.lines:
                _logger.log(level, line)
            if collected.is_silent:
                on_silence()

    thread = threading.Thread(target=forward, name="collect-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        if not is_lost():
            thread.join()


def _collect(control: ControlHandle, before: Collected | None) -> Collected | None:
    """Collect from the control actor, and tell an actor that has started again what it knew; None if it is lost."""
    # A call in a lost cluster would wait, and Ray's C++ would print that it cannot tell the driver.
    if ClusterWatch().loss() is not None:
        return None
    try:
        collected: Collected = answer(control.collect.remote())
    except RayError:
        if is_lost() or ClusterWatch().loss(is_suspected=True) is not None:
            return None
        raise
    if before is None:
        # The actor may have died before this collection, and waits to be told what it knew: here, nothing more.
        control.resume.remote(collected.state)
    elif collected.actor != before.actor:
        control.resume.remote(before.state)
        _logger.info("the control actor died, and has started again")
        return collected._replace(state=before.state)  # until the actor has got it
    return collected


def _call(name: str, function: Callable[..., Any] | None, *args: Any) -> None:
    if function is None:
        return
    try:
        function(*args)
    except Exception:  # the user's function may raise anything, and the run must not end by it
        _logger.exception("%s failed; it is called again all the same", name)


@contextlib.contextmanager
def showing_info() -> Iterator[None]:
    """Print what this package logs at level INFO, unless the program has configured logging."""
    if _logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), _logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)
