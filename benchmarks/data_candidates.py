"""The candidates of `data.py`, each timed in a process of its own: `data_candidates.py NAME SETTINGS`.

The process prints one line of JSON. A candidate imports only what it times: no time includes other imports.
"""

import itertools
import json
import logging
import multiprocessing
import os
import resource
import statistics
import sys
import time
import timeit
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

FILES = ("train.bin", "val.bin")
SEED = 2357
NUM_PROCESSES = 2
NUM_CHUNKS = 64
SEQ_LEN = 1024
BATCH_SIZE = 32
SMALL_TOKENS = 10_000_000
LARGE_TOKENS = 9_000_000_000
NUM_WINDOWS = (LARGE_TOKENS - 1) // SEQ_LEN
NUM_STEPS = 30_000
NUM_TUTORIAL_STEPS = 1500
NUM_FIRST_BATCH_STEPS = 1000
NUM_INDICES = 4_000_000
NUM_REPEATS = 5

Figures = dict[str, float]


def prepare(corpus: str, num_mb: float) -> Figures:
    """Prepare token files by `owt_data.prepare`."""
    import owt_data

    make, options = owt_data.prepare, owt_data.PrepareOptions(tokenizer="gpt2")  # imported on first use
    began = time.perf_counter()
    make(corpus, "out", options, num_processes=NUM_PROCESSES)
    seconds = time.perf_counter() - began
    peak_rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # excludes the processes that tokenize
    return {"prepare_mb_per_s": num_mb / seconds, "prepare_peak_rss_mb": peak_rss_kib * 1024 / 1e6}


