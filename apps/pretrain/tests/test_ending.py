"""The texts at the end of a run."""

import dataclasses
import io
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample, read_history
from pretrain._run.result import RunResult
from pretrain._screen.ending import sample_lines, show_finished, show_result, show_stopped
from ray_jax_launch import Checkpoints

RESULT = RunResult(
    steps=1500,
    tokens=1_536_000,
    epochs=0.1343,
    metrics={"loss": 1.61234},
    full_val_loss=1.51173,
    full_val_bits_per_byte=2.18094,
    best_val_loss=1.6,
    best_val_step=1250,
    last_val_loss=1.61965,
    last_val_step=1500,
    seconds={"starting": 20.0, "training": 175.0, "evaluating": 5.0, "saving": 0.5},
    restarts=0,
    workers=1,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run in the folder `runs` of the working folder."""
    monkeypatch.setattr("sys.argv", ["pretrain"])
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "a run")
    run.path.mkdir(parents=True)
    config = PRESETS["quickstart"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
    write_description(run, describe(config, data, "local"))
    return run


def shown(folder, result=RESULT, width=80):
    out = io.StringIO()
    show_result(read_history(folder), result, Console(file=out, width=width), sample="a text")
    return out.getvalue()


def test_the_end_tells_which_validation_loss_is_of_what(folder):
    for prompt in ("def ", "import "):
        for step, text in ((0, "\x1b[31m~q"), (250, "se\n\tlf"), (500, "self."), (1500, "self):\n    pass")):
            append_line(folder.samples, {"step": step, "prompt": prompt, "text": prompt + text})
    assert (
        shown(folder)
        == f"""\
done in 3:20
steps          1,500: 1,536,000 tokens, 0.13 epochs
loss           1.6123
val loss       1.5117 on all validation tokens, as `eval` prints
               1.6197 at step 1,500, best 1.6000 at step 1,250, on 20,480 validation tokens
bits per byte  2.1809 on all validation tokens
time           training 87%, starting 10%, evaluating 2%

samples of the prompt "def "
step     0  def ·[31m~q
step   250  def se⏎→lf
step 1,500  def self):⏎    pass

run folder: {folder}
  pretrain sample 'a run'
  pretrain eval 'a run'
  pretrain report 'a run'
  pretrain export 'a run' OUT
"""
    )


def test_the_end_of_a_run_of_several_starts_tells_their_number_and_their_time(folder):
    result = dataclasses.replace(RESULT, restarts=2, tokens_per_s=25_600.4, best_val_step=1500, best_val_loss=1.61965)
    assert shown(folder, result).splitlines()[:8] == [
        "done in 3:20 of work over 3 starts",
        "steps          1,500: 1,536,000 tokens, 0.13 epochs",
        "restarts       2",
        "loss           1.6123",
        "val loss       1.5117 on all validation tokens, as `eval` prints",
        "               1.6197 at step 1,500, the best, on 20,480 validation tokens",
        "bits per byte  2.1809 on all validation tokens",
        "speed          25,600 tokens/s while training",
    ]


def test_the_end_tells_the_losses_of_a_mixture(folder):
    losses = {"val_loss/web": 1.8, "val_loss/code": 1.25, "full_val_loss/web": 1.75, "full_val_loss/code": 1.3}
    result = dataclasses.replace(RESULT, metrics={"loss": 1.61234, **losses})
    lines = shown(folder, result).splitlines()
    assert "by source      web 1.7500, code 1.3000" in lines


def test_the_end_tells_how_many_steps_made_no_update(folder):
    result = dataclasses.replace(RESULT, metrics={"loss": 1.6, "num_skipped": 29})
    assert shown(folder, result).splitlines()[2:4] == [
        "skipped        29 steps, whose loss or gradient was not finite",
        "loss           1.6000",
    ]


def test_a_validation_on_all_tokens_is_no_part(folder):
    result = dataclasses.replace(RESULT, last_val_loss=RESULT.full_val_loss)
    assert "1.5117 at step 1,500, best 1.6000 at step 1,250, on all validation tokens" in shown(folder, result)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("apps/pretrain", "uv run apps/pretrain"),
        ("/a/bin/pretrain", "pretrain"),
        ("/a/pretrain/__main__.py", "python -m pretrain"),
        ("notebook.py", "pretrain"),
    ],
)
def test_the_next_commands_begin_as_this_one(folder, monkeypatch, program, expected):
    Path("apps/pretrain").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", [program])
    assert shown(folder).splitlines()[-1] == f"  {expected} export 'a run' OUT"


@pytest.mark.parametrize(("place", "expected"), [("first", "./first"), ("data/first", "data/first")])
def test_a_run_outside_of_the_default_storage_is_named_by_its_path(folder, place, expected):
    Path(place).parent.mkdir(exist_ok=True)
    folder.path.rename(place)
    history = read_history(RunFolder(Path(place).absolute()))
    out = io.StringIO()
    show_result(history, RESULT, Console(file=out, width=80))
    assert out.getvalue().splitlines()[-1] == f"  pretrain export {expected} OUT"


def test_a_run_without_samples_ends_with_the_text_of_the_model(folder):
    lines = shown(folder).splitlines()
    assert lines[lines.index("─" * 36 + " sample " + "─" * 36) + 1] == "a text"


@pytest.mark.parametrize("num_steps", [1, 2, 3, 9])
def test_samples_are_the_first_the_middle_and_the_last(num_steps):
    samples = [Sample(step=step, prompt="a", text="a" * 200) for step in range(num_steps)]
    lines = sample_lines(samples, 40)
    expected = sorted({0, (num_steps - 1) // 2, num_steps - 1})
    assert [line.split()[1] for line in lines] == [str(step) for step in expected]
    assert {len(line) for line in lines} == {39}


@pytest.mark.parametrize(
    ("steps", "expected"), [((), "stopped before the first checkpoint"), ((7,), "stopped, saved at step 7")]
)
def test_a_stopped_run_tells_what_is_saved(tmp_path, steps, expected):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in steps:
            checkpoints.save(step, {"params": {"bias": jnp.zeros(2)}}, metadata={})
    out = io.StringIO()
    show_stopped(tmp_path / "checkpoints", Console(file=out, width=200))
    assert out.getvalue() == f"{expected}\n"


@pytest.mark.parametrize(
    ("eval_tokens", "part"),
    [(None, "all validation tokens"), (10, "64 validation tokens"), (2000, "1,984 validation tokens")],
)
def test_a_validation_is_on_whole_windows(folder, eval_tokens, part):
    history = read_history(folder)
    config = history.description.config
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_tokens=eval_tokens))
    history = dataclasses.replace(history, description=dataclasses.replace(history.description, config=config))
    out = io.StringIO()
    show_result(history, RESULT, Console(file=out, width=80))
    assert f"best 1.6000 at step 1,250, on {part}\n" in out.getvalue()


def test_the_end_of_a_run_whose_files_have_little_tells_what_they_have(folder):
    result = RunResult(steps=None, metrics={}, restarts=None, workers=None)
    assert shown(folder, result).splitlines()[:2] == ["done", "─" * 36 + " sample " + "─" * 36]
    validated = dataclasses.replace(result, best_val_loss=1.5, best_val_step=7, last_val_loss=1.75, last_val_step=9)
    timed = dataclasses.replace(validated, steps=9, seconds={"training": 99.0, "saving": 0.0, "evaluating": 1.0})
    assert shown(folder, timed).splitlines()[:4] == [
        "done in 1:40",
        "steps     9",
        "val loss  1.7500 at step 9, best 1.5000 at step 7, on 20,480 validation tokens",
        "time      training 99%, evaluating 1%",
    ]


def test_a_finished_run_tells_its_numbers(folder):
    out = io.StringIO()
    show_finished(read_history(folder), RESULT, Console(file=out, width=30))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(f"the run in {folder} is finished")
    assert lines[1] == "steps          1,500: 1,536,000 tokens, 0.13 epochs"
    assert lines[-1] == "time           training 87%, starting 10%, evaluating 2%"


@pytest.mark.parametrize("uri", [None, "s3://bucket/runs/a [b]?region=eu-west-1"])
def test_a_run_elsewhere_is_named_in_full(folder, tmp_path, monkeypatch, uri):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    place = folder.path.rename(tmp_path / "a [b]")
    history, out = read_history(RunFolder(place)), io.StringIO()
    show_result(dataclasses.replace(history, folder=RunFolder(place, uri)), RESULT, Console(file=out, width=20))
    lines = out.getvalue().splitlines()
    assert lines[-5] == f"run folder: {uri or place}"
    assert lines[-4] == f"  pretrain sample '{uri or place}'"


def test_samples_on_a_terminal_are_as_wide_as_the_terminal(folder):
    append_line(folder.samples, {"step": 7, "prompt": "a\n", "text": "a\n" * 99})
    out = io.StringIO()
    show_result(read_history(folder), RESULT, Console(file=out, width=60, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    sample = lines[lines.index('samples of the prompt "a⏎"') + 1]
    assert (sample[:10], len(sample)) == ("step 7  a⏎", 59)
