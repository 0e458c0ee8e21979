"""Tokens of an unfinished folder: the shards that exist, the wishes of readers, and the end of the preparation."""

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from owt_data import (
    DataError,
    GrowingTokens,
    OrderKind,
    PrepareOptions,
    Progress,
    find_source,
    open_tokens,
    prepare_in_background,
    read_manifest,
)
from owt_data._prepare import background
from owt_data._prepare.local_encoder import local_encoder
from owt_data._prepare.shards import tokenize
from owt_data._sources.documents import Documents
from owt_data._tokens import growing_tokens
from owt_data._tokens.growing_tokens import note_end, note_start, raise_failure, read_num_wanted
from owt_data._tokens.window_order import num_windows

TEXT = np.resize([*b"nine char", 256], 120)
ORDER: OrderKind = "sequential"
START = PrepareOptions(tokenizer="bytes", split="start")


@pytest.fixture
def unfinished(tmp_path) -> Callable[[str, int], Path]:
    """Makes shards of ten tokens of a split in the working folder of `out`, and returns their folder."""

    def make(split: str, num_shards: int) -> Path:
        path, folder = tmp_path / f"{split}.jsonl", tmp_path / ".out.partial" / f"parts-{split}"
        path.write_text('{"text": "nine char"}\n' * num_shards)
        with local_encoder("bytes", 1) as encoder:
            tokenize(
                Documents(find_source(str(path))), folder, shard_bytes=9, encoder=encoder, report=lambda *call: None
            )
        return folder

    return make


def window(tokens, index):
    """The window of 7 inputs at an index."""
    return tokens.windows(np.array([index]), seq_len=7, order=ORDER, seed=0)[0]


@pytest.mark.parametrize("is_one_source", [False, True])
def test_a_reader_wishes_the_shards_of_its_windows(
    is_one_source: bool, unfinished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    unfinished("all" if is_one_source else "train", 12)
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=is_one_source)
    assert len(tokens) == 10 * (12 - is_one_source)
    for index, num_shards in ((0, 1), (1, 2), (5, 5), (3, 5), (8, 7)):  # window 8 ends with the last token of its shard
        np.testing.assert_array_equal(window(tokens, index), TEXT[7 * index : 7 * index + 8])
        assert read_num_wanted(tmp_path / "out") == num_shards + is_one_source


def test_a_reader_of_starts_wishes_the_shards_of_its_windows(
    unfinished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """A preparation waits for a wish, and a reader for the preparation."""
    unfinished("train", 12)
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=False)
    for index, num_shards in ((1, 2), (8, 7)):
        assert tokens.starts(np.array([index]), seq_len=7, order=ORDER, seed=0).tolist() == [7 * index]
        assert read_num_wanted(tmp_path / "out") == num_shards


