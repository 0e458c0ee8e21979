"""Tokens that are read while they are prepared."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from owt_data import (
    Batches,
    DataError,
    GrowingTokens,
    OrderKind,
    PrepareOptions,
    Progress,
    TokenData,
    open_tokens,
    prepare,
    prepare_in_background,
    read_steps,
)
from owt_data._prepare.background import _Worker
from owt_data._tokens.growing_tokens import read_num_wanted
from owt_data._tokens.journal import read_journal

START = PrepareOptions(tokenizer="bytes", split="start")
SEQ_LEN, BATCH = 64, 128
TIMEOUT_S = 60
ORDER: OrderKind = "sequential-first"


def window_digests(tokens, first, last, *, order: OrderKind = ORDER):
    """The digest of each window of some steps."""
    batches = Batches(seq_len=SEQ_LEN, global_batch_size=BATCH, order=order)
    steps = read_steps(tokens, batches, start_step=first, stop_step=last)
    return [hashlib.sha256(windows.tobytes()).hexdigest() for _, windows in steps]


@pytest.fixture(scope="module")
def prepared_start(corpus):
    """The tokens of the corpus, prepared first and read later."""
    out = corpus.with_name("prepared-start")
    prepare(str(corpus), out, START, num_processes=1)
    return open_tokens(str(out), tokenizer="bytes")


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """A source for training and one for validation."""
    folder = tmp_path_factory.mktemp("two")
    rng = np.random.default_rng(0)
    for name, count in (("a", 3000), ("b", 200)):
        texts = ("".join(rng.choice(list("abcdef \n"), size=rng.integers(1, 1500))) for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [f"train={folder / 'a.jsonl'}", f"val={folder / 'b.jsonl'}"]


def test_windows_equal_those_of_a_finished_preparation(corpus, prepared_start, tmp_path):
    num_steps = prepared_start.train.num_windows(SEQ_LEN) // BATCH + 10  # into the second epoch
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        assert len(data.train) < len(prepared_start.train) / 4
        streamed = window_digests(data.train, 0, num_steps)
        np.testing.assert_array_equal(validation_windows(data), validation_windows(prepared_start))
    assert streamed == window_digests(prepared_start.train, 0, num_steps)
    assert (tmp_path / "out/train.bin").read_bytes() == (corpus.with_name("prepared-start") / "train.bin").read_bytes()
    assert not (tmp_path / ".out.partial").exists()


def validation_windows(data):
    count = data.val.num_windows(SEQ_LEN)
    return data.val.windows(np.arange(count), seq_len=SEQ_LEN, order="sequential", seed=0)


def test_each_split_can_have_its_own_source(two_sources, tmp_path):
    options = PrepareOptions(tokenizer="bytes")
    prepare(two_sources, tmp_path / "prepared", options, num_processes=1)
    prepared = open_tokens(str(tmp_path / "prepared"), tokenizer="bytes")
    with prepare_in_background(two_sources, tmp_path / "out", options, num_processes=2) as data:
        np.testing.assert_array_equal(validation_windows(data), validation_windows(prepared))
        assert window_digests(data.train, 0, 225) == window_digests(prepared.train, 0, 225)


def test_the_preparation_stays_a_few_shards_ahead_of_the_readers(corpus, tmp_path, monkeypatch, wait_until):
    seen, shards = [], tmp_path / ".out.partial/parts-all"

    def look(folder):
        seen.append(len(list(shards.glob("*.bin"))))
        return read_num_wanted(folder)

    monkeypatch.setattr("owt_data._prepare.background.read_num_wanted", look)
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        for window, num_shards in ((0, 6), (0, 6), (43_250, 16)):  # of about forty
            data.train.windows(np.array([window]), seq_len=SEQ_LEN, order=ORDER, seed=0)
            seen.clear()
            # It asks once per shard, and again and again while it is held back.
            wait_until(lambda: len(seen) > 2 and seen[-1] == seen[-3])
            assert seen[-1] == num_shards


def test_the_end_of_the_block_stops_the_preparation_and_the_next_start_resumes(
    corpus, prepared_start, tmp_path, tokenizing_processes
):
    out = tmp_path / "out"
    with prepare_in_background(str(corpus), out, START, num_processes=1) as data:
        first = window_digests(data.train, 0, 25)
        fingerprint = data.source_fingerprint
    assert not out.exists()
    unfinished = open_tokens(str(out), tokenizer="gpt2")
    assert (unfinished.tokenizer, unfinished.source_fingerprint) == ("bytes", fingerprint)
    np.testing.assert_array_equal(validation_windows(unfinished), validation_windows(prepared_start))
    with prepare_in_background(str(corpus), out, START, num_processes=2) as data:
        assert len(tokenizing_processes()) == 2
        assert data.source_fingerprint == fingerprint
        assert window_digests(data.train, 0, 25) == first
        window_digests(data.train, 0, prepared_start.train.num_windows(SEQ_LEN) // BATCH + 1)
    assert tokenizing_processes() == []
    with prepare_in_background(str(corpus), out, START) as data:
        assert data.source_fingerprint == fingerprint
        assert window_digests(data.train, 0, 25) == first


def test_a_reader_that_waits_wishes_again_after_a_reader_of_earlier_windows(
    corpus, prepared_start, tmp_path, monkeypatch
):
    out, order = tmp_path / "out", {"seq_len": SEQ_LEN, "order": ORDER, "seed": 0}
    last = np.array([prepared_start.train.num_windows(SEQ_LEN) - 1])
    with prepare_in_background(str(corpus), out, START, num_processes=1) as data:
        ahead, behind = (pickle.loads(pickle.dumps(data.train)) for _ in range(2))
        ahead.windows(last // 2, **order)
    with monkeypatch.context() as patch:
        patch.setattr("owt_data._tokens.growing_tokens._PATIENCE_S", 0.5)
        with pytest.raises(DataError, match="has ended before its last tokens"):
            ahead.windows(last, **order)
    behind.windows(np.array([0]), **order)
    with ThreadPoolExecutor(1) as thread, prepare_in_background(str(corpus), out, START, num_processes=1):
        windows = thread.submit(ahead.windows, last, **order).result(TIMEOUT_S)
    np.testing.assert_array_equal(windows, prepared_start.train.windows(last, **order))


def test_progress_is_reported_and_no_thread_is_left(
    articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN", "MAX"):
        monkeypatch.setattr(f"owt_data._prepare.planning.{name}_SHARD_BYTES", 5000)
    before, calls = threading.active_count(), []
    with prepare_in_background(str(articles), tmp_path / "out", START, num_processes=1, progress=calls.append) as data:
        assert calls[0].stage == "reading"
        second_epoch = np.array([articles.stat().st_size // SEQ_LEN])
        assert data.train.windows(second_epoch, seq_len=SEQ_LEN, order=ORDER, seed=0).shape == (1, SEQ_LEN + 1)
    assert (calls[-1].stage, calls[-1].num_documents, calls[-1].fraction) == ("assembling", 300, 1.0)
    assert threading.active_count() == before


def test_the_end_of_the_block_stops_the_last_stage_too(
    articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN", "MAX"):
        monkeypatch.setattr(f"owt_data._prepare.planning.{name}_SHARD_BYTES", 5000)
    monkeypatch.setattr("owt_data._prepare.background.read_num_wanted", lambda folder: 1000)
    stages = []

    def end_the_block(progress: Progress) -> None:
        stages.append(progress.stage)
        if progress.stage == "assembling":
            worker.stop.set()

    worker = _Worker(tmp_path / "out", end_the_block)
    worker.run(str(articles), START, num_processes=1, use_ray=False)
    assert (stages[0], stages.count("assembling"), worker.error) == ("reading", 1, None)
    assert not (tmp_path / "out").exists()
    assert read_journal(tmp_path / ".out.partial/parts-all")


def test_an_error_in_the_block_ends_the_preparation(corpus: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(2):  # the second start finds no lock
        with (
            pytest.raises(ZeroDivisionError),
            prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data,
        ):
            raise ZeroDivisionError(len(data.train))
        assert threading.active_count() == before
    assert not (tmp_path / ".out.partial/running").exists()


def test_readers_in_other_processes_see_the_tokens_grow(corpus, prepared_start, tmp_path):
    (tmp_path / "tokens").mkdir()
    program = (
        "import pickle, sys; from owt_data import Batches, read_steps; tokens = pickle.load(sys.stdin.buffer); "
        "batches = Batches(seq_len=64, global_batch_size=128, rank=1, world_size=2, order='sequential-first'); "
        "steps = read_steps(tokens, batches, start_step=0, stop_step=500); "
        "print(sum(int(windows.sum()) for _, windows in steps))"
    )
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        reader = subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(data.train), stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    batches = Batches(seq_len=SEQ_LEN, global_batch_size=BATCH, rank=1, world_size=2, order=ORDER)
    steps = read_steps(prepared_start.train, batches, start_step=0, stop_step=500)
    assert int(reader.stdout) == sum(int(windows.sum()) for _, windows in steps)


KILLED = """
import hashlib, sys
from owt_data import Batches, PrepareOptions, prepare_in_background, read_steps
corpus, out, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
with prepare_in_background(corpus, out, PrepareOptions(tokenizer="bytes", split="start"), num_processes=2) as data:
    batches = Batches(seq_len=64, global_batch_size=128, order="sequential-first")
    steps = read_steps(data.train, batches, start_step=first, stop_step=1000)
    for step, windows in steps:
        print(step, hashlib.sha256(windows.tobytes()).hexdigest(), flush=True)
