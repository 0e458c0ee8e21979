"""Windows through a real Ray cluster."""

import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from pyarrow.fs import FileSystem
from ray import cloudpickle

from owt_data import (
    Batches,
    DataError,
    TokenSequence,
    TokenSpan,
    iter_steps,
    open_tokens,
    read_steps_by_tasks,
    step_windows,
    token_windows,
)
from owt_data._stream.ray_reader import _num_blocks
from owt_data._tokens.layout import Layout

SEQ_LEN, BATCH, STEPS = 16, 8, 700
WITHOUT_CPUS = """
import os, sys, time, ray
from owt_data import Batches, open_tokens, read_steps_by_tasks

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
occupied = ray.remote(num_cpus=1)(lambda: time.sleep(600)).remote()
while ray.available_resources().get("CPU", 0):
    time.sleep(0.05)
tokens = open_tokens(sys.argv[1], tokenizer="bytes").train
batches = Batches(seq_len=16, global_batch_size=8, rank=0, world_size=1)
steps = read_steps_by_tasks(tokens, batches, start_step=0, stop_step=9, first_steps=3)
taken = [next(steps)[0], next(steps)[0]]
steps.close()
print("closed after the steps", taken, flush=True)
ray.cancel(occupied, force=True)
ray.shutdown()
os._exit(0)
"""


def steps_of(tokens: Any, *, start_step: int, stop_step: int, **changed: Any) -> Any:
    batches = Batches(**{"seq_len": SEQ_LEN, "global_batch_size": BATCH, "seed": 3, **changed})
    return step_windows(tokens, batches, start_step=start_step, stop_step=stop_step)


pytestmark = pytest.mark.usefixtures("cluster")


def expected(tokens, order, first, last):
    """The global batches of steps `[first, last)`, computed without Ray."""
    windows = tokens.windows(np.arange(first * BATCH, last * BATCH), order=order, seed=3, seq_len=SEQ_LEN)
    return windows.reshape(-1, BATCH, SEQ_LEN + 1)


def collect(dataset):
    steps, batches = zip(*iter_steps(dataset), strict=True)
    return list(steps), np.stack(batches)


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_a_stream_is_the_window_order_step_by_step(tokens, order):
    dataset = steps_of(tokens, rank=0, world_size=1, start_step=0, stop_step=STEPS, order=order)
    steps, batches = collect(dataset)
    assert steps == list(range(STEPS))
    assert batches.dtype == np.uint16
    np.testing.assert_array_equal(batches, expected(tokens, order, 0, STEPS))


def test_tokens_of_32_bits_keep_their_type(tmp_path):
    ids = np.random.default_rng(0).integers(0, 200_000, 5000)
    ids.astype("<u4").tofile(tmp_path / "x.bin")
    tokens = open_tokens(tmp_path / "x.bin", tokenizer="o200k_base").train
    steps, batches = collect(steps_of(tokens, rank=0, world_size=1, start_step=0, stop_step=4, order="shuffle"))
    assert steps == [0, 1, 2, 3]
    assert batches.dtype == np.uint32
    np.testing.assert_array_equal(batches, expected(tokens, "shuffle", 0, 4))
    rows = token_windows(tokens, seq_len=16, num_rows=9, order="sequential").take_all()
    np.testing.assert_array_equal(np.concatenate([row["x"] for row in rows]), ids[: 9 * 16])


def test_ranks_make_up_the_same_global_batches_from_any_step(tokens):
    shares = []
    for rank in range(4):
        dataset = steps_of(tokens, rank=rank, world_size=4, start_step=650, stop_step=STEPS)
        steps, batches = collect(dataset)
        assert steps == list(range(650, STEPS))
        shares.append(batches)
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), expected(tokens, "shuffle", 650, STEPS))


def test_streams_have_one_seed_unless_they_are_given_another(tokens: TokenSequence) -> None:
    """A change of the defaults would change the batches of runs that rely on them."""
    rows = token_windows(tokens, seq_len=7, num_rows=9).take_all()
    drawn = tokens.windows(np.arange(9), seq_len=7, order="random", seed=2357)
    np.testing.assert_array_equal(np.stack([row["x"] for row in rows]), drawn[:, :-1])
    given = Batches(seq_len=7, global_batch_size=9, rank=1, world_size=3)
    steps, batches = collect(step_windows(tokens, given, start_step=3, stop_step=7))
    assert steps == [3, 4, 5, 6]
    shuffled = tokens.windows(np.arange(27, 63), seq_len=7, order="shuffle", seed=2357).reshape(4, 9, 8)
    np.testing.assert_array_equal(batches, shuffled[:, 3:6])


