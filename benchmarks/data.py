"""Preparing text, streaming steps and ordering windows, against what one would write without owt-data.

    uv run benchmarks/data.py --rounds 3

prepare  owt_data.prepare; a script over `datasets` as nanoGPT and the tutorials have it, whose files must be the same
         byte for byte; and tiktoken alone on documents in memory, which nothing that tokenizes can beat.
         Two processes each, gpt2, on the Python files of this environment as JSON lines.
stream   step_windows and iter_steps; the pipeline of Ray's tutorials over a memory-mapped file of 10 M tokens; and the
         time to the first batch of that file and of one of 9 G tokens, which is all holes.
order    window_starts for the windows of 9 G tokens; numpy's permutation of them all.

Every contestant has a fresh process, fresh folders and a fresh cache, and they take turns, in an order that turns
round with every round. The first round warms up and does not count. gpt2's two files come from TIKTOKEN_CACHE_DIR, or
are downloaded. Writes data.md and data.json with the parts that ran: give --out with --only.
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
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
PACKAGES = ("numpy", "tiktoken", "datasets", "ray", "pyarrow", "owt-data")

SPLITS = ("train.bin", "val.bin")
SEED, MIN_CORPUS_MB, SAMPLE_S = 2357, 50, 0.05

NUM_PROCESSES, NUM_CHUNKS = 2, 64
SEQ_LEN, BATCH_SIZE, VOCAB_SIZE = 1024, 32, 50257
SMALL_TOKENS, LARGE_TOKENS = 10_000_000, 9_000_000_000
NUM_WINDOWS = (LARGE_TOKENS - 1) // SEQ_LEN
NUM_STEPS, NUM_TUTORIAL_STEPS, NUM_FIRST_BATCH_STEPS = 30_000, 1500, 1000
NUM_INDICES, NUM_REPEATS = 4_000_000, 7

Figures = dict[str, float]


class Goal(NamedTuple):
    """What a median, or its ratio to a peer's, should be. The 1.1 are 1.0 and a tenth for noise."""

    figure: str
    peer: str | None
    sign: str
    bound: float


GOALS = (
    Goal("prepare_mb_per_s", "script_mb_per_s", ">=", 2.0),
    Goal("prepare_mb_per_s", "tiktoken_mb_per_s", ">=", 0.8),
    Goal("prepare_extra_disk_per_output", None, "<", 1.2),
    Goal("step_windows_tokens_per_s", "tutorial_tokens_per_s", ">=", 3.0),
    Goal("first_batch_of_9g_tokens_s", "first_batch_of_10m_tokens_s", "<", 1.1),
    Goal("window_starts_per_s", None, ">=", 50e6),
    Goal("window_starts_per_s", "permutation_indices_per_s", ">=", 1.0),
    Goal("extra_bytes_of_16m_indices", "extra_bytes_of_1m_indices", "<", 1.1),
)


# The contestants. Each runs in a process of its own and imports what it times, so that none pays for another's imports.


def prepare_text(corpus: str, out: str) -> Figures:
    """`owt_data.prepare`."""
    from owt_data import PrepareOptions, prepare

    began = time.perf_counter()
    prepare(corpus, out, PrepareOptions(tokenizer="gpt2"), num_processes=NUM_PROCESSES)
    seconds = time.perf_counter() - began
    peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # without the tokenizing processes
    return {"seconds": seconds, "prepare_peak_rss_mb": peak_rss_mb}


def prepare_by_script(corpus: str, out: str) -> Figures:
    """The same files as nanoGPT and the tutorials make them, with `datasets`."""
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
    Path(out).mkdir()
    for split, name in zip(("train", "test"), SPLITS, strict=True):
        write_shards(tokenized[split], Path(out) / name)
    return {"seconds": time.perf_counter() - began}


