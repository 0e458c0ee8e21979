"""Verification of opened token files by their SHA-256, before their first use or in the background."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable

from owt_data._digests import check_sha256, file_state, known_sha256, share_counter
from owt_data._errors import check_function, check_text, check_type
from owt_data._tokens.open import TokenData

_log = logging.getLogger("owt_data")


def check_digests(data: TokenData, *, report: Callable[[float], None] | None = None) -> None:
    """Check the SHA-256 of the token files on disk against their manifests.

    A file is read once. The result is kept in the user's cache folder (`~/.cache/owt-data/digests` on Linux) until the
    file's size, inode, or time of change differs. Files without a manifest were read by `open_tokens`, and files in
    object storage are not read here.

    Args:
        data: opened tokens.
        report: called with the share done, after each block.

    Raises:
        DataError: a file is damaged or cannot be read. The message names the first such file.
    """
    _check_data(data)
    check_function("report", report)
    advance = share_counter(sum(file_state(path).size for path in data.digests), report)
    for path, expected in data.digests.items():
        check_sha256(path, expected, advance)


class BackgroundVerification:
    """Verification in one process of the lowest priority; see `verify_in_background`.

    The process ends by itself, by `stop`, at the end of a `with` block, and with the process that started it, also
    after SIGKILL.
    """

    def __init__(self, digests: dict[str, str]) -> None:
        check_type("digests", digests, dict, "the digests of opened tokens", "Call verify_in_background.")
        for text in (*digests, *digests.values()):
            check_text("Each path and digest", text, least=1)
        self._damage: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        unknown = {path: sha256 for path, sha256 in digests.items() if known_sha256(path) != sha256}
        if not unknown:
            return
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "owt_data._tokens.digest_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # only the parent receives Ctrl-C
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `poll` reports
            process.stdin.write(json.dumps(unknown).encode() + b"\n")
            process.stdin.flush()

    @property
    def is_done(self) -> bool:
        """Return whether the process has ended, or was not needed."""
        self.poll()
        return self._process is None

    def poll(self) -> str | None:
        """Return the sentence about a damaged or unreadable file; None if none was found so far. Does not wait."""
        if self._process is not None and self._process.poll() is not None:
            self._finish(self._process)
        return self._damage

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Wait until all files are verified, or for a time. Returns what `poll` returns."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        return self.poll()

    def stop(self) -> None:
        """End the process. Its finished files stay verified for the next start."""
        if self._process is not None:
            self._process = None
            self._end()

    def __enter__(self) -> "BackgroundVerification":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _finish(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        answer = process.stdout.read()
        if answer:
            self._damage = json.loads(answer)
        else:
            _log.warning("the token files are not verified: the process ended with exit code %s", process.returncode)
        self.stop()


def verify_in_background(data: TokenData) -> BackgroundVerification:
    """Start to check the SHA-256 of token files as `check_digests` does, in one process of the lowest priority.

    No process is started if all files are verified already, or if none has a manifest. A verification that cannot
    run to its end, for instance because it was killed, is logged as a warning and is no damage.

    Args:
        data: opened tokens.

    Raises:
        OSError: the process cannot be started.
    """
    _check_data(data)
    return BackgroundVerification(data.digests)


def _check_data(data: TokenData) -> None:
    check_type("data", data, TokenData, "the result of open_tokens", "Open the folder first.")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process, and close its pipes."""
    process.kill()
    process.communicate()
