"""Events of a launch, for `launch(on_event=)`: what happens to its workers. Imports nothing of Ray."""

from collections.abc import Callable
from typing import Literal, NamedTuple


class Restarting(NamedTuple):
    """The workers have stopped, and start again."""

    reason: Literal["failure", "preemption", "resize"]
    """Why they stopped: a worker or Ray Train's controller failed; a node is preempted; an elastic group gets another
    number of workers."""

    text: str
    """The cause, in one line."""

    num_failures: int = 0
    """Number of failures without a new checkpoint between them, with this one. 0 if nothing failed."""


class WaitingForNodes(NamedTuple):
    """The cluster has too few nodes for the workers, and the launch waits for more."""

    wait_s: float
    """Seconds after which the launch ends."""


Event = Restarting | WaitingForNodes
"""An event of a launch."""

OnEvent = Callable[[Event], None]
"""Function of an event."""
