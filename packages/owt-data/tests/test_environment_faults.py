"""Faults of a preparation's environment, with valid documents. Finished shards must stay."""

import errno
import functools
import json
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken

from owt_data import DataError, PrepareOptions, prepare, tokenizer_files, verify
from owt_data._cli import main
from owt_data._complete_files import sync_folder, write_file

OPTIONS = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
Record = Callable[[str, object], None]
COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def rows() -> str:
    """3 MB of documents: a dozen shards."""
    rng = random.Random(0)
    texts = ("".join(rng.choices("abcdefgh \n", k=rng.randrange(5000))) for _ in range(1200))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def corpus(rows, tmp_path) -> Path:
    """A file of the documents, which a test may change."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(rows)
    return path


class Interruption(Exception):
    """Interruption of a preparation by a test."""


def interrupt(corpus, out, options=OPTIONS, num_documents=500):
    """Prepare some shards, and no more."""

    def stop(progress):
        if progress.num_documents > num_documents:
            raise Interruption

    with pytest.raises(Interruption):
        prepare(str(corpus), out, options, num_processes=1, progress=stop)
    assert len(shards(out)) >= 3


def shards(out):
    """Name, content and time of every shard file."""
    found = sorted(out.with_name(f".{out.name}.partial").glob("parts-*/*.bin"))
    return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in found]


def run(*arguments, **environment):
    """`owt-data` with these arguments."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_rejected(done, start):
    """Assert that the command printed one line and exited with 2."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(start)
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def assert_goes_on(corpus, out, record_property, options=OPTIONS):
    """Assert that the same call keeps all shards, and writes the files of an undisturbed preparation."""
    kept = {name: time_ns for name, _, time_ns in shards(out)}
    seen = {}

    def look(progress):
        if progress.stage == "assembling":
            seen.update({name: time_ns for name, _, time_ns in shards(out)})

    began = time.monotonic()
    prepare(str(corpus), out, options, num_processes=1, progress=look)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert {name: seen[name] for name in kept} == kept
    assert_same(corpus, out, options)


def assert_same(corpus, out, options=OPTIONS):
    """Assert that the files equal those of an undisturbed preparation."""
    expected = out.with_name("undisturbed")
    prepare(str(corpus), expected, options, num_processes=1)
    for file in ("train.bin", "val.bin", "manifest.json"):
        assert (out / file).read_bytes() == (expected / file).read_bytes()
    assert verify(out) == []


@pytest.mark.fault
@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
def test_a_ray_address_that_does_not_answer_keeps_finished_shards(address, corpus, tmp_path, record_property):
    record_property("fault", f"preparation resumed with RAY_ADDRESS={address}, where no cluster is")
    record_property("lost", "nothing")
    out = tmp_path / "out"
    interrupt(corpus, out)
    before = shards(out)
    done = run("prepare", corpus, out, "--tokenizer", "bytes", "--val-fraction", "0.1", "--ray", RAY_ADDRESS=address)
    assert_rejected(done, f"error: RAY_ADDRESS must name a Ray cluster that answers, got {address} (")
    assert shards(out) == before
    assert_goes_on(corpus, out, record_property)


@pytest.mark.fault
@pytest.mark.parametrize("num_processes", [1, 2])
def test_missing_tokenizer_files_keep_finished_shards(
    num_processes, corpus, tmp_path, small_bpe, no_ranks, record_property
):
    record_property("fault", f"tokenizer files cannot be had at the resume, {num_processes} processes")
    record_property("lost", "nothing")
    out, options = tmp_path / "out", PrepareOptions(tokenizer="gpt2", val_fraction=0.1)
    interrupt(corpus, out, options)
    before = shards(out)
    done = run("prepare", corpus, out, "--val-fraction", "0.1", "--num-processes", num_processes, **no_ranks)
    assert_rejected(done, "error: The files of tokenizer 'gpt2' could not be downloaded: ProxyError.")
    assert shards(out) == before
    assert_goes_on(corpus, out, record_property, options)


@pytest.mark.fault
def test_tokens_of_another_version_of_the_tokenizer_are_not_mixed_with_finished_shards(
    corpus: Path, tmp_path: Path, small_bpe: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    record_property("fault", "the tokenizer's files changed between kill and resume")
    record_property("lost", "nothing")
    out, options = tmp_path / "out", PrepareOptions(tokenizer="gpt2", val_fraction=0.1)
    interrupt(corpus, out, options)
    before, known = shards(out), dict(small_bpe._mergeable_ranks)
    first, second = [piece for piece, rank in known.items() if rank in (400, 401)]
    other = tiktoken.Encoding(
        "gpt2",
        pat_str=small_bpe._pat_str,
        mergeable_ranks={**known, first: known[second], second: known[first]},
        special_tokens=small_bpe._special_tokens,
    )
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "gpt2", other)
    with pytest.raises(DataError, match=r"was interrupted, and that of .* is another one: tokenizer differ\."):
        prepare(str(corpus), out, options, num_processes=1)
    assert shards(out) == before


@pytest.mark.fault
def test_a_download_of_something_else_is_no_tokenizer(corpus, tmp_path, no_ranks, record_property):
    record_property("fault", "a login page is downloaded in place of the tokenizer's files")
    record_property("lost", "nothing")
    code = f"""
