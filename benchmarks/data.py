"""Preparation of text, stream of steps and order of windows, against code without owt-data.

    uv run benchmarks/data.py --rounds 3

prepare  owt_data.prepare; a `datasets` script as in nanoGPT and the tutorials, which must write the same bytes; and
         tiktoken alone on documents in memory, the upper bound of speed. Each uses two processes and the tokenizer
         gpt2, on the Python files of this environment as JSON lines.
stream   step_windows and iter_steps; the pipeline of Ray's tutorials over a memory-mapped file of 10 M tokens; and the
         time to the first batch of this file, and of a sparse file of 9 G tokens, neither cached in memory.
order    window_starts for the windows of 9 G tokens; numpy's permutation of all of them.

Each candidate has a fresh process, fresh folders and a fresh cache. The candidates take turns; each round reverses
their order. The first round is a warm-up and does not count. The two files of gpt2 come from TIKTOKEN_CACHE_DIR, or
are downloaded. Writes data_<group>.md and .json.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import timeit
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from options import count

PACKAGES = ("numpy", "tiktoken", "datasets", "ray", "pyarrow", "owt-data")
FILES = ("train.bin", "val.bin")
SEED, MIN_CORPUS_MB, SAMPLE_S = 2357, 50, 0.05
NUM_PROCESSES, NUM_CHUNKS = 2, 64
SEQ_LEN, BATCH_SIZE, VOCAB_SIZE = 1024, 32, 50257
SMALL_TOKENS, LARGE_TOKENS = 10_000_000, 9_000_000_000
NUM_WINDOWS = (LARGE_TOKENS - 1) // SEQ_LEN
NUM_STEPS, NUM_TUTORIAL_STEPS, NUM_FIRST_BATCH_STEPS, NUM_INDICES, NUM_REPEATS = 30_000, 1500, 1000, 4_000_000, 5

Figures = dict[str, float]

# A figure, the baseline that divides it, and the bound for the ratio of their medians. The bound 1.1 is 1.0 plus noise.
GOALS = (
    ("prepare_mb_per_s", "script_mb_per_s", ">=", 2.0),
    ("prepare_mb_per_s", "bare_tiktoken_mb_per_s", ">=", 0.8),
    ("prepare_extra_disk_per_output", None, "<", 1.2),
    ("step_windows_tokens_per_s", "tutorial_tokens_per_s", ">=", 3.0),
    ("first_batch_of_9g_tokens_s", "first_batch_of_10m_tokens_s", "<", 1.1),
    ("window_starts_per_s", None, ">=", 50e6),
    ("window_starts_per_s", "permutation_indices_per_s", ">=", 1.0),
    ("extra_bytes_of_16m_indices", "extra_bytes_of_1m_indices", "<", 1.1),
)


# The candidates. Each has its own process and imports only what it times: no time includes other imports.


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
    from owt_data import TokenSequence, TokenSpan, step_windows

    tokens = TokenSequence((TokenSpan(path=path, start=0, stop=num_tokens),))
    share: Any = {"rank": 0, "world_size": 1, "start_step": 0, "stop_step": num_steps}
    return step_windows(tokens, seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, order=order, seed=SEED, **share)


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


# The parent process. It stays small: on Linux, the peak memory of a new process starts at that of its parent.


def measure(temp: Path, name: str, settings: dict[str, Any]) -> tuple[Figures, tuple[str, ...]]:
    """Run a candidate in its own process and folder. Return its figures, and the SHA-256 of the files that it wrote."""
    work, out = temp / name, temp / name / "out"
    work.mkdir()
    environment = os.environ | {
        "HF_HOME": str(work / "hf"),
        "HF_DATASETS_CACHE": str(work / "hf" / "datasets"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # Bytecode is cached, as in a used installation, also if this installation is read-only.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(temp / "bytecode"),
    }
    command = [sys.executable, __file__, "--candidate", name, json.dumps(settings)]
    os.sync()  # no candidate waits for the writes of another one
    peak_bytes = 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, cwd=work, stdout=subprocess.PIPE, stderr=log, text=True)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, disk_bytes(work))
            time.sleep(SAMPLE_S)
        log.seek(0)
        if process.returncode:
            sys.exit(f"{name} ended with exit code {process.returncode}:\n{log.read()}")
    figures, digests = json.loads(process.communicate()[0].splitlines()[-1]), ()
    if out.exists():
        figures[f"{name}_extra_disk_per_output"] = peak_bytes / disk_bytes(out) - 1
        digests = tuple(hashlib.sha256((out / file).read_bytes()).hexdigest() for file in FILES)
    shutil.rmtree(work)
    return figures, digests


def disk_bytes(folder: str | Path) -> int:
    """Return the size of all files below a folder, while processes create and delete files."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                total += disk_bytes(entry.path) if entry.is_dir() else entry.stat().st_size
    return total


