"""Train step of nnx-gpt2 against baselines, in turns; each candidate has a fresh process in each round.

    uv run benchmarks/train_step.py --preset baby --batch-size 12 --torch-python PATH
    PYTHONPATH=packages/nnx-gpt2/src python benchmarks/train_step.py --preset gpt2 --batch-size largest

The baselines are the model of the Ray Train JAX GPT-2 tutorial, and GPT-2 of transformers under torch. The windows are
random and in memory; Ray is not used. The parent process imports neither jax nor torch: it must not hold the device,
and its memory must not count as a child's. Writes benchmarks/results/train_step_<preset>.md and .json.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from environment import environment
from options import count, python_with
from train_step_candidates import NUM_DISCARDED, OURS, PRESETS, PYTORCH, TRANSFORMERS, TUTORIAL, Job

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "benchmarks" / "train_step_candidates.py"
# The settings of the allocator with which `launch` starts workers.
TUNABLES = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}:glibc.malloc.hugetlb=1"
MEMORY_FRACTION = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # the default of jax is 0.75; torch uses the full GPU
TORCH_SETTINGS = (
    "no dropout, AdamW(6e-4, weight_decay=0.1), clipping at 1.0, no remat; on CPU eager with a thread per core; on GPU "
    "torch.compile, fused AdamW, autocast where dtype is bfloat16"
)
BASELINE_SETTINGS = {
    TUTORIAL: "separate q, k, v, dense causal mask, full logits, adamw(5e-4, weight_decay=0.1), no clipping, no remat",
    TRANSFORMERS: f"GPT2LMHeadModel, sdpa, {TORCH_SETTINGS}",
    PYTORCH: f"the model of torch_gpt.py, sdpa, {TORCH_SETTINGS}",
}


def run(name: str, job: Job, tunables: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time a candidate in a fresh process, and read the last line that it prints."""
    settings = {"GLIBC_TUNABLES": TUNABLES if tunables == "on" else ""}
    environment = dict([MEMORY_FRACTION]) | dict(os.environ) | settings
    python = options.torch_python or sys.executable if name in (TRANSFORMERS, PYTORCH) else sys.executable
    command = [python, str(WORKER), name, json.dumps(asdict(job))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    error = MemoryError if re.search("RESOURCE_EXHAUSTED|out of ?memory", done.stderr, re.I) else RuntimeError
    raise error(f"{name} with {job} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def largest_batch_size(name: str, job: Job, tunables: str, options: argparse.Namespace) -> int:
    """Return the largest power of two (times `--first-batch-size`) that fits into memory."""
    size = options.first_batch_size
    try:
        while True:
            run(name, replace(job, batch_size=size, steps=NUM_DISCARDED + 1), tunables, options)
            print(f"{name}: batch size {size} fits", flush=True)
            size *= 2
    except MemoryError:
        if size == options.first_batch_size:
            raise
        return size // 2


def make_rows(rounds: dict[tuple[str, str], list], jobs: dict[str, Job], peak_tokens_per_s: float | None) -> list:
    """Return a row per candidate and tunables setting: medians over the rounds, and ratios of tokens/s."""
    rows = []
    for (name, tunables), found in rounds.items():
        job = jobs[name]
        row: dict[str, Any] = {"candidate": name, "tunables": tunables, "batch_size": job.batch_size}
        row |= {key: statistics.median(one[key] for one in found) for key in ("first_call_s", "step_s", "peak_bytes")}
        row["tokens_per_s"] = job.batch_size * PRESETS[job.preset]["seq_len"] / row["step_s"]
        row["mfu"] = row["tokens_per_s"] / peak_tokens_per_s if peak_tokens_per_s else None
        rows.append(row | {"rounds": found})
    for row in rows:
        others = [other for other in rows if other["tunables"] == row["tunables"] and other is not row]
        row["ratio_to"] = {other["candidate"]: row["tokens_per_s"] / other["tokens_per_s"] for other in others}
    return rows


def as_table(heads: list[str], rows: list[list[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows)]


def as_markdown(result: dict[str, Any], baselines: list[str]) -> str:
    """Return the tables, and the configuration to repeat the run."""
    heads = ["candidate", "tunables", "batch", "first call", "step", "by round", "tokens/s", "MFU", "peak memory"]
    rows = [
        [
            row["candidate"], row["tunables"], row["batch_size"], f"{row['first_call_s']:.1f} s",
            f"{row['step_s'] * 1e3:.1f} ms", ", ".join(f"{one['step_s'] * 1e3:.1f}" for one in row["rounds"]),
            f"{row['tokens_per_s']:.0f}", "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_bytes'] / 2**20:.0f} MiB", *(f"{row['ratio_to'].get(name, 1):.3f}" for name in baselines),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    text = [
        f"# Train step of nnx-gpt2, {result['config']['preset']}\n",
        f"{result['hardware']}; {result['date']}; {result['versions']}\n",
        *as_table([*heads, *(f"x {name}" for name in baselines)], rows),
        "\nEach value is the median over rounds of the median of a round. The last columns are ratios of tokens/s,\n"
        "above 1 if the row is faster than the baseline with the same setting of the allocator. The first call is\n"
        f"compilation and one step. The next {NUM_DISCARDED} steps are discarded. Tunables on is the environment of\n"
        f"workers, `GLIBC_TUNABLES={TUNABLES}`.\n"
        "MFU is of the dense bfloat16 peak. Peak memory is the device's on GPU, the process's on CPU.\n\n"
        "## Configuration\n",
        *(f"- {name}: {value}" for name, value in result["config"].items()),
    ]
    if "operations" in result:
        heads = ["operation", "calls per step", "ms per step", "share"]
        text += ["\n## Longest operations of nnx-gpt2 on the GPU\n"]
        text += as_table(heads, result["operations"]) if result["operations"] else ["The trace has no operations."]
    return "\n".join(text) + "\n"


def parse() -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="baby", help="model (default: %(default)s)")
    add("--baseline", choices=(TUTORIAL, TRANSFORMERS, PYTORCH, "none"), action="append",
        help="repeatable (default: tutorial, and with --torch-python also the other two)")  # fmt: skip
    add("--torch-python", type=python_with("torch", "transformers"),
        help="interpreter with torch and transformers (default: this one)")  # fmt: skip
    add("--batch-size", default="8", help="number, or 'largest' (GPU only): doubled until a candidate's memory is full")
    add("--first-batch-size", type=count, default=1, help="first size that 'largest' tries")
    add("--rounds", type=count, default=3, help="turns of each candidate (default: %(default)s)")
    add("--steps", type=count, default=8, help=f"steps after the first call; {NUM_DISCARDED} are discarded")
    add("--remat", choices=("none", "dots", "full"), default="none", help="rematerialization in nnx-gpt2")
    add("--tunables", choices=("off", "on", "both"), help="default: both on CPU, off on GPU")
    add("--profile", type=Path, help="folder for a trace of nnx-gpt2 after the rounds")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    add("--stem", help="file name of the results (default: train_step_<preset>)")
    options = parser.parse_args()
    if options.steps <= NUM_DISCARDED:
        parser.error(f"--steps must be above {NUM_DISCARDED}, got {options.steps}. Raise it.")
    return options


def main() -> None:
    """Run the rounds and write the results."""
    options = parse()
    from nnx_gpt2 import GPT2Config, OptimizerConfig, flops_per_token, peak_flops_per_s

    job = Job(preset=options.preset, batch_size=1, steps=options.steps)
    device = run("probe", job, "off", options)
    on_cpu, job = device["platform"] == "cpu", replace(job, platform=device["platform"])
    everything = [TUTORIAL, TRANSFORMERS, PYTORCH]
    default = everything if options.torch_python else [TUTORIAL]
    baselines = [name for name in everything if name in (options.baseline or default)]
    options.tunables = options.tunables or ("both" if on_cpu else "off")
    settings = ["off", "on"] if options.tunables == "both" else [options.tunables]
    is_largest = options.batch_size == "largest"
    if on_cpu and is_largest:
        sys.exit("--batch-size must be a number on CPU, got largest, which would fill the memory. Give a number.")
    jobs = {OURS: replace(job, remat=options.remat)} | dict.fromkeys(baselines, job)
    for name, request in jobs.items():
        size = largest_batch_size(name, request, settings[0], options) if is_largest else int(options.batch_size)
        jobs[name] = replace(request, batch_size=size)

    rounds = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for number, setting, name in itertools.product(range(options.rounds), settings, jobs):
        found = run(name, jobs[name], setting, options)
        rounds[name, setting].append(found)
        print(f"round {number + 1}, tunables {setting}, {name}: {found['step_s'] * 1e3:.1f} ms", flush=True)

    config, peak = GPT2Config(**PRESETS[options.preset], remat=options.remat), peak_flops_per_s(device["device_kind"])
    about = environment(device="cpu" if on_cpu else device["device_kind"])
    versions = {name: text for found in rounds.values() for name, text in found[0]["versions"].items()}
    result: dict[str, Any] = {
        "rows": make_rows(rounds, jobs, peak and peak / flops_per_token(config)),
        **about,
        "versions": about["versions"] | versions,
        "config": {name: getattr(options, name) for name in ("preset", "batch_size", "rounds", "steps", "tunables")}
        | {OURS: asdict(config), "optimizer": asdict(OptimizerConfig())}
        | {name: BASELINE_SETTINGS[name] for name in baselines}
        | ({} if on_cpu else {MEMORY_FRACTION[0]: os.environ.get(*MEMORY_FRACTION)}),
    }
    if options.profile is not None:
        traced = run(OURS, replace(jobs[OURS], profile=str(options.profile)), settings[0], options)
        result["operations"] = traced["operations"]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.stem or f'train_step_{options.preset}'}.md"
    file.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    file.write_text(as_markdown(result, baselines))
    print(file.read_text())


if __name__ == "__main__":
    main()
