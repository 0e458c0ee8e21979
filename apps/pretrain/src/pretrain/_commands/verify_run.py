"""The command `verify`: a run with kills has the bits of an undisturbed run.

Both runs are trained by commands `train` in processes of their own, in a temporary folder. They have
`train.num_shards`, with which the bits are the same on each number of workers.
"""

import contextlib
import random
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from pretrain._audit.child_run import ChildRun
from pretrain._audit.killed_run import ChildFailedError, train_with_kills
from pretrain._audit.planned_kills import plan_kills
from pretrain._audit.recorded_run import RecordedRun, read_run
from pretrain._audit.run_difference import compare_runs
from pretrain._commands.diff import diff
from pretrain._data import find_texts, open_prepared
from pretrain._errors import UsageError, one_line, rejecting, shown
from pretrain._formats import duration
from pretrain._output import print_error
from pretrain._presets import PRESETS
from pretrain._resolve.devices import given_hardware
from pretrain._run.folder import locate
from pretrain._run.result import read_result
from pretrain._screen.kill_table import KillTable
from pretrain._screen.printing import print_facts, print_line
from ray_jax_launch import DamagedCheckpointError, Hardware, parse_hardware

MAX_STEPS = 120
MAX_KILLS = 20

# Dropout, so that the random keys of the steps count. A record each step tells the step to the command.
_OPTIONS: dict[str, Any] = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.embed_dim": 64,
    "model.seq_len": 64,
    "model.dropout_rate": 0.1,
    "train.global_batch_size": 16,
    "train.max_steps": MAX_STEPS,
    "train.num_shards": 4,
    "train.checkpoint_every": 10,
    "train.eval_every": MAX_STEPS,
    "train.eval_tokens": 4_096,
    "train.log_every": 1,
    "train.sample_tokens": 0,
    "train.max_failures": -1,
}
# The built-in corpus, cut to some documents.
_NUM_DOCUMENTS = 60
_UNDISTURBED, _KILLED = "undisturbed", "killed"
_DIGITS = 16
_WIDTH = 80
# On two idle CPU cores: two runs, and what a kill of the command adds on top of half as much for a worker.
_RUNS_S, _KILL_S = 80.0, 18.0


def verify(*, kills: int, hardware: str, data: str, seed: int, keep: str | None, console: Console) -> bool:
    """Train a small run undisturbed, then again with kills and on other workers, and compare the two to the bit.

    All processes that this function starts have ended when it returns or raises.

    Args:
        kills: number of processes to kill by SIGKILL.
        hardware: where the second run trains. The first one trains on one device.
        data: the data, in the forms of the command `train`.
        seed: decides the places of the kills.
        keep: a folder for both runs and their output, new or empty; None takes a temporary one and deletes it, unless
            the runs differ.
        console: the output.

    Returns:
        True if the runs are equal, False if they differ or one has failed.

    Raises:
        UsageError: an option is out of its range, or the data is rejected.
        DataError: the data does not exist.
        KeyboardInterrupt: Ctrl-C.
    """
    if not 1 <= kills <= MAX_KILLS:
        raise UsageError(f"--kills must be at least 1 and at most {MAX_KILLS}, got {kills}.")
    if seed < 0:
        raise UsageError(f"--seed must be at least 0, got {seed}.")
    found = _checked(hardware, data)
    single = {"cpu": "local", "gpu": "gpu:1", "local": "local"}[found.kind]
    runs_s = 10 * round((_RUNS_S + kills * _KILL_S) / 10)
    introduction = (
        f"Trains a small GPT-2 twice, {MAX_STEPS} steps each, with --train.num-shards {_OPTIONS['train.num_shards']}: "
        f"undisturbed on one device, then on {hardware}, where "
        f"{'a process is' if kills == 1 else f'{kills} processes are'} killed by SIGKILL, at places that --seed {seed} "
        f"chooses. Then the two runs are compared to the bit. This takes about {duration(runs_s)} on two idle CPU "
        "cores."
    )
    with _folder(keep) as folder:
        for line in textwrap.wrap(introduction, _WIDTH, break_long_words=False, break_on_hyphens=False):
            print_line(console, line)
        try:
            num_kills = _train_both(folder.path, found, single, hardware, data, kills, seed, console)
            is_equal = judge(folder.path / _UNDISTURBED, folder.path / _KILLED, num_kills, console)
        except (ChildFailedError, DamagedCheckpointError) as error:
            folder.is_kept = True
            print_error(f"error: {one_line(str(error).rstrip('.'))}. All output is in {folder.path}")
            return False
        folder.is_kept |= not is_equal
        if folder.is_kept:
            print_line(console, f"both runs are in {folder.path}")
    return is_equal


