import dataclasses
import json

from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._training.run_log import RunLog

CONFIG = dataclasses.replace(PRESETS["quickstart"](), trackers=())
DESCRIPTION = describe(CONFIG, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    sent = []
    with RunLog(folder, CONFIG, DESCRIPTION, sent.append) as log:
        log.begin(10, 0.0, "cpu", 1)
        log.write({"step": 10, "loss": 2.0})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [
        {"step": 0},
        {"step": 10, "loss": 2.0},
    ]
    assert {"step": 10, "loss": 2.0} in sent
    assert json.loads(folder.starts.read_text())["step"] == 10


def test_what_is_not_finite_is_left_out(tmp_path):
    folder, sent = RunFolder(tmp_path), []
    with RunLog(folder, CONFIG, DESCRIPTION, sent.append) as log:
        log.begin(0, 0.0, "cpu", 1)
        log.write({"step": 0, "val_loss": float("nan"), "learning_rate": 0.5})
    assert read_lines(folder.metrics) == [{"step": 0, "learning_rate": 0.5}]
    assert {"step": 0, "learning_rate": 0.5} in sent