@pytest.mark.parametrize(("text", "num_wanted"), [("17", 17), ("", 2), ("-3", 2), ("9" * 30, 2), ("7\n", 2)])
def test_a_damaged_wish_of_a_reader_is_that_of_the_first(text: str, num_wanted: int, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/wanted").write_text(text)
    assert read_num_wanted(tmp_path / "out") == num_wanted


@pytest.mark.parametrize("is_one_source", [False, True])
def test_validation_is_the_first_shard_or_a_source_of_its_own(
    is_one_source: bool, unfinished: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._tokens.growing_tokens._PATIENCE_S", 0.5)  # for a reader that waits
    unfinished("all", 4)
    unfinished("train", 5)
    unfinished("val", 3)
    val = GrowingTokens(tmp_path / "out", "val", is_one_source=is_one_source)
    assert (len(val), val.num_windows(7), val.is_complete) == ((10, 1, False) if is_one_source else (30, 4, False))
    np.testing.assert_array_equal(window(val, 0), TEXT[:8])
    # All validation tokens exist: what follows the last window is the second epoch, and nobody waits.
    indices, again = np.arange(6), [0, 0, 0, 0, 0, 0] if is_one_source else [0, 7, 14, 21, 0, 7]
    new = GrowingTokens(tmp_path / "out", "val", is_one_source=is_one_source)
    assert new.starts(indices, seq_len=7, order=ORDER, seed=0).tolist() == again
    assert val.windows(indices, seq_len=7, order=ORDER, seed=0)[:, 0].tolist() == TEXT[again].tolist()
    assert not (tmp_path / ".out.partial/wanted").exists()


def test_a_shard_without_a_record_is_not_read(unfinished: Callable[[str, int], Path], tmp_path: Path) -> None:
    folder = unfinished("train", 5)
    (folder / "000005.bin").write_bytes((folder / "000004.bin").read_bytes())
    assert len(GrowingTokens(tmp_path / "out", "train", is_one_source=False)) == 50


def test_a_shard_that_was_missing_for_a_while_is_read(
    unfinished: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._tokens.growing_tokens._PATIENCE_S", 0.25)
    folder = unfinished("train", 5)
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=False)
    np.testing.assert_array_equal(window(tokens, 0), TEXT[:8])
    (folder / "000003.bin").rename(tmp_path / "hidden")
    with pytest.raises((DataError, FileNotFoundError), match=r"000003\.bin"):
        window(tokens, 4)
    (tmp_path / "hidden").rename(folder / "000003.bin")
    np.testing.assert_array_equal(window(tokens, 4), TEXT[28:36])


def test_the_end_of_a_preparation_is_noted_with_its_reason(
    unfinished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    staging, out = unfinished("train", 5).parent, tmp_path / "out"
    tokens = GrowingTokens(out, "train", is_one_source=False)
    for error, message in (
        (DataError("The disk must work, got smoke."), r"^The disk must work, got smoke\.$"),
        (ValueError("a\nb"), rf"^The preparation of {out} has failed: ValueError"),
    ):
        note_start(out)
        raise_failure(out)
        assert (staging / "running").exists()
        note_end(out, error)
        assert not (staging / "running").exists()
        with pytest.raises(DataError, match=message):
            window(tokens, 9)
    note_start(out)
    note_end(out, None)
    assert sorted(path.name for path in staging.iterdir()) == ["parts-train", "wanted"]


def test_another_thread_may_look_for_the_tokens_again(
    unfinished: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished("train", 5)
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=False)
    assert len(tokens) == 50

    def find_again(num_tokens: int, seq_len: int) -> int:
        tokens._forget()
        return num_windows(num_tokens, seq_len)

    monkeypatch.setattr("owt_data._tokens.growing_tokens.num_windows", find_again)
    np.testing.assert_array_equal(window(tokens, 3), TEXT[21:29])


@pytest.mark.parametrize("is_one_source", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_that_grow_are_those_of_all_shards(
    split: Literal["train", "val"], is_one_source: bool, unfinished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    tokens = GrowingTokens(tmp_path / "out", split, is_one_source=is_one_source)
    for num_shards in (0, 1, 2, 2, 5):
        if num_shards:
            unfinished("all" if is_one_source else split, num_shards)
        new = GrowingTokens(tmp_path / "out", split, is_one_source=is_one_source)
        assert tokens.existing() == pickle.loads(pickle.dumps(tokens)).existing() == new.existing()
    assert len(tokens) == (50 if not is_one_source else 40 if split == "train" else 10)


@pytest.mark.parametrize("looks_between", [False, True])
def test_shards_of_another_preparation_take_the_place_of_the_first(
    looks_between: bool, unfinished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=False)
    folder = unfinished("train", 3)
    assert len(tokens) == 30
    shutil.rmtree(folder)
    assert not looks_between or len(tokens) == 0
    shutil.rmtree(unfinished("train", 5))
    (tmp_path / "train.jsonl").unlink()
    unfinished("train", 2)
    assert len(tokens) == 20


@pytest.mark.parametrize("order", ["sequential", "sequential-first"])
def test_a_complete_folder_has_the_windows_of_its_file_and_its_vocabulary(order: OrderKind, prepared: Path) -> None:
    for split in ("train", "val"):
        growing = GrowingTokens(prepared, split, is_one_source=True, vocab_size=257)
        complete = getattr(open_tokens(str(prepared), tokenizer="bytes"), split)
        assert (len(growing), growing.is_complete) == (len(complete), True)
        assert growing.num_windows(7) == complete.num_windows(7)
        indices = np.arange(3 * complete.num_windows(7))
        np.testing.assert_array_equal(
            growing.windows(indices, seq_len=7, order=order, seed=3),
            complete.windows(indices, seq_len=7, order=order, seed=3),
        )
        tokens = np.fromfile(prepared / f"{split}.bin", "<u2")
        tokens[9] = 257
        tokens.tofile(prepared / f"{split}.bin")
        with pytest.raises(DataError, match=rf"{split}\.bin must be below 257, .*, got 257 at token 9\."):
            growing.windows(np.array([1]), seq_len=7, order=order, seed=3)


KILLED_EARLY = """
import sys, time
from owt_data import PrepareOptions, prepare_in_background
with prepare_in_background(sys.argv[1], sys.argv[2], PrepareOptions(tokenizer="bytes", split="start"), num_processes=1):
    print("reading", flush=True)
    time.sleep(600)
"""


@pytest.mark.fault
def test_a_reader_does_not_wait_for_a_preparation_that_was_killed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    record_property("fault", "SIGKILL of a process that prepares tokens, while another one waits for them")
    monkeypatch.setattr("owt_data._tokens.growing_tokens._PATIENCE_S", 1.0)
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_EARLY, str(corpus), str(out)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
    assert (tmp_path / ".out.partial/running").exists()
    tokens, errors = GrowingTokens(out, "train", is_one_source=True), list[str]()

    def read() -> None:
        try:
            tokens.windows(np.array([corpus.stat().st_size // 64 - 10]), seq_len=64, order=ORDER, seed=0)
        except DataError as error:
            errors.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert ["has ended before its last tokens" in error for error in errors] == [True]


def test_a_reader_waits_for_a_slow_preparation(articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signs of life count, not the shards that it finishes."""
    assert 3 * background._SIGN_OF_LIFE_S < growing_tokens._PATIENCE_S  # a sign may be late
    for name in ("MIN", "MAX"):
        monkeypatch.setattr(f"owt_data._prepare.planning.{name}_SHARD_BYTES", 5000)
    monkeypatch.setattr("owt_data._prepare.background._SIGN_OF_LIFE_S", 0.1)
    monkeypatch.setattr("owt_data._tokens.growing_tokens._PATIENCE_S", 3.0)
    waiting, answers = threading.Event(), []

    def stall(progress: Progress) -> None:
        if waiting.is_set() and not answers:
            answers.append(time.sleep(5.0))

    out = tmp_path / "out"
    with prepare_in_background(str(articles), out, START, num_processes=1, progress=stall) as data:
        waiting.set()
        last = np.array([data.train.num_windows(64) + 100])
        windows = data.train.windows(last, seq_len=64, order=ORDER, seed=0)
    assert answers
    assert windows.shape == (1, 64 + 1)


class Clock:
    """A clock of this machine. Each sleep passes at once, and calls a function before."""

    def __init__(self, at_sleep: Callable[[float], object]) -> None:
        self.now_s, self.at_sleep = 1000.0, at_sleep

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.at_sleep(self.now_s - 1000.0)
        self.now_s += seconds


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_are_not_empty_while_their_folder_becomes_complete(
    split: Literal["train", "val"], prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder gets its name after a reader has looked for it, and before the reader looks for the journal."""
    answers = iter([None])
    monkeypatch.setattr(
        "owt_data._tokens.growing_tokens.read_manifest", lambda folder: next(answers, read_manifest(folder))
    )
    tokens = GrowingTokens(prepared, split, is_one_source=True)
    complete = getattr(open_tokens(str(prepared), tokenizer="bytes"), split)
    np.testing.assert_array_equal(window(tokens, 0), complete.read(0, 8))
    assert len(tokens) == len(complete)


def test_a_file_that_a_complete_folder_lacks_is_named_at_once(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("owt_data._tokens.growing_tokens.time", Clock(lambda _: pytest.fail("waits")))
    tokens = GrowingTokens(prepared, "train", is_one_source=True)
    assert len(tokens)
    (prepared / "train.bin").unlink()
    with pytest.raises(DataError, match=r"train\.bin must be readable, got No such file or directory"):
        window(tokens, 0)


@pytest.mark.parametrize("storage_s", [0, 1 << 33], ids=["in 1970", "in 2242"])
def test_signs_of_life_are_compared_with_one_another_and_not_with_the_clock(
    storage_s: int, unfinished: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of files are those of the storage, whose clock may be wrong."""
    monkeypatch.setattr("owt_data._tokens.growing_tokens._POLL_S", 1.0)
    running = unfinished("train", 5).parent / "running"
    note_start(tmp_path / "out")

    def live_for_200_s(waited_s: float) -> None:
        os.utime(running, (storage_s + min(waited_s, 200) // 10, storage_s + min(waited_s, 200) // 10))

    clock = Clock(live_for_200_s)
    monkeypatch.setattr("owt_data._tokens.growing_tokens.time", clock)
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=False)
    with pytest.raises(DataError, match="has ended before its last tokens"):
        window(tokens, 9)
    assert 1000 + 200 + 90 <= clock.now_s <= 1000 + 200 + 90 + 2
    clock = Clock(lambda waited_s: unfinished("train", 12) if waited_s == 300 else live_for_200_s(waited_s / 2))
    monkeypatch.setattr("owt_data._tokens.growing_tokens.time", clock)
    np.testing.assert_array_equal(window(tokens, 9), TEXT[63:71])
    assert clock.now_s == 1000 + 300 + 1


def test_positions_of_windows_are_known_before_the_folder_is_complete(unfinished, tmp_path):
    unfinished("all", 4)  # the first shard is the validation tokens
    tokens = GrowingTokens(tmp_path / "out", "train", is_one_source=True)
    np.testing.assert_array_equal(tokens.starts(np.array([3, 0, 1]), seq_len=7, order=ORDER, seed=0), [21, 0, 7])
