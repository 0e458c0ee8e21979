"""The command `runs`: a table of the runs of a storage path."""

import dataclasses
import fnmatch
import itertools
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pyarrow.fs import FileSelector, FileType
from rich.console import Console

from pretrain._config import LENGTHS, PretrainConfig
from pretrain._data_names import label_of, parse_data
from pretrain._errors import UsageError, one_line, short
from pretrain._formats import age, count, duration, loss
from pretrain._presets import PRESETS
from pretrain._run.description import DataDescription
from pretrain._run.differences import changes_result, differing_options, option_values
from pretrain._run.files import flatten
from pretrain._run.find import DEFAULT_STORAGE
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_recent, work_s
from pretrain._run.metrics import last_values, of_sources, of_trained
from pretrain._run.names import short_name, short_value
from pretrain._run.remote_copy import pull_changed
from pretrain._run.state import last_seen_s, run_state
from pretrain._screen.printing import print_line, print_table
from pretrain._screen.runs_table import runs_table
from pretrain._suggestions import did_you_mean
from ray_jax_launch import LaunchError, as_storage_path, is_uri, join_path, latest_step, open_uri

PART = "*"
"""The mark of a validation loss that is not of all validation tokens."""

_BEFORE_OPTIONS, _AFTER_OPTIONS = ("run", "state"), ("step", "loss", "val", "tokens", "device", "time", "age")
_GROUP_BEFORE, _GROUP_AFTER = ("rank", "run", "runs"), ("val", "spread")
# Other names of columns, those of the files of a run.
_SAME = {"name": "run", "val_loss": "val"}
_NUM_THREADS = 8  # requests to object storage take long, and wait for each other otherwise
_SEED = re.compile(r"-seed\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of the table: a run, or several that are equal but for the seed."""

    values: Mapping[str, Any]
    """Values to sort by, by the names of the columns. An unknown value is missing."""

    texts: Mapping[str, str]
    """Texts of the columns."""

    facts: Mapping[str, Any]
    """The object of `--json`."""

    config: PretrainConfig | None = None
    """The resolved configuration; None if it cannot be read."""

    seen_s: float = 0.0
    problem: str = ""
    is_diverged: bool = False
    """True if the run is finished, but its last step has no loss or no validation loss."""

    compared: tuple[str, ...] = ()
    """The validation data, the length, and the part that is validated, as texts. Ranks need equal ones."""

    data: str = ""
    """The tokens, as text."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values of the options that differ, by their dotted names."""


def show_runs(
    storage_path: str = str(DEFAULT_STORAGE),
    globs: Sequence[str] = (),
    *,
    sort: str | None = None,
    columns: str | None = None,
    group_by: Literal["seed"] | None = None,
    as_json: bool = False,
    console: Console,
    clock: Callable[[], float] = time.time,
) -> None:
    """Print a table of runs, the newest last.

    Args:
        storage_path: a folder or URI. A name of a run in `runs`, or one with `*`, `?` or `[`, is a glob of runs there.
        globs: patterns of the names of runs; none for all runs.
        sort: the column to sort by, in ascending order.
        columns: the columns to show, with commas; None for all that fit.
        group_by: make one row of the runs that are equal but for this option.
        as_json: print one line of JSON, with all numbers.
        console: the output.
        clock: returns the Unix time.

    Raises:
        UsageError: the storage path holds no such run, or there is no such column.
        LaunchError: the object storage cannot be reached.
    """
    is_glob = {*storage_path} & {*"*?["} or (not is_uri(storage_path) and _is_run(DEFAULT_STORAGE / storage_path))
    if is_glob and not is_uri(storage_path) and not Path(storage_path).exists():
        storage_path, globs = str(DEFAULT_STORAGE), (storage_path, *globs)
    rows = _with_options(_read_rows(storage_path, globs, clock()))
    options = [*dict.fromkeys(name for row in rows for name in row.options)]
    problems = [row for row in rows if row.problem]
    remarks: list[str] = []
    if group_by is not None:
        rows, remarks = _groups(rows)
    before, after = (_BEFORE_OPTIONS, _AFTER_OPTIONS) if group_by is None else (_GROUP_BEFORE, _GROUP_AFTER)
    hidden = LENGTHS if group_by is None else (*LENGTHS[1:], group_by)  # the length of a run is beside its step
    shown = [short_name(name) for name in options if name not in hidden]
    names = [*before, *shown, *after]
    source_columns = dict.fromkeys(name for row in rows for name in row.values if name.startswith("val_loss/"))
    known = [*names, *source_columns, *map(short_name, filter(changes_result, option_values(PRESETS["quickstart"]())))]
    if sort is not None:
        rows = sorted(rows, key=lambda row: _sort_key(row.values.get(_column(sort, known, "--sort"))))
    if columns is not None:
        names = [_column(name.strip(), known, "--columns") for name in columns.split(",")]
    if as_json:
        print_line(console, json.dumps([{**row.facts, "options": row.options} for row in rows]))
        return
    print_table(console, runs_table([row.texts for row in rows], names, console))
    losses = [name for name in names if name == "val" or name.startswith("val_loss/")]
    if any(row.texts.get(name, "").endswith(PART) for row in rows for name in losses):
        print_line(console, f"{PART} validation loss on a part of the validation tokens (train.eval_tokens)")
    for remark in remarks:
        print_line(console, remark)
    for row in problems:
        print_line(console, f"{row.texts['run']}: {row.problem}")


def _read_rows(storage_path: str, globs: Sequence[str], now_s: float) -> list[_Row]:
    """Return the rows of the runs, the newest last.

    Raises:
        UsageError: there are none.
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
        chosen = [
            folder
            for folder in folders
            if not globs or any(fnmatch.fnmatchcase(folder.path.name, glob) for glob in globs)
        ]
        if folders and not chosen:
            raise UsageError(
                f"the patterns must match the name of a run in {storage_path}, got {short(' '.join(globs))}. Leave "
                "them out to see all runs."
            )
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            rows = [row for row in threads.map(lambda folder: _row(folder, now_s), chosen) if row is not None]
    if not rows:
        raise UsageError(
            f"the storage path must hold the folder of a run, got {storage_path} without any. Give the folder or URI "
            "of --storage-path, or train a run."
        )
    return sorted(rows, key=lambda row: row.seen_s)


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
        name, state = one_line(folder.path.name), "unreadable" if is_unreadable else "damaged"
        texts, problem = {"run": name, "state": state}, one_line(str(error))
        return _Row(
            values=texts, texts=texts, facts={"name": name, "state": state, "problem": problem}, problem=problem
        )


def _read_row(folder: RunFolder, now_s: float) -> _Row:
    history = read_recent(folder)
    config, result = history.description.config, history.result
    last = (result.metrics if result is not None else {}) | last_values(of_trained(history.records))
    start = history.starts[-1] if history.starts else {}
    seen_s, num_devices = last_seen_s(history), start.get("devices", 1)
    device = start.get("device", history.description.hardware)
    device = one_line(f"{num_devices} x {device}" if num_devices > 1 else device)
    val_loss, is_full = last.get("full_val_loss", last.get("val_loss")), "full_val_loss" in last
    seconds = work_s(history.phases, seen_s)
    if not history.phases and result is not None:
        seconds = sum(result.seconds.values())
    name, state = one_line(folder.path.name), run_state(history, now_s)
    source_losses = {f"val_loss/{label}": value for label, value in of_sources(last).items()}
    values = {
        **source_losses,
        "run": name, "state": state, "step": last.get("step", 0), "loss": last.get("loss"), "val": val_loss,
        "tokens": last.get("tokens"), "device": device, "time": seconds, "age": now_s - seen_s,
    }  # fmt: skip
    texts = {
        **{column: loss(value) + ("" if f"full_{column}" in last else PART) for column, value in source_losses.items()},
        "run": name,
        "state": state,
        "step": f"{last.get('step', 0)}/{config.train.max_steps}",
        "loss": loss(last["loss"]) if "loss" in last else "",
        "val": "" if val_loss is None else loss(val_loss) + ("" if is_full else PART),
        "tokens": count(last["tokens"], exact_below=1e3) if "tokens" in last else "",
        "device": device,
        "time": duration(seconds) if seconds else "",
        "age": age(now_s - seen_s),
    }
    facts = {
        "name": name, "place": str(folder), "state": state, "step": last.get("step", 0),
        "max_steps": config.train.max_steps, "val_loss": val_loss, "val_is_full": is_full, "device": device,
        "work_s": round(seconds, 3), "seen_s": seen_s, "metrics": last,
    }  # fmt: skip
    data = history.description.data
    at_end = last_values(record for record in history.records if record["step"] == values["step"])
    has_end = "loss" in at_end and (val_loss is None or not at_end.keys().isdisjoint(("val_loss", "full_val_loss")))
    return _Row(
        values=values,
        texts=texts,
        facts=facts,
        config=config,
        seen_s=seen_s,
        is_diverged=state == "finished" and not has_end,
        compared=(
            repr((_validation_digests(data), data.tokenizer_kind, config.model.seq_len)),
            str(config.train.max_steps),
            "all" if is_full else str(config.train.eval_tokens),
        ),
        data=json.dumps([data.fingerprint, data.tokenizer_kind, data.window_order_version], sort_keys=True),
    )


def _validation_digests(data: DataDescription) -> str:
    """Return a text that is equal for equal validation tokens: their digests, or all that is known of a stream."""
    known = flatten(data.fingerprint)
    digests = {name: value for name, value in known.items() if name.endswith("val.bin")}
    return json.dumps(digests or known, sort_keys=True)


def _with_options(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows with the values of all options, and with those that differ between the runs by themselves."""
    configs = [row.config for row in rows if row.config is not None]
    differing = differing_options(configs) if configs else {}
    numbers = itertools.count()
    return [row if row.config is None else _with_values(row, row.config, differing, next(numbers)) for row in rows]


def _with_values(row: _Row, config: PretrainConfig, differing: Mapping[str, Sequence[Any]], number: int) -> _Row:
    every = {name: value for name, value in option_values(config).items() if changes_result(name)}
    shown_values = {**every, "data": label_of(parse_data(config.data))}  # a path would take the whole width
    return dataclasses.replace(
        row,
        values={**{short_name(name): value for name, value in every.items()}, **row.values},
        texts={**{short_name(name): one_line(short_value(value)) for name, value in shown_values.items()}, **row.texts},
        options={name: column[number] for name, column in differing.items()},
    )


def _groups(rows: Iterable[_Row]) -> tuple[list[_Row], list[str]]:
    """Return a row for the runs that are equal but for the seed, the best first, and remarks about the ranks.

    Finished runs alone count, each seed once: a second run of a seed is in another group. The spread is the standard
    deviation, with the divisor n - 1. Groups are ranked if their losses can be compared.
    """
    members: dict[tuple[str, int], list[_Row]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for row in sorted(rows, key=lambda row: row.values["state"] != "finished" or row.is_diverged):
        if row.config is not None:
            options = {name: value for name, value in option_values(row.config).items() if changes_result(name)}
            left_out = dict.fromkeys((*LENGTHS, "seed"))
            name = repr(({**options, **left_out}, row.config.train.max_steps, row.data))
            members.setdefault((name, seen[name, row.config.seed]), []).append(row)
            seen[name, row.config.seed] += 1
    groups = [_group(group) for group in members.values()]
    groups.sort(key=lambda group: (group.is_diverged, _sort_key(group.values.get("val"))))
    ranked = [group for group in groups if "val" in group.values and not group.is_diverged]
    remarks = []
    if diverged := sorted(row.values["run"] for group in members.values() for row in group if row.is_diverged):
        remarks.append(
            f"no rank with a run that is finished, but has no loss or no validation loss of its last step: "
            f"{', '.join(diverged)}"
        )
    kinds = ("validation data", "lengths (train.max_steps)", "parts of the validation tokens (train.eval_tokens)")
    compared = zip(*(group.compared for group in ranked), strict=True)
    if different := [kind for kind, values in zip(kinds, compared, strict=bool(ranked)) if len({*values}) > 1]:
        remarks.append(f"no ranks: the runs have different {' and '.join(different)}. Choose runs by their names.")
        return groups, remarks
    for rank, group in enumerate(ranked, 1):
        texts, facts = {**group.texts, "rank": str(rank)}, {**group.facts, "rank": rank}
        groups[groups.index(group)] = dataclasses.replace(
            group, values={**group.values, "rank": rank}, texts=texts, facts=facts
        )
    return groups, remarks


def _group(group: Sequence[_Row]) -> _Row:
    first = group[0]
    finished = [
        row
        for row in group
        if row.values["state"] == "finished" and row.values["val"] is not None and not row.is_diverged
    ]
    losses = [row.values["val"] for row in finished]
    seeds = sorted(row.values["seed"] for row in group)
    group = sorted(group, key=lambda row: row.values["seed"])
    name = min((_SEED.sub("", row.values["run"]) for row in group), key=len)
    values = {**first.values, "run": name, "runs": len(losses), "seed": seeds[0]}
    texts = {**first.texts, "run": name, "runs": f"{len(losses)}/{len(group)}", "val": "", "spread": ""}
    texts["seed"] = ",".join(map(str, seeds))
    facts = {
        "name": name,
        "runs": [row.values["run"] for row in group],
        "seeds": seeds,
        "max_steps": first.facts["max_steps"],
        "num_finished": len(losses),
    }
    values.pop("val")
    if losses:
        mark = PART if any(row.texts["val"].endswith(PART) for row in finished) else ""
        values["val"] = facts["val_loss"] = statistics.fmean(losses)
        texts["val"] = loss(values["val"]) + mark
    if len(losses) > 1:
        values["spread"] = facts["val_loss_std"] = statistics.stdev(losses)
        texts["spread"] = f"{values['spread']:.4f}"
    for column in [name for name in first.values if name.startswith("val_loss/")]:
        del values[column], texts[column]
        if of_runs := [row.values[column] for row in finished if column in row.values]:
            values[column] = facts[column] = statistics.fmean(of_runs)
            mark = PART if any(row.texts[column].endswith(PART) for row in finished if column in row.values) else ""
            texts[column] = loss(values[column]) + mark
    options = {name: value for name, value in first.options.items() if name != "seed"}
    return _Row(
        values=values,
        texts=texts,
        facts=facts,
        config=first.config,
        is_diverged=any(row.is_diverged for row in group),
        compared=tuple(repr(sorted({*values})) for values in zip(*(row.compared for row in finished), strict=True)),
        options=options,
    )


def _column(name: str, known: Sequence[str], option: str) -> str:
    """Return the name of a column.

    Raises:
        UsageError: there is no such column.
    """
    if "/" not in name:  # that of a loss of a name of a mixture, which may have a hyphen
        name = _SAME.get(name, short_name(name.replace("-", "_")))
    if name not in known:
        shown = ", ".join(dict.fromkeys(known[:12]))
        raise UsageError(f"{option} must be columns, such as {shown}, got {short(name)}.{did_you_mean(name, known)}")
    return name


def _sort_key(value: Any) -> tuple[bool, bool, Any]:
    """Return a key that sorts numbers before texts, and what is unknown last."""
    return value is None, isinstance(value, str), 0 if value is None else value
