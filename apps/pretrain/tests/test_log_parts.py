"""The log of a run in object storage: a local S3 server."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSelector

from pretrain._run import log_parts
from pretrain._run.files import read_lines, replacing
from pretrain._run.folder import RunFolder
from pretrain._run.log_parts import METRICS, PHASES, SAMPLES, SCORES, STARTS, TEXTS, LogWriter, pull_log
from pretrain._run.remote_copy import pull_changed, reader_copy
from ray_jax_launch import LaunchError, open_uri


@pytest.fixture
def uri(s3, tmp_path):
    return f"{s3}/{tmp_path.name}/run"


@pytest.fixture
def writer(uri, tmp_path):
    (tmp_path / "driver").mkdir()
    return LogWriter(tmp_path / "driver", uri)


def parts(uri):
    """Names and sizes of the parts."""
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info(FileSelector(f"{root}/log", allow_not_found=True))
    return {info.base_name: info.size for info in infos if info.is_file}


def pulled(uri, folder):
    folder.mkdir(exist_ok=True)
    filesystem, root = open_uri(uri)
    pull_log(filesystem, root, folder)
    path = folder / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_record_is_uploaded_once(uri, writer, tmp_path):
    sizes = []
    for step in range(20):
        writer.append(METRICS, {"step": step, "loss": 2.0})
        before = set(parts(uri))
        writer.flush()
        sizes += [size for name, size in parts(uri).items() if name not in before]
    writer.flush()
    assert len(sizes) == len(parts(uri)) == 20
    assert max(sizes) <= min(sizes) + 1
    assert pulled(uri, tmp_path / "reader") == [{"step": step, "loss": 2.0} for step in range(20)]


def test_a_line_that_comes_during_an_upload_is_in_the_next_one(uri, writer, tmp_path, monkeypatch):
    write = log_parts._write

    def write_slowly(*part):
        if len(parts(uri)) == 0:
            writer.append(METRICS, {"step": 2})
        write(*part)

    monkeypatch.setattr(log_parts, "_write", write_slowly)
    writer.append(METRICS, {"step": 1})
    writer.flush()
    assert pulled(uri, tmp_path / "first") == [{"step": 1}]
    writer.flush()
    assert pulled(uri, tmp_path / "second") == [{"step": 1}, {"step": 2}]


def test_many_parts_become_few(uri, writer, tmp_path, monkeypatch):
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    for step in range(25):
        writer.append(METRICS, {"step": step})
        writer.flush()
    assert len(parts(uri)) <= 5  # 9 + 9 + 3 + 3 + 1
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [*range(25)]


def test_a_part_that_a_killed_writer_has_merged_but_not_deleted_counts_once(uri, writer, tmp_path, monkeypatch):
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    for step in range(2):
        writer.append(METRICS, {"step": step})
        writer.flush()
    filesystem, root = open_uri(uri)
    left = {name: filesystem.open_input_stream(f"{root}/log/{name}").read() for name in parts(uri)}
    writer.append(METRICS, {"step": 2})
    writer.flush()
    for name, content in left.items():
        with filesystem.open_output_stream(f"{root}/log/{name}") as stream:
            stream.write(content)
    assert len(parts(uri)) == 3
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [0, 1, 2]


def test_a_run_that_continues_drops_the_records_after_its_checkpoint(uri, writer, tmp_path):
    for step in (0, 10, 20):
        writer.append(METRICS, {"step": step, "loss": 1.0})
        writer.append(SAMPLES, {"step": step, "prompt": "a", "text": "b"})
    writer.append(PHASES, {"step": 20, "time_s": 1.0, "phase": "training"})
    writer.flush()
    second = RunFolder(tmp_path / "second", uri)
    second.path.mkdir()
    second.pull()
    log = second.log_writer()
    log.cut(10)
    log.append(METRICS, {"step": 10, "loss": 2.0})
    log.flush()
    writer.append(METRICS, {"step": 30, "loss": 9.0})  # of a worker that was taken for dead
    writer.flush()
    assert pulled(uri, tmp_path / "reader") == [{"step": 0, "loss": 1.0}, {"step": 10, "loss": 2.0}]
    assert {name.partition("-")[0] for name in parts(uri)} == {"000001", "000002"}  # the order of the writers
    for name in (METRICS, SAMPLES, PHASES):
        assert (tmp_path / "reader" / name).read_bytes() == (second.path / name).read_bytes()


@pytest.mark.parametrize(("step", "kept"), [(0, []), (1, [0]), (3, [0]), (4, [0, 3]), (9, [0, 3, 7])])
def test_a_run_in_a_folder_keeps_the_records_before_a_step_and_all_that_has_happened(
    step: int, kept: list[int], tmp_path: Path
) -> None:
    log = LogWriter(tmp_path, None)
    for number in (0, 3, 7):
        log.append(METRICS, {"step": number})
        log.append(SAMPLES, {"step": number, "prompt": "a", "text": "ab"})
        log.append(PHASES, {"step": number, "time_s": 1.0, "phase": "training"})
        log.append(STARTS, {"step": number})
        log.append(SCORES, {"step": number, "tasks/step": number})
    log.cut(step)
    found = {name: [line["step"] for line in read_lines(tmp_path / name, texts)] for name, texts in TEXTS.items()}
    assert found == {METRICS: kept, SAMPLES: kept} | {key: [0, 3, 7] for key in (PHASES, STARTS, SCORES)}


def test_a_reader_downloads_each_byte_once_also_from_merged_parts(uri, writer, tmp_path, monkeypatch):
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    num_bytes, read = 0, log_parts._read

    def counted(*args):
        nonlocal num_bytes
        content = read(*args)
        num_bytes += len(content)
        return content

    monkeypatch.setattr(log_parts, "_read", counted)
    folder = reader_copy(uri)
    for step in range(14):
        writer.append(METRICS, {"step": step})
        writer.flush()
        if step % 2:
            assert pull_changed(folder)
        assert not pull_changed(folder) or not step % 2
    assert num_bytes == sum(parts(uri).values())
    assert pulled(uri, folder.path) == [{"step": step} for step in range(14)]


@pytest.mark.parametrize("damage", ["appended", "cut", "deleted", "no state", "damaged state"])
def test_a_copy_that_something_else_has_changed_is_written_again(uri, writer, tmp_path, damage):
    for step in range(3):
        writer.append(METRICS, {"step": step})
        writer.flush()
    reader = tmp_path / "reader"
    records = pulled(uri, reader)
    if damage == "appended":
        with (reader / METRICS).open("a") as file:
            file.write('{"step": 9}\n')
    elif damage == "cut":
        (reader / METRICS).write_text('{"step": 0}\n{"st')
    elif damage == "deleted":
        (reader / METRICS).unlink()
    else:
        (reader / log_parts._READ).write_text("" if damage == "no state" else '{"sizes": 5')
    writer.append(METRICS, {"step": 3})
    writer.flush()
    assert pulled(uri, reader) == [*records, {"step": 3}]


def test_a_line_is_uploaded_three_times_at_most_and_kept_in_no_memory(uri, writer, tmp_path, monkeypatch):
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    sizes, write = [], log_parts._write
    monkeypatch.setattr(log_parts, "_write", lambda *args: (sizes.append(len(args[3])), write(*args)))
    for step in range(81):
        writer.append(METRICS, {"step": step})
        writer.flush()
    assert sum(sizes) == 3 * sum(parts(uri).values())
    assert len(parts(uri)) == 9
    assert [*(tmp_path / "driver" / "log").iterdir()] == []
    assert writer._levels == [[], []]
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [*range(81)]


def test_records_are_uploaded_while_the_run_goes_on(uri, writer, monkeypatch):
    monkeypatch.setattr(log_parts, "UPLOAD_EVERY_S", 0.1)
    is_uploaded = threading.Event()
    write = log_parts._write
    monkeypatch.setattr(log_parts, "_write", lambda *args: (write(*args), is_uploaded.set()))
    writer.start()
    writer.append(METRICS, {"step": 0})
    assert is_uploaded.wait(60)
    writer.stop()
    assert len(parts(uri)) == 1


def test_lines_wait_for_a_storage_that_fails_for_a_while(uri, writer, tmp_path, monkeypatch):
    write, failures = log_parts._write, [OSError("no route to host")]

    def fail_once(*args):
        if failures:
            raise failures.pop()
        write(*args)

    monkeypatch.setattr(log_parts, "_write", fail_once)
    writer.append(METRICS, {"step": 0})
    with pytest.raises(OSError, match="no route"):
        writer.flush()
    writer.append(METRICS, {"step": 1})
    writer.flush()
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [0, 1]


def test_damaged_parts_lose_their_damaged_lines_only(uri, writer, tmp_path):
    writer.append(METRICS, {"step": 0})
    writer.flush()
    filesystem, root = open_uri(uri)
    lines = ["[" * 100_000, "{", "[]", '{"cut": "1"}', '{"file": "metrics.jsonl", "line": 5}', '{"file": "../x"}']
    with filesystem.open_output_stream(f"{root}/log/000009-ab-000001-000001.jsonl") as stream:
        stream.write("\n".join([*lines, '{"file": "metrics.jsonl", "line": {"step": 1}}', ""]).encode())
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [0, 1]


def test_a_merged_part_is_written_before_its_parts_are_deleted(
    uri: str, writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two loses no line."""
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    before, write = dict[str, int](), log_parts._write

    def note_and_write(*args: Any) -> None:
        if args[2].first < args[2].last:
            before.update(parts(uri))
        write(*args)

    monkeypatch.setattr(log_parts, "_write", note_and_write)
    for step in range(3):
        writer.append(METRICS, {"step": step})
        writer.flush()
    assert [name[-19:] for name in sorted(before)] == [f"{n:06}-{n:06}.jsonl"[-19:] for n in (1, 2, 3)]
    (merged,) = parts(uri)
    assert merged.endswith("-000001-000003.jsonl")
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [0, 1, 2]


