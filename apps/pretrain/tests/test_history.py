"""The end of a run, as the driver writes it."""

import pytest

from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run.description import DataDescription, RunDescription
from pretrain._run.files import append_line
from pretrain._run.find import best_step
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history, read_phases, read_scores, summarize, write_end


@pytest.mark.parametrize(
    ("last", "time_s", "written"),
    [
        ("training", 50.0, [("failed", 7, 50.0)]),
        ("training", None, [("failed", 7, 20.0)]),  # the time of the last sign of life
        ("stopped", 50.0, []),
        ("finished", 50.0, []),
    ],
)
def test_the_end_of_a_command_is_written_once(tmp_path, last, time_s, written):
    folder = RunFolder(tmp_path)
    append_line(folder.phases, {"step": 3, "time_s": 10.0, "phase": last})
    append_line(folder.metrics, {"step": 7, "time_s": 20.0})
    for _ in range(2):
        write_end(folder, "failed", time_s)
    _, *ends = [(phase.phase, phase.step, phase.time_s) for phase in read_phases(folder)]
    assert ends == written


def test_the_end_of_a_command_has_the_time_of_all_phases_before_it(tmp_path):
    folder = RunFolder(tmp_path)
    append_line(folder.phases, {"step": 3, "time_s": 10.0, "phase": "training", "before_s": 2.5})
    write_end(folder, "failed", 30.0)
    assert [phase.before_s for phase in read_phases(folder)] == [2.5, 22.5]


def test_no_end_is_written_into_the_folder_of_another_run(tmp_path):
    write_end(RunFolder(tmp_path, owner="the id of this command"), "failed", 50.0)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("time_s", "written_s"), [(50.98765, 50.988), (None, 1234.568)])
def test_the_end_of_a_command_without_a_step_is_at_step_0_in_milliseconds(tmp_path, monkeypatch, time_s, written_s):
    monkeypatch.setattr("pretrain._run.history.time.time", lambda: 1234.56789)
    folder = RunFolder(tmp_path)
    write_end(folder, "stopped", time_s)
    assert [(phase.phase, phase.step, phase.time_s) for phase in read_phases(folder)] == [("stopped", 0, written_s)]


def test_an_end_that_cannot_be_written_is_no_error(tmp_path):
    folder = RunFolder(tmp_path)
    folder.phases.mkdir()
    write_end(folder, "stopped", 50.0)
    assert [*folder.phases.iterdir()] == []


def test_a_checkpoint_that_was_scored_twice_has_its_last_scores_and_all_are_in_the_order_of_checkpoints(tmp_path):
    folder = RunFolder(tmp_path)
    for step, of, score in ((12, 8, 0.5), (14, 4, 0.25), (16, 8, 0.75)):
        append_line(folder.scores, {"step": step, "tasks/step": of, "tasks/piqa/acc": score})
    append_line(folder.scores, {"step": 20, "loss": 1.0})  # no scores
    assert read_scores(folder) == [
        {"step": of, "tasks/step": of, "tasks/piqa/acc": score} for of, score in ((4, 0.25), (8, 0.75))
    ]


def test_the_first_of_equal_validation_losses_is_the_best(tmp_path):
    """That of `RUN@best` is among the checkpoints that exist, as is the one that the run keeps."""
    losses = ((0, 1.0), (5, 2.5), (10, 2.0), (15, 2.0), (20, 2.25))
    records = [{"step": step, "val_loss": loss} for step, loss in losses]
    assert best_step([*records, {"step": 25, "val_loss": float("nan")}, {"step": 30}], [5, 10, 15, 20, 25]) == 10
    assert best_step(records, [5, 15, 20]) == 15
    assert best_step([{"step": 30}], [30]) is None
    folder = RunFolder(tmp_path)
    for record in records:
        append_line(folder.metrics, record)
    config, data = PRESETS["quickstart"](), DataDescription(tokens="a", tokenizer="bytes", fingerprint={})
    description = RunDescription(config=with_vocab_size(config, 257), data=data, hardware="local", versions={})
    found = summarize(read_history(folder, description))
    # The loss of the untrained model does not count.
    assert (found.best_val_loss, found.best_val_step, found.last_val_step) == (2.0, 10, 20)
    assert (found.began_at, found.ended_at) == (None, None)
    # A run whose phases are lost began when its first workers did.
    append_line(folder.starts, {"step": 0, "time_s": 60.0})
    append_line(folder.starts, {"step": 9, "time_s": 120.0})
    assert summarize(read_history(folder, description)).began_at == "1970-01-01T00:01:00+00:00"
    append_line(folder.phases, {"step": 0, "time_s": 30.0, "phase": "starting"})
    assert summarize(read_history(folder, description)).began_at == "1970-01-01T00:00:30+00:00"