def write_shards(rows: Any, path: Path) -> None:
    """The script's last step: a memory-mapped file, filled shard by shard."""
    tokens = np.memmap(path, dtype=np.uint16, mode="w+", shape=(sum(rows["len"][:]),))
    num_shards, at = min(1024, len(rows)), 0
    for index in range(num_shards):
        shard = rows.shard(num_shards=num_shards, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"][:])
        tokens[at : at + len(ids)] = ids
        at += len(ids)
    tokens.flush()


HELD: dict[str, Any] = {}
"""What the processes of `encode_in_memory` inherit."""


def encode_in_memory(corpus: str) -> Figures:
    """Tiktoken on documents in memory, their tokens counted and let go."""
    import tiktoken

    with Path(corpus).open(encoding="utf-8") as file:
        HELD["texts"] = [json.loads(line)["text"] for line in file]
    HELD["encoding"] = tiktoken.get_encoding("gpt2")
    up_to = np.cumsum([len(text) for text in HELD["texts"]])
    inner = np.searchsorted(up_to, np.arange(1, NUM_CHUNKS) * up_to[-1] / NUM_CHUNKS)
    chunks = list(itertools.pairwise([0, *inner.tolist(), len(up_to)]))
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES) as pool:
        pool.map(count_tokens, [(0, 1)] * NUM_PROCESSES, chunksize=1)  # so that they have started
        began = time.perf_counter()
        assert sum(pool.imap_unordered(count_tokens, chunks)) > 0
        return {"seconds": time.perf_counter() - began}


def count_tokens(chunk: tuple[int, int]) -> int:
    """`encode_ordinary` in its faster spelling, without the list of Python integers."""
    encode = HELD["encoding"].encode_to_numpy
    return sum(len(encode(text, disallowed_special=())) for text in HELD["texts"][slice(*chunk)])


def stream_steps(path: str) -> Figures:
    """`step_windows`, read by `iter_steps`."""
    from owt_data import iter_steps

    start_ray()
    began = time.perf_counter()
    return rates("step_windows", iter_steps(our_steps(path, SMALL_TOKENS, NUM_STEPS, "random")), began)


def stream_by_tutorial(path: str) -> Figures:
    """What Ray's tutorials make of nanoGPT's `get_batch`: drawn starts, mapped to windows."""
    import ray.data

    def read_windows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        windows = np.stack([tokens[start : start + SEQ_LEN + 1] for start in batch["start"]]).astype(np.int32)
        return {"x": windows[:, :-1], "y": windows[:, 1:]}

    start_ray()
    began = time.perf_counter()
    starts = np.random.default_rng(SEED).integers(0, SMALL_TOKENS - SEQ_LEN, NUM_TUTORIAL_STEPS * BATCH_SIZE)
    rows = ray.data.from_items([{"start": int(start)} for start in starts])
    windows = rows.map_batches(read_windows, batch_size=BATCH_SIZE)
    return rates("tutorial", windows.iter_batches(batch_size=BATCH_SIZE, prefetch_batches=2), began)


def first_batches(small: str, large: str) -> Figures:
    """Seconds to the first batch, from a running Ray on: of a small file, of a large one, of many steps."""
    from owt_data import iter_steps

    start_ray()
    runs = {
        "first_batch_of_10m_tokens_s": (small, SMALL_TOKENS, NUM_FIRST_BATCH_STEPS),
        "first_batch_of_9g_tokens_s": (large, LARGE_TOKENS, NUM_FIRST_BATCH_STEPS),
        "first_batch_of_9g_tokens_in_an_epoch_of_steps_s": (large, LARGE_TOKENS, NUM_WINDOWS // BATCH_SIZE),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + NUM_REPEATS):
        for name, run in runs.items():
            began = time.perf_counter()
            batches = iter_steps(our_steps(*run, "shuffle"))
            next(batches)
            times[name].append(time.perf_counter() - began)
            del batches
            time.sleep(0.5)  # until what was read ahead is put away
    # Without the first of each, for which Ray starts processes.
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def start_ray() -> None:
    """A Ray of four logical CPUs."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def our_steps(path: str, num_tokens: int, num_steps: int, order: Any) -> Any:
    """One worker's steps from a file."""
    from owt_data import TokenSequence, TokenSpan, step_windows

    tokens = TokenSequence((TokenSpan(path=path, start=0, stop=num_tokens),))
    share: Any = {"rank": 0, "world_size": 1, "start_step": 0, "stop_step": num_steps}
    return step_windows(tokens, seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, order=order, seed=SEED, **share)


def rates(name: str, batches: Iterable[Any], began: float) -> Figures:
    """Tokens per second from the first batch's arrival on, and from `began` on."""
    arrivals = [time.perf_counter() for _ in batches]
    steady, whole = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]), len(arrivals) / (arrivals[-1] - began)
    tokens = BATCH_SIZE * SEQ_LEN
    return {f"{name}_tokens_per_s": steady * tokens, f"{name}_tokens_per_s_with_start": whole * tokens}