def _train_both(
    folder: Path, found: Hardware, single: str, hardware: str, data: str, kills: int, seed: int, console: Console
) -> int:
    """Train the two runs. Return the number of kills."""
    rng = random.Random(seed)
    # The processes to kill are on this machine. The first run is on the platform of the second.
    variables = {"RAY_ADDRESS": None} | ({"JAX_PLATFORMS": "cpu"} if found.kind == "cpu" else {})
    planned = plan_kills(kills, MAX_STEPS, has_workers=found.kind != "local", rng=rng)
    for name, where in ((_UNDISTURBED, single), (_KILLED, hardware)):
        arguments = _arguments(folder, name, where, data)
        run = ChildRun(locate(folder / name), arguments, log=folder / f"{name}.log", variables=variables)
        with contextlib.closing(run), KillTable(console) as table:
            if not console.is_interactive:
                print_line(console, f"the run {name}, on {where}")
            table.present(
                lambda run=run, where=where, table=table: f"{run.folder.name} run, on {where}: {progress(run, table)}"
            )
            try:
                train_with_kills(run, [] if name == _UNDISTURBED else planned, rng, table)
            except KeyboardInterrupt:
                print_line(console, "ending all processes; another Ctrl-C kills them")
                raise
    return len(table.rows)


def progress(run: ChildRun, table: KillTable) -> str:
    """Return the present of a run: its step, its phase, or that it starts again."""
    if table.rows and not table.rows[-1].continued_by:
        return "starting again after the kill"
    phase = run.phase()
    if phase != "training":
        return phase
    return f"step {run.step() or run.starts()[-1]['step']} of {MAX_STEPS}"


def _checked(text: str, data: str) -> Hardware:
    """Return the hardware of the second run.

    Raises:
        UsageError: it is not on this machine, or cannot train the run.
        LaunchError: a number in it is invalid.
        DataError: the text or the tokens do not exist, or the tokens cannot be read.
    """
    if text.partition(":")[0] not in ("local", "cpu", "gpu"):
        raise UsageError(
            f"--hardware must be local, cpu:WORKERS or gpu:WORKERS, got {shown(text)}. The processes to kill are on "
            "this machine."
        )
    config = PRESETS["quickstart"]().with_options({**_OPTIONS, "hardware": text, "data": data})
    if text != "local":  # whose devices would start in this process
        given_hardware(config)
    if open_prepared(config) is None:
        find_texts(config)
    return parse_hardware(text)


def _arguments(folder: Path, name: str, hardware: str, data: str) -> list[str]:
    """Return the arguments of `train`."""
    options = {**_OPTIONS, "name": name, "hardware": hardware, "data": data, "storage_path": folder}
    if data == "builtin":
        options |= {"prepare.limit_rows": _NUM_DOCUMENTS, "prepare.cache_path": folder / "tokens"}
    return ["train", "--trackers", *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())]


class _Folder:
    def __init__(self, path: Path, *, is_kept: bool) -> None:
        self.path, self.is_kept = path, is_kept


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[_Folder]:
    """Yield a folder, and delete it at the end unless it is kept.

    Raises:
        UsageError: the folder to keep has content, or cannot be made.
    """
    if keep is not None:
        path = Path(keep).absolute()
        with rejecting():
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"--keep must be a new or empty folder, got {shown(keep)}. Choose another one.")
        yield _Folder(path, is_kept=True)
        return
    folder = _Folder(Path(tempfile.mkdtemp(prefix="pretrain-verify-")), is_kept=False)
    try:
        yield folder
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


def judge(undisturbed: Path, killed: Path, num_kills: int, console: Console) -> bool:
    """Compare the two runs, and print their digests and the answer. If they differ, print what `diff` prints.

    Args:
        undisturbed: the folder of the undisturbed run.
        killed: the folder of the other one.
        num_kills: the number of kills.
        console: the output.

    Returns:
        True if they are equal.

    Raises:
        UsageError: a folder has no run.
        DamagedCheckpointError: a checkpoint cannot be read.
    """
    runs = [read_run(str(folder)) for folder in (undisturbed, killed)]
    digests = [_digests(run) for run in runs]
    kills = f"{num_kills} kill{'' if num_kills == 1 else 's'}"
    facts = (f"digests: params {params}  optimizer {opt_state}" for params, opt_state in digests)
    print_facts(console, [*zip(("undisturbed", f"with {kills}"), facts, strict=True)])
    found = compare_runs(*runs)
    last = runs[0].last_step
    if digests[0] == digests[1] and not found.first and last == runs[1].last_step and last in found.same_checkpoints:
        print_line(
            console,
            f"equal, to the bit: parameters and optimizer after {last} steps with {kills},\n"
            f"the losses of {found.num_losses} steps, and the positions of the windows of {found.num_windows} records",
        )
        return True
    print_line(console, "not equal:")
    diff(str(undisturbed), str(killed), elements=False, as_json=False, console=console)
    return False


def _digests(run: RecordedRun) -> tuple[str, str]:
    """Return the beginnings of the digests of the parameters and of the optimizer of a finished run."""
    result = read_result(run.folder)
    digests = {} if result is None else result.digests
    return digests.get("params", "")[:_DIGITS] or "-", digests.get("opt_state", "")[:_DIGITS] or "-"
