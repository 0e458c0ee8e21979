"""Text that changes while `prepare` reads it."""

import functools
import json
import os
import random
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import DataError, PrepareOptions, find_source, prepare, train_tokenizer
from owt_data._cli import main
from owt_data._digests import file_state
from owt_data._sources.source import SourceStates

OPTIONS = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
NUM_TEXTS = 600


@functools.cache
def texts(seed):
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh \n", k=1500)) for _ in range(NUM_TEXTS)]


def write(path, seed):
    """Write 0.9 MB of text: several shards."""
    if path.suffix == ".txt":
        path.write_text("".join(texts(seed)))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(seed)))
    else:
        pq.write_table(pa.table({"text": texts(seed)}), path)


def append(path):
    with path.open("ab") as file:
        file.write(b'{"text": "more"}\n')


def overwrite(path):
    """Write other bytes of the same length at 40 %."""
    with path.open("r+b") as file:
        file.seek(int(0.4 * path.stat().st_size))
        file.write(b"e" * 3)


def overwrite_and_restore_the_time(path):
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path):
    other = path.with_name(f"other{path.suffix}")
    write(other, seed=1)
    os.replace(other, path)


@pytest.mark.parametrize("change", [append, overwrite, overwrite_and_restore_the_time, replace])
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_text_that_changes_while_it_is_read_is_rejected(suffix, num_processes, change, tmp_path):
    path = tmp_path / f"text{suffix}"
    write(path, seed=0)
    changed = []

    def change_once(progress):
        if progress.stage == "tokenizing" and not changed:
            changed.append(True)
            change(path)

    with pytest.raises(DataError, match=rf"^{path} has changed while it was read\."):
        prepare(str(path), tmp_path / "out", OPTIONS, num_processes=num_processes, progress=change_once)
    assert changed
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    write(path, seed=2)
    once_more, other = (prepare(str(path), tmp_path / name, OPTIONS, num_processes=1) for name in ("out", "other"))
    assert once_more == other


@pytest.mark.parametrize("clock", ["of nanoseconds", "of hours"])
def test_a_change_is_noticed_by_the_state_of_an_old_file_and_by_the_contents_of_a_new_one(clock, tmp_path, monkeypatch):
    """A second change within a step of the file system's clock leaves the state as it is."""
    path = tmp_path / "text.jsonl"
    write(path, seed=0)
    if clock == "of nanoseconds":
        monkeypatch.setattr("owt_data._digests._SETTLED_S", -60)  # the file is old
        monkeypatch.setattr("owt_data._sources.source.file_sha256", lambda *_: "0" * 64)
    else:
        state = file_state(path)
        monkeypatch.setattr("owt_data._digests._SETTLED_S", 3600)
        monkeypatch.setattr("owt_data._sources.source.file_state", lambda _: state)
    states = SourceStates([find_source(str(path))])
    states.check_unchanged()
    overwrite(path)
    with pytest.raises(DataError, match=rf"^{path} has changed while it was read\."):
        states.check_unchanged()


def test_one_changing_file_of_a_glob_is_named(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(3):
        write(tmp_path / f"texts/{number}.txt", seed=number)

    def change(progress):
        if progress.stage == "tokenizing":
            append(tmp_path / "texts/1.txt")

    with pytest.raises(DataError, match=r"texts/1\.txt has changed while it was read"):
        prepare(f"{tmp_path}/texts/*.txt", tmp_path / "out", OPTIONS, num_processes=1, progress=change)
    assert [entry.name for entry in tmp_path.iterdir()] == ["texts"]


def test_the_command_ends_with_exit_code_2(tmp_path, capsys, monkeypatch):
    path = tmp_path / "text.txt"
    write(path, seed=0)
    os.utime(path, (0, 0))
    digest = "owt_data._prepare.prepare.digest_of"
    from owt_data._sources.source import digest_of

    def digest_and_change(*arguments):
        found = digest_of(*arguments)
        overwrite(path)
        return found

    monkeypatch.setattr(digest, digest_and_change)
    assert main(["prepare", str(path), str(tmp_path / "out"), "--tokenizer", "bytes", "--num-processes", "1"]) == 2
    assert f"error: {path} has changed while it was read" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("change", [append, overwrite_and_restore_the_time])
def test_no_tokenizer_is_made_of_a_text_that_changes(change, tmp_path):
    path = tmp_path / "text.jsonl"
    write(path, seed=0)
    changed = []

    def change_once(progress):
        if not changed:
            changed.append(change(path))

    with pytest.raises(DataError, match=rf"^{path} has changed while it was read\."):
        train_tokenizer(str(path), tmp_path / "out", vocab_size=260, num_processes=1, progress=change_once)
    assert changed
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_text_that_looks_damaged_while_it_changes_is_named_as_one_that_changes(tmp_path, monkeypatch):
    path, start = tmp_path / "text.jsonl", subprocess.Popen
    write(path, seed=0)
    # The training process sees the text as another program has written half of it.
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **given: path.write_text("{torn") and start(*a, **given))
    with pytest.raises(DataError, match=rf"^{path} has changed while it was read\."):
        train_tokenizer(str(path), tmp_path / "out", vocab_size=260, num_processes=1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
