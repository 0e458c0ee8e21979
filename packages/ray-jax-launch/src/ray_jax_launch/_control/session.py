"""The session of a worker: its launch, as this process sees it. Imports neither Ray nor jax."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_jax_launch._storage import StoragePath

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

    from ray_jax_launch._control.heartbeat import Heartbeat
    from ray_jax_launch._control.stop_poller import LocalStop, StopPoller


@dataclass
class Session:
    """The launch of a worker, and what its loop has done so far."""

    control: Any
    """Handle of the control actor."""

    run_path: StoragePath | None
    """The run's folder or URI. None if the storage is a filesystem of the user's own."""

    run_name: str
    """Name of the run."""

    marker: Path | None
    """A file in the run's folder, which every worker must find there. None in object storage."""

    is_local: bool = False
    """True if the loop runs in the driver's process."""

    prints: bool = False
    """True if the driver logs what the loop prints."""

    is_watched: bool = False
    """True if the control actor has a watchdog."""

    gauges: "dict[str, Gauge]" = field(default_factory=dict)
    """Ray's gauges of the metrics, by name."""

    poller: "StopPoller | LocalStop | None" = None
    """Looks for a stop request, from the loop's first `stop_requested` on."""

    heartbeat: "Heartbeat | None" = None
    """Sends how far the loop is, if it is watched."""

    failed_saves: list[Exception] = field(default_factory=list)
    """Errors of saves in the background of this process."""


_session: Session | None = None


def set_session(session: Session | None) -> None:
    """Set the session of this process; None after its loop."""
    global _session
    _session = session


def current_session() -> Session:
    """Return the session of this process.

    Raises:
        RuntimeError: this process runs no loop of `launch` or `JaxTrainer`.
    """
    if _session is None:
        raise RuntimeError("No training loop runs in this process. Call this in the loop of `launch` or `JaxTrainer`.")
    return _session


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Tell the watchdog that the block is no step, and must end, if a loop runs in this process."""
    heartbeat = None if _session is None else _session.heartbeat
    with contextlib.nullcontext() if heartbeat is None else heartbeat.saving():
        yield
