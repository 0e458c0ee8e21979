import json

from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._trackers.tracker import Trackers
from pretrain._training.run_log import RunLog


def without_trackers(folder, start):
    return Trackers()


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    sent = []
    with RunLog(folder, sent.append, without_trackers) as log:
        log.begin(10)
        log.write({"step": 10, "loss": 2.0})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [
        {"step": 0},
        {"step": 10, "loss": 2.0},
    ]
    assert sent == [{"step": 10, "loss": 2.0}]
    assert json.loads(folder.starts.read_text())["step"] == 10


def test_what_is_not_finite_is_left_out(tmp_path):
    folder, sent = RunFolder(tmp_path), []
    with RunLog(folder, sent.append, without_trackers) as log:
        log.begin(0)
        log.write({"step": 0, "val_loss": float("nan"), "learning_rate": 0.5})
    assert sent == read_lines(folder.metrics) == [{"step": 0, "learning_rate": 0.5}]