def script(corpus: str, num_mb: float) -> Figures:
    """Write the same files with `datasets`, like nanoGPT and the tutorials."""
    import datasets
    import tiktoken

    began = time.perf_counter()
    encoding = tiktoken.get_encoding("gpt2")

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        ids = encoding.encode_ordinary(row["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    rows = datasets.load_dataset("json", data_files=corpus, split="train")
    assert isinstance(rows, datasets.Dataset)
    splits = rows.train_test_split(test_size=0.0005, seed=SEED, shuffle=True)
    tokenized = splits.map(tokenize, remove_columns=["text"], num_proc=NUM_PROCESSES)
    Path("out").mkdir()
    for split, name in zip(("train", "test"), FILES, strict=True):
        write_shards(tokenized[split], Path("out", name))
    return {"script_mb_per_s": num_mb / (time.perf_counter() - began)}


def write_shards(rows: Any, path: Path) -> None:
    """Write the tokens of a split to a memory-mapped file, shard by shard."""
    tokens = np.memmap(path, dtype=np.uint16, mode="w+", shape=(sum(rows["len"][:]),))
    num_shards, at = min(1024, len(rows)), 0
    for index in range(num_shards):
        shard = rows.shard(num_shards=num_shards, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"][:])
        tokens[at : at + len(ids)] = ids
        at += len(ids)
    tokens.flush()


INHERITED: dict[str, Any] = {}
"""Data that the forked processes of `bare_tiktoken` inherit."""


def bare_tiktoken(corpus: str, num_mb: float) -> Figures:
    """Tokenize documents in memory with tiktoken alone, and count the tokens."""
    import tiktoken

    with Path(corpus).open(encoding="utf-8") as file:
        INHERITED["texts"] = [json.loads(line)["text"] for line in file]
    INHERITED["encoding"] = tiktoken.get_encoding("gpt2")
    up_to = np.cumsum([len(text) for text in INHERITED["texts"]])
    inner = np.searchsorted(up_to, np.arange(1, NUM_CHUNKS) * up_to[-1] / NUM_CHUNKS)
    chunks = list(itertools.pairwise([0, *inner.tolist(), len(up_to)]))
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES) as pool:
        pool.map(count_tokens, [(0, 1)] * NUM_PROCESSES, chunksize=1)  # waits until the processes have started
        began = time.perf_counter()
        assert sum(pool.imap_unordered(count_tokens, chunks)) > 0
        return {"bare_tiktoken_mb_per_s": num_mb / (time.perf_counter() - began)}


def count_tokens(chunk: tuple[int, int]) -> int:
    """Count tokens like `encode_ordinary`, but faster: without a list of Python integers."""
    encode = INHERITED["encoding"].encode_to_numpy
    return sum(len(encode(text, disallowed_special=())) for text in INHERITED["texts"][slice(*chunk)])


def step_windows(path: str) -> Figures:
    """Read the stream of `step_windows` by `iter_steps`."""
    from owt_data import iter_steps

    start_ray()
    began = time.perf_counter()
    return rates("step_windows", iter_steps(our_steps(path, SMALL_TOKENS, NUM_STEPS, "random")), began)


def tutorial(path: str) -> Figures:
    """Read the stream of Ray's tutorials: random starts, mapped to windows like nanoGPT's `get_batch`."""
    import ray.data

    def read_windows(batch: Any) -> Any:
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        windows = np.stack([tokens[start : start + SEQ_LEN + 1] for start in batch["start"]]).astype(np.int32)
        return {"x": windows[:, :-1], "y": windows[:, 1:]}

    start_ray()
    began = time.perf_counter()
    starts = np.random.default_rng(SEED).integers(0, SMALL_TOKENS - SEQ_LEN, NUM_TUTORIAL_STEPS * BATCH_SIZE)
    rows = ray.data.from_items([{"start": int(start)} for start in starts])
    windows = rows.map_batches(read_windows, batch_size=BATCH_SIZE)
    return rates("tutorial", windows.iter_batches(batch_size=BATCH_SIZE, prefetch_batches=2), began)


def first_batch(small: str, large: str) -> Figures:
    """Return the seconds to the first batch, with Ray running: small file, large file, large file and many steps."""
    from owt_data import iter_steps

    start_ray()
    files = {path: os.open(path, os.O_RDONLY) for path in (small, large)}
    runs = {
        "first_batch_of_10m_tokens_s": (small, SMALL_TOKENS, NUM_FIRST_BATCH_STEPS),
        "first_batch_of_9g_tokens_s": (large, LARGE_TOKENS, NUM_FIRST_BATCH_STEPS),
        "first_batch_of_9g_tokens_in_an_epoch_of_steps_s": (large, LARGE_TOKENS, NUM_WINDOWS // BATCH_SIZE),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + NUM_REPEATS):
        for name, run in runs.items():
            os.posix_fadvise(files[run[0]], 0, 0, os.POSIX_FADV_DONTNEED)  # read the file from disk again
            began = time.perf_counter()
            batches = iter_steps(our_steps(*run, "shuffle"))
            next(batches)
            times[name].append(time.perf_counter() - began)
            del batches
            time.sleep(0.5)  # until Ray has released the prefetched batches
    # Ray starts processes for the first repetition of each run, which does not count.
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def start_ray() -> None:
    """Start Ray with four logical CPUs."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def our_steps(path: str, num_tokens: int, num_steps: int, order: Any) -> Any:
    """Return the steps of one worker from a file."""
    from owt_data import Batches, TokenSequence, TokenSpan, step_windows

    tokens = TokenSequence((TokenSpan(path=path, start=0, stop=num_tokens),))
    batches = Batches(seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, order=order, seed=SEED)
    return step_windows(tokens, batches, start_step=0, stop_step=num_steps)


def rates(name: str, batches: Iterable[Any], began: float) -> Figures:
    """Return the tokens per second since the arrival of the first batch, and since `began`."""
    first, *later = [time.perf_counter() for _ in batches]
    steady, with_start = len(later) / (later[-1] - first), (1 + len(later)) / (later[-1] - began)
    tokens = BATCH_SIZE * SEQ_LEN
    return {f"{name}_tokens_per_s": steady * tokens, f"{name}_tokens_per_s_with_start": with_start * tokens}


def order() -> Figures:
    """Time `window_starts` and numpy's permutation in turns; measure the memory of `window_starts`."""
    from owt_data import window_starts

    def ours(num_indices: int) -> Callable[[], np.ndarray]:
        begin = 20 * NUM_WINDOWS - 8000  # each range of indices crosses an epoch
        indices = np.arange(begin, begin + num_indices)
        return lambda: window_starts(indices, order="shuffle", seed=1, num_tokens=LARGE_TOKENS, seq_len=SEQ_LEN)

    calls = ours(NUM_INDICES), lambda: np.random.default_rng(0).permutation(NUM_WINDOWS)
    times = [[timeit.timeit(call, number=1) for call in calls] for _ in range(NUM_REPEATS)]
    our_s, baseline_s = map(statistics.median, zip(*times, strict=True))
    return {
        "window_starts_per_s": NUM_INDICES / our_s,
        "permutation_indices_per_s": NUM_WINDOWS / baseline_s,
        "permutation_bytes": calls[1]().nbytes,
        "extra_bytes_of_1m_indices": extra_bytes(ours(1_000_000)),
        "extra_bytes_of_16m_indices": extra_bytes(ours(16_000_000)),
    }


def extra_bytes(call: Callable[[], np.ndarray]) -> int:
    """Return the peak memory of a call in bytes, without its result."""
    tracemalloc.start()
    output = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - output.nbytes


CANDIDATES: dict[str, Callable[..., Figures]] = {
    call.__name__: call for call in (prepare, script, bare_tiktoken, step_windows, tutorial, first_batch, order)
}


if __name__ == "__main__":
    print(json.dumps(CANDIDATES[sys.argv[1]](**json.loads(sys.argv[2]))))
