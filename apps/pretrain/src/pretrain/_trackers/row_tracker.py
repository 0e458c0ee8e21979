"""Trackers that take one row per step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from pretrain._run.history import Sample
from pretrain._run.metrics import Record
from pretrain._trackers.shown_values import tagged


class RowTracker(ABC):
    """A tracker of a service that takes the metrics and the samples of a step together, in the order of steps.

    A row is sent when the next step begins, or at the end. A kill may lose it: the run's files have its content, and
    the next start sends it.
    """

    first_step: int
    """First step that the service lacks. A subclass sets it."""

    def __init__(self) -> None:
        self._step = -1
        self._values = dict[str, float]()
        self._samples = list[Sample]()

    @abstractmethod
    def send(self, step: int, values: Mapping[str, float], samples: list[Sample]) -> None:
        """Send a row."""

    @abstractmethod
    def finish(self) -> None:
        """End the connection to the service."""

    def write(self, record: Record) -> None:
        """Add the metrics of a step to its row."""
        self._begin(record["step"])
        self._values |= tagged(record)

    def write_sample(self, sample: Sample) -> None:
        """Add a sample to the row of its step."""
        self._begin(sample.step)
        self._samples.append(sample)

    def flush(self) -> None:  # noqa: B027 - it is not abstract: no service has more to do
        """Do nothing: a later start sends what a kill has lost."""

    def close(self) -> None:
        """Send the last row, and end the connection."""
        self._begin(-1)
        self.finish()

    def _begin(self, step: int) -> None:
        if step == self._step:
            return
        if self._values or self._samples:
            self.send(self._step, self._values, self._samples)
        self._step = step
        self._values = {}
        self._samples = []