import tiktoken.load
tiktoken.load.read_file = lambda address: b"<html>log in</html>"  # what requests returns behind a login page
{COMMAND}"""
    done = subprocess.run(
        [sys.executable, "-c", code, "prepare", str(corpus), str(tmp_path / "out"), "--num-processes", "1"],
        env=no_ranks,
        capture_output=True,
        text=True,
        check=False,
    )
    assert_rejected(done, "error: The files of tokenizer 'gpt2' could not be downloaded: ValueError.")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.fault
def test_a_source_that_cannot_be_read_for_a_while_keeps_finished_shards(corpus, tmp_path, record_property):
    record_property("fault", "the source's storage fails while a resumed preparation reads it")
    record_property("lost", "nothing")
    out = tmp_path / "out"
    interrupt(corpus, out)
    before = shards(out)
    hidden = tmp_path / "hidden.jsonl"

    def hide(progress):  # after the contents were compared, before the documents are read
        if progress.stage == "checking" and not hidden.exists():
            corpus.rename(hidden)
            corpus.mkdir()  # which opens and cannot be read, as a file of a failing mount

    with pytest.raises(
        DataError, match=r"corpus.jsonl must be readable, got Is a directory. Correct that and run the same"
    ):
        prepare(str(corpus), out, OPTIONS, num_processes=1, progress=hide)
    corpus.rmdir()
    hidden.rename(corpus)
    assert shards(out) == before
    assert_goes_on(corpus, out, record_property)


@pytest.mark.fault
@pytest.mark.parametrize("damaged", ["empty", "cut", "zeros", "null", "missing"])
def test_a_plan_damaged_by_a_power_cut_restarts_the_preparation(damaged, corpus, tmp_path, record_property, caplog):
    record_property("fault", f"plan.json {damaged} after a power cut")
    record_property("lost", "the shards, which have no valid plan")
    out, plan = tmp_path / "out", tmp_path / ".out.partial/plan.json"
    interrupt(corpus, out)
    data = plan.read_bytes()
    if damaged == "missing":
        plan.unlink()
    else:
        plan.write_bytes(
            {"empty": b"", "cut": data[: len(data) // 2], "zeros": bytes(len(data)), "null": b"null"}[damaged]
        )
    began = time.monotonic()
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert "plan.json is missing or cannot be read: all shards are made again" in caplog.text
    assert_same(corpus, out)


@pytest.mark.fault
def test_shards_without_a_plan_are_not_used_for_another_source(corpus, tmp_path, record_property):
    record_property("fault", "plan.json lost, and the source changed")
    record_property("lost", "the shards, which have no valid plan")
    out = tmp_path / "out"
    interrupt(corpus, out)
    (tmp_path / ".out.partial/plan.json").unlink()
    corpus.write_text("".join(json.dumps({"text": f"another {number}"}) + "\n" for number in range(1200)))
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    assert_same(corpus, out)


@pytest.mark.fault
@pytest.mark.parametrize("tail", [b"\0" * 300, b'{"num_bytes": 5}\n', b"[]\n{}\n", b"\xff\n"])
def test_records_damaged_by_a_power_cut_lose_only_their_shards(tail, corpus, tmp_path, record_property):
    record_property("fault", f"the record of shards ends in {tail[:8]!r} after a power cut")
    record_property("lost", "the shards of the damaged records")
    out, journal = tmp_path / "out", tmp_path / ".out.partial/parts-all/parts.jsonl"
    interrupt(corpus, out)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + tail)
    began = time.monotonic()
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert_same(corpus, out)


@pytest.mark.fault
def test_records_that_follow_a_cut_one_are_kept_by_later_starts(corpus, tmp_path, record_property):
    record_property("fault", "a record of a shard cut by a kill, and the next start killed, too")
    record_property("lost", "the shard of the cut record")
    out, journal = tmp_path / "out", tmp_path / ".out.partial/parts-all/parts.jsonl"
    interrupt(corpus, out)
    journal.write_bytes(journal.read_bytes()[:-20])
    before = journal.read_bytes().count(b"\n")
    interrupt(corpus, out, num_documents=900)
    assert journal.read_bytes().count(b"\n") >= before + 3
    assert_goes_on(corpus, out, record_property)


@pytest.mark.fault
@pytest.mark.parametrize("damaged", ["empty", "cut"])
def test_a_manifest_damaged_by_a_power_cut_is_reported_in_one_sentence(
    damaged, corpus, tmp_path, record_property, capsys
):
    record_property("fault", f"manifest.json {damaged} after a power cut")
    record_property("lost", "nothing")
    out = tmp_path / "out"
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    manifest = out / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100] if damaged == "cut" else b"")
    for command in (("prepare", corpus, out), ("verify", out), ("inspect", out)):
        assert main(list(map(str, command))) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {manifest} must be a manifest of owt-data, got another or a damaged one: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("tokenizer", ["bytes", "a file"])
def test_token_files_and_the_plan_are_on_disk_before_they_have_their_names(tokenizer, corpus, tmp_path, monkeypatch):
    # The last part of a file is smaller than Python's buffer.
    options, of_tokenizer = replace(OPTIONS, limit_rows=20), []
    if tokenizer == "a file":
        path, of_tokenizer = tmp_path / "mine.json", ["tokenizer.json"]
        path.write_text(tokenizer_files("bytes", max_tokens=8)["tokenizer.json"])
        options = replace(options, tokenizer=str(path))
    synced, renamed = [], []
    fsync, rename = os.fsync, os.replace

    def identify(found):
        return found.st_ino, found.st_size if stat.S_ISREG(found.st_mode) else None

    def note_fsync(handle):
        synced.append(identify(os.fstat(handle)))
        fsync(handle)

    def note_replace(source, target):
        inside = Path(source).iterdir() if Path(source).is_dir() else []
        needed = {identify(path.stat()) for path in (Path(source), *inside)}
        rename(source, target)
        if Path(target).parent.name == "digests":  # the cache of digests may be lost
            return
        renamed.append((Path(target).name, needed <= set(synced), identify(Path(target).parent.stat()), len(synced)))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    prepare(str(corpus), tmp_path / "out", options, num_processes=1)
    durable = [entry for entry in renamed if not entry[0].endswith(".bin")]  # shards have checksums instead
    if of_tokenizer:
        assert durable.pop(0)[0] == "tokenizer.json"  # each start copies it again into the working folder
    assert [name for name, *_ in durable] == [
        "plan.json",
        "train.docs",
        "val.docs",
        *of_tokenizer,
        "manifest.json",
        "out",
    ]
    for name, contents_are_on_disk, folder, num_before in durable:
        assert contents_are_on_disk, name
        assert synced[num_before] == folder, name


@pytest.mark.fault
def test_a_preparation_beside_another_keeps_the_shards_of_both(corpus, tmp_path, record_property):
    record_property("fault", "a second preparation into the same folder")
    record_property("lost", "nothing")
    out = tmp_path / "out"
    interrupt(corpus, out)
    before = shards(out)
    done = []

    def beside(progress):
        if not done and progress.stage == "checking":
            done.append(run("prepare", corpus, out, "--tokenizer", "bytes", "--val-fraction", "0.1"))
            assert shards(out) == before
            raise Interruption

    with pytest.raises(Interruption):
        prepare(str(corpus), out, OPTIONS, num_processes=1, progress=beside)
    assert_rejected(done[0], f"error: Another process prepares into {out}. Wait for it, or choose another folder.")
    assert_goes_on(corpus, out, record_property)


@pytest.mark.fault
@pytest.mark.parametrize("out", ["s3://bucket/folder", "gs://bucket/folder", "s3:/bucket/folder"])
def test_a_folder_in_object_storage_is_rejected_and_nothing_is_written(
    out, corpus, tmp_path, record_property, monkeypatch
):
    record_property("fault", f"asked to prepare into {out.partition('/')[0]}//...")
    record_property("lost", "nothing")
    monkeypatch.chdir(tmp_path)
    # No server is asked: the address leads nowhere.
    done = run("prepare", corpus, out, "--tokenizer", "bytes", AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert_rejected(done, f"error: The output must be a local or mounted folder, got {out!r}. Prepare into one and")
    with pytest.raises(DataError, match="must be a local or mounted folder"):
        prepare(str(corpus), Path(out), OPTIONS)
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.fault
def test_a_source_in_object_storage_is_rejected(tmp_path, record_property):
    record_property("fault", "asked to prepare from s3://...")
    record_property("lost", "nothing")
    done = run("prepare", "s3://bucket/rows.jsonl", tmp_path / "out", "--tokenizer", "bytes")
    assert_rejected(
        done, "error: The source must be files on this machine or a dataset of the Hugging Face hub, got 's3://"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_affinity_masks_prepares_the_same(corpus, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    prepare(str(corpus), tmp_path / "out", OPTIONS)
    assert_same(corpus, tmp_path / "out")
    code = f"import os; vars(os).pop('sched_getaffinity', None); {COMMAND}"
    arguments = ["prepare", str(corpus), str(tmp_path / "again"), "--tokenizer", "bytes", "--val-fraction", "0.1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(corpus, tmp_path / "again")


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a file system whose folders cannot be synced")
def test_a_file_system_that_cannot_sync_folders_does_not_stop_a_write(record_property):
    record_property("fault", "a file system that cannot sync a folder")
    record_property("lost", "nothing")
    with pytest.raises(OSError, match="Invalid argument"):
        sync("/proc/self")
    sync_folder(Path("/proc/self"))


def test_several_writers_of_one_file_leave_the_file_of_one_of_them(tmp_path: Path) -> None:
    """Also beside what a writer has left that was killed."""
    path = tmp_path / "wanted"
    for suffix in ("tmp", "0123.tmp"):
        (tmp_path / f"wanted.{suffix}").touch()
    before, contents = {*tmp_path.iterdir()}, [f"{number}" * 70_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(functools.partial(write_file, path), contents * 10):
            assert path.read_text() in contents
    assert {*tmp_path.iterdir()} == {*before, path}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_file(tmp_path / "folder", "a file")
    assert {*tmp_path.iterdir()} == {*before, path, tmp_path / "folder"}


def test_a_folder_that_cannot_be_synced_for_another_reason_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
    assert len(list(Path("/dev/fd").iterdir())) == before


def sync(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