@pytest.mark.parametrize(("start", "first_steps"), [(2, 3), (0, 1), (5, 200)])
def test_tasks_take_over_from_the_thread_at_any_step(tokens, start, first_steps):
    batches = Batches(seq_len=SEQ_LEN, global_batch_size=BATCH, rank=1, world_size=2, seed=3)
    with mock.patch("owt_data._stream.ray_reader.step_windows", side_effect=step_windows) as made:
        steps = read_steps_by_tasks(tokens, batches, start_step=start, stop_step=9, first_steps=first_steps)
        found = [next(steps)]
        assert made.call_count == 0  # the first step does not wait for them
        found += steps
        assert [call.kwargs["start_step"] for call in made.call_args_list] == [
            *range(start + first_steps, 9)[:1],
        ]
    assert [step for step, _ in found] == [*range(start, 9)]
    windows = np.stack([windows for _, windows in found])
    np.testing.assert_array_equal(windows, expected(tokens, "shuffle", start, 9)[:, BATCH // 2 :])


# Ray Data leaves its log file open after an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damaged", [2, 3, 7])
def test_an_error_of_the_thread_or_of_a_task_is_raised_at_its_step(damaged, tokens):
    """The thread reads the first three steps, and nobody waits for a batch that never comes."""
    (span,) = tokens.spans
    values = np.fromfile(span.path, "<u2")
    values[damaged * BATCH * SEQ_LEN + 5] = 60_000
    values.tofile(span.path)
    limited = TokenSequence(tokens.spans, vocab_size=5000)
    batches = Batches(seq_len=SEQ_LEN, global_batch_size=BATCH, order="sequential")
    taken = []
    with (
        mock.patch("owt_data._stream.ray_reader._BLOCK_BYTES", 1),  # each step is a task of its own
        mock.patch("owt_data._stream.ray_reader._STEPS_PER_FETCH", 1),
    ):
        steps = read_steps_by_tasks(limited, batches, start_step=0, stop_step=9, first_steps=3)
        with pytest.raises(DataError, match=r"must be below 5000, .*, got 60000 at token"):
            taken.extend(step for step, _ in steps)
    assert taken == [*range(len(taken))]
    assert len(taken) <= damaged


def test_as_many_steps_are_fetched_ahead_as_asked(tokens):
    dataset = steps_of(tokens, start_step=0, stop_step=40)
    with mock.patch.object(dataset, "iter_batches", side_effect=dataset.iter_batches) as read:
        for prefetch_steps, num_batches in ((0, 0), (16, 1), (17, 2)):
            assert next(iter_steps(dataset, prefetch_steps=prefetch_steps))[0] == 0
            assert read.call_args.kwargs["prefetch_batches"] == num_batches
    assert next(iter_steps(dataset.iterator()))[0] == 0  # as Ray Train gives it to a worker


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "num_blocks"),
    [
        (1, 8, 1),
        (1 << 20, 8, 1),
        ((1 << 20) + 1, 8, 2),
        (5, 100 << 20, 5),  # a row that is larger than a block
        (1 << 31, 8, 1000),  # blocks of more than 8 MiB
        (1 << 40, 8, 1 << 17),  # and of at most 64 MiB
    ],
)
def test_a_block_has_8_mib_unless_there_would_be_more_than_a_thousand(num_rows, row_bytes, num_blocks):
    assert abs(_num_blocks(num_rows, row_bytes) - num_blocks) <= (1 if num_blocks == 1000 else 0)