def order_windows() -> Figures:
    """`window_starts` and numpy's permutation, in turns; and the memory of the former."""
    from owt_data import window_starts

    def order(num_indices: int) -> Callable[[], np.ndarray]:
        begin = 20 * NUM_WINDOWS - 500_000  # all cross from an epoch into the next
        indices = np.arange(begin, begin + num_indices)
        return lambda: window_starts(indices, order="shuffle", seed=1, num_tokens=LARGE_TOKENS, seq_len=SEQ_LEN)

    def permutation() -> np.ndarray:
        return np.random.default_rng(0).permutation(NUM_WINDOWS)

    ours = order(NUM_INDICES)
    times = [(seconds_of(ours), seconds_of(permutation)) for _ in range(NUM_REPEATS)]
    our_s, peer_s = map(statistics.median, zip(*times, strict=True))
    return {
        "window_starts_per_s": NUM_INDICES / our_s,
        "permutation_indices_per_s": NUM_WINDOWS / peer_s,
        "permutation_bytes": permutation().nbytes,
        "extra_bytes_of_1m_indices": extra_bytes(order(1_000_000)),
        "extra_bytes_of_16m_indices": extra_bytes(order(16_000_000)),
    }


def seconds_of(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def extra_bytes(call: Callable[[], np.ndarray]) -> int:
    """The most that a call holds beside what it returns."""
    tracemalloc.start()
    output = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - output.nbytes


CONTESTANTS: dict[str, Callable[..., Figures]] = {
    "prepare": prepare_text,
    "script": prepare_by_script,
    "tiktoken": encode_in_memory,
    "step_windows": stream_steps,
    "tutorial": stream_by_tutorial,
    "first_batch": first_batches,
    "order": order_windows,
}


# The referee, which stays small: to Linux, the peak memory of a new process begins with that of its parent.


def compete(temp: Path, name: str, **settings: Any) -> tuple[Figures, int]:
    """Run a contestant in a process of its own, in the new folder `temp/NAME`.

    Returns:
        What it answers, and the most bytes that lay in its folder at any one time.
    """
    work = temp / name
    work.mkdir()
    environment = os.environ | {
        "HF_HOME": str(work / "hf"),
        "HF_DATASETS_CACHE": str(work / "hf" / "datasets"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # Bytecode as in any used installation, also where this environment has none and may write none.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(temp / "bytecode"),
    }
    command = [sys.executable, __file__, "--contestant", name, json.dumps(settings)]
    os.sync()  # so that none waits for what another wrote
    peak_bytes = 0
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=answer, stderr=log)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, disk_bytes(work))
            time.sleep(SAMPLE_S)
        for file in (answer, log):
            file.seek(0)
        if process.returncode:
            sys.exit(f"{name} ended with exit code {process.returncode}:\n{log.read()}")
        return json.loads(answer.read().splitlines()[-1]), peak_bytes


def disk_bytes(folder: str | Path) -> int:
    """The size of all files below a folder, while others come and go."""
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += disk_bytes(entry.path) if entry.is_dir() else entry.stat().st_size
    return total


def write_corpus(path: Path, max_mb: int) -> float:
    """Write the Python files of this environment as JSON lines, and return their megabytes of text."""
    num_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            text = source.read_text(encoding="utf-8", errors="replace") if num_bytes < max_mb * 1e6 else ""
            if text:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                num_bytes += len(text.encode())
    if num_bytes < MIN_CORPUS_MB * 1e6:
        sys.exit(f"expected {MIN_CORPUS_MB} MB of Python files, got {num_bytes / 1e6:.1f}: raise --corpus-mb")
    return num_bytes / 1e6


def prepare_rounds(corpus_mb: int, temp: Path) -> Iterator[Figures]:
    """Prepare a corpus in all three ways, and compare the files that two of them write."""
    corpus = temp / "corpus.jsonl"
    num_mb = write_corpus(corpus, corpus_mb)
    names = ("prepare", "script", "tiktoken")
    for turns in itertools.cycle((names, names[::-1])):
        figures, digests = {"corpus_mb": num_mb}, set()
        for name in turns:
            out = temp / name / "out"
            answer, peak_bytes = compete(temp, name, corpus=str(corpus), out=str(out))
            figures |= {f"{name}_mb_per_s": num_mb / answer.pop("seconds"), **answer}
            if out.exists():
                digests.add(tuple(hashlib.sha256((out / split).read_bytes()).hexdigest() for split in SPLITS))
                figures[f"{name}_extra_disk_per_output"] = peak_bytes / disk_bytes(out) - 1
            shutil.rmtree(temp / name)
        if len(digests) != 1:
            sys.exit(f"expected the same {' and '.join(SPLITS)} of prepare and of the script, got {digests}")
        yield figures


