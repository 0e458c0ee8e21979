"""Files of a run that another program has replaced or damaged: each command ends soon, and in a sentence."""

import dataclasses
import json
import os
import signal

import pytest

from pretrain import PRESETS, main
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.history import read_history
from pretrain._run.lock import lock_run
from pretrain._run.result import read_result

BEGAN_S = 1_700_000_000.0
COMMANDS = (
    "watch run",
    "runs",
    "report run --out page.html",
    "eval run",
    "sample run",
    "export run out",
)
TRAIN = "--name run --hardware local"
DEEP = "[" * 200_000
HUGE = "1" + "0" * 400
LINES = ("metrics.jsonl", "starts.jsonl", "phases.jsonl", "samples.jsonl")
DAMAGE = {
    "too deep": DEEP + "\n",
    "too deep in a line": '{"step": 1, "loss": ' + DEEP + "\n",
    "huge step": f'{{"step": {HUGE}}}\n{{"step": {HUGE}, "time_s": 1.0, "phase": "training"}}\n',
    "huge loss": f'{{"step": 1, "loss": {HUGE}}}\n',
    "large floats": '{"step": 1, "loss": 1e300, "step_s": 1e300, "tokens_per_s": 1e300}\n',
    "infinite": '{"step": 1, "loss": 1e999, "step_s": Infinity, "time_s": 5.0, "tokens": 1e999}\n',
    "late": '{"step": 1, "time_s": 1e300, "phase": "training"}\n{"step": 1, "loss": 1.0, "time_s": 1e300}\n',
    "late start": '{"step": 1, "time_s": 1.0, "began_s": 1e300, "workers": 1, "device": "cpu"}\n',
    "denormal losses": "".join(f'{{"step": {n}, "loss": {n * 5e-324}, "val_loss": {n * 5e-324}}}\n' for n in (2, 3)),
    "unknown phase": '{"step": 1, "time_s": 1.0, "phase": "resting"}\n',
    "many workers": f'{{"step": 1, "time_s": 1.0, "workers": {HUGE}, "devices": {HUGE}, "device": "cpu"}}\n',
}
RESULT = {"steps": 1, "metrics": {"loss": 1.0}, "restarts": 0, "workers": 1}
RESULTS = {
    "too deep": DEEP,
    "huge steps": json.dumps(RESULT | {"steps": 10**400}),
    "huge loss": json.dumps(RESULT | {"metrics": {"loss": 10**400}}),
    "large times": json.dumps(RESULT | {"tokens_per_s": 1e300, "seconds": {"training": 1e300}}),
    "no time": json.dumps(RESULT | {"began_at": "soon", "ended_at": "x"}),
}
# Values of the right type that no run writes.
IMPOSSIBLE = {
    "infinite time": {"seconds": {"training": float("inf")}},
    "no number": {"tokens_per_s": float("nan")},
    "negative time": {"seconds": {"training": -5.0, "saving": 5.0}},
    "negative steps": {"steps": -1},
    "infinite loss": {"metrics": {"loss": float("inf")}},
    "no end": {"ended_at": "soon"},
    "best loss without a step": {"best_val_loss": 1.0},
    "loss without a step": {"best_val_loss": 1.0, "last_val_loss": 1.0, "best_val_step": 1, "last_val_step": None},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that a killed command has left before its first checkpoint."""
    monkeypatch.chdir(tmp_path)
    with lock_run("runs/run") as folder:
        config = PRESETS["quickstart"]()
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
        data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
        write_description(folder, describe(config, data, "local"))
        append_line(folder.starts, {"step": 0, "time_s": BEGAN_S, "workers": 1, "devices": 2, "device": "TPU v4"})
        append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
        append_line(folder.metrics, {"step": 1, "time_s": BEGAN_S + 1, "loss": 2.0, "step_s": 1.0})
    return folder


@pytest.fixture(autouse=True)
def _limit():
    """End a test that hangs in a system call."""

    def fail(number, frame):
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def ends(capsys, command):
    """The output of a command, which ends with exit code 0 or 2."""
    code = main(command.split())
    found = capsys.readouterr()
    assert code in (0, 2), found.err
    assert "Traceback" not in found.err
    assert len([line for line in found.err.splitlines() if line.startswith("error: ")]) == (code == 2)
    return found.out + found.err


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_no_traceback(run, capsys, damage):
    for name in LINES:
        with (run.path / name).open("a") as file:
            file.write(DAMAGE[damage])
    for command in COMMANDS:
        ends(capsys, command)


@pytest.mark.parametrize("damage", RESULTS)
def test_a_damaged_result_is_no_traceback(run, capsys, damage):
    run.result.write_text(RESULTS[damage])
    for command in COMMANDS:
        ends(capsys, command)


@pytest.mark.parametrize("damage", IMPOSSIBLE)
def test_a_result_with_impossible_values_is_damaged(run, capsys, damage):
    run.result.write_text(json.dumps(RESULT | IMPOSSIBLE[damage]))
    assert read_result(run) is None
    assert "finished" not in ends(capsys, "watch run")


def test_the_page_of_denormal_losses_has_them_as_zero(run, capsys):
    run.metrics.write_text('{"step": 1, "loss": 5e-324}\n{"step": 2, "loss": 1e-323}\n')
    assert "wrote page.html" in ends(capsys, "report run --out page.html")


def test_records_are_read_in_the_order_of_steps(run, capsys):
    run.metrics.write_text(
        '{"step": 3, "loss": 1.0, "time_s": 1700000003.0}\n{"step": 1, "loss": 2.0, "time_s": 1700000001.0}\n'
    )
    assert [record["step"] for record in read_history(run).records] == [1, 3]
    assert "wrote page.html" in ends(capsys, "report run --out page.html")


@pytest.mark.parametrize("tokens", ["-1e39", "-1", "1e39"])
def test_a_record_with_an_impossible_number_of_tokens_is_damaged(run, capsys, tokens):
    with run.metrics.open("a") as file:
        file.write(f'{{"step": 2, "tokens": {tokens}}}\n')
    assert " 1/1500 " in ends(capsys, "runs")


@pytest.mark.parametrize(
    "content", [DEEP, '{"format": 1, "config": {"train": {"max_steps": ' + HUGE + "}}}"], ids=["deep", "huge"]
)
def test_a_damaged_description_is_one_sentence(run, capsys, content):
    run.config.write_text(content)
    for command in COMMANDS:
        assert "must be JSON as a run writes it" in ends(capsys, command)


@pytest.mark.parametrize("name", ["config.json", *LINES, "result.json", ".lock"])
def test_a_pipe_in_place_of_a_file_does_not_hang(run, capsys, name):
    path = run.path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    # Without its lock, nothing tells that the command was killed, and `watch` goes on.
    for command in [TRAIN, *(command for command in COMMANDS if (command, name) != ("watch run", ".lock"))]:
        is_read = name != ".lock" and (command == TRAIN or (command == "runs" and name != "samples.jsonl"))
        assert "a named pipe" in ends(capsys, command) or not is_read


def test_a_killed_command_is_seen_at_once_on_its_machine(run, capsys):
    assert "the run has failed at step 1: run the same command again to continue" in ends(capsys, "watch run")
    assert "failed" in ends(capsys, "runs")
