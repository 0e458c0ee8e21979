"""The command `compare`, on the files of runs."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain import PRESETS, main
from pretrain._config import with_vocab_size
from pretrain._run.description import DataDescription, Origin, describe, write_description
from pretrain._run.folder import RunFolder
from pretrain._run.lock import lock_run
from pretrain._run.result import RunResult, write_result
from pretrain._run.step_losses import ValLosses, write_step_losses, write_val_losses

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "compare.py"
STEPS, SEQ_LEN, WINDOWS = 120, 64, 90


def series(size, seed, length=STEPS):
    return size * np.random.default_rng(seed).normal(size=length)


BATCHES = 3 - np.arange(STEPS) / STEPS + series(0.3, 0)
TEXT = 2 + series(0.2, 1, WINDOWS)


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Makes the files of a run in `runs`."""
    monkeypatch.chdir(tmp_path)

    def make(
        name, losses, *, val=None, seed=1, last_count=SEQ_LEN, data=None, train=None, model=None, rate=1e-3, origin=None
    ):
        config = with_vocab_size(PRESETS["quickstart"](), 257)
        config = dataclasses.replace(
            config,
            seed=seed,
            train=dataclasses.replace(config.train, **{"order": "shuffle", **(train or {})}),
            model=dataclasses.replace(config.model, **{"seq_len": SEQ_LEN, **(model or {})}),
            optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
        )
        fields = {"tokens": "text", "tokenizer": "bytes", "fingerprint": {"sha256": "1"}} | (data or {})
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        write_description(folder, describe(config, DataDescription(**fields), "local", origin))
        write_step_losses(folder.step_losses, 1, [float(value) for value in losses])
        if val is not None:
            write_val_losses(folder.val_losses, ValLosses(losses=val.astype(np.float32), last_count=last_count))
            write_result(folder, RunResult(steps=len(losses), metrics={}, restarts=0, workers=1))
        return folder

    return make


