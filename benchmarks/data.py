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
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_candidates
import numpy as np
from data_candidates import FILES, LARGE_TOKENS, SMALL_TOKENS, Figures
from environment import environment
from options import count

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "benchmarks" / "data_candidates.py"
PACKAGES = ("numpy", "tiktoken", "datasets", "ray", "pyarrow", "owt-data")
VOCAB_SIZE = 50257
MIN_CORPUS_MB = 50
SAMPLE_S = 0.05
# Ray 2.60 can abort a process that stops reading a Dataset, if a task that it cancels ends at that moment.
RAY_DEFECT = "Tried to complete task that was not pending"

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


def measure(temp: Path, name: str, settings: dict[str, Any], *, retries: int = 2) -> tuple[Figures, tuple[str, ...]]:
    """Run a candidate in its own process and folder. Return its figures, and the SHA-256 of the files that it wrote."""
    work, out = temp / name, temp / name / "out"
    work.mkdir()
    env = os.environ | {
        "HF_HOME": str(work / "hf"),
        "HF_DATASETS_CACHE": str(work / "hf" / "datasets"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # Bytecode is cached, as in a used installation, also if this installation is read-only.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(temp / "bytecode"),
    }
    command = [sys.executable, str(WORKER), name, json.dumps(settings)]
    # On Linux, the peak memory of a new process starts at that of its parent: this process imports little.
    os.sync()  # no candidate waits for the writes of another one
    peak_bytes = 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=env, cwd=work, stdout=subprocess.PIPE, stderr=log, text=True)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, disk_bytes(work))
            time.sleep(SAMPLE_S)
        log.seek(0)
        messages = log.read()
        if retries and process.returncode == -signal.SIGABRT and RAY_DEFECT in messages:
            print(f"{name} was ended by Ray, and runs again", flush=True)
            shutil.rmtree(work)
            return measure(temp, name, settings, retries=retries - 1)
        if process.returncode:
            sys.exit(f"{name} ended with exit code {process.returncode}:\n{messages}")
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
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3, help="rounds after the warm-up (default: %(default)s)")
    parser.add_argument("--only", choices=GROUPS, help="run one group (default: all)")
    parser.add_argument("--corpus-mb", type=count, default=300, help="MB of text, 50 or more (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    constants = {name.lower(): value for name, value in vars(data_candidates).items() if isinstance(value, int)}
    about = {
        **environment(*PACKAGES),
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
