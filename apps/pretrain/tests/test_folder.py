import contextlib
import dataclasses
import json
import os
from pathlib import Path

import pytest

from pretrain import PRESETS
from pretrain._commands.train import write_result_and_picture
from pretrain._config import with_vocab_size
from pretrain._errors import UsageError
from pretrain._run.checkpoint_digests import description_digests
from pretrain._run.description import DataDescription, RunDescription, read_description, write_description
from pretrain._run.files import append_line
from pretrain._run.find import NoRunError, find_run, find_unless_published
from pretrain._run.folder import RunFolder, locate
from pretrain._run.remote_copy import reader_copy
from pretrain._run.result import RunResult, read_result


def described(path):
    """The folder of a run of the quickstart."""
    config = with_vocab_size(PRESETS["quickstart"](), 257)
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={})
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    write_description(
        folder, RunDescription(config=config, data=data, hardware="cpu:1", versions={"nnx-gpt2": "0.7.0"}, commit="abc")
    )
    return folder


def repetition(folder):
    """The fields of the result that a repetition of the run needs."""
    description = read_description(folder)
    assert description is not None
    return {
        "repeat": f"pretrain --config {folder.config} --name {folder.name}-again",
        "hardware": "cpu:1", "versions": {"nnx-gpt2": "0.7.0"}, "digests": description_digests(description),
    }  # fmt: skip


def test_a_name_is_that_of_a_run_before_that_of_a_folder(tmp_path, monkeypatch):
    """The command `export first first` writes a folder beside `runs`."""
    monkeypatch.chdir(tmp_path)
    described(tmp_path / "runs" / "first")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text('{"model_type": "gpt2"}')
    assert find_run("first")[0].path == tmp_path / "runs" / "first"
    with pytest.raises(UsageError, match="must be a run, got a folder of weights alone"):
        find_run("./first")


@pytest.mark.parametrize(
    "place",
    ["runs/first", "s3://bucket/first", "s3://bucket/runs/first?endpoint_override=http://host:9000&scheme=http"],
)
def test_the_name_of_a_run_is_the_last_part_of_its_place(place):
    assert locate(place).name == "first"


def test_runs_of_one_name_have_copies_of_their_own():
    servers = [f"s3://runs/first?endpoint_override=http://{host}:9000" for host in ("a", "b")]
    places = ["s3://runs/first", "s3://other/first", "gs://runs/first", *servers]
    assert len({locate(place).path for place in places}) == len({reader_copy(place).path for place in places}) == 5


def test_a_run_with_a_long_name_has_a_copy_whose_name_a_file_system_takes() -> None:
    for place in (locate(f"s3://bucket/{'x' * 255}"), reader_copy(f"s3://bucket/{'x' * 255}")):
        assert len(place.path.name) < 100
        place.path.mkdir(parents=True)
        place.lock.touch()


def test_the_runs_beside_a_name_that_does_not_exist_are_told_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for storage, ages in (("runs", "hcjadgbief"), ("elsewhere", "mkl")):
        for age, name in enumerate(ages):
            config = tmp_path / storage / name / "config.json"
            config.parent.mkdir(parents=True)
            config.touch()
            os.utime(config, (1000.0 - age, 1000.0 - age))
    with pytest.raises(UsageError, match="runs has h, c, j, a, d, g, b, i and 2 more"):
        find_run("absent")
    with pytest.raises(UsageError, match=r"got first@3\. This command takes a run: leave out what follows the @\.$"):
        find_run("first@3")
    with pytest.raises(UsageError, match="elsewhere has m, k, l"):
        find_run(str(tmp_path / "elsewhere" / "absent"))