def test_parts_that_an_attempt_before_has_deleted_do_not_end_the_uploads(
    uri: str, writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    filesystem, root = open_uri(uri)
    for step in range(7):
        if step == 2:
            filesystem.delete_file(f"{root}/log/{min(parts(uri))}")
        writer.append(METRICS, {"step": step})
        writer.flush()
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [*range(7)]


def test_a_part_that_is_merged_while_it_is_read_is_read_in_its_new_place(
    uri: str, writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_parts, "_MERGED", 3)
    for step in range(2):
        writer.append(METRICS, {"step": step})
        writer.flush()
    needed = log_parts._needed

    def merge_first(found: Any) -> Any:
        monkeypatch.setattr(log_parts, "_needed", needed)
        writer.append(METRICS, {"step": 2})
        writer.flush()
        return needed(found)

    monkeypatch.setattr(log_parts, "_needed", merge_first)
    assert [record["step"] for record in pulled(uri, tmp_path / "reader")] == [0, 1, 2]


def test_several_readers_share_a_copy(uri: str, writer: LogWriter, tmp_path: Path) -> None:
    records = [{"step": step} for step in range(12)]
    for record in records:
        writer.append(METRICS, record)
        writer.flush()
        with ThreadPoolExecutor(4) as threads:
            for _ in threads.map(lambda _: pulled(uri, tmp_path / "reader"), range(4)):
                pass
    assert pulled(uri, tmp_path / "reader") == records


def test_uploads_go_on_after_a_storage_that_fails_for_a_while(
    uri: str, writer: LogWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning tells it, and a second one tells a second failure."""
    monkeypatch.setattr(log_parts, "UPLOAD_EVERY_S", 0.01)
    upload, outcomes = LogWriter._upload, [OSError("a"), LaunchError("b"), OSError("c"), None, OSError("d"), None]
    is_done = threading.Event()

    def fail_sometimes(self: LogWriter, uri: str) -> None:
        if not outcomes:
            is_done.set()
        elif (outcome := outcomes.pop(0)) is not None:
            raise outcome
        upload(self, uri)

    monkeypatch.setattr(LogWriter, "_upload", fail_sometimes)
    writer.append(METRICS, {"step": 0})
    writer.start()
    assert is_done.wait(60)
    writer.stop()
    assert "log-upload" not in {thread.name for thread in threading.enumerate()}
    assert [message[-1] for message in caplog.messages] == ["a", "d"]
    assert len(parts(uri)) == 1


def test_a_copy_that_fails_leaves_the_file_as_it_was(tmp_path):
    def fail(partial):
        partial.write_text("new")
        raise OSError("gone")

    (tmp_path / "copy").write_text("old")
    with pytest.raises(OSError, match="gone"), replacing(tmp_path / "copy") as partial:
        fail(partial)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    with replacing(tmp_path / "copy") as partial:
        partial.write_text("new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]
