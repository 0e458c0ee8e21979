"""Faults of `prepare`: kills, full and read-only disks, damaged shards, second starts."""

import fcntl
import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from owt_data import DataError, PrepareOptions, prepare, verify
from owt_data._tokens.journal import read_journal, shard_path

OPTIONS = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
TIMEOUT_S = 120
COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
APPEND, RENAME = "owt_data._prepare.shards.append_record", "owt_data._prepare.prepare.rename_durably"
COPY = "owt_data._prepare.assemble.copy_ranges"


@pytest.fixture(scope="module")
def undisturbed(corpus) -> Path:
    out = corpus.with_name("undisturbed")
    prepare(str(corpus), out, OPTIONS)
    return out


@pytest.fixture(scope="module")
def killed(corpus, hold_at) -> Path:
    """The working folder of a prepare that was killed after five shards."""
    out, staging = corpus.with_name("killed"), corpus.with_name(".killed.partial")
    kill_held(start(corpus, out, before=hold_at(APPEND, 6)))
    assert not out.exists()
    assert len(read_journal(staging / "parts-all")) == 5
    return staging


@pytest.fixture
def interrupted(killed, tmp_path) -> Path:
    """The output folder of a prepare that was killed."""
    shutil.copytree(killed, tmp_path / ".out.partial")
    return tmp_path / "out"


