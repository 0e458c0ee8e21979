import dataclasses
import json
import re

import pytest

from pretrain import PRESETS
from pretrain._errors import UsageError
from pretrain._report import write_report
from pretrain._run import RunFolder, check_same_data, check_same_settings, claim, describe, write_json


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
