"""trackio. Its environment variables, such as `TRACKIO_DIR` and `TRACKIO_SPACE_ID`, have their effect."""

import contextlib
import io
import os
from collections.abc import Mapping
from typing import Any

from pretrain._run.history import Sample
from pretrain._trackers.row_tracker import RowTracker


class TrackioTracker(RowTracker):
    """A run of trackio, continued if it exists.

    Args:
        name: the name that trackio shows.
        run_id: the id of the run. trackio finds a run by its name, which therefore contains the id.
        settings: the configuration.
    """

    def __init__(self, name: str, run_id: str, settings: dict[str, Any]) -> None:
        import trackio  # an extra

        super().__init__()
        self._trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # trackio has no option to print nothing
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "pretrain"),
                name=f"{name}-{run_id}",
                config=settings,
                resume="allow",
                embed=False,
            )
        # The step after the last one that trackio's database or server has. It has no public name.
        self.first_step = self._run._next_step

    def send(self, step: int, values: Mapping[str, float], samples: list[Sample]) -> None:
        """Send a row, with each sample as text."""
        texts = {f"samples/{number}": self._trackio.Markdown(sample.text) for number, sample in enumerate(samples, 1)}
        self._run.log({**values, **texts}, step=step)

    def finish(self) -> None:
        """Wait until the rows are written, at most 30 s, and end the run of trackio."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # `self._run.finish` alone would be repeated when the process ends