def prepare_group(temp: Path, corpus_mb: int) -> dict[str, Any]:
    """Write the Python files of this installation as JSON lines. Return the candidates with their settings."""
    corpus, num_bytes = temp / "corpus.jsonl", 0
    with corpus.open("w", encoding="utf-8") as file:
        roots = map(Path, map(sysconfig.get_path, ("purelib", "stdlib")))
        for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
            text = path.read_text(encoding="utf-8", errors="replace") if num_bytes < corpus_mb * 1e6 else ""
            if text:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                num_bytes += len(text.encode())
    if num_bytes < MIN_CORPUS_MB * 1e6:
        sys.exit(f"the corpus must be at least {MIN_CORPUS_MB} MB, got {num_bytes / 1e6:.1f} MB. Raise --corpus-mb.")
    settings = {"corpus": str(corpus), "num_mb": num_bytes / 1e6}
    return {"prepare": settings, "script": settings, "bare_tiktoken": settings}


def stream_group(temp: Path, _: int) -> dict[str, Any]:
    """Write a small file of random tokens and a large sparse file. Return the candidates with their settings."""
    small, large = temp / "small.bin", temp / "large.bin"
    np.random.default_rng(0).integers(0, VOCAB_SIZE, SMALL_TOKENS, dtype=np.uint16).tofile(small)
    large.touch()
    os.truncate(large, 2 * LARGE_TOKENS)
    path = {"path": str(small)}
    return {"step_windows": path, "tutorial": path, "first_batch": {"small": str(small), "large": str(large)}}


GROUPS = {"prepare": prepare_group, "stream": stream_group, "order": lambda *_: {"order": {}}}


def run_group(group: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run all rounds of a group. Return the figures by round."""
    rounds: list[Figures] = []
    with tempfile.TemporaryDirectory() as temp:
        settings = GROUPS[group](Path(temp), options.corpus_mb)
        for number in range(1 + options.rounds):
            answers = [measure(Path(temp), name, settings[name]) for name in list(settings)[:: -1 if number % 2 else 1]]
            if len({digests for _, digests in answers if digests}) > 1:
                sys.exit(f"prepare and script must write the same {' and '.join(FILES)}, got {answers}")
            rounds.append({name: value for figures, _ in answers for name, value in figures.items()})
            print(f"{group}, {f'round {number}' if number else 'warm-up'}: {rounds[-1]}", flush=True)
    return {name: [figures[name] for figures in rounds[1:]] for name in sorted(rounds[0])}


def rows(figures: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield the median of each figure, and the values with goals: mostly ratios of medians."""
    for name, values in figures.items():
        if (name, None) not in {goal[:2] for goal in GOALS}:
            yield {"what": name, "value": statistics.median(values), "by_round": values, "goal": ""}
    for name, base, sign, bound in GOALS:
        if name in figures:
            ours, theirs = figures[name], figures[base] if base else [1.0] * len(figures[name])
            value = statistics.median(ours) / statistics.median(theirs)
            by_round = [our / their for our, their in zip(ours, theirs, strict=True)]
            goal = f"{sign} {bound:,g}: {'met' if (value < bound) == (sign == '<') else 'missed'}"
            yield {"what": f"{name} / {base}" if base else name, "value": value, "by_round": by_round, "goal": goal}


def markdown(result: dict[str, Any]) -> str:
    """Return the results as Markdown tables."""
    lines = ["# Data, against code without owt-data", ""]
    lines += [f"- {name}: {about}" for name, about in result.items() if name not in GROUPS]
    for group in [group for group in GROUPS if group in result]:
        lines += ["", f"## {group}", "", "| median, or ratio of medians | value | by round | goal |", "|---" * 4 + "|"]
        for row in result[group]:
            by_round = ", ".join(f"{value:,.4g}" for value in row["by_round"])
            lines.append(f"| {row['what']} | {row['value']:,.4g} | {by_round} | {row['goal']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the rounds and write the results, or run one candidate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3, help="rounds after the warm-up (default: %(default)s)")
    parser.add_argument("--only", choices=GROUPS, help="run one group (default: all)")
    parser.add_argument("--corpus-mb", type=count, default=300, help="MB of text, 50 or more (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    parser.add_argument("--candidate", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.candidate:
        print(json.dumps(CANDIDATES[options.candidate[0]](**json.loads(options.candidate[1]))))
        return
    constants = {name.lower(): value for name, value in globals().items() if isinstance(value, int | float)}
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    about = {
        "hardware": f"{os.cpu_count()} CPU cores, {cpus[0].partition(': ')[2] if cpus else ''} {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "configuration": {"rounds": options.rounds, "corpus_mb": options.corpus_mb, **constants},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for group in [options.only] if options.only else GROUPS:
        result = about | {group: list(rows(run_group(group, options)))}
        (options.out / f"data_{group}.json").write_text(json.dumps(result, indent=2) + "\n")
        (options.out / f"data_{group}.md").write_text(markdown(result))
        print(markdown(result))


if __name__ == "__main__":
    main()
