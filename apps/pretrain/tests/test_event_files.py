"""TensorBoard's event files: the samples, the configuration, and the tag of each metric."""

import dataclasses
import struct
from typing import Any

from tensorboardX.proto import api_pb2, event_pb2, plugin_hparams_pb2

from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.differences import changes_result, option_values
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample
from pretrain._trackers.shown_values import hyperparameters
from pretrain._trackers.tensorboard import TensorBoard
from pretrain._trackers.tracker import open_trackers

# Their import makes the classes; type checkers do not see them.
api: Any = api_pb2
events: Any = event_pb2
hparams: Any = plugin_hparams_pb2
CONFIG = dataclasses.replace(PRESETS["quickstart"](), trackers=("tensorboard",), prompts=("a|b\n",))
DESCRIPTION = describe(CONFIG, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")


def values(folder, name):
    """The step and the value of each summary in the files of `train` or `val`."""
    for path in sorted((folder / name).iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack_from("<Q", data)
            event = events.Event.FromString(data[12 : 12 + size])
            yield from ((event.step, value) for value in event.summary.value)
            data = data[16 + size :]


def texts(folder):
    """Folder, step, tag and content of each text, those of `train` first."""
    return [
        (name, step, value.tag.removesuffix("/text_summary"), value.tensor.string_val[0].decode())
        for name in ("train", "val")
        for step, value in values(folder, name)
        if value.metadata.plugin_data.plugin_name == "text"
    ]


def scalars(folder, name):
    """Step, tag and value of each number."""
    return {
        (step, value.tag, value.simple_value)
        for step, value in values(folder, name)
        if not value.metadata.plugin_data.plugin_name
    }


def test_a_sample_has_the_number_of_its_prompt_and_its_text(tmp_path):
    tracker = TensorBoard(tmp_path, 0, {}, {}, ("def ", "import "))
    for prompt, text in (("import ", "import re"), ("def ", "def f():\n    pass\n"), ("other", "other words")):
        tracker.write_sample(Sample(step=7, prompt=prompt, text=text))
    tracker.write_sample(Sample(step=9, prompt="other", text="other"))
    tracker.close()
    assert texts(tmp_path)[1:] == [
        ("val", 7, "samples/2", "    import re\n"),
        ("val", 7, "samples/1", "    def f():\n        pass\n"),
        ("val", 7, "samples/3", "    other words\n"),
        ("val", 9, "samples/3", "    other\n"),
    ]


def test_the_configuration_is_shown_once(tmp_path):
    for start in (0, 3):
        trackers = open_trackers(CONFIG, DESCRIPTION, RunFolder(tmp_path), start)
        trackers.write({"step": start, "loss": 3.0})
        trackers.write({"step": start + 2, "loss": 3.0})
        trackers.close()
    ((name, step, tag, table),) = texts(tmp_path / "tensorboard")
    assert (name, step, tag) == ("train", 0, "config")
    lines = table.splitlines()
    assert lines[:2] == ["| option | value |", "|---|---|"]
    assert {"| model.num_layers | 4 |", '| prompts | ["a\\|b\\n"] |', '| hardware | "cpu:1" |'} <= {*lines}
    assert {line.replace("\\|", "").count("|") for line in lines[2:]} == {3}


def test_a_metric_of_the_validation_is_in_the_folder_of_the_validation(tmp_path):
    tracker = TensorBoard(tmp_path, 0, {}, {}, ())
    tracker.write(
        {"step": 7, "loss": 1.5, "mfu": 0.25, "val_loss": 2.5, "val_bits_per_byte": 3.5, "full_val_loss": 4.5}
    )
    tracker.close()
    assert scalars(tmp_path, "train") == {(7, "loss", 1.5), (7, "speed/mfu", 0.25)}
    assert scalars(tmp_path, "val") == {(7, "loss", 2.5), (7, "bits_per_byte", 3.5), (7, "full_loss", 4.5)}
    assert (tmp_path / "recorded_steps").read_text() == "8"


def sessions(folder):
    """Step, options and status of each summary for the page HPARAMS, by its tag."""
    for step, value in values(folder, "val"):
        if value.metadata.plugin_data.plugin_name == "hparams":
            content = hparams.HParamsPluginData.FromString(value.metadata.plugin_data.content)
            options = {
                name: getattr(option, option.WhichOneof("kind"))
                for name, option in content.session_start_info.hparams.items()
            }
            yield value.tag, step, options, content.session_end_info.status


def test_the_options_that_change_the_result_are_written_once(tmp_path):
    for start in (0, 3, 6):
        trackers = open_trackers(CONFIG, DESCRIPTION, RunFolder(tmp_path), start)
        trackers.write({"step": start + 2, "val_loss": 3.0} | ({"full_val_loss": 3.5} if start == 6 else {}))
        trackers.close()
    begun, ended = sessions(tmp_path / "tensorboard")
    assert begun == (
        "_hparams_/session_start_info",
        0,
        hyperparameters(DESCRIPTION),
        api.Status.Value("STATUS_UNKNOWN"),
    )
    assert ended == ("_hparams_/session_end_info", 8, {}, api.Status.Value("STATUS_SUCCESS"))
    assert {*(path.parent.name for path in tmp_path.glob("tensorboard/**/events*"))} == {"train", "val"}


def test_hyperparameters_are_the_options_that_change_the_result():
    found = hyperparameters(DESCRIPTION)
    assert found["optimizer.learning_rate"] == 2e-3
    assert (found["seed"], found["train.mask_documents"], found["data"]) == (2357, False, "builtin")
    assert "model.mlp_dim" not in found  # none
    assert {name for name in found if not changes_result(name)} == set()
    lacking = {name for name, value in option_values(CONFIG).items() if changes_result(name)} - found.keys()
    assert {option_values(CONFIG)[name] for name in lacking} == {None}
