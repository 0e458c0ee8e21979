"""The files of the losses: cut, damaged, in object storage, and of runs that are stopped and killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from many_runs import environment
from pyarrow.fs import FileSelector

from pretrain import main
from pretrain._errors import UsageError
from pretrain._run import log_parts
from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._run.log_parts import METRICS, STARTS, TEXTS, LogWriter
from pretrain._run.metrics import read_records
from pretrain._run.remote_copy import pull_changed, reader_copy
from pretrain._run.step_losses import (
    ValLosses,
    cut_step_losses,
    read_step_losses,
    read_val_losses,
    write_step_losses,
    write_val_losses,
)
from ray_jax_launch import open_uri

NAN = float("nan")
APPLICATION = str(Path(__file__).parent.parent)
STEPS, SEQ_LEN = 43, 16
OPTIONS = (
    f"--data book.txt --tokenizer bytes --hardware local --name run --trackers --train.max-steps {STEPS} "
    f"--train.global-batch-size 4 --model.seq-len {SEQ_LEN} --model.num-layers 1 --model.num-heads 1 "
    "--model.embed-dim 8 --train.log-every 4 --train.eval-every 21 --train.checkpoint-every 9 --train.sample-tokens 0"
).split()


def check(path, expected):
    np.testing.assert_array_equal(read_step_losses(path), np.array(expected, np.float32))


def test_entries_are_little_endian_float32_in_the_order_of_steps(tmp_path):
    path = tmp_path / "losses"
    write_step_losses(path, 1, [1.5, NAN])
    write_step_losses(path, 3, [0.1])
    assert path.read_bytes() == bytes.fromhex("0000c03f 0000c07f cdcccc3d")


def test_a_missing_file_has_no_losses(tmp_path):
    check(tmp_path / "losses", [])


def test_entries_that_are_missing_become_nan(tmp_path):
    path = tmp_path / "losses"
    write_step_losses(path, 3, [3.0])
    check(path, [NAN, NAN, 3.0])
    cut_step_losses(path, 5)
    check(path, [NAN, NAN, 3.0, NAN, NAN])


def test_a_step_that_is_done_again_replaces_the_later_ones(tmp_path):
    path = tmp_path / "losses"
    write_step_losses(path, 1, [1.0, 2.0, 3.0, 4.0])
    write_step_losses(path, 2, [5.0])
    check(path, [1.0, 5.0])


@pytest.mark.parametrize(("num_steps", "expected"), [(0, []), (2, [1.0, 2.0]), (3, [1.0, 2.0, NAN])])
def test_an_entry_that_a_kill_has_cut_is_lost(num_steps, expected, tmp_path):
    path = tmp_path / "losses"
    path.write_bytes(np.array([1.0, 2.0, 3.0], "<f4").tobytes()[:-1])
    check(path, [1.0, 2.0])
    cut_step_losses(path, num_steps)
    check(path, expected)
    assert path.stat().st_size == 4 * num_steps


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "losses")
    functions = read_step_losses, lambda path: write_step_losses(path, 1, [1.0]), lambda path: read_val_losses(path, 8)
    for function in functions:
        with pytest.raises(OSError, match="named pipe"):
            function(tmp_path / "losses")


def test_losses_of_windows_come_back(tmp_path):
    losses = np.array([1.5, 2.5, 0.1], np.float32)
    write_val_losses(tmp_path / "losses", ValLosses(losses=losses, last_count=5))
    found = read_val_losses(tmp_path / "losses", 8)
    assert found is not None
    np.testing.assert_array_equal(found.losses, losses)
    assert found.last_count == 5


@pytest.mark.parametrize("entries", [[], [8.0], [1.0, 0.0], [1.0, 9.0], [1.0, 2.5], [1.0, NAN], [1.0, float("inf")]])
def test_damaged_losses_of_windows_are_rejected(entries, tmp_path):
    (tmp_path / "losses").write_bytes(np.array(entries, "<f4").tobytes())
    with pytest.raises(UsageError, match="losses must be losses of windows as a run writes them, got a damaged file"):
        read_val_losses(tmp_path / "losses", 8)


def test_a_cut_file_of_windows_is_rejected(tmp_path):
    (tmp_path / "losses").write_bytes(np.array([1.0, 8.0], "<f4").tobytes() + b"x")
    with pytest.raises(UsageError, match="damaged"):
        read_val_losses(tmp_path / "losses", 8)


@pytest.fixture
def uri(s3, tmp_path):
    return f"{s3}/{tmp_path.name}/run"


def sizes(uri):
    filesystem, root = open_uri(uri)
    return {info.base_name: info.size for info in filesystem.get_file_info(FileSelector(f"{root}/log"))}


def test_the_losses_of_a_run_in_object_storage_are_uploaded_once(uri, tmp_path):
    (tmp_path / "driver").mkdir()
    writer, uploaded = LogWriter(tmp_path / "driver", uri), []
    for step in range(1, 41, 4):
        before = set(sizes(uri)) if uploaded else set()
        writer.append_losses(step, [1.0 / number for number in range(step, step + 4)])
        writer.flush()
        uploaded += [size for name, size in sizes(uri).items() if name not in before]
    assert len(uploaded) == 10
    assert max(uploaded) <= min(uploaded) + 1  # the number of the step has a digit more
    folder = reader_copy(uri)
    assert pull_changed(folder)
    assert not pull_changed(folder)
    check(folder.step_losses, [1.0 / number for number in range(1, 41)])
    assert folder.step_losses.read_bytes() == (tmp_path / "driver" / "step_losses.f32").read_bytes()


def test_a_run_in_object_storage_that_continues_drops_later_losses(uri, tmp_path, monkeypatch):
    monkeypatch.setattr(log_parts, "_MERGED", 2)
    (tmp_path / "driver").mkdir()
    first = LogWriter(tmp_path / "driver", uri)
    for step in (1, 3, 5):
        first.append_losses(step, [float(step), step + 1.0])
        first.append(METRICS, {"step": step + 1})
        first.flush()
    folder = RunFolder(tmp_path / "second", uri)
    folder.path.mkdir()
    folder.pull()
    second = folder.log_writer()
    second.cut(3)
    second.append_losses(4, [40.0])
    second.flush()
    first.append_losses(7, [7.0])  # of a worker that was taken for dead
    first.flush()
    reader = RunFolder(tmp_path / "reader", uri)
    reader.path.mkdir()
    reader.pull()
    check(reader.step_losses, [1.0, 2.0, 3.0, 40.0])
    assert reader.step_losses.read_bytes() == folder.step_losses.read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        {"first_step": 0, "losses": "AACAPw=="},
        {"first_step": 2**31, "losses": "AACAPw=="},
        {"first_step": 1.0, "losses": "AACAPw=="},
        {"first_step": 1, "losses": "no base64!"},
        {"first_step": 1, "losses": [1.0]},
        {"first_step": 1},
        {"cut": 2**31},
        {"cut": -1},
    ],
    ids=json.dumps,
)
def test_damaged_lines_of_a_part_are_left_out(line, uri, tmp_path):
    (tmp_path / "driver").mkdir()
    writer = LogWriter(tmp_path / "driver", uri)
    writer.append_losses(1, [1.5])
    writer._add(line)
    writer.append_losses(2, [2.5])
    writer.flush()
    folder = RunFolder(tmp_path / "reader", uri)
    folder.path.mkdir()
    folder.pull()
    check(folder.step_losses, [1.5, 2.5])


# The signal comes before the end.
SLOWLY = ("--train.eval-every", "2")


def train(place, *options):
    command = [sys.executable, APPLICATION, *OPTIONS, *options]
    # The bits are compared with those of a run in this process.
    return subprocess.Popen(
        command, cwd=place, env=environment(place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output.decode()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of an undisturbed run."""
    place = tmp_path_factory.mktemp("place")
    (place / "book.txt").write_text("".join(f"A short book, of some words {number}. " for number in range(300)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        finish(train(place))
    return place / "runs/run"


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """A folder with the same text, and no run."""
    shutil.copy(finished.parent.parent / "book.txt", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(finished.parent.parent / "cache"))
    return tmp_path


def test_the_loss_of_each_step_is_that_of_the_records(finished):
    losses = read_step_losses(finished / "step_losses.f32")
    assert len(losses) == STEPS
    last = 0
    for record in read_records(finished / "metrics.jsonl"):
        if record["step"]:
            assert record["loss"] == pytest.approx(losses[last : record["step"]].astype(float).mean(), rel=1e-5)
        last = record["step"]


def test_the_losses_of_the_windows_give_the_loss_of_the_validation(finished):
    found = read_val_losses(finished / "val_losses.f32", SEQ_LEN)
    assert found is not None
    result = json.loads((finished / "result.json").read_text())
    counts = [*[SEQ_LEN] * (len(found.losses) - 1), found.last_count]
    assert found.last_count < SEQ_LEN
    assert np.average(found.losses, weights=counts) == pytest.approx(result["full_val_loss"], rel=1e-5)


def equal(finished, run):
    names = ("step_losses.f32", "val_losses.f32")
    return all((run / name).read_bytes() == (finished / name).read_bytes() for name in names)


def wait_for_step(process, run, step):
    until_s = time.monotonic() + 240
    while max((record["step"] for record in read_records(run / "metrics.jsonl")), default=0) < step:
        assert process.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.002)


@pytest.mark.fault
def test_a_run_that_was_killed_has_the_bytes_of_an_undisturbed_one(finished, place, record_property):
    record_property("fault", "the command is killed, and then continues, with the losses of its steps")
    record_property("lost", "nothing: the files have the same bytes")
    run = place / "runs/run"
    process = train(place, *SLOWLY)
    wait_for_step(process, run, 20)
    process.kill()
    process.communicate(timeout=120)
    assert not (run / "result.json").exists()
    with (run / "step_losses.f32").open("ab") as file:
        file.write(b"\x01")  # as after a power cut: a piece of an entry
    finish(train(place))
    assert len({start["step"] for start in read_lines(run / "starts.jsonl", TEXTS[STARTS])}) == 2
    assert equal(finished, run)


@pytest.mark.slow
def test_losses_that_are_lost_are_nan_in_a_continued_run(finished, place):
    process = train(place, *SLOWLY)
    run = place / "runs/run"
    wait_for_step(process, run, 20)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    (run / "step_losses.f32").unlink()
    finish(train(place))
    start = read_lines(run / "starts.jsonl", TEXTS[STARTS])[-1]["step"]
    assert start >= 20
    expected = read_step_losses(finished / "step_losses.f32")
    expected[:start] = NAN
    check(run / "step_losses.f32", expected)


def test_a_run_in_object_storage_has_the_files_at_its_end(s3, finished, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    storage = f"{s3}/{tmp_path.name}"
    assert main([*OPTIONS, "--storage-path", storage]) == 0
    filesystem, root = open_uri(f"{storage}/run")
    for name in ("step_losses.f32", "val_losses.f32"):
        with filesystem.open_input_stream(f"{root}/{name}") as file:
            assert file.read() == (finished / name).read_bytes()
    capsys.readouterr()
    assert main(["compare", f"{storage}/run", str(finished)]) == 0
    assert "The losses of all steps up to 43 are equal." in capsys.readouterr().out
