"""The command `runs`: a table of all runs of a storage path."""

import dataclasses
import io
import subprocess
import sys

import pytest
from rich.console import Console

from pretrain import PRESETS
from pretrain._commands.runs import show_runs
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.result import RunResult, write_result

BEGAN_S = 1_700_000_000.0


def make_run(path, last_phase, after_s, *, hardware="cpu:2", **metrics):
    """A run of 1 500 steps at step 750, whose last phase began some seconds after its start."""
    run = RunFolder(path)
    run.path.mkdir(parents=True)
    config = PRESETS["quickstart"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
    write_description(run, describe(config, data, hardware))
    append_line(run.phases, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
    append_line(run.phases, {"step": 750, "time_s": BEGAN_S + after_s, "phase": last_phase})
    append_line(run.metrics, {"step": 750, "tokens": 768000, "loss": 1.8123, "val_loss": 1.9, **metrics})
    return run


@pytest.fixture
def storage(tmp_path):
    """Four runs and a damaged one, and a file and a folder that are none."""
    root = tmp_path / "storage"
    done = make_run(root / "quickstart-builtin", "finished", 240, full_val_loss=1.5117)
    append_line(done.starts, {"step": 0, "workers": 1, "devices": 4, "device": "TPU v4"})
    append_line(done.starts, {"step": 250, "workers": 2, "devices": 8, "device": "NVIDIA H100 80GB HBM3"})
    make_run(root / "wikitext-a-longer-name-of-a-run", "training", 86_400)
    make_run(root / "silent", "training", 80_000)
    make_run(root / "stopped", "stopped", 3600)
    make_run(root / "broken", "training", 0).config.write_text("{")
    (root / "notes.txt").write_text("no run")
    (root / "empty").mkdir()
    return root


def shown(storage, **options):
    out = io.StringIO()
    show_runs(str(storage), console=Console(file=out, **options), clock=lambda: BEGAN_S + 86_460)
    return out.getvalue()


PLAIN = """\
run                             state               step   loss     val tokens device                        time   age
broken                          damaged
quickstart-builtin              finished        750/1500 1.8123  1.5117   768k 8 x NVIDIA H100 80GB HBM3     4:00  23 h
stopped                         stopped         750/1500 1.8123 1.9000*   768k cpu:2                      1:00:00  23 h
silent                          no sign of life 750/1500 1.8123 1.9000*   768k cpu:2                     22:13:20   1 h
wikitext-a-longer-name-of-a-run training        750/1500 1.8123 1.9000*   768k cpu:2                     24:00:00 1 min
* validation loss on a part of the validation tokens (train.eval_tokens)
"""
NARROW = """\
run                   state        step   loss     val   age
broken                damaged
quickstart-builtin    finished 750/1500 1.8123  1.5117  23 h
stopped               stopped  750/1500 1.8123 1.9000*  23 h
silent                no sign  750/1500 1.8123 1.9000*   1 h
                      of life
wikitext-a-longer-nam training 750/1500 1.8123 1.9000* 1 min
e-of-a-run
* validation loss on a part of the validation tokens (train.eval_tokens)
"""


def test_each_run_is_a_row_without_a_terminal(storage):
    table, damage = shown(storage).split("broken: ")
    assert table == PLAIN
    assert damage.startswith(f"{storage / 'broken' / 'config.json'} must be JSON as a run writes it, got an error")


def test_control_characters_of_a_device_are_escaped(storage):
    append_line(
        RunFolder(storage / "stopped").starts, {"step": 750, "workers": 1, "devices": 1, "device": "\x1b[31mred"}
    )
    assert "\\x1b[31mred" in shown(storage)
    assert "\x1b" not in shown(storage)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_table_fits_a_terminal(storage, width):
    table, _, _ = shown(storage, force_terminal=True, width=width, color_system=None).partition("* validation loss")
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    assert all("750/1500" in line for line in lines if line.split()[1:2] in (["finished"], ["stopped"], ["training"]))


def test_a_narrow_table_has_the_important_columns_and_whole_numbers(storage):
    text = shown(storage, force_terminal=True, width=60, color_system=None)
    assert "".join(f"{line.rstrip()}\n" for line in text.splitlines()).startswith(NARROW)


def test_a_folder_without_runs_is_rejected(storage):
    with pytest.raises(UsageError, match=r"the storage path must hold the folder of a run, got .* without any"):
        show_runs(str(storage / "empty"), console=Console(quiet=True))


@pytest.mark.parametrize(
    "command", ["runs STORAGE", "watch STORAGE/quickstart-builtin", "report STORAGE/silent --out page.html"]
)
def test_a_command_that_reads_files_imports_neither_ray_nor_jax(storage, tmp_path, command):
    code = (
        "import sys; from pretrain import main; code = main(sys.argv[1:]); print(code, {'ray', 'jax'} & {*sys.modules})"
    )
    arguments = command.replace("STORAGE", str(storage)).split()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 set()", done.stderr


def test_a_run_without_phases_has_the_time_of_its_result(tmp_path):
    run = make_run(tmp_path / "storage" / "first", "training", 0)
    run.phases.unlink()
    append_line(run.starts, {"step": 0, "workers": 1, "devices": 1, "device": "TPU v4"})
    append_line(run.metrics, {"step": 1500, "tokens": 1_536_000, "time_s": BEGAN_S})
    write_result(run, RunResult(steps=1500, metrics={}, wall_s=208.0, restarts=0, workers=1))
    rows = [line.split() for line in shown(tmp_path / "storage").splitlines()]
    assert rows[1] == ["first", "finished", "1500/1500", "1.8123", "1.9000*", "1.54M", "TPU", "v4", "3:28", "1", "d"]
