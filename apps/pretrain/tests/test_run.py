import dataclasses
import json
import re

import pytest

from pretrain import PRESETS
from pretrain._errors import UsageError
from pretrain._report import read_result, summary, write_report
from pretrain._run import (
    RunFolder,
    check_same_data,
    check_same_settings,
    claim,
    describe,
    read_description,
    write_json,
)


def test_a_folder_is_held_against_a_second_command(tmp_path):
    with (
        claim(str(tmp_path / "run")) as folder,
        pytest.raises(UsageError, match="another command is training in"),
        claim(str(tmp_path / "run")),
    ):
        pass
    with claim(str(tmp_path / "run")):
        assert folder.path.exists()


def test_a_refusal_leaves_no_folder_behind(tmp_path):
    with pytest.raises(ValueError, match="too few"), claim(str(tmp_path / "run")):
        raise ValueError("too few")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_leaves_an_earlier_run_alone(tmp_path):
    with claim(str(tmp_path / "run")) as folder:
        write_json(folder.config, {"a": 1})
    with pytest.raises(ValueError, match="conflict"), claim(str(tmp_path / "run")):
        raise ValueError("conflict")
    assert json.loads(folder.config.read_text()) == {"a": 1}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"expected a storage path that can be written, .*: Not a directory"),
        claim(str(tmp_path / "file" / "run")),
    ):
        pass


@pytest.fixture
def stored():
    return describe(
        PRESETS["quickstart"](), {"train": "a", "fingerprint": {"train.bin": "x", "tokenizer": "b"}}, "cpu:1"
    )


def test_the_same_settings_elsewhere_continue_a_run(stored, tmp_path):
    config = dataclasses.replace(PRESETS["quickstart"](), hardware="gpu:8", data="elsewhere", prompt="class ")
    check_same_settings(json.loads(json.dumps(stored)), config, tmp_path)
    check_same_data(stored, {"tokenizer": "b", "train.bin": "x"}, tmp_path)


def test_other_settings_are_named(stored, tmp_path):
    config = PRESETS["quickstart"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=6))
    with pytest.raises(UsageError, match=re.escape("was started with model.num_layers 4, not 6")):
        check_same_settings(stored, config, tmp_path)


def test_other_data_is_named(stored, tmp_path):
    with pytest.raises(UsageError, match=re.escape("was started on other data (train.bin differs)")):
        check_same_data(stored, {"train.bin": "y", "tokenizer": "b"}, tmp_path)


def test_versions_of_everything_are_recorded(stored):
    assert set(stored["versions"]) >= {"python", "pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "ray"}


def test_the_report_sums_up_the_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(
        '{"step": 0, "val_loss": 5.0}\n{"step": 9, "loss": 2.0}\n{"step": 10, "loss": 1.5, "val_loss": 1.7}\n'
    )
    folder.starts.write_text('{"step": 0, "workers": 1}\n{"step": 5, "workers": 2}\n')
    result = write_report(folder, "mine", wall_s=12.34)
    assert result == {
        "steps": 10,
        "metrics": {"val_loss": 1.7, "loss": 1.5},
        "wall_s": 12.3,
        "restarts": 1,
        "workers": 2,
    }
    assert json.loads(folder.result.read_text()) == result
    assert folder.loss_picture.read_bytes().startswith(b"\x89PNG")
    assert read_result(folder) == result
    assert summary(result) == "10 steps, validation loss 1.7000"


@pytest.mark.fault
def test_a_picture_that_cannot_be_drawn_does_not_keep_a_run_from_being_finished(tmp_path, caplog, record_property):
    record_property("fault", "loss.png cannot be written")
    record_property("lost", "the picture")
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0, "val_loss": NaN}\n{"step": 10, "loss": 1.5}\n')
    folder.starts.write_text('{"step": 0, "workers": 1}\n')
    folder.loss_picture.mkdir()
    assert write_report(folder, "mine", wall_s=1.0) == read_result(folder)
    (warning,) = caplog.messages
    assert warning.startswith(f"the run goes on without the picture {folder.loss_picture}: IsADirectoryError: ")


@pytest.mark.fault
@pytest.mark.parametrize("contents", [b"", b"\0\0\0\0", b'{"step": 1'])
def test_a_run_whose_metrics_are_lost_can_be_finished(tmp_path, caplog, contents, record_property):
    record_property("fault", f"metrics.jsonl and starts.jsonl hold {contents!r} at the end of a run")
    record_property("lost", "the damaged lines")
    folder = RunFolder(tmp_path)
    for path in (folder.metrics, folder.starts):
        path.write_bytes(contents)
    result = write_report(folder, "mine", wall_s=1.0)
    assert result == {"steps": None, "metrics": {}, "wall_s": 1.0, "restarts": None, "workers": None}
    assert summary(result) == "its metrics are lost"
    assert folder.loss_picture.read_bytes().startswith(b"\x89PNG")
    assert caplog.messages == []


@pytest.mark.fault
@pytest.mark.parametrize("contents", [b"", b"\0\0\0\0", b'{"steps": 1', b"[]", b"{}"])
def test_a_result_that_a_power_cut_emptied_is_written_again(tmp_path, contents, record_property):
    record_property("fault", f"result.json holds {contents!r}")
    record_property("lost", "nothing")
    folder = RunFolder(tmp_path)
    assert read_result(folder) is None
    folder.result.write_bytes(contents)
    assert read_result(folder) is None


@pytest.mark.parametrize(
    ("contents", "got"),
    [
        (b"", "an empty one"),
        (b"\0\0", "an empty one"),
        (b'{"config": {"pre', '\'{"config": {"pre\''),
        (b"[1]", "'[1]'"),
    ],
)
def test_a_configuration_that_a_power_cut_emptied_is_named(tmp_path, contents, got):
    folder = RunFolder(tmp_path)
    folder.config.write_bytes(contents)
    expected = (
        f"{folder.config} must be a file of one JSON object, got {got}. Restore it from a copy, or choose another"
    )
    with pytest.raises(UsageError, match=re.escape(expected)):
        read_description(folder)
    folder.config.write_text('{"config": {}, "data": 3}')
    with pytest.raises(
        UsageError, match=re.escape("must have the objects config, data and versions, got none as data.")
    ):
        read_description(folder)