@pytest.fixture
def compared(capsys):
    """Returns the output of the command."""

    def compare(line):
        assert main(["compare", *line.split()]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80 or "/" in max(out.splitlines(), key=len)
        return out

    return compare


@pytest.fixture
def rejected(capsys):
    """Returns the error of the command."""

    def compare(line):
        assert main(["compare", *line.split()]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    return compare


def better(size):
    """A difference that grows to the end, with the noise of the training."""
    return -size * np.arange(STEPS) / STEPS + series(0.01, 2)


def test_the_better_run_is_named_with_its_interval(make_run, compared):
    make_run("a", BATCHES, val=TEXT)
    make_run("b", BATCHES + better(0.5), val=TEXT - 0.4 + series(0.01, 3, WINDOWS), rate=2e-3)
    words = " ".join(compared("a b").split())
    assert "optimizer.learning_rate: 1e-3 in A, 2e-3 in B" in words
    assert "B is better by 0.43" in words
    assert "at step 120. The training losses of the steps 91 to 120 are 2." in words
    assert "on the same windows. The interval allows for the noise of the training as far as one pair of runs" in words
    assert "If A and B had read different windows, their mean losses over about " in words
    assert "the model of B is better by 0.40" in words
    words = " ".join(compared("b a").split())
    assert "A is better by 0.43" in words
    assert "the model of A is better by 0.40" in words


def test_runs_that_differ_by_noise_cannot_be_told_apart(make_run, compared):
    make_run("a", BATCHES)
    make_run("b", BATCHES + series(0.01, 2))
    words = " ".join(compared("a b").split())
    assert "A and B cannot be told apart: B - A is " in words
    assert "validation" not in words


def test_a_run_that_is_better_is_named_even_where_one_pair_does_not_tell_its_options_from_noise(make_run, compared):
    """The difference comes early, and shrinks."""
    course = np.interp(np.arange(STEPS), [0, 5, STEPS], [0.0, 1.0, 0.4])
    make_run("a", BATCHES)
    make_run("b", BATCHES + course + series(0.01, 2))
    words = " ".join(compared("a b").split())
    first = next(line for line in compared("a b").splitlines() if "/" not in line)
    assert first.startswith("The model of A is better by 0.48")
    assert "in training, on the same windows. One pair of runs cannot say whether the options are the cause." in words
    assert "As far as this pair shows that noise, B - A is +0.48" in words
    assert "Train A and B with more seeds, and compare them: compare A1 A2 A3 --against B1 B2 B3." in words
    assert json.loads(compared("a b --json"))["better"] is None


def test_models_that_differ_on_the_validation_text_are_not_called_alike(make_run, compared):
    """The losses in training differ by noise, those on the validation text clearly."""
    make_run("a", BATCHES, val=TEXT)
    make_run("b", BATCHES + series(0.3, 2), val=TEXT - 0.4 + series(0.01, 3, WINDOWS), rate=2e-3)
    words = " ".join(compared("a b").split())
    _, _, first = words.partition("2e-3 in B ")
    assert first.startswith("The model of B is better by 0.40")
    assert "on the validation text. One pair of runs cannot say whether the options are the cause." in first
    assert "cannot be told apart" not in words
    assert json.loads(compared("a b --json"))["better"] is None


def test_patterns_stand_for_the_runs_that_they_match(make_run, compared):
    for seed in (1, 2, 3):
        make_run(f"low-seed{seed}", BATCHES + series(0.1, seed), seed=seed)
        make_run(f"high-seed{seed}", BATCHES + series(0.1, seed) - 0.1 * seed, seed=seed, rate=2e-3)
    found = json.loads(compared("low-* --against high-seed[13] high-*2 --json"))
    assert [Path(name).name for name in found["first"]] == ["low-seed1", "low-seed2", "low-seed3"]
    assert [pair["seeds"] for pair in found["pairs"]] == [[1, 1], [2, 2], [3, 3]]
    assert found["seeds"]["mean"] == pytest.approx(-0.2, abs=1e-6)
    found = json.loads(compared("*-seed2 --json"))  # both runs of a seed
    assert [Path(name).name for name in (*found["first"], *found["second"])] == ["high-seed2", "low-seed2"]


def test_equal_runs_are_equal(make_run, compared):
    make_run("a", BATCHES)
    make_run("b", BATCHES)
    assert compared("a b").splitlines()[-1] == "The losses of all steps up to 120 are equal."


def test_json_has_the_numbers(make_run, compared):
    make_run("a", BATCHES, val=TEXT, last_count=1)
    shift = np.where(np.arange(WINDOWS) == WINDOWS - 1, 1.0, -0.5)
    make_run("b", BATCHES + better(0.5), val=TEXT + shift, last_count=1, rate=2e-3)
    found = json.loads(compared("a b --json"))
    assert (found["better"], found["step"], found["from_step"]) == ("B", 120, 91)
    assert [Path(name).name for name in (*found["first"], *found["second"])] == ["a", "b"]
    assert found["differing_options"] == {"optimizer.learning_rate": [0.001, 0.002]}
    (pair,) = found["pairs"]
    assert pair["options"]["mean"] == pytest.approx(better(0.5)[90:].mean(), abs=1e-6)
    assert pair["losses"][0] == pytest.approx(BATCHES[90:].mean(), abs=1e-6)
    assert pair["options"]["half_width"] > pair["batches"]["half_width"] > 0
    counts = [*[SEQ_LEN] * (WINDOWS - 1), 1]
    assert pair["models"]["mean"] == pytest.approx(np.average(shift, weights=counts), abs=1e-6)
    assert pair["val_losses"][0] == pytest.approx(np.average(TEXT, weights=counts), abs=1e-6)
    assert found["seeds"] is None


def test_the_same_windows_save_steps(make_run, compared):
    """The losses of a run have a standard deviation of 0.3, and the differences one of 0.01."""
    make_run("a", BATCHES)
    make_run("b", BATCHES + series(0.01, 2))
    (pair,) = json.loads(compared("a b --json"))["pairs"]
    assert pair["unpaired_steps"] == pytest.approx(2 * (1.96 * 0.3 / pair["batches"]["half_width"]) ** 2, rel=0.5)
    assert pair["unpaired_steps"] > 5_000


def test_windows_that_save_no_steps_are_not_mentioned(make_run, compared):
    """The noise of the differences is greater than that of the losses."""
    make_run("a", BATCHES)
    make_run("b", 6 - BATCHES + np.linspace(0, 4, STEPS))
    (pair,) = json.loads(compared("a b --json"))["pairs"]
    assert 0 < pair["unpaired_steps"] <= 30
    words = " ".join(compared("a b").split())
    assert "If A and B had read different windows" not in words


def test_an_earlier_step_is_compared_without_the_last_validation(make_run, compared):
    make_run("a", BATCHES, val=TEXT)
    make_run("b", BATCHES + better(0.5), val=TEXT)
    found = json.loads(compared("a b --at 80 --json"))
    assert (found["step"], found["from_step"]) == (80, 61)
    assert found["pairs"][0]["options"]["mean"] == pytest.approx(better(0.5)[60:80].mean(), abs=1e-6)
    assert found["pairs"][0]["models"] is None


def test_a_longer_run_is_compared_up_to_the_end_of_the_shorter(make_run, compared):
    make_run("a", BATCHES)
    make_run("b", (BATCHES + better(0.5))[:100])
    assert json.loads(compared("a b --json"))["step"] == 100


def test_validations_after_different_steps_are_not_compared(make_run, compared):
    make_run("a", BATCHES, val=TEXT)
    make_run("b", (BATCHES + better(0.5))[:100], val=TEXT + 1)
    make_run("training", (BATCHES + better(0.5))[:100])
    words = " ".join(compared("a b").split())
    assert "the model of" not in words
    reason = "losses on the validation text are not compared, as they are of different steps: 120 in A, and 100 in B."
    assert words.endswith(f"The {reason}")
    (pair,) = json.loads(compared("a b --json"))["pairs"]
    assert (pair["val_steps"], pair["val_losses"], pair["models"]) == ([120, 100], None, None)
    assert "validation text" not in compared("a training")
    for run, length in (("c", 100), ("d", 120)):
        make_run(run, BATCHES[:length], val=TEXT, seed=2)
    found = json.loads(compared("a c --against b d --json"))
    assert (found["step"], found["val_seeds"]) == (100, None)
    assert "of different steps: 100 and 120 in A, and 100 and 120 in B." in " ".join(
        compared("a c --against b d").split()
    )


def test_the_validation_before_an_extension_is_not_that_of_the_present_step(make_run, compared):
    """Until its new end, an extended run has the losses of its former last step, and no result."""
    make_run("a", BATCHES, val=TEXT)
    extended = make_run("b", BATCHES + better(0.5), val=TEXT + 1, rate=2e-3)
    assert "the model of A is better" in " ".join(compared("a b").split())
    extended.delete_result()
    assert "validation text" not in compared("a b")
    assert json.loads(compared("a b --json"))["pairs"][0]["val_steps"] == [120, None]


def test_steps_without_a_loss_are_left_out(make_run, compared):
    lost = BATCHES + better(0.5)
    lost[[3, 95, 100]] = np.nan
    make_run("a", BATCHES)
    make_run("b", lost)
    found = json.loads(compared("a b --json"))
    assert found["from_step"] == 89  # the last 30 of 117
    kept = [step for step in range(88, 120) if step not in (95, 100)]
    assert found["pairs"][0]["options"]["mean"] == pytest.approx(better(0.5)[kept].mean(), abs=1e-6)


def test_runs_of_other_seeds_are_not_paired(make_run, compared):
    make_run("a", BATCHES)
    make_run("b", BATCHES + series(0.3, 4), seed=2)
    assert "on different windows (the seeds differ)" in " ".join(compared("a b").split())
    assert json.loads(compared("a b --json"))["pairs"][0]["unpaired_steps"] is None


def test_several_runs_are_paired_by_their_seeds(make_run, compared):
    for seed, effect in ((1, 0.1), (2, 0.2), (3, 0.3)):
        make_run(f"a{seed}", BATCHES + series(0.1, seed), val=TEXT, seed=seed)
        make_run(f"b{seed}", BATCHES + series(0.1, seed) - effect, val=TEXT + effect, seed=seed, rate=2e-3)
    for seed in (1, 2):
        make_run(f"c{seed}", BATCHES + series(0.1, seed) + 1 + 0.01 * seed, seed=seed, rate=2e-3)
    line = "a1 a2 a3 --against b3 b1 b2"
    found = json.loads(compared(f"{line} --json"))
    assert [pair["seeds"] for pair in found["pairs"]] == [[1, 1], [2, 2], [3, 3]]
    assert [Path(name).name for name in found["second"]] == ["b1", "b2", "b3"]
    for name, sign in (("seeds", -1), ("val_seeds", 1)):
        assert found[name]["mean"] == pytest.approx(sign * 0.2, abs=1e-6)
        assert found[name]["half_width"] == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-4)
    assert found["better"] is None
    words = " ".join(compared(line).split())
    assert "A and B cannot be told apart: B - A is -0.2000 +- 0.2484 nats (95 %) at step 120, over 3 seeds." in words
    width = found["pairs"][1]["options"]["half_width"]
    assert f"seed 2: B - A is -0.2000 +- {width:.4f}, validation +0.2000" in words
    assert "With 3 seeds the interval is +- 4.3 standard errors, with 4 seeds +- 3.2. Train another seed" in words
    words = " ".join(compared("a1 a2 --against b1 b2").split())
    assert "With 2 seeds the interval is +- 12.7 standard errors, with 3 seeds +- 4.3. Train another seed" in words
    assert "standard errors" not in compared("a1 a2 --against c1 c2")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train": {"global_batch_size": 8}}, "got train.global_batch_size 16 in "),
        ({"model": {"seq_len": 32}}, "got model.seq_len 64 in "),
        ({"train": {"order": "random"}}, "got train.order shuffle in "),
        ({"data": {"fingerprint": {"sha256": "2"}}}, "got other tokens in "),
        ({"data": {"window_order_version": 99}}, "got the window order's version "),
        ({"data": {"tokenizer": "gpt2"}}, "runs must have one tokenizer to compare nats per token, got bytes in "),
    ],
)
def test_runs_that_read_other_windows_are_rejected(options, expected, make_run, rejected):
    make_run("a", BATCHES)
    make_run("b", BATCHES, **options)
    assert expected in rejected("a b")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a", "RUN must be two runs, got 1 run. Write: compare A B, or compare A1 A2 --against B1 B2"),
        ("a b c", "RUN must be two runs, got 3 runs."),
        ("a b c --against a c", "RUN must be as many runs as --against has, got 3 and 2 runs. Each seed has an A and"),
        ("a --against", "--against must have a value, got none"),
        ("[abc] short", "RUN must be two runs, got 4 runs."),
        ("no-* b", "RUN must match the name of a run here or in runs, got no-*, which matches none. The command "),
        ("no-*", "RUN must match the name of a run here or in runs, got no-*, which matches none."),
        ("[ab] --against no-*", "--against must match the name of a run here or in runs, got no-*, which matches none"),
        ("a b@80", "RUN must be a run without a checkpoint, got b@80. Write b, and --at 80."),
        ("a@best b", "RUN must be a run without a checkpoint, got a@best. Write a."),
        ("a nosuch", "run must be the folder or URI of a run"),
        ("a b --at 39", "--at must be a step from 40 to 120, the last one that "),
        ("a b --at 121", "--at must be a step from 40 to 120, the last one that "),
        ("a b --at x", "--at must be an integer"),
        ("a short", "runs must have the losses of at least 40 steps (step_losses.f32), got 39 in "),
        ("a lost", "runs must have at least 40 steps of which every run has the loss, got 39. The other losses are "),
        ("a b --against b a", "runs must form pairs of one seed, each seed once, got the seeds [1, 1]"),
        ("a second --against b b", "got the seeds [1, 2] --against [1, 1]"),
        ("a second --against b second", "the runs of one side must differ in their seeds alone, got optimizer.l"),
        ("a windows", "val_losses.f32 must have the same windows in both runs, got 90 in "),
        ("a damaged", "val_losses.f32 must be losses of windows as a run writes them, got a damaged file."),
    ],
)
def test_wrong_input_is_one_sentence(line, expected, make_run, rejected):
    make_run("a", BATCHES, val=TEXT)
    make_run("b", BATCHES, val=TEXT)
    make_run("c", BATCHES)
    make_run("short", BATCHES[:39])
    make_run("lost", np.where(np.arange(STEPS) < 81, np.nan, BATCHES))
    make_run("second", BATCHES, seed=2, rate=2e-3)
    make_run("windows", BATCHES, val=TEXT[:-1])
    make_run("damaged", BATCHES, val=TEXT).val_losses.write_bytes(b"12345")
    assert expected in rejected(line)


