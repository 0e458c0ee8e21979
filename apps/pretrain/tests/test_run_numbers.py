"""A run in this process against a plain loop: its numbers, samples and phases, also after stops at several steps."""

import hashlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_gpt2 import (
    create_optimizer,
    create_train_state,
    learning_rate_schedule,
    make_mesh,
    make_train_step,
    merge,
    put_batch,
)
from owt_data import TokenMixture, load_tokenizer, open_tokens
from pretrain import PretrainConfig, main
from pretrain._cli import parse_command
from pretrain._commands.train import _view as view_of
from pretrain._config import with_vocab_size
from pretrain._data import load_tokens
from pretrain._run.description import read_description
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history, read_phases, read_samples, read_starts
from pretrain._run.metrics import read_records
from pretrain._training import loop
from pretrain._training.sampling import continue_prompt
from pretrain._training.validation import Validation
from ray_jax_launch import newest_metadata, parse_hardware, stop_requested

# No option has its default, and no interval divides another one or the length.
OPTIONS = (
    "--tokenizer bytes --val-fraction 0.2 --hardware local --seed 7 --prompts a bc --trackers --model.seq-len 9 "
    "--model.num-layers 1 --model.num-heads 3 --model.embed-dim 12 --model.dropout-rate 0.1 --train.max-steps 11 "
    "--train.global-batch-size 9 --train.micro-batch-size 3 --train.order random --train.mask-documents "
    "--train.log-every 3 --train.checkpoint-every 4 --train.eval-every 5 --train.eval-tokens 100 "
    "--train.sample-tokens 3 --optimizer.warmup-steps 3"
)
MAX_STEPS, SEED, END_OF_TEXT = 11, 7, 256
RECORDED, EVALUATED = (0, 3, 4, 5, 6, 8, 9, 10, 11), (0, 5, 10, 11)
# A step with a record, one with a checkpoint, one without either, and one with a record and a validation.
STOPS = (3, 4, 7, 10)
TIMES = {"time_s", "step_s", "tokens_per_s", "data_wait_s"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents that are shorter than two windows."""
    place = tmp_path_factory.mktemp("place")
    lines = [json.dumps({"text": f"document {number}"}) for number in range(100)]
    (place / "documents.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"text": f"{number}th row of the others"}) for number in range(30)]
    (place / "others.jsonl").write_text("\n".join(lines) + "\n")
    return place


def arguments(place: Path, name: str) -> list[str]:
    # The weights change at steps with a record, with a checkpoint, and without either.
    data = f"docs=2>0@3>1@7:{place}/documents.jsonl,others=1>3@4:{place}/others.jsonl"
    paths = f"--data {data} --storage-path {place} --prepare.cache-path {place}/tokens"
    return f"--name {name} {OPTIONS} {paths}".split()


@pytest.fixture(scope="module")
def run(place: Path) -> RunFolder:
    """A run that nothing has stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        assert main(arguments(place, "run")) == 0
    return RunFolder(place / "run")


def numbers(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of a run, without their times."""
    return [
        {name: value for name, value in record.items() if name not in TIMES} for record in read_records(folder.metrics)
    ]


def phases(folder: RunFolder) -> list[tuple[str, int]]:
    return [(phase.phase, phase.step) for phase in read_phases(folder)]


def plain_run(place: Path) -> tuple[list[dict[str, Any]], list[tuple[int, str, str]]]:
    """Return the records and the samples of a plain loop over the same windows."""
    config = parse_command(arguments(place, "plain"))
    assert isinstance(config, PretrainConfig)
    data = load_tokens(config, Console(quiet=True))
    model = with_vocab_size(config, data.vocab_size).model
    optimizer, mesh, key = create_optimizer(config.optimizer, MAX_STEPS), make_mesh(), jax.random.key(SEED)
    schedule, tokenizer = learning_rate_schedule(config.optimizer, MAX_STEPS), load_tokenizer("bytes")
    train_step = make_train_step(model, optimizer, mesh, grad_accum_steps=3, end_of_text=END_OF_TEXT)
    part, full = (
        Validation(
            model,
            data.val,
            num_tokens=num_tokens,
            batch_size=9,
            mesh=mesh,
            end_of_text=END_OF_TEXT,
            sources=[*zip(("docs", "others"), data.val_lengths, strict=True)],
        )
        for num_tokens in (100, None)
    )
    state = create_train_state(model, optimizer, jax.random.fold_in(key, 2**32 - 1), mesh)
    records, samples, losses, norms = [], [], list[float](), list[float]()
    for step in range(MAX_STEPS + 1):
        if step:
            windows = data.train.windows(np.arange(9) + (step - 1) * 9, seq_len=9, order="random", seed=SEED)
            state, metrics = train_step(state, put_batch(windows, mesh), key)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        if step not in RECORDED:
            continue
        record = {"step": step, "tokens": step * 81, "epoch": round(step * 9 / data.train.num_windows(9), 4)}
        if step:
            record |= {"loss": sum(losses) / len(losses), "grad_norm_max": max(norms)}
            record["learning_rate"] = float(schedule(step - 1))
            indices = np.arange(9) + (step - 1) * 9
            starts = data.train.starts(indices, order="random", seed=SEED, seq_len=9)
            record["windows"] = hashlib.sha256(starts.astype("<i8").tobytes()).hexdigest()[:16]
            losses, norms = [], []
        measured = [("", part)] * (step in EVALUATED) + [("full_", full)] * (step == MAX_STEPS)
        for prefix, validation in measured:
            loss, of_windows = validation.evaluate(state.params)
            bits = validation.bits_per_byte(loss, tokenizer)
            record |= {f"{prefix}val_loss": loss, f"{prefix}val_bits_per_byte": bits}
            record |= {f"{prefix}val_loss/{name}": value for name, value in of_windows.of_sources.items()}
        records.append(record)
        for number, prompt in enumerate(("a", "bc") if step in EVALUATED else ()):
            (text,) = continue_prompt(
                merge(model, state.params), tokenizer, prompt, num_samples=1, max_new_tokens=3, temperature=0.8,
                top_k=40, key=jax.random.fold_in(jax.random.key(SEED), 1) if number else jax.random.key(SEED),
            )  # fmt: skip
            samples.append((step, prompt, text))
    return records, samples


def test_a_run_has_the_records_and_the_samples_of_a_plain_loop(run: RunFolder, place: Path) -> None:
    """Each option has its effect: the seed, the order, the dropout, the microbatches, the masks and the intervals."""
    records, samples = plain_run(place)
    found = numbers(run)
    assert [record["step"] for record in found] == [*RECORDED]
    for record, expected in zip(found, records, strict=True):
        assert record.pop("windows", None) == expected.pop("windows", None)
        assert record == pytest.approx(expected, rel=1e-5)
    assert [(sample.step, sample.prompt, sample.text) for sample in read_samples(run)] == samples


def test_the_weights_of_a_run_change_after_their_steps(run: RunFolder, place: Path, capsys) -> None:
    description = read_description(run)
    assert description is not None
    assert description.data.fingerprint["weights"] == [[[0, 2.0], [27, 0.0], [63, 1.0]], [[0, 1.0], [36, 3.0]]]
    files = {}
    for step in range(1, MAX_STEPS + 1):
        assert main(["data", str(run.path), "--step", str(step), "--json"]) == 0
        windows = json.loads(capsys.readouterr().out)["windows"]
        files[step] = {Path(part["file"]).stem for window in windows for part in window["documents"]}
    assert all(files[step] == {"others"} for step in (4, 5, 6, 7))
    assert files[2] == files[8] == {"documents", "others"}
    data = open_tokens(description.data.tokens, tokenizer="bytes")
    assert isinstance(data.train, TokenMixture)
    counts = [data.train.counts(9 * step, SEED)[0] for step in range(MAX_STEPS + 1)]
    assert counts[3] == counts[7] < counts[11]


def test_other_weights_do_not_continue_a_run(run: RunFolder, place: Path, capsys) -> None:
    changed = [word.replace(">1@7:", ">1@8:") for word in arguments(place, "run")]
    assert main(changed) == 2
    assert "weights must be [[[0, 2.0], [27, 0.0], [63, 1.0]], [[0, 1.0], [36, 3.0]]]" in capsys.readouterr().err


def test_the_phases_of_a_run_have_the_steps_at_which_they_begin(run: RunFolder) -> None:
    assert phases(run) == [
        ("starting", 0), ("loading", 0), ("evaluating", 0), ("sampling", 0), ("compiling", 0), ("training", 1),
        ("saving", 4), ("training", 4), ("evaluating", 5), ("sampling", 5), ("training", 5), ("saving", 8),
        ("training", 8), ("evaluating", 10), ("sampling", 10), ("training", 10), ("saving", 11), ("evaluating", 11),
        ("sampling", 11), ("finished", 11),
    ]  # fmt: skip


def test_stops_at_several_steps_change_no_number(run: RunFolder, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = [*STOPS]

    def stop_at_the_next(step: int, computed: Any) -> bool:
        is_requested = stop_requested(step, computed)
        if step in stops:
            stops.remove(step)
            signal.raise_signal(signal.SIGINT)
            is_requested = stop_requested(step, computed)
        return is_requested

    monkeypatch.setattr(loop, "stop_requested", stop_at_the_next)
    folder, saved = RunFolder(place / "stopped"), {}
    for step in STOPS:
        assert main(arguments(place, "stopped")) == 130
        metadata = newest_metadata(folder.checkpoints)
        assert metadata is not None
        assert metadata["record"]["step"] == step
        saved[step] = metadata["record"]
    assert main(arguments(place, "stopped")) == 0
    assert numbers(folder) == numbers(run)
    assert read_samples(folder) == read_samples(run)
    assert folder.sample.read_text() == run.sample.read_text()
    assert [start["step"] for start in read_starts(folder)] == [0, *STOPS]
    # The record of a step that was saved is that of its own workers, with their times.
    written = {record["step"]: record for record in read_records(folder.metrics)}
    assert 7 not in written
    assert {step: saved[step].items() <= written[step].items() for step in (3, 4, 10)} == {3: True, 4: True, 10: True}
    assert phases(folder) == [
        ("starting", 0), ("loading", 0), ("evaluating", 0), ("sampling", 0), ("compiling", 0), ("training", 1),
        ("saving", 3), ("stopped", 3),
        ("starting", 3), ("loading", 3), ("compiling", 3), ("training", 4), ("saving", 4), ("stopped", 4),
        ("starting", 4), ("loading", 4), ("compiling", 4), ("training", 5), ("evaluating", 5), ("sampling", 5),
        ("training", 5), ("saving", 7), ("stopped", 7),
        ("starting", 7), ("loading", 7), ("compiling", 7), ("training", 8), ("saving", 8), ("training", 8),
        ("saving", 10), ("stopped", 10),
        ("starting", 10), ("loading", 10), ("evaluating", 10), ("sampling", 10), ("compiling", 10), ("training", 11),
        ("saving", 11), ("evaluating", 11), ("sampling", 11), ("finished", 11),
    ]  # fmt: skip


def test_a_run_that_was_killed_between_its_last_step_and_its_result_has_both(run: RunFolder, place: Path) -> None:
    shutil.copytree(run.path, place / "killed")
    folder = RunFolder(place / "killed")
    for path in (folder.result, folder.sample, folder.loss_picture):
        path.unlink()
    assert main(arguments(place, "killed")) == 0
    assert numbers(folder) == numbers(run)
    assert read_samples(folder) == read_samples(run)
    assert folder.sample.read_text() == run.sample.read_text()
    assert folder.loss_picture.exists()
    result = json.loads(folder.result.read_text())
    assert (result["steps"], result["restarts"]) == (11, 1)
    assert phases(folder)[-5:] == [
        ("starting", 11), ("loading", 11), ("evaluating", 11), ("sampling", 11), ("finished", 11),
    ]  # fmt: skip


def test_a_finished_run_gets_the_picture_that_a_kill_has_prevented_and_nothing_else(run: RunFolder, capsys) -> None:
    def files() -> dict[str, int]:
        kept = (path for path in run.path.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {str(path): path.stat().st_mtime_ns for path in kept}

    before = files()
    run.loss_picture.unlink()
    assert main(arguments(run.path.parent, "run")) == 0
    assert "is finished" in capsys.readouterr().out
    picture = str(run.loss_picture)
    assert files() == before | {picture: files()[picture]}
    assert files()[picture] != before[picture]
    assert main(arguments(run.path.parent, "run")) == 0
    assert files()[picture] != before[picture]


def test_the_best_checkpoint_is_one_that_was_saved(run: RunFolder) -> None:
    """No validation before the last step is at a step with a checkpoint, and that of step 11 came after its save."""
    metadata = newest_metadata(run.checkpoints)
    assert metadata is not None
    losses = [record["val_loss"] for record in read_records(run.metrics) if record["step"] in EVALUATED[:-1]]
    assert metadata["best"]["best_loss"] == min(losses)
    assert (metadata["best"]["best_saved_loss"], metadata["best"]["best_saved_step"]) == (None, None)


def test_the_text_at_the_end_of_a_run_continues_its_first_prompt(run: RunFolder) -> None:
    assert run.sample.read_text().startswith("a")


def test_a_continued_run_does_not_count_the_time_since_a_kill(run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    *lines, last = folder.phases.read_text().splitlines(keepends=True)
    assert json.loads(last)["phase"] == "finished"
    folder.phases.write_text("".join(lines))
    times = [phase.time_s for phase in read_phases(folder)]
    alive_s = max(*times, *(record["time_s"] for record in read_records(folder.metrics)))
    view = view_of(read_history(folder), parse_hardware("local"), None, alive_s + 1000)
    view.clock = lambda: alive_s + 1005
    assert (view.phase, view.phase_s(), view.num_restarts) == ("starting", pytest.approx(5), 1)
    assert view.elapsed_s() == pytest.approx(alive_s - times[0] + 5)
