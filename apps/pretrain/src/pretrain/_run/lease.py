"""The lease of a run in object storage: one command at a time trains it, from whatever machine.

<uri>/.lease/<owner>.json    a command that holds the lease, or asks for it

pyarrow writes no object on condition. Each command therefore writes an object of its own, and then lists all of them; a
list has every object that was written before it. Of two commands that ask at once, at least one sees the other. The one
with the greater id withdraws, and the other waits until that object is gone. A command that sees itself alone takes the
lease. Only the lapse of a lease depends on a clock: it compares the times of two objects, which the storage has set.
"""

import contextlib
import dataclasses
import getpass
import json
import logging
import os
import platform
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyarrow.fs import FileSelector

from pretrain._errors import UsageError
from pretrain._run.files import parse_json
from pretrain._run.result import as_utc
from ray_jax_launch import LaunchError, open_uri

RENEW_EVERY_S = 20.0
"""Seconds between two renewals of a lease."""

LAPSES_AFTER_S = 90.0
"""Seconds from the last renewal of a lease to its lapse. A killed command on the same machine has none at once."""

_FOLDER = ".lease"
_ASK_AGAIN_S = 0.2
_PATIENCE_S = 30.0
_ATTEMPTS = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_logger = logging.getLogger("pretrain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A command that uses a run: the content of `.lock`, and of an object of the lease."""

    owner: str
    """A random id."""

    host: str
    """Name of the machine."""

    pid: int
    """Number of the process."""

    user: str
    """Name of the user."""

    time_s: float
    """Unix time at which the command has locked the run."""

    machine: str
    """Identity of the machine since its start."""

    lock: str
    """Identity on this machine of the file `.lock`. A command that locks the same file later is the only one left."""

    state: Literal["asks", "holds"] = "asks"
    """State of the command: it holds the lease, or asks for it."""

    generation: int = 0
    """One more than the generations that the holder has found. Of two holders, the lower one has lost the lease."""

    def __str__(self) -> str:
        """Return host, user, process and time."""
        return f"{self.host} (process {self.pid} of {self.user}) since {as_utc(self.time_s)}"


def this_command(lock: os.stat_result) -> Owner:
    """Return the owner that this process is.

    Args:
        lock: the file `.lock`.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        user = str(os.getuid())
    return Owner(
        owner=secrets.token_hex(8),
        host=platform.node(),
        pid=os.getpid(),
        user=user,
        time_s=round(time.time(), 3),
        machine=this_machine(),
        lock=f"{lock.st_dev}:{lock.st_ino}",
    )


def this_machine() -> str:
    """Return the identity of this machine, or of this container, since its start."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        boot_id = f"{uuid.getnode():x}"
    return f"{platform.node()} {boot_id}"


@contextlib.contextmanager
def leasing(uri: str, command: Owner, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease of a run while the block runs.

    Args:
        uri: the run.
        command: this command, which has locked the local copy of the run.
        on_lost: called in a thread with a sentence, once, if another command has taken the lease. This happens if this
            command could not renew it for `LAPSES_AFTER_S`.

    Raises:
        UsageError: another command holds the lease.
        LaunchError: the storage cannot be reached.
        OSError: the storage cannot be read or written.
    """
    lease = _Lease(uri, command, on_lost)
    lease.take()
    try:
        yield
    finally:
        lease.release()


class _Lease:
    def __init__(self, uri: str, command: Owner, on_lost: Callable[[str], None]) -> None:
        self._uri = uri
        self._own = command
        self._on_lost = on_lost
        self._filesystem, root = open_uri(uri)
        self._place = f"{root.rstrip('/')}/{_FOLDER}"
        self._is_missing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stop, name="lease", daemon=True)

    def take(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        try:
            self._write()
            while others := self._update_others():
                self._reject(others, is_late=time.monotonic() > until)
                time.sleep(_ASK_AGAIN_S)
            self._own = dataclasses.replace(self._own, state="holds", generation=self._own.generation + 1)
            self._write()
            self._reject([other for other in self._update_others() if other.state == "holds"], is_late=False)
        except BaseException:  # also Ctrl-C
            self._delete(self._own.owner)
            raise
        self._thread.start()

    def release(self) -> None:
        """Give the lease back. A storage that cannot be reached forgets it when it lapses."""
        self._stop.set()
        self._thread.join(timeout=LAPSES_AFTER_S)
        self._delete(self._own.owner)

    def _reject(self, others: list[Owner], *, is_late: bool) -> None:
        """Reject this command for one that holds the lease, or that asks for it and has a smaller id."""
        for other in others:
            if other.state == "holds" or other.owner < self._own.owner or is_late:
                raise UsageError(
                    f"Another command uses {self._uri}, on {other}. Wait for its end (after a crash, "
                    f"{LAPSES_AFTER_S:.0f} s), or choose another --name."
                )

    def _renew_until_stop(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                newer = [other for other in self._update_others() if other.generation >= self._own.generation]
                newer = [other for other in newer if other.state == "holds"]
                is_lost = self._is_missing or bool(newer)
                if not is_lost:
                    self._write()
            except (OSError, LaunchError) as error:
                _logger.warning("the lease of %s cannot be renewed, the next attempt follows: %s", self._uri, error)
                continue
            if is_lost:
                other = f"uses the run now, on {newer[0]}" if newer else "has used the run since"
                self._on_lost(
                    f"This command could not renew its lease of {self._uri} for {LAPSES_AFTER_S:.0f} s, and another "
                    f"command {other}"
                )
                return

    def _update_others(self) -> list[Owner]:
        """Read the objects of the other commands, note whether the own one is missing, and return the others.

        While this command asks for the lease, it writes its own object again if it is missing, deletes the objects of
        lapsed and dead commands, and takes the highest generation that it has seen.
        """
        asks = self._own.state == "asks"
        while True:
            infos = self._filesystem.get_file_info(FileSelector(self._place, allow_not_found=True))
            times = {info.base_name.removesuffix(".json"): info.mtime_ns for info in infos if info.is_file}
            self._is_missing = self._own.owner not in times  # another command has taken this one for dead
            if not self._is_missing or not asks:
                break
            self._write()
        others = []
        for name in times.keys() - {self._own.owner}:
            try:
                other = self._read(name)
            except FileNotFoundError:  # released
                continue
            # This command has locked the file that the other one had locked.
            is_dead = (other.machine, other.lock) == (self._own.machine, self._own.lock)
            if asks and (is_dead or times[self._own.owner] - times[name] > LAPSES_AFTER_S * 1e9):
                self._delete(name)
            else:
                others.append(other)
            if asks:
                self._own = dataclasses.replace(self._own, generation=max(self._own.generation, other.generation))
        return others

    def _read(self, name: str) -> Owner:
        attempt = 0
        while True:
            attempt += 1
            try:
                with self._filesystem.open_input_stream(f"{self._place}/{name}.json") as stream:
                    content: bytes = stream.read()
                break
            except FileNotFoundError:
                raise
            except OSError:  # its owner has replaced it between the request for its size and that for its content
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(_ASK_AGAIN_S)
        try:
            return parse_json(Owner, content, name, "")
        except UsageError:  # it keeps the run until it lapses
            return Owner(
                owner=name, host="unknown", pid=0, user="unknown", time_s=0.0, machine="", lock="", state="holds"
            )

    def _write(self) -> None:
        with self._filesystem.open_output_stream(f"{self._place}/{self._own.owner}.json") as stream:
            stream.write(json.dumps(dataclasses.asdict(self._own)).encode())

    def _delete(self, name: str) -> None:
        try:
            self._filesystem.delete_file(f"{self._place}/{name}.json")
        except FileNotFoundError:
            return
        except OSError as error:
            _logger.warning("the lease of %s lapses only in %.0f s: %s", self._uri, LAPSES_AFTER_S, error)