def test_a_fork_with_few_steps_of_its_own_names_its_parent(make_run, rejected):
    make_run("con", BATCHES)
    for name, is_weights in (("fork", False), ("weights", True)):
        origin = Origin(place="runs/con", step=40, tokenizer="bytes", weights_only=is_weights)
        make_run(name, np.where(np.arange(70) < 40, np.nan, BATCHES[:70]), origin=origin)
    error = rejected("con fork")
    assert "of which every run has the loss, got 30. The first 40 steps of " in error
    assert "runs/fork are those of runs/con, which it starts from. " in error
    assert error.endswith("or continue its training.\n")
    assert rejected("con fork --at 60").endswith("Give a later --at, or none.\n")
    assert "lost, or their steps were skipped." in rejected("con weights")


def test_a_run_that_is_being_trained_is_to_be_waited_for(make_run, rejected):
    make_run("a", BATCHES)
    short, empty = make_run("short", BATCHES[:39]), make_run("empty", [])
    assert ". Wait if a command on another machine trains it, or continue its training.\n" in rejected("a short")
    assert rejected("a empty").endswith("or continue its training, or train it again with this version.\n")
    with lock_run(short.path):
        assert rejected("a short").endswith(". A command trains it: wait until it has more steps.\n")
    assert rejected("a short").endswith(". Continue its training.\n")
    with lock_run(empty.path):
        assert rejected("a empty").endswith(". A command trains it: wait until it has more steps.\n")


@pytest.mark.slow
def test_the_calibration_runs_in_its_short_form(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--short", "--out", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "compare.json").read_text())
    assert [row["step"] for row in found["alarms"]] == [40, 60]
    assert all(row["spread"] > 0 for row in found["alarms"])
    # A fifth of the learning rate is seen at the end of the warmup, by pairs and by groups of four.
    assert found["planted"][-1]["mean"] > 0.1
    assert found["planted"][-1]["seeds"] == 1.0
    assert "| -80% | 60 |" in (tmp_path / "compare.md").read_text()