def start(corpus, out, *options, before):
    """`owt-data prepare` of the corpus, after some code."""
    arguments = ["prepare", str(corpus), str(out), "--tokenizer", "bytes", "--val-fraction", "0.1", *options]
    # Background processes of a shell inherit that Ctrl-C is ignored.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    return subprocess.Popen(
        [sys.executable, "-c", before + heed + COMMAND, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill(process):
    """Kill a process, which must not have ended."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def kill_held(process):
    """Kill a process once it is held."""
    assert process.stdout.readline() == "held\n", process.communicate()[1]
    kill(process)


def assert_same(out, expected):
    names = ["manifest.json", "train.bin", "train.docs", "val.bin", "val.docs"]
    for file in names:
        assert (out / file).read_bytes() == (expected / file).read_bytes()
    assert sorted(entry.name for entry in out.iterdir()) == names
    assert not out.with_name(f".{out.name}.partial").exists()
    assert verify(out) == []


@pytest.mark.fault
def test_prepare_killed_at_random_moments_writes_the_same_bytes(
    corpus, undisturbed, tmp_path, record_property, wait_until, hold_at
):
    record_property("fault", "SIGKILL of prepare at four random moments")
    record_property("lost", "the shards in progress")
    rng = random.Random(1)
    out, staging = tmp_path / "out", tmp_path / ".out.partial"
    for _ in range(4):
        process = start(corpus, out, before=hold_at(RENAME, 1))
        wait_until(staging.exists, process)
        time.sleep(rng.uniform(0, 0.5))
        kill(process)  # if it is already done, it is held before its folder gets its name
        assert not out.exists()
    began = time.monotonic()
    process = start(corpus, out, before="")
    process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0
    assert_same(out, undisturbed)


@pytest.mark.fault
def test_a_prepare_killed_while_assembling_resumes(corpus, undisturbed, tmp_path, record_property, hold_at):
    record_property("fault", "SIGKILL of prepare while it assembles the shards")
    record_property("lost", "what was assembled")
    out = tmp_path / "out"
    kill_held(start(corpus, out, before=hold_at(COPY, 2)))
    assert (tmp_path / ".out.partial/result/train.bin").exists()
    assert not out.exists()
    began = time.monotonic()
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert_same(out, undisturbed)


KILLED_IN_THE_CLEAN_UP = """
import os, shutil, signal, sys
from pathlib import Path
from owt_data._cli import main
out, remove = sys.argv[1], shutil.rmtree
def remove_some(folder, **options):
    if not os.path.exists(out):
        return remove(folder, **options)
    for path in sorted(Path(folder).glob("*/*.bin"))[:5]:
        path.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree = remove_some
main(sys.argv[2:])
"""


@pytest.mark.fault
def test_a_prepare_killed_while_it_cleans_up_has_finished(corpus, undisturbed, tmp_path, record_property):
    record_property("fault", "SIGKILL of prepare while it deletes the shards of finished token files")
    record_property("lost", "nothing")
    out = tmp_path / "out"
    arguments = ["prepare", str(corpus), str(out), "--tokenizer", "bytes", "--val-fraction", "0.1"]
    command = [sys.executable, "-c", KILLED_IN_THE_CLEAN_UP, str(out), *arguments]
    assert subprocess.run(command, check=False, timeout=TIMEOUT_S).returncode == -signal.SIGKILL
    assert list((tmp_path / ".out.partial").glob("*/*.bin"))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    began = time.monotonic()
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert_same(out, undisturbed)


def test_finished_shards_are_not_tokenized_again(corpus, interrupted, undisturbed):
    folder = interrupted.with_name(".out.partial") / "parts-all"
    # A shard that the journal does not have was in progress.
    finished = [shard_path(folder, index) for index in range(len(read_journal(folder)))]
    assert finished
    before = {path.name: path.stat().st_mtime_ns for path in finished}
    seen, progress = [], []

    def look(now):
        progress.append(now)
        seen.append({name: (folder / name).stat().st_mtime_ns for name in before} if folder.exists() else None)

    manifest = prepare(str(corpus), interrupted, OPTIONS, num_processes=1, progress=look)
    assert all(now == before for now in seen if now is not None)
    stages = [now.stage for now in progress]
    assert list(dict.fromkeys(stages)) == ["reading", "checking", "tokenizing", "assembling"]
    assert stages.count("checking") == len(finished)
    assert progress[-1].num_documents == 4000
    assert progress[-1].num_tokens == sum(record.num_tokens for record in manifest.files.values())
    assert_same(interrupted, undisturbed)


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_shard_damaged_between_kill_and_resume_is_made_again(
    damage, corpus, interrupted, undisturbed, caplog, record_property
):
    record_property("fault", f"a shard of a killed prepare damaged: {damage}")
    record_property("lost", "that shard")
    path = interrupted.with_name(".out.partial") / "parts-all/000002.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-2])
    began = time.monotonic()
    prepare(str(corpus), interrupted, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert "000002.bin is damaged or missing: tokenizing it again" in caplog.text
    assert_same(interrupted, undisturbed)


@pytest.mark.fault
def test_a_record_cut_short_is_made_again(corpus, interrupted, undisturbed, record_property):
    record_property("fault", "the record of a shard cut short")
    record_property("lost", "that shard")
    journal = interrupted.with_name(".out.partial") / "parts-all/parts.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    began = time.monotonic()
    prepare(str(corpus), interrupted, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert_same(interrupted, undisturbed)


@pytest.mark.fault
def test_a_shard_damaged_while_assembling_is_reported_and_repaired_by_the_next_start(
    corpus, undisturbed, tmp_path, monkeypatch, record_property
):
    record_property("fault", "a shard damaged while prepare assembles")
    record_property("lost", "that shard")
    out, staging = tmp_path / "out", tmp_path / ".out.partial"

    def damage(progress):
        if progress.stage == "tokenizing" and progress.num_documents == 4000:
            (staging / "parts-all/000001.bin").write_bytes(b"\0\0")

    with pytest.raises(DataError, match=r"000001.bin has changed after it was written"):
        prepare(str(corpus), out, OPTIONS, num_processes=1, progress=damage)
    assert not out.exists()
    began = time.monotonic()
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert_same(out, undisturbed)


@pytest.mark.fault
def test_another_tokenizer_source_or_split_than_the_interrupted_ones_is_rejected(
    corpus, interrupted, undisturbed, record_property
):
    record_property("fault", "tokenizer, source or split changed between kill and resume")
    record_property("lost", "nothing")
    other = corpus.with_name("other.jsonl")
    other.write_text('{"text": "x"}\n' * 100)
    kept = sorted(interrupted.with_name(".out.partial").rglob("*"))
    for source, options, what in (
        (corpus, PrepareOptions(tokenizer="gpt2", val_fraction=0.1), "tokenizer 'bytes' and 'gpt2'"),
        (corpus, PrepareOptions(tokenizer="bytes", val_fraction=0.2), "val_fraction 0.1 and 0.2"),
        (other, OPTIONS, "contents"),
    ):
        with pytest.raises(DataError, match=rf"was interrupted, and that of .* is another one: {what} differ\. Repeat"):
            prepare(str(source), interrupted, options)
    assert sorted(interrupted.with_name(".out.partial").rglob("*")) == kept
    began = time.monotonic()
    prepare(str(corpus), interrupted, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert_same(interrupted, undisturbed)


@pytest.mark.fault
def test_two_prepares_into_one_folder_are_rejected_and_the_first_resumes(
    corpus, undisturbed, tmp_path, record_property, hold_at, wait_until_held
):
    record_property("fault", "a second prepare into one folder")
    record_property("lost", "nothing")
    out = tmp_path / "out"
    first = start(corpus, out, "--num-processes", "1", before=hold_at(APPEND, 1))
    wait_until_held(first)
    with pytest.raises(DataError, match=r"^Another process prepares into .*out"):
        prepare(str(corpus), out, OPTIONS)
    first.communicate()
    assert first.returncode == 0
    assert_same(out, undisturbed)


@pytest.mark.fault
def test_a_lock_of_a_dead_process_does_not_block(articles, tmp_path, record_property):
    record_property("fault", "the holder of the folder's lock gone")
    record_property("lost", "nothing")
    staging = tmp_path / ".out.partial"
    staging.mkdir()
    holder = os.open(staging, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(DataError, match=r"^Another process prepares into .*out"):
        prepare(str(articles), tmp_path / "out", OPTIONS)
    os.close(holder)
    prepare(str(articles), tmp_path / "out", OPTIONS)


@pytest.mark.fault
def test_ctrl_c_keeps_finished_shards(corpus, undisturbed, tmp_path, record_property, hold_at, wait_until_held):
    record_property("fault", "Ctrl-C in prepare")
    record_property("lost", "the shards in progress")
    out = tmp_path / "out"
    process = start(corpus, out, "--num-processes", "1", before=hold_at(APPEND, 2))
    wait_until_held(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == "interrupted: run the same command again to resume\n"
    assert not out.exists()
    assert len(read_journal(tmp_path / ".out.partial/parts-all")) == 1
    prepare(str(corpus), out, OPTIONS, num_processes=1)
    assert_same(out, undisturbed)


@pytest.mark.fault
def test_a_tokenizing_process_that_dies_is_reported_and_loses_only_its_shard(
    corpus, tmp_path, monkeypatch, record_property, tokenizing_processes
):
    record_property("fault", "SIGKILL of all tokenizing processes")
    record_property("lost", "the shards in progress")
    # At most four shards are ahead. Otherwise the processes might have done their work before they are found.
    monkeypatch.setattr("owt_data._prepare.shards.MAX_SHARD_BYTES", 1 << 18)
    out, killed = tmp_path / "out", []

    def kill(progress):
        if progress.stage == "tokenizing" and not killed:
            killed.extend(tokenizing_processes())
            for process in killed:
                os.kill(process, signal.SIGKILL)

    sources = [str(corpus)] * 4
    with pytest.raises(DataError, match=r"^A tokenizing process has ended with exit code -9 \(-9: out of mem"):
        prepare(sources, out, OPTIONS, num_processes=2, progress=kill)
    assert len(killed) == 2
    num_finished = len(read_journal(tmp_path / ".out.partial/parts-all"))
    assert num_finished > 0
    began = time.monotonic()
    manifest = prepare(sources, out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert sum(record.num_documents for record in manifest.files.values()) == 4 * 4000
    assert verify(out) == []


@pytest.mark.fault
def test_a_torn_gzip_file_is_rejected_and_prepared_once_complete(corpus, undisturbed, tmp_path, record_property):
    record_property("fault", "a source .jsonl.gz torn in the middle")
    record_property("lost", "the shards made of the torn file")
    source, out = tmp_path / "corpus.jsonl.gz", tmp_path / "out"
    data = gzip.compress(corpus.read_bytes(), 1)
    source.write_bytes(data[: 2 * len(data) // 3])
    with pytest.raises(DataError, match=r"corpus.jsonl.gz must hold JSON lines, .*: Compressed file ended before"):
        prepare(str(source), out, OPTIONS, num_processes=1)
    assert sorted(tmp_path.iterdir()) == [source]
    source.write_bytes(data)
    began = time.monotonic()
    prepare(str(source), out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    for file in ("train.bin", "val.bin"):
        assert (out / file).read_bytes() == (undisturbed / file).read_bytes()