def test_a_reader_ends_while_no_cpu_is_left_for_its_tasks(tmp_path):
    """As after the loss of the node with these CPUs. Its thread stays, so that it needs a process of its own."""
    np.random.default_rng(0).integers(0, 257, 5000, np.uint16).tofile(tmp_path / "x.bin")
    command = [sys.executable, "-c", WITHOUT_CPUS, str(tmp_path / "x.bin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-1] == "closed after the steps [0, 1]"


def test_a_dataset_of_rows_has_no_steps(tokens):
    with pytest.raises(DataError, match="dataset must be that of step_windows, got one with x and y"):
        next(iter_steps(token_windows(tokens, seq_len=SEQ_LEN, num_rows=4)))


def test_order_holds_over_many_blocks(tokens, monkeypatch):
    monkeypatch.setattr("owt_data._stream.ray_reader._BLOCK_BYTES", 4096)
    dataset = steps_of(tokens, rank=1, world_size=2, start_step=0, stop_step=STEPS)
    steps, batches = collect(dataset)
    assert steps == list(range(STEPS))
    np.testing.assert_array_equal(batches, expected(tokens, "shuffle", 0, STEPS)[:, BATCH // 2 :])


@pytest.mark.parametrize(("width", "num_blocks"), [("<u2", 8), ("<u4", 16)])
def test_blocks_of_wide_tokens_have_the_same_size(tmp_path, monkeypatch, width, num_blocks):
    np.zeros(5000, width).tofile(tmp_path / "x.bin")
    monkeypatch.setattr("owt_data._stream.ray_reader._BLOCK_BYTES", 4096)
    span = TokenSpan(path=str(tmp_path / "x.bin"), start=0, stop=5000, layout=Layout(width, 0))
    batches = Batches(seq_len=15, global_batch_size=16, order="sequential", seed=0)  # 512 or 1,024 bytes a step
    dataset = step_windows(TokenSequence((span,)), batches, start_step=3, stop_step=67)
    assert dataset.materialize().num_blocks() == num_blocks


def test_a_block_of_token_windows_has_the_bytes_of_x_and_y(tokens, monkeypatch):
    monkeypatch.setattr("owt_data._stream.ray_reader._BLOCK_BYTES", 4096)
    dataset = token_windows(tokens, seq_len=64, num_rows=64)  # 512 bytes a row: 4 of each token of x and y
    assert dataset.materialize().num_blocks() == 8


@pytest.mark.parametrize("concurrency", [None, 1])
def test_a_task_reads_one_batch_of_token_windows(tokens, concurrency):
    options = {"seq_len": SEQ_LEN, "num_rows": 100, "order": "sequential", "concurrency": concurrency}
    batches = token_windows(tokens, batch_size=30, **options).iter_batches(batch_size=None)
    rows = [batch["x"] for batch in batches]
    assert [len(x) for x in rows] == [25] * 4
    expected = tokens.windows(np.arange(100), seq_len=SEQ_LEN, order="sequential", seed=0)[:, :-1]
    np.testing.assert_array_equal(np.concatenate(rows), expected)


def test_with_a_concurrency_of_1_one_task_reads_at_once(tokens, tmp_path):
    spans_of = tmp_path / "spans"
    spans_of.mkdir()

    # A local class travels to the tasks, which cannot import this module.
    class Timed:
        """Tokens that note when a task of several windows begins and ends."""

        def __len__(self):
            return len(tokens)

        def num_windows(self, seq_len):
            return tokens.num_windows(seq_len)

        def windows(self, indices, **order):
            begin = time.monotonic()
            if len(indices) > 1:
                time.sleep(1)
                (spans_of / f"{indices.min()}").write_text(f"{begin} {time.monotonic()}")
            return tokens.windows(indices, **order)

        def starts(self, indices, **order):
            return tokens.starts(indices, **order)

    rows = token_windows(Timed(), seq_len=SEQ_LEN, num_rows=40, batch_size=10, concurrency=1)
    assert len(rows.take_all()) == 40
    spans = sorted(tuple(map(float, path.read_text().split())) for path in spans_of.iterdir())
    assert len(spans) == 4
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_token_windows_are_inputs_and_targets(tmp_path):
    values = np.random.default_rng(0).permutation(5000).astype("<u2")
    values.tofile(tmp_path / "mixed.bin")
    tokens = TokenSequence((TokenSpan(path=str(tmp_path / "mixed.bin"), start=0, stop=5000),))
    rows = token_windows(tokens, seq_len=SEQ_LEN, num_rows=100, order="sequential").take_all()
    assert len(rows) == 100
    assert rows[3]["x"].dtype == rows[3]["y"].dtype == np.int32
    position_of = np.argsort(values)
    starts = [int(position_of[row["x"][0]]) for row in rows]
    assert starts == [number * SEQ_LEN for number in range(100)]
    for start, row in zip(starts, rows, strict=True):
        np.testing.assert_array_equal(row["x"], values[start : start + SEQ_LEN])
        np.testing.assert_array_equal(row["y"], values[start + 1 : start + 1 + SEQ_LEN])


def test_rows_keep_the_order_when_the_first_block_is_the_last_to_be_read(tokens):
    # A local class travels to the tasks, which cannot import this module.
    class SlowFirst:
        """Tokens whose first windows are read slowly: later blocks are complete before the first one."""

        def __init__(self, tokens):
            self._tokens = tokens

        def __len__(self):
            return len(self._tokens)

        def num_windows(self, seq_len):
            return self._tokens.num_windows(seq_len)

        def windows(self, indices, **order):
            if len(indices) > 1 and indices.min() == 0:
                time.sleep(2)
            return self._tokens.windows(indices, **order)

        def starts(self, indices, **order):
            return self._tokens.starts(indices, **order)

    rows = token_windows(SlowFirst(tokens), seq_len=SEQ_LEN, num_rows=100, order="shuffle", seed=3, batch_size=10)
    read = np.stack([row["x"] for row in rows.iter_rows()])
    np.testing.assert_array_equal(
        read, tokens.windows(np.arange(100), seq_len=SEQ_LEN, order="shuffle", seed=3)[:, :-1]
    )


def test_an_error_of_a_task_is_raised_as_it_is(tokens):
    limited = TokenSequence(tokens.spans, vocab_size=4000)
    dataset = steps_of(limited, rank=0, world_size=1, start_step=0, stop_step=STEPS)
    with pytest.raises(DataError, match=r"^The ids in .*tokens\.bin must be below 4000, .*, got 4\d+ at token 4\d+\. "):
        list(iter_steps(dataset))


def test_workers_that_do_not_divide_the_batch_are_rejected(tokens):
    with pytest.raises(DataError, match="global_batch_size must be a multiple of the 3 workers, got 8"):
        steps_of(tokens, rank=0, world_size=3, start_step=0, stop_step=1)


def test_a_rank_beyond_the_world_size_is_rejected(tokens):
    with pytest.raises(DataError, match="rank must be an integer from 0 to 1, got 2"):
        steps_of(tokens, rank=2, world_size=2, start_step=0, stop_step=1)


def test_an_empty_range_of_steps_is_rejected(tokens):
    with pytest.raises(DataError, match="stop_step must be an integer of at least 6, got 5"):
        steps_of(tokens, rank=0, world_size=1, start_step=5, stop_step=5)


def test_too_few_tokens_are_rejected_at_once(tokens):
    with pytest.raises(DataError, match="The tokens must be at least 6001"):
        token_windows(tokens, seq_len=6000, num_rows=1)


@pytest.mark.parametrize("kind", ["rows", "steps"])
def test_a_task_gets_no_table_of_files(kind: str, tokens: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    (span,) = tokens.spans
    many = TokenSequence((span,) * 10_000)
    sizes = []
    for given in (tokens, many):
        with mock.patch("owt_data._stream.ray_reader.untyped", side_effect=lambda read: read) as made:
            if kind == "rows":
                token_windows(given, seq_len=7, num_rows=100)
            else:
                steps_of(given, start_step=0, stop_step=10)
        task = cloudpickle.dumps(made.call_args.args[0])  # pyright: ignore[reportPrivateImportUsage] - undeclared
        sizes.append(len(task))
    assert sizes[1] < sizes[0] + 100


def test_a_process_opens_a_file_once_for_all_its_tasks(
    s3: str, s3_requests: list[tuple[str, str]], tmp_path: Path
) -> None:
    uri = f"{s3}/{tmp_path.name}.bin"
    filesystem, path = FileSystem.from_uri(uri)
    with filesystem.open_output_stream(path) as stream:
        stream.write(np.arange(5000, dtype="<u2").tobytes())
    remote = TokenSequence((TokenSpan(path=uri, start=0, stop=5000),))
    before = len(s3_requests)
    rows = token_windows(remote, seq_len=7, num_rows=60, order="sequential", batch_size=1).take_all()
    assert [row["x"].tolist() for row in rows] == [[*range(7 * number, 7 * number + 7)] for number in range(60)]
    counts = Counter(method for method, name in s3_requests[before:] if name.endswith(path.partition("/")[2]))
    assert counts["GET"] == 61  # the first window is read here too
    assert counts["HEAD"] <= 12  # there are four CPUs, and Ray may replace processes
