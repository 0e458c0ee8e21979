"""The training of a tokenizer: the same bytes for any number of threads and after kills, from every form of text."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import (
    DataError,
    PrepareOptions,
    Progress,
    load_tokenizer,
    prepare,
    train_tokenizer,
    verify,
    vocab_size,
)
from owt_data._cli import main
from owt_data._prepare.train_tokenizer import _write

RNG = np.random.default_rng(2)
WORDS = ["".join(RNG.choice(list("abcdefghijklmnoßé語🙂"), RNG.integers(1, 9))) for _ in range(800)]
TEXTS = [" ".join(RNG.choice(WORDS, 60)) + "\n" for _ in range(400)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": one, "other": 1}) + "\n" for one in TEXTS))
    return path


def train(text, out, num_processes):
    command = [sys.executable, "-m", "owt_data", "tokenizer", str(text), str(out), "--vocab", "700"]
    return subprocess.Popen([*command, "--num-processes", str(num_processes)], stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    return train_tokenizer(str(text), tmp_path_factory.mktemp("trained") / "new", vocab_size=700, num_processes=1)


def test_it_is_the_same_file_for_any_number_of_threads_and_form_of_the_text(text, trained, tmp_path, monkeypatch):
    half = len(TEXTS) // 2
    pq.write_table(pa.table({"body": TEXTS[half:]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"body": TEXTS[:half]}), tmp_path / "a.parquet")
    (tmp_path / "val.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    names = [f"train={tmp_path}/[ab].parquet", f"val={tmp_path}/val.parquet"]
    stages: list[Progress] = []
    started, start_process = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **given: started.append(given) or start_process(*a, **given))
    other = train_tokenizer(
        names, tmp_path / "out.json", vocab_size=700, num_processes=4, text_column="body", progress=stages.append
    )
    assert [given["env"]["RAYON_NUM_THREADS"] for given in started] == ["4"]
    assert other == tmp_path / "out.json"
    assert other.read_bytes() == trained.read_bytes()
    assert [stages[0].stage, stages[-1].stage] == ["reading", "merging"]
    assert 0 < (stages[0].fraction or 0) <= 1
    assert stages[-1].fraction is None
    assert stages[-1].num_documents == len(TEXTS)
    assert stages[-1].num_bytes == sum(len(one.encode()) for one in TEXTS)


def test_rows_after_the_limit_are_not_read(text, tmp_path):
    (tmp_path / "first.jsonl").write_text("".join(text.read_text().splitlines(keepends=True)[:25]))
    files = [
        train_tokenizer(str(path), tmp_path / f"{number}.json", vocab_size=400, limit_rows=limit).read_bytes()
        for number, (path, limit) in enumerate([(text, 25), (tmp_path / "first.jsonl", None), (text, None)])
    ]
    assert files[0] == files[1] != files[2]


def test_the_file_is_on_the_disk_when_it_has_its_name(tmp_path, monkeypatch):
    path, synced, sync = tmp_path / "new" / "tokenizer.json", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append((os.fstat(file).st_ino, path.exists())), sync(file)))
    path.parent.mkdir()
    path.with_name("tokenizer.json.0123.tmp").touch()  # of a process that was killed
    _write(path, b"{}")
    assert [one.name for one in path.parent.iterdir()] == ["tokenizer.json"]
    assert synced == [(path.stat().st_ino, False), (path.parent.stat().st_ino, True)]
    _write(path, b"{}")
    assert len(synced) == 2  # an equal file is left


def test_it_gives_back_every_text_and_has_fewer_tokens(trained):
    tokenizer = load_tokenizer(trained)
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (700, 699)
    for one in (*TEXTS[:50], "other words <|endoftext|>\r\n\t\0 \ud7ff"):
        assert tokenizer.decode(tokenizer.encode_ordinary(one)) == one
    assert len(tokenizer.encode_ordinary(TEXTS[0])) < 0.6 * len(TEXTS[0].encode())


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_kill_leaves_nothing_and_its_repetition_gives_the_file(num_kills, text, trained, tmp_path):
    for kill in range(num_kills):
        process = train(text, tmp_path / "out", 4)
        time.sleep(0.9 + 0.1 * kill)
        process.send_signal(signal.SIGINT if kill % 3 == 2 else signal.SIGKILL)
        process.communicate()
        files = [*(tmp_path / "out").glob("tokenizer.json")] if (tmp_path / "out").exists() else []
        assert [path.read_bytes() for path in files] in ([], [trained.read_bytes()])
    process = train(text, tmp_path / "out", 4)
    error = process.communicate()[1]
    assert process.returncode == 0, error
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == trained.read_bytes()


def test_a_second_time_leaves_the_file_and_another_vocabulary_is_rejected(text, trained):
    before = trained.stat()
    assert train_tokenizer(str(text), trained.parent, vocab_size=700) == trained
    assert trained.stat() == before
    with pytest.raises(DataError, match=r"tokenizer.json holds another tokenizer. Choose another folder, or delete"):
        train_tokenizer(str(text), trained.parent, vocab_size=300)
    assert trained.stat() == before


def test_files_in_the_working_folder_are_not_imported_by_the_processes(text, trained, tmp_path, monkeypatch):
    for name in ("tokenizers.py", "pyarrow.py", "json.py"):
        (tmp_path / name).write_text("raise RuntimeError('not a module of owt-data')")
    monkeypatch.chdir(tmp_path)
    path = train_tokenizer(str(text), tmp_path / "out", vocab_size=700)
    assert path.read_bytes() == trained.read_bytes()
    prepare(str(text), tmp_path / "tokens", PrepareOptions(tokenizer=str(path), val_fraction=0.1), num_processes=2)
    assert verify(tmp_path / "tokens") == []


def test_a_short_text_gives_fewer_ids_and_the_command_says_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("aaab aaab")
    assert main(["tokenizer", str(tmp_path / "a.txt"), str(tmp_path / "out"), "--vocab", "300"]) == 0
    num_ids = vocab_size(tmp_path / "out")
    # The bytes, `aa`, `ab` or `aaa`, `aaab` and the end of text: each occurs twice, and `Ġaaab` once.
    assert num_ids == 256 + 3 + 1
    assert f"{num_ids} ids, as the text has no more pairs to merge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "options", "sentence"),
    [
        ("", [], "text.jsonl must hold text, got none"),
        ('{"text": 5}\n', [], "The column 'text' of"),
        ('{"text": "a"}\n', ["--vocab", "256"], "vocab must be an integer from 257 to 1048576, got 256."),
        ('{"text": "a"}\n', ["--num-processes", "0"], "num_processes must be an integer from 1 to 65536, got 0."),
    ],
)
def test_bad_text_and_options_are_one_sentence_and_write_nothing(contents, options, sentence, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text(contents)
    assert main(["tokenizer", str(tmp_path / "text.jsonl"), str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /sys, which is read-only for every user")
def test_a_folder_that_cannot_be_written_is_rejected_before_the_text_is_read(text):
    read = []
    with pytest.raises(DataError, match=r"^/sys must be writable, got "):
        train_tokenizer(str(text), "/sys/out", vocab_size=300, progress=read.append)
    assert read == []