def stream_rounds(_: int, temp: Path) -> Iterator[Figures]:
    """Stream random windows in both ways, and see how long the first batch takes."""
    small, large = temp / "small.bin", temp / "large.bin"
    np.random.default_rng(0).integers(0, VOCAB_SIZE, SMALL_TOKENS, dtype=np.uint16).tofile(small)
    large.touch()
    os.truncate(large, 2 * LARGE_TOKENS)
    names = ("step_windows", "tutorial", "first_batch")
    for turns in itertools.cycle((names, names[::-1])):
        figures = {}
        for name in turns:
            files = {"small": str(small), "large": str(large)} if name == "first_batch" else {"path": str(small)}
            figures |= compete(temp, name, **files)[0]
            shutil.rmtree(temp / name)
        yield figures


def order_rounds(_: int, temp: Path) -> Iterator[Figures]:
    """Order windows, single-threaded."""
    while True:
        yield compete(temp, "order")[0]
        shutil.rmtree(temp / "order")


PARTS = {"prepare": prepare_rounds, "stream": stream_rounds, "order": order_rounds}


def play(part: str, num_rounds: int, corpus_mb: int) -> dict[str, Any]:
    """The rounds of a part, their medians, and what became of its goals."""
    rounds: list[Figures] = []
    with tempfile.TemporaryDirectory() as temp:
        for number, figures in zip(range(num_rounds + 1), PARTS[part](corpus_mb, Path(temp)), strict=False):
            print(f"{part}, {f'round {number}' if number else 'warm-up'}: {figures}", flush=True)
            rounds += [figures] if number else []
    medians = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
    goals = [judge(goal, medians, rounds) for goal in GOALS if goal.figure in medians]
    return {"medians": medians, "rounds": rounds, "goals": goals}


def judge(goal: Goal, medians: Figures, rounds: list[Figures]) -> dict[str, Any]:
    """What became of a goal."""
    value, *by_round = [
        figures[goal.figure] / (figures[goal.peer] if goal.peer else 1) for figures in (medians, *rounds)
    ]
    met = value >= goal.bound if goal.sign == ">=" else value < goal.bound
    return {**goal._asdict(), "value": value, "by_round": by_round, "met": met}


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    about = "; ".join(f"{name}: {result[name]}" for name in ("config", "hardware", "date", "versions"))
    lines = ["# Data, against what one would write without owt-data", "", about]
    for part in [part for part in PARTS if part in result]:
        lines += ["", f"## {part}", "", "| median | value | by round | goal |", "|---|---|---|---|"]
        rows = [
            (name, value, [r[name] for r in result[part]["rounds"]], "")
            for name, value in result[part]["medians"].items()
        ]
        for goal in result[part]["goals"]:
            name = goal["figure"] + (f" / {goal['peer']}" if goal["peer"] else "")
            asked = f"{goal['sign']} {goal['bound']:,g}: {'yes' if goal['met'] else 'no'}"
            rows.append((name, goal["value"], goal["by_round"], asked))
        for name, value, by_round, asked in rows:
            lines.append(f"| {name} | {value:,.4g} | {', '.join(f'{v:,.4g}' for v in by_round)} | {asked} |")
    return "\n".join(lines) + "\n"


def hardware() -> str:
    """The cores and their name, which Linux keeps in a file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} CPU cores, {model}, {platform.machine()}"


def main() -> None:
    """Run the rounds and write the results, or be one of the contestants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument(
        "--corpus-mb", type=int, default=100, help="text to prepare, at least 50 (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        name, settings = options.contestant
        print(json.dumps(CONTESTANTS[name](**json.loads(settings))))
        return
    parts = [options.only] if options.only else list(PARTS)
    result = {
        "config": {"rounds": options.rounds, "corpus_mb": options.corpus_mb, **CONFIG},
        "hardware": hardware(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        **{part: play(part, options.rounds, options.corpus_mb) for part in parts},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "data.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "data.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