sys.stdin.readline()  # does not end before it is killed
"""


@pytest.mark.fault
def test_windows_are_the_same_after_every_kill(corpus, prepared_start, tmp_path, record_property):
    record_property("fault", "SIGKILL of a process that reads tokens while it prepares them, five times")
    record_property("lost", "the shards in progress")
    digests = {}
    for number in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "out"), str(len(digests))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        if number == 5:
            print(file=process.stdin, flush=True)
        for line in process.stdout:
            step, digest = line.split()
            assert digests.setdefault(int(step), digest) == digest
            if number < 5 and len(digests) > 75 * (number + 1):
                os.kill(process.pid, signal.SIGKILL)
                break
        process.communicate()
        assert process.returncode == (-signal.SIGKILL if number < 5 else 0)
    assert list(digests.values()) == window_digests(prepared_start.train, 0, 1000)


def test_a_failure_after_the_first_tokens_is_logged_and_reaches_the_readers(corpus, tmp_path, caplog):
    lines = corpus.read_text().splitlines(keepends=True)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("".join([*lines[:3000], '{"text": 7}\n', *lines[3000:]]))
    with (
        prepare_in_background(str(damaged), tmp_path / "out", START, num_processes=1) as data,
        pytest.raises(DataError, match="must hold text"),
    ):
        window_digests(data.train, 0, 1000)
    assert [one[:38] for one in caplog.messages] == ["no more text can be tokenized, the read"[:38]]
    assert list(tmp_path.iterdir()) == [damaged]  # else the repaired text is another source


@pytest.mark.fault
def test_a_failed_preparation_goes_on_once_its_cause_is_gone(
    corpus: Path, prepared_start: TokenData, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("fault", "a shard that cannot be written while tokens are read")
    record_property("lost", "the shards in progress")
    staging = tmp_path / ".out.partial"
    in_the_way = staging / "parts-all/000009.bin"
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        in_the_way.mkdir()
        with pytest.raises(DataError, match=r"000009\.bin.* must be writable, got"):
            window_digests(data.train, 0, 1000)
    in_the_way.rmdir()
    assert read_journal(in_the_way.parent)
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        assert not (staging / "error.txt").exists()  # of the start before
        assert window_digests(data.train, 0, 500) == window_digests(prepared_start.train, 0, 500)


def test_a_failure_before_the_first_tokens_is_raised_and_not_logged(tmp_path, caplog):
    (tmp_path / "damaged.jsonl").write_text('{"text": 7}\n')
    with (
        pytest.raises(DataError, match="must hold text"),
        prepare_in_background(str(tmp_path / "damaged.jsonl"), tmp_path / "out", START),
    ):
        pytest.fail("the block must not run")
    assert caplog.messages == []
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.jsonl"]


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_orders_that_need_the_number_of_all_tokens_are_rejected(corpus, tmp_path, order):
    with (
        prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data,
        pytest.raises(DataError, match=f"must be sequential or sequential-first, got {order}"),
    ):
        window_digests(data.train, 0, 1, order=order)


def test_one_source_needs_the_split_start(corpus, tmp_path):
    with (
        pytest.raises(DataError, match="split must be start"),
        prepare_in_background(str(corpus), tmp_path / "out", PrepareOptions(tokenizer="bytes")),
    ):
        pytest.fail("the block must not run")


def test_readers_end_when_the_preparation_has_ended(corpus, tmp_path, monkeypatch):
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        window_digests(data.train, 0, 1)
    monkeypatch.setattr("owt_data._tokens.growing_tokens._PATIENCE_S", 0.5)
    monkeypatch.setattr("owt_data._tokens.growing_tokens._SHARED_WITHIN_S", 0.0)  # its shards are here
    with pytest.raises(DataError, match=r"^The preparation of .*out has ended before its last tokens"):
        window_digests(data.train, 0, 1000)


def test_a_machine_without_the_folder_says_so(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._tokens.growing_tokens._SHARED_WITHIN_S", 0.5)
    elsewhere = GrowingTokens(tmp_path / "not-shared", "train", is_one_source=True)
    with pytest.raises(FileNotFoundError, match="not-shared"):
        window_digests(elsewhere, 0, 1)


def test_a_folder_with_leftovers_of_its_preparation_is_complete(corpus, prepared_start, tmp_path):
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1):
        pass
    prepare(str(corpus), tmp_path / "whole", START, num_processes=1)
    (tmp_path / ".out.partial").rename(tmp_path / ".whole.partial")  # as after a kill between renaming and deleting
    assert open_tokens(str(tmp_path / "whole"), tokenizer="bytes").fingerprint == prepared_start.fingerprint


def test_unfinished_folders_are_not_mixed(corpus, tmp_path):
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1):
        pass
    with pytest.raises(DataError, match="must be complete"):
        open_tokens({str(tmp_path / "out"): 1.0}, tokenizer="bytes")


def test_a_val_without_a_window_is_rejected_at_once(corpus, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "short"}\n')
    sources = [f"train={corpus}", f"val={tmp_path / 'short.jsonl'}"]
    with prepare_in_background(sources, tmp_path / "out", PrepareOptions(tokenizer="bytes"), num_processes=1) as data:
        began = time.monotonic()
        with pytest.raises(DataError, match=r"^The tokens must be at least 65, .*, got 6\. "):
            data.val.windows(np.arange(1), seq_len=64, order="sequential", seed=0)
        assert time.monotonic() - began < 30  # it was 90 s, the patience with a network file system


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_val_without_a_document_is_rejected_before_the_training_text_is_tokenized(num_bytes, corpus, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n" * num_bytes)
    sources = [f"train={corpus}", f"val={tmp_path / 'empty.jsonl'}"]
    options = PrepareOptions(tokenizer="bytes")
    with (
        pytest.raises(DataError, match=r"The text of val=\.\.\. must have at least one document, got none"),
        prepare_in_background(sources, tmp_path / "out", options, num_processes=1),
    ):
        pytest.fail("the block must not run")


def test_an_id_outside_the_vocabulary_in_a_growing_shard_is_named_at_once(corpus, tmp_path):
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1) as data:
        window_digests(data.train, 0, 1)
        shard = tmp_path / ".out.partial/parts-all/000001.bin"
        values = np.fromfile(shard, "<u2")
        values[5] = 65_535
        values.tofile(shard)
        with pytest.raises(DataError, match=f"{shard} must be below 257, .*, got 65535 at token 5"):
            window_digests(data.train, 0, 1)


@pytest.mark.parametrize("num_bytes", [300_000, 1_050_000, 2_500_000])
def test_the_validation_tokens_of_a_text_leave_the_rest_to_training(num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a line of words\n" * (num_bytes // 16))
    with prepare_in_background(str(tmp_path / "book.txt"), tmp_path / "out", START, num_processes=1) as data:
        assert 256 << 10 <= len(data.val) < (256 << 10) + 5_000
        last = np.array([(num_bytes - len(data.val) - SEQ_LEN) // SEQ_LEN - 1])
        assert data.train.windows(last, seq_len=SEQ_LEN, order=ORDER, seed=0).shape == (1, SEQ_LEN + 1)


def test_a_text_that_validation_takes_completely_is_rejected_before_the_block(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a line of words\n" * 10_000)
    with (
        pytest.raises(DataError, match=r"more text than validation takes, its first 262144 bytes .*, got 160000"),
        prepare_in_background(str(tmp_path / "book.txt"), tmp_path / "out", START, num_processes=1),
    ):
        pytest.fail("the block must not run")
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]
