"""Weights & Biases. The environment variables of wandb, such as `WANDB_MODE` and `WANDB_PROJECT`, have their effect."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain._run.history import Sample
from pretrain._trackers.row_tracker import RowTracker

# At the end, a run waits at most this long for the upload. `wandb sync` uploads the rest.
_FINISH_TIMEOUT_S = 60.0
# A terminal without a stored key asks for one. Without an answer, the run continues without wandb.
_LOGIN_TIMEOUT_S = 60.0

_logger = logging.getLogger("pretrain")


class WandbTracker(RowTracker):
    """A run of wandb, continued if it exists.

    Online, the service knows the last step that it has. Offline, wandb's process dies with a killed run, and loses the
    rows that it has not written. Each start then writes the curve from the beginning, in place of the former one.

    Args:
        folder: the run's folder. wandb's files are in its folder `wandb`.
        name: the name that wandb shows.
        run_id: the id of the run.
        settings: the configuration.
    """

    def __init__(self, folder: Path, name: str, run_id: str, settings: dict[str, Any]) -> None:
        import wandb  # an extra

        super().__init__()
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pretrain"),
            id=run_id,
            name=name,
            resume="allow",
            config=settings,
            dir=folder,
            settings=wandb.Settings(
                silent=True, console="off", finish_timeout=_FINISH_TIMEOUT_S, login_timeout=_LOGIN_TIMEOUT_S
            ),
        )
        if self._run.url:
            _logger.info("wandb: %s", self._run.url)
        self.first_step = 0 if self._run.offline else self._run.starting_step
        if self._run.offline:
            current = Path(self._run.settings.sync_dir).resolve()
            for former in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
                if former.resolve() != current:
                    shutil.rmtree(former)

    def send(self, step: int, values: Mapping[str, float], samples: list[Sample]) -> None:
        """Send a row, with the samples as a table."""
        table = self._table(columns=["prompt", "text"], data=[[sample.prompt, sample.text] for sample in samples])
        self._run.log({**values, **({"samples": table} if samples else {})}, step=step, commit=True)

    def finish(self) -> None:
        """End the run of wandb."""
        self._run.finish()
