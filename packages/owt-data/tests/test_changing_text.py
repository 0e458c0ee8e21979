"""Text that changes while `prepare` reads it."""

import functools
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import DataError, PrepareOptions, prepare
from owt_data._cli import main

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
