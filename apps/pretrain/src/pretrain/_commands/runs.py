"""The command `runs`: a table of all runs of a storage path."""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileSelector, FileType
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pretrain._errors import UsageError, one_line, short
from pretrain._formats import age, count, duration, loss
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history, seconds_by_phase
from pretrain._run.metrics import last_values
from pretrain._run.remote_copy import pull_changed
from pretrain._run.state import last_seen_s, run_state
from pretrain._screen.printing import print_line, print_table
from ray_jax_launch import LaunchError, as_storage_path, join_path, latest_step, open_uri

PART = "*"
"""The mark of a validation loss that is not of all validation tokens."""

_COLUMNS = {
    "run": "name",
    "state": "state",
    "step": "step",
    "loss": "loss",
    "val": "val_loss",
    "tokens": "tokens",
    "device": "device",
    "time": "time",
    "age": "age",
}
# The least width of columns whose texts may be wrapped.
_WRAPPED = {"run": 16, "state": 8, "device": 8}
_LEAST_IMPORTANT = ("device", "tokens", "time", "loss", "age", "val")
_GAP = 1
_NUM_THREADS = 8  # requests to object storage take long, and wait for each other otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A run in the table. An unknown value is an empty text."""

    name: str
    state: str
    step: str = ""
    loss: str = ""
    val_loss: str = ""
    tokens: str = ""
    device: str = ""
    time: str = ""
    age: str = ""
    seen_s: float = 0.0
    problem: str = ""


def show_runs(storage_path: str, *, console: Console, clock: Callable[[], float] = time.time) -> None:
    """Print a table of all runs of a storage path, the newest last.

    Args:
        storage_path: a folder or URI.
        console: the output.
        clock: returns the Unix time.

    Raises:
        UsageError: the storage path holds no run.
        LaunchError: the object storage cannot be reached.
    """
    place = as_storage_path(storage_path)
    if isinstance(place, Path):
        _check_folder(place)
    with tempfile.TemporaryDirectory() as copies:
        if isinstance(place, Path):
            folders = [RunFolder(folder.absolute()) for folder in sorted(place.iterdir()) if _is_run(folder)]
        else:
            filesystem, root = open_uri(place)
            infos = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
            names = sorted(info.base_name for info in infos if info.type == FileType.Directory)
            folders = [RunFolder(Path(copies, name), str(join_path(place, name))) for name in names]
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            rows = list(threads.map(lambda folder: _row(folder, clock()), folders))
    rows = [row for row in rows if row is not None]
    if not rows:
        raise UsageError(
            f"the storage path must hold the folder of a run, got {storage_path} without any. Give the folder or URI "
            "of --storage-path, or train a run."
        )
    print_table(console, _table(sorted(rows, key=lambda row: row.seen_s), console))
    if any(row.val_loss.endswith(PART) for row in rows):
        print_line(console, f"{PART} validation loss on a part of the validation tokens (train.eval_tokens)")
    for row in rows:
        if row.problem:
            print_line(console, f"{row.name}: {row.problem}")


def _check_folder(place: Path) -> None:
    if not place.exists():
        found, remedy = "which does not exist", "Train a run first, or name another"
    elif not place.is_dir():
        found, remedy = "a file", "Give a folder"
    elif _is_run(place):
        found, remedy = "a run itself", "Give the folder that holds it"
    else:
        return
    raise UsageError(f"the storage path must be a folder of runs, got {short(str(place))}, {found}. {remedy}.")


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, or nobody but its owner may know."""
    try:
        return folder.is_dir() and ((folder / "config.json").exists() or (folder / "checkpoints").is_dir())
    except PermissionError:
        return True


def _row(folder: RunFolder, now_s: float) -> _Row | None:
    """Return the row of a run; None for a folder of object storage that holds none.

    Raises:
        LaunchError: the object storage cannot be reached.
        OSError: an object cannot be read.
    """
    if folder.uri is not None:
        pull_changed(folder)
        if not _is_run(folder.path) and latest_step(folder.checkpoints) is None:
            return None
    try:
        return _read_row(folder, now_s)
    except (ValueError, OSError) as error:  # a file that another program has written or cut, or that is another user's
        is_unreadable = isinstance(error, LaunchError | PermissionError)
        if is_unreadable and folder.uri is not None:
            raise  # the storage cannot be reached
        state = "unreadable" if is_unreadable else "damaged"
        return _Row(name=one_line(folder.path.name), state=state, problem=one_line(str(error)))


def _read_row(folder: RunFolder, now_s: float) -> _Row:
    history = read_history(folder)
    last, result = last_values(history.records), history.result
    start = history.starts[-1] if history.starts else {}
    seen_s, num_devices = last_seen_s(history), start.get("devices", 1)
    device = start.get("device", history.description.hardware)
    val_loss, is_full = last.get("full_val_loss", last.get("val_loss")), "full_val_loss" in last
    seconds = sum(seconds_by_phase(history.phases, seen_s).values())
    if not history.phases and result is not None:
        seconds = result.wall_s
    return _Row(
        name=one_line(folder.path.name),
        state=run_state(history, now_s),
        step=f"{last.get('step', 0)}/{history.description.config.train.max_steps}",
        loss=loss(last["loss"]) if "loss" in last else "",
        val_loss="" if val_loss is None else loss(val_loss) + ("" if is_full else PART),
        tokens=count(last["tokens"], exact_below=1e3) if "tokens" in last else "",
        device=one_line(f"{num_devices} x {device}" if num_devices > 1 else device),
        time=duration(seconds) if seconds else "",
        age=age(now_s - seen_s),
        seen_s=seen_s,
    )


def _table(rows: list[_Row], console: Console) -> Table:
    """Return the table. On a terminal that is too narrow, texts wrap and the least important columns are left out."""
    full = {name: max(len(name), *(len(getattr(row, field)) for row in rows)) for name, field in _COLUMNS.items()}
    least = {name: min(width, _WRAPPED.get(name, width)) for name, width in full.items()}
    spare = console.width + _GAP - sum(width + _GAP for width in least.values())
    for name in _LEAST_IMPORTANT if console.is_terminal else ():
        if spare < 0:
            spare += least.pop(name) + _GAP
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name, width in least.items():
        wanted = full[name] - width
        extra = max(0, min(wanted, spare)) if console.is_terminal else wanted
        spare -= extra
        table.add_column(name, width=width + extra, overflow="fold", justify="left" if name in _WRAPPED else "right")
    for row in rows:
        table.add_row(*(Text(getattr(row, _COLUMNS[name])) for name in least))
    return table
