import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from pretrain._run.files import append_line, read_lines, sync_folder, write_durably
from pretrain._run.metrics import cut_lines
from pretrain._surroundings.output_file import write_output


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    records = [{"step": 0, "val_loss": 5.5}, {"step": 10, "loss": 0.1 + 0.2}]
    for record in records:
        append_line(path, record)
    assert read_lines(path) == records


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_lines(path) == [{"step": 1}]


def test_what_a_resumed_run_repeats_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n{"step": 30')
    cut_lines(path, 10)
    assert path.read_text() == '{"step": 0}\n{"step": 10}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.fault
def test_lines_that_a_power_cut_damaged_do_not_stop_a_run(tmp_path, caplog, record_property):
    record_property("fault", "metrics.jsonl with zeros and half lines, as a power cut leaves it")
    record_property("lost", "the damaged lines")
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 0}\n\0\0\0\0\n{"step": 2, "lo\n[3]\n{"loss": 4.0}\n\xff\xfe\n{"step": 5}\n'
        b'{"step": "6"}\n{"step": 99999999999999999999}\n{"step": 7, "loss": []}\n'
        b'{"step": -1}\n{"step": true}\n{"step": 8, "time_s": -1.0}\n{"step": 9, "loss": "2.0"}\n'
    )
    assert [record["step"] for record in read_lines(path)] == [0, 5]
    read_lines(path)  # a command may read a file several times
    what = "lines that are no JSON object with a step, or have too large a number"
    assert caplog.messages == [f"{path}: dropped 12 {what}"]
    cut_lines(path, 4)
    assert path.read_bytes() == b'{"step": 0}\n'
    cut_lines(path, -1)
    cut_lines(path, 10)
    assert path.read_bytes() == b""


def test_a_record_after_a_line_that_was_cut_off_has_a_line_of_its_own(tmp_path):
    path = tmp_path / "starts.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    append_line(path, {"step": 2})
    assert read_lines(path) == [{"step": 0}, {"step": 2}]


@pytest.mark.parametrize(
    ("write", "content", "syncs_folder"),
    [
        pytest.param(write_durably, "{}", True, id="of a run", marks=pytest.mark.fault),
        pytest.param(write_output, b"{}", False, id="of a user"),
    ],
)
def test_a_file_is_on_disk_before_it_has_its_name(write, content, syncs_folder, tmp_path, monkeypatch, record_property):
    """The order of the calls decides what a power cut leaves. The test makes the calls and records them."""
    record_property("fault", "power cut while a file is replaced")
    record_property("lost", "nothing")
    calls = []

    def noted(name, function):
        def call(*args):
            found = os.fstat(args[0]) if name == "sync" else Path(args[0]).stat()
            calls.append((name, found.st_ino, found.st_size if stat.S_ISREG(found.st_mode) else None))
            return function(*args)

        return call

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    monkeypatch.setattr(os, "replace", noted("rename", os.replace))
    path = tmp_path / "config.json"
    write(path, content)
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert calls == [("sync", file, 2), ("rename", file, 2), *[("sync", folder, None)] * syncs_folder]
    assert path.read_text() == "{}"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_durably(path, "no UTF-8: \ud800")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["config.json"]


def num_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len([*Path("/dev/fd").iterdir()])


@pytest.mark.parametrize(
    ("number", "is_fatal"),
    [(0, False), (errno.EINVAL, False), (errno.ENOSYS, False), (errno.ENOTSUP, False), (errno.EIO, True)],
)
def test_a_folder_that_cannot_be_synced_is_an_error_if_its_disk_has_failed(
    number: int, is_fatal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems over object storage sync no folder. No descriptor stays open."""

    def fail(descriptor: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    before = num_descriptors()
    with pytest.raises(OSError, match="error") if is_fatal else contextlib.nullcontext():
        sync_folder(tmp_path)
    assert num_descriptors() == before
