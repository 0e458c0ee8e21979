"""A run that commands `train` train in processes of their own, and all processes of these commands."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain._early_interrupt import CHILD
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_phases, read_starts
from pretrain._run.metrics import read_records
from pretrain._surroundings.process_tree import Process, living, processes_below

_LOOK_EVERY_S = 0.5
# A command that is interrupted saves, and ends its cluster.
_SAVE_WITHIN_S = 20.0
# The processes of a killed command end by themselves, within 10 s for those of Ray, and then its folder is deleted.
_END_WITHIN_S = 30.0
_WAIT_S = 0.1
_WORKER = "ray::RayTrainWorker"


class ChildRun:
    """A run, and the commands that train it one after the other.

    Args:
        folder: the run's folder.
        arguments: those of the command `train`.
        log: the file with the output of the commands.
        variables: environment variables of the commands, beside those of this process; None deletes one.
    """

    def __init__(
        self, folder: RunFolder, arguments: Sequence[str], *, log: Path, variables: Mapping[str, str | None]
    ) -> None:
        self.folder, self.log = folder, log
        self._arguments = arguments
        environment = {**os.environ, **variables}
        self._environment = {name: value for name, value in environment.items() if value is not None}
        self._command: subprocess.Popen[bytes] | None = None
        self._seen: dict[Process, None] = {}
        self._looked_s = 0.0

    def start(self) -> None:
        """Start the command, which continues the run if it has begun. The command before it has ended."""
        self._close_input()
        with self.log.open("ab") as log:
            self._command = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, *self._arguments],
                stdin=subprocess.PIPE,  # its end interrupts the command
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for this process alone
            )

    @property
    def pid(self) -> int:
        """The process of the command."""
        assert self._command is not None, "it is started"
        return self._command.pid

    def poll(self) -> int | None:
        """Return the exit code of the command, or None while it runs. Note its processes, now and then."""
        assert self._command is not None, "it is started"
        if time.monotonic() - self._looked_s > _LOOK_EVERY_S:
            self.processes()
        return self._command.poll()

    def processes(self) -> list[Process]:
        """Return the processes below the command, and note them."""
        if self._command is None or self._command.returncode is not None:  # another process may have its pid
            return []
        found = processes_below(self._command.pid)
        self._seen |= dict.fromkeys(found)
        self._looked_s = time.monotonic()
        return found

    def workers(self) -> list[Process]:
        """Return the processes of the workers."""
        return [process for process in self.processes() if process.command_line.startswith(_WORKER)]

    def kill_command(self) -> None:
        """Kill the command, and wait for its end, but not for that of the processes below it."""
        assert self._command is not None, "it is started"
        self.processes()
        self._command.kill()
        self._command.wait()

    def _close_input(self) -> None:
        if self._command is not None and self._command.stdin is not None:
            self._command.stdin.close()

    def starts(self) -> list[dict[str, Any]]:
        """Return the starts of the workers."""
        return read_starts(self.folder)

    def step(self) -> int:
        """Return the last step that is recorded since the last start of the workers; 0 if there is none."""
        starts, records = self.starts(), read_records(self.folder.metrics)
        is_new = bool(starts and records) and records[-1]["time_s"] > starts[-1]["time_s"]
        return records[-1]["step"] if is_new else 0

    def phase(self) -> str:
        """Return the present phase."""
        phases = read_phases(self.folder)
        return phases[-1].phase if phases else "starting"

    def last_line(self) -> str:
        """Return the last line of the output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "no output"

    def close(self) -> None:
        """Interrupt the command if it runs, and wait until all processes of all commands have ended.

        After some time, or a second interrupt of this process, they are killed.
        """
        if self._command is None:
            return
        try:
            if self._command.poll() is None:
                self.processes()
                self._command.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._command.wait(_SAVE_WITHIN_S)
                self.kill_command()
            until_s = time.monotonic() + _END_WITHIN_S
            while living(self._seen) and time.monotonic() < until_s:
                time.sleep(_WAIT_S)
        finally:
            self.kill_command()
            self._close_input()
            for process in living(self._seen):
                process.kill()
