"""The command `report`: one page about runs, to look at and to send."""

import contextlib
import glob
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from pretrain._errors import UsageError, one_line, short
from pretrain._report.page import render_page
from pretrain._report.reported_run import fork_of
from pretrain._run.find import DEFAULT_STORAGE, find_run
from pretrain._run.history import read_history
from pretrain._screen.printing import print_line
from pretrain._surroundings.output_file import check_output, is_open_file, write_output
from ray_jax_launch import as_storage_path, is_uri

_NAME = "report.html"
_FIRST = b"<!doctype html>"


def report(runs: Sequence[str], *, out: str | None, console: Console, clock: Callable[[], float] = time.time) -> Path:
    """Write a page about runs: one HTML file, which loads nothing.

    Args:
        runs: folders, URIs or names of runs, finished or not; or patterns of folders or names, such as `lr-*`.
        out: the file; None takes `report.html` in the folder of a single run, otherwise in the working folder.
        console: prints the file's path.
        clock: returns the Unix time.

    Returns:
        The file.

    Raises:
        UsageError: a run does not exist or is damaged, or `out` cannot be written.
    """
    if not runs:
        raise UsageError("RUN must be one or more runs, got none. Give a run.")
    target = None if out is None else _parse_out(out)
    folders = [find_run(name)[0] for pattern in runs for name in matching_runs(pattern)]
    is_in_folder = len(folders) == 1 and folders[0].uri is None
    path = target or _checked((folders[0].path if is_in_folder else Path()) / _NAME)
    histories = [read_history(folder) for folder in folders]
    page = render_page(histories, now_s=clock(), forks=[fork_of(history) for history in histories]).encode()
    with _failures(path):
        write_output(path, page)
    if not is_open_file(path):
        print_line(console, f"wrote {one_line(str(path))} ({len(page) / 1e6:.2f} MB)")
    return path


def matching_runs(pattern: str, *, option: str = "RUN") -> list[str]:
    """Return the folders of the runs that a pattern matches, here or else in `runs`; a name that is none as it is.

    Args:
        pattern: a name, a folder, a URI or a pattern.
        option: the name of the argument, for the error.

    Raises:
        UsageError: no run matches the pattern.
    """
    if is_uri(pattern) or not glob.has_magic(pattern):
        return [pattern]
    for place in (Path(), DEFAULT_STORAGE):
        for form in (pattern, glob.escape(pattern)):  # a name may have such characters itself
            paths = sorted(glob.glob(str(place / form)))  # noqa: PTH207 - takes a pattern with an absolute path
            if found := [str(Path(path).absolute()) for path in paths if (Path(path) / "config.json").is_file()]:
                return found
    raise UsageError(
        f"{option} must match the name of a run here or in {DEFAULT_STORAGE}, got {short(pattern)}, which matches "
        "none. The command `runs` shows the names."
    )


def _parse_out(out: str) -> Path:
    if not out or out.endswith("/"):
        raise UsageError(f"--out must be the name of a file, got {short(out)}. Write a name such as {_NAME}.")
    path = as_storage_path(out)
    if not isinstance(path, Path):
        raise UsageError(f"--out must be a file on this machine, got {out}. Write a file, and copy it.")
    return _checked(path)


def _checked(path: Path) -> Path:
    """Return the file, after a check that must not wait until the runs are read."""
    with _failures(path):
        check_output(path, name="--out")
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(len(_FIRST)).lower() != _FIRST:
                    raise UsageError(
                        f"--out must be a new file or a page that it can replace, got {short(str(path))}, another "
                        "file. Give another name."
                    )
    return path


@contextlib.contextmanager
def _failures(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe has read enough
        raise
    except OSError as error:
        raise UsageError(
            f"--out must be a file that can be written, got {path} ({error.strerror}). Give another --out."
        ) from error