def test_the_report_sums_up_the_run(tmp_path):
    folder = described(tmp_path)
    folder.metrics.write_text(
        '{"step": 0, "val_loss": 5.0}\n{"step": 2, "loss": 3.0}\n'
        '{"step": 5, "loss": 2.0, "val_loss": 1.6, "step_s": 0.5}\n'
        '{"step": 10, "epoch": 0.5, "tokens": 640, "loss": 1.5, "val_loss": 1.7, "full_val_loss": 1.8, "step_s": 0.25,'
        ' "full_val_bits_per_byte": 2.6, "time_s": 1020.0}\n'
    )
    folder.starts.write_text(
        '{"step": 0, "workers": 1}\n{"step": 5, "workers": 2, "devices": 4, "device": "NVIDIA H200",'
        ' "processor": "EPYC"}\n'
    )
    phases = [(0, 1000.0, "starting"), (0, 1004.0, "training"), (5, 1010.0, "stopped"), (5, 1015.5, "starting")]
    phases += [(5, 1016.0, "training"), (10, 1020.0, "evaluating"), (10, 1021.0, "finished")]
    for step, time_s, phase in phases:
        append_line(folder.phases, {"step": step, "time_s": time_s, "phase": phase})
    result = write_result_and_picture(folder, "mine")
    assert result == RunResult(
        steps=10,
        metrics={
            "val_loss": 1.7, "loss": 1.5, "full_val_loss": 1.8, "full_val_bits_per_byte": 2.6, "step_s": 0.25,
        },
        restarts=1, workers=2, num_params=834432, tokens=640, epochs=0.5,
        full_val_loss=1.8, full_val_bits_per_byte=2.6,
        best_val_loss=1.6, best_val_step=5, last_val_loss=1.7, last_val_step=10,
        began_at="1970-01-01T00:16:40+00:00", ended_at="1970-01-01T00:17:01+00:00",
        device="NVIDIA H200", devices=4, commit="abc",
        tokens_per_s=2978.91,  # the 8 timed steps, of 1 024 tokens, in 3 * 0.5 + 5 * 0.25 seconds
        seconds={"starting": 4.5, "training": 10.0, "evaluating": 1.0}, processor="EPYC", **repetition(folder),
    )  # fmt: skip
    assert json.loads(folder.result.read_text()) == dataclasses.asdict(result)
    assert folder.loss_picture.read_bytes().startswith(b"\x89PNG")
    assert read_result(folder) == result


@pytest.mark.fault
def test_a_picture_that_cannot_be_drawn_does_not_keep_a_run_from_being_finished(tmp_path, caplog, record_property):
    record_property("fault", "loss.png cannot be written")
    record_property("lost", "the picture")
    folder = described(tmp_path)
    folder.metrics.write_text('{"step": 0, "val_loss": NaN}\n{"step": 10, "loss": 1.5}\n')
    folder.starts.write_text('{"step": 0, "workers": 1}\n')
    folder.loss_picture.mkdir()
    assert write_result_and_picture(folder, "mine") == read_result(folder)
    (warning,) = caplog.messages
    assert warning.startswith(f"the run goes on without the picture {folder.loss_picture}: ")


@pytest.mark.fault
@pytest.mark.parametrize("contents", [b"", b"\0\0\0\0", b'{"step": 1'])
def test_a_run_whose_metrics_are_lost_can_be_finished(tmp_path, caplog, contents, record_property):
    record_property("fault", f"metrics.jsonl and starts.jsonl hold {contents!r} at the end of a run")
    record_property("lost", "the damaged lines")
    folder = described(tmp_path)
    for path in (folder.metrics, folder.starts, folder.phases, folder.samples):
        path.write_bytes(contents)
    result = write_result_and_picture(folder, "mine")
    assert result == RunResult(
        steps=None,
        metrics={},
        restarts=None,
        workers=None,
        num_params=834432,
        commit="abc",
        **repetition(folder),
    )
    assert folder.loss_picture.read_bytes().startswith(b"\x89PNG")
    assert caplog.messages == []


@pytest.mark.fault
@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\0\0\0\0",
        b'{"steps": 1',
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"steps": 1, "metrics": {"val_loss": "low"}, "restarts": 0, "workers": 1}',
    ],
)
def test_a_result_that_a_power_cut_emptied_is_written_again(tmp_path, contents, record_property):
    record_property("fault", f"result.json holds {contents!r}")
    record_property("lost", "nothing")
    folder = RunFolder(tmp_path)
    assert read_result(folder) is None
    folder.result.write_bytes(contents)
    assert read_result(folder) is None


@pytest.mark.parametrize(
    ("name", "is_published"),
    [
        ("gpt2", True), ("gpt2-xl", True), ("gpt3", False), ("owner/model", True), ("runs/model", False),
        ("./owner/model", False), ("/owner/model", False), ("a/b/c", False), ("here/model", False), ("weights", True),
        ("both", False), ("damaged", False),
    ],
)  # fmt: skip
def test_a_name_is_that_of_weights_if_it_is_one_of_the_hub_or_of_their_folder(
    name: str, is_published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, text in (
        ("here/model", '{"format": 1}'), ("weights", '{"model_type": "gpt2"}'), ("both", '{"model_type": "gpt2"}'),
        ("runs/both", '{"format": 1}'), ("damaged", "[3"),
    ):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(text)

    def find(name: str) -> str:
        raise NoRunError(name, "Train one.")

    with contextlib.nullcontext() if is_published else pytest.raises(UsageError, match=f"got {name}. Train one."):
        assert find_unless_published(name, find) is None
