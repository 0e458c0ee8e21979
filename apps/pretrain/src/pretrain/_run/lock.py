"""The lock of a run, and what is left of a run whose command fails.

The rule: once a worker has written its start, nothing is deleted, and every error is a failure of the run
(`RunFailedError`). Before that, rejected input leaves nothing.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ray_jax_launch
from pretrain._errors import RunFailedError, UsageError, rejection
from pretrain._run.files import check_kind, load_json, parse_json, read_text
from pretrain._run.folder import RunFolder, locate
from pretrain._run.history import PhaseName, read_starts, write_end
from pretrain._run.lease import Owner, leasing, this_command, this_machine
from ray_jax_launch import StopRequestedError, StoragePath, UnsavedCheckpointError, latest_step

# Commands that only read hold the lock for an instant, to see whether another command holds it.
_LOCK_WITHIN_S, _LOCK_AGAIN_S = 1.0, 0.02
# Errors of a run that has begun, whose texts are sentences.
_FAILURES = (OSError, StopRequestedError, UnsavedCheckpointError)


def _end(reason: str) -> None:
    """End the launch without a save, as the run belongs to another command. Without a launch, interrupt the thread."""
    if ray_jax_launch.request_stop(reason):  # imports Ray
        return
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in the background of a shell
    number = signal.SIGTERM if is_ignored else signal.SIGINT
    signal.pthread_kill(threading.main_thread().ident or 0, number)


@contextlib.contextmanager
def lock_run(place: StoragePath, *, on_lost: Callable[[str], None] = _end) -> Iterator[RunFolder]:
    """Lock a run against a second command until the block ends. Create its folder if necessary.

    A run in a folder is locked by a file in it. A run in object storage has a lease too, which commands on other
    machines see. If a worker has started in the block, an error leaves all files, and becomes a RunFailedError; the
    phases of the run then end with `failed`, or with `stopped` after Ctrl-C. If none has started, and the block rejects
    its input or fails before it has written `config.json`, a folder that this function has created is deleted, unless
    it holds a checkpoint.

    Args:
        place: the run's folder, or its URI in object storage.
        on_lost: called in a thread with a sentence if another command has taken the lease. It must end the block.

    Raises:
        UsageError: another command has locked the run, or `RunFolder.check` has rejected the folder.
        RunFailedError: the run has begun, and has failed.
        OSError: the folder cannot be written.
        LaunchError: the object storage cannot be reached.
    """
    run, lost = locate(place), list[str]()
    made = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]

    def note_loss(sentence: str) -> None:
        lost.append(sentence)
        on_lost(sentence)

    with contextlib.ExitStack() as stack:
        command = stack.enter_context(_locked(run))
        run = dataclasses.replace(run, owner=command.owner)
        is_own = False
        is_new = False
        num_starts = None
        try:
            if run.uri is not None:
                stack.enter_context(leasing(run.uri, command, note_loss))
            is_own = True
            is_new = run.is_empty() and (run.uri is not None or run.path in made)
            run.pull()
            run.check()
            num_starts = len(read_starts(run))
            yield run
        except BaseException as error:  # also Ctrl-C
            end: PhaseName = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            if lost:
                raise RunFailedError(lost[0]) from error
            if num_starts is not None and _has_begun(run, num_starts):
                # A failure of the run: nothing is deleted.
                write_end(run, end, time.time())
                if (sentence := _failure(error)) is not None:
                    raise RunFailedError(sentence) from error
            elif is_new and (isinstance(error, ValueError) or not run.config.exists()):
                # Rejected input, or nothing that another command could continue.
                _delete(run, made)
            elif is_new or (is_own and end == "stopped"):
                # The command has ended before its workers began. The same command goes on.
                write_end(run, end, None)
            elif run.uri is not None and run.path in made:
                # The local copy of a run that stays as it is, such as that of another command.
                shutil.rmtree(run.path)
            raise


@contextlib.contextmanager
def _locked(run: RunFolder) -> Iterator[Owner]:
    """Lock the file `.lock` of a run until the block ends, and write this command into it."""
    until = time.monotonic() + _LOCK_WITHIN_S
    while True:
        run.path.mkdir(parents=True, exist_ok=True)
        check_kind(run.lock)
        with run.lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise UsageError(
                        f"Another command uses {run}{_holder(run)}. Wait for its end, or choose another --name."
                    ) from error
                time.sleep(_LOCK_AGAIN_S)
                continue
            opened = os.fstat(file.fileno())
            try:
                is_same = os.path.samestat(opened, run.lock.stat())
            except FileNotFoundError:  # a rejected command has just deleted the folder
                is_same = False
            if is_same:
                command = this_command(opened)
                file.truncate(0)
                file.write(json.dumps(dataclasses.asdict(command)) + "\n")
                file.flush()
                os.fsync(file.fileno())  # workers on other nodes read it
                yield command
                return


def _holder(run: RunFolder) -> str:
    with contextlib.suppress(OSError, UsageError):
        return f", on {parse_json(Owner, read_text(run.lock), run.lock, '')}"
    return ""


def _has_begun(run: RunFolder, num_starts: int) -> bool:
    """Return whether a worker has written its start, or can have written it to storage that is now out of reach."""
    try:
        run.check_place()
        run.pull()
        return len(read_starts(run)) > num_starts
    except (OSError, ValueError):
        return True


def _failure(error: BaseException) -> str | None:
    """Return the sentence for an error of a run that has begun; None for one that passes as it is."""
    if not isinstance(error, Exception) or isinstance(error, RunFailedError | BrokenPipeError):
        return None
    sentence = rejection(error) or (str(error) if isinstance(error, _FAILURES) else None)
    return None if sentence is None else sentence.rstrip(".")


def _delete(run: RunFolder, made: Sequence[Path]) -> None:
    """Delete a run that never began, and the folders that were made for it."""
    if latest_step(run.checkpoints) is not None:
        return
    run.delete()
    for folder in made:
        with contextlib.suppress(OSError):  # another program has written to one, or it is deleted
            folder.rmdir()


def command_runs(run: RunFolder) -> bool | None:
    """Return whether a command of this machine trains a run; None if its command may be on another machine.

    The lock is shared for an instant, and a command that starts tries again for a second.
    """
    path = run.lock if run.uri is None else locate(run.uri).lock
    try:
        check_kind(path)
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            content = load_json(file.read())
    except (OSError, ValueError):  # no command has used the run on this machine, or this user may not look
        return None
    is_here = isinstance(content, dict) and content.get("machine") == this_machine()
    return False if is_here else None
