"""Reads of parts of a log, whose costs do not depend on the length of the run.

A run may have millions of lines. They are in the order of steps, because a run that continues from a checkpoint drops
the later ones: a line of a step is found in a few reads.
"""

import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pretrain._run.files import open_lines, parse_line

_BLOCK = 1 << 16
_PROBE = 1 << 11  # some lines
_NEAR = 16  # steps
_COMPARED = 1 << 15


def lines_backwards(path: Path, texts: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the position of the end of each line, and the line, the last line first. A missing file has no lines.

    Damaged lines, and a last line without its end, are left out.

    Args:
        path: a file of JSON objects, one per line.
        texts: names whose values are texts.
    """
    with open_lines(path) as file:
        start = file.seek(0, os.SEEK_END)
        rest: bytes | None = None  # the beginning of the line that ends before `start`; None before the last end
        while start:
            size = min(start, max(_BLOCK, len(rest or b"")))
            start -= size
            content = os.pread(file.fileno(), size, start) + (rest or b"")
            first, *lines = content.split(b"\n")
            end = start + len(content) + 1
            if rest is None:
                if not lines:
                    continue
                end -= len(lines.pop()) + 1
            for line in reversed(lines):
                if (value := parse_line(line, texts)) is not None:
                    yield end, value
                end -= len(line) + 1
            rest = first
        if rest is not None and (value := parse_line(rest, texts)) is not None:
            yield len(rest) + 1, value


def last_lines(path: Path, most: int, texts: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the last lines, at most a number of them, in the order of the file."""
    lines = [line for _, line in itertools.islice(lines_backwards(path, texts), most)]
    return lines[::-1]


def lines_from(path: Path, step: int, texts: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the lines of a step and of later ones. A missing file has no lines.

    Args:
        path: a file of JSON objects, one per line, in the order of steps.
        step: the first step.
        texts: names whose values are texts.
    """
    with open_lines(path, _PROBE) as file:
        file.seek(_position(file, step, texts))
        for line in file:
            value = parse_line(line[:-1], texts) if line.endswith(b"\n") else None
            if value is not None and value["step"] >= step:
                yield value


def _position(file: BinaryIO, step: int, texts: Collection[str]) -> int:
    """Return the beginning of a line, all lines before which have lower steps, near the first line of a step.

    Most probes are where the step is if all lines have one length. Every third one halves what is left: the number of
    probes is at most three times that of a bisection.
    """
    low, low_step = 0, 0
    high, high_step = file.seek(0, os.SEEK_END), None
    middle = high - 2 * _PROBE
    for number in itertools.count(1):
        if high - low <= _PROBE or step - low_step <= _NEAR:
            return low
        begin, found = _first_line(file, max(low, middle), high, texts)
        if found is None or found >= step:
            high, high_step = max(low, middle), high_step if found is None else found
        else:
            low, low_step = begin, found
        middle = (low + high) // 2
        if number % 3 and high_step is not None:
            share = (step - _NEAR // 2 - low_step) / max(1, high_step - low_step)
            middle = low + int((high - low) * min(1.0, max(0.0, share)))
    raise AssertionError("the loop returns")


def _first_line(file: BinaryIO, start: int, stop: int, texts: Collection[str]) -> tuple[int, int | None]:
    """Return the beginning and the step of the first line that begins after a position; None if it is too far."""
    file.seek(start)
    file.readline()  # the rest of a line
    while (begin := file.tell()) < stop:
        if (value := parse_line(file.readline()[:-1], texts)) is not None:
            return begin, value["step"]
    return stop, None


class NewLines:
    """The lines that a log gets. A restart of the run may replace lines.

    Args:
        path: a file of JSON objects, one per line.
        texts: names whose values are texts.
    """

    def __init__(self, path: Path, texts: Collection[str] = ()) -> None:
        self._path, self._texts = path, texts
        self._end = next((end for end, _ in lines_backwards(path, texts)), 0)
        with open_lines(path) as file:
            self._last = _before(file, self._end)

    def read(self) -> list[dict[str, Any]]:
        """Return the lines since the last call. If the run was cut and writes lines again, these are among them.

        A cut of many lines is not followed back to its place: the lines at the end of the file are returned then.

        Raises:
            OSError: the file cannot be read.
        """
        with open_lines(self._path) as file:
            begin = self._end - len(self._last)
            found = os.pread(file.fileno(), len(self._last), begin)
            pairs = zip(self._last.splitlines(keepends=True), found.splitlines(keepends=True), strict=False)
            begin += sum(len(line) for line, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            file.seek(min(begin, file.seek(0, os.SEEK_END)))
            *lines, rest = file.read().split(b"\n")
            self._end = file.tell() - len(rest)
            self._last = _before(file, self._end)
        return [value for line in lines if (value := parse_line(line, self._texts)) is not None]


def _before(file: BinaryIO, end: int) -> bytes:
    return os.pread(file.fileno(), min(end, _COMPARED), max(0, end - _COMPARED))
