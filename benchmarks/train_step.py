"""Train step of nnx-gpt2 against baselines, in turns; each candidate has a fresh process in each round.

    uv run benchmarks/train_step.py --preset small-bytes --torch-python PATH
    PYTHONPATH=packages/nnx-gpt2/src python benchmarks/train_step.py --preset gpt2 --batch-size largest

The baselines are the model of the Ray Train JAX GPT-2 tutorial, and GPT-2 of transformers under torch. The windows are
random and in memory; Ray is not used. The parent process imports neither jax nor torch: it must not hold the device,
and its memory must not count as a child's. Writes benchmarks/results/train_step_<preset>.md and .json.
"""

# Functions import jax, flax and nnx_gpt2 where they use them: the interpreter with torch has none of these packages.

import argparse
import itertools
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parent.parent
OURS, TUTORIAL, TRANSFORMERS = "nnx-gpt2", "tutorial", "transformers"
NUM_DISCARDED = 2  # steps after the first call, until allocators and clocks are stable
NUM_PROFILED = 3
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # XLA on CPU allocates temporaries in each step, which causes page faults
JAX_PACKAGES = ("jax", "jaxlib", "flax", "optax")
MEMORY_FRACTION = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # the default of jax is 0.75; torch uses the full GPU
BASELINE_SETTINGS = {
    TUTORIAL: "separate q, k, v, dense causal mask, full logits, adamw(5e-4, weight_decay=0.1), no clipping, no remat",
    TRANSFORMERS: "GPT2LMHeadModel, sdpa, no dropout, AdamW(6e-4, weight_decay=0.1), clipping at 1.0, no remat; "
    "on CPU eager with a thread per core; on GPU torch.compile, fused AdamW, autocast where dtype is bfloat16",
}

# The fields of GPT2Config as plain numbers, for the process with torch too.
_SMALL = {"vocab_size": 257, "seq_len": 256, "num_layers": 6, "num_heads": 6, "embed_dim": 384, "dtype": "float32"}
_GPT2 = {"vocab_size": 50257, "seq_len": 1024, "num_layers": 12, "num_heads": 12, "embed_dim": 768, "dtype": "bfloat16"}
PRESETS: dict[str, dict[str, Any]] = {
    "small-bytes": _SMALL,
    "small-gpt2": _SMALL | {"vocab_size": 50257},
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2 | {"num_layers": 24, "num_heads": 16, "embed_dim": 1024},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Request to one process: the step to time."""

    preset: str
    batch_size: int
    steps: int
    platform: str = "unknown"
    remat: Any = "none"
    profile: str | None = None


def timed(job: Job, step: Callable[[int], Any], peak_bytes: Callable[[], int], *packages: str) -> dict[str, Any]:
    """Time calls of `step(i)`, which waits for the device and returns the loss."""
    times, losses = [], []
    for i in range(job.steps + 1):
        began = time.perf_counter()
        losses.append(step(i))
        times.append(time.perf_counter() - began)
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB
    return {
        "first_call_s": times[0],
        "step_s": statistics.median(times[1 + NUM_DISCARDED :]),
        "peak_bytes": resident_bytes if job.platform == "cpu" else peak_bytes(),
        "losses": [float(loss) for loss in losses],
        "versions": {name: version(name) for name in packages},
    }


def probe(job: Job) -> dict[str, Any]:
    """Return the device that jax uses, and its peak of allocated bytes (None on CPU, where jax does not count)."""
    import jax

    device = jax.devices()[0]
    peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {"platform": device.platform, "device_kind": device.device_kind, "peak_bytes": peak_bytes}


def random_windows(job: Job) -> Any:
    """Return one batch per call in host memory: uint16 [steps + 1, batch, seq_len + 1]."""
    import numpy as np

    vocab_size, window = PRESETS[job.preset]["vocab_size"], PRESETS[job.preset]["seq_len"] + 1
    return np.random.default_rng(0).integers(0, vocab_size, (job.steps + 1, job.batch_size, window), np.uint16)


def time_ours(job: Job) -> dict[str, Any]:
    """Time the step of nnx-gpt2, with its defaults."""
    import jax

    from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, make_train_step

    config, key = GPT2Config(**PRESETS[job.preset], remat=job.remat), jax.random.key(0)
    optimizer = create_optimizer(OptimizerConfig(), 1000)
    state = create_train_state(config, optimizer, key)
    train_step = make_train_step(config, optimizer)
    batches = random_windows(job)

    def step(i: int) -> Any:
        nonlocal state
        state, metrics = train_step(state, batches[i], key)
        return jax.block_until_ready(metrics)["loss"]

    result = timed(job, step, lambda: probe(job)["peak_bytes"], *JAX_PACKAGES)
    if job.profile is not None:
        with jax.profiler.trace(job.profile):
            for i in range(NUM_PROFILED):
                step(i)
        result["operations"] = top_operations(Path(job.profile))
    return result


def top_operations(folder: Path) -> list[list[str]]:
    """Return the longest kernels in the newest trace: calls, ms and share of a step. On CPU the list is empty."""
    from jax.profiler import ProfileData

    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    trace, times_ns = ProfileData.from_file(str(newest)), defaultdict[str, list[float]](list)
    lines = [line for plane in trace.planes if plane.name.startswith("/device:GPU:") for line in plane.lines]
    # The lines of streams hold the kernels. Other lines hold the same time again, by module or by step.
    for event in [event for line in lines if (line.name or "").startswith("Stream") for event in line.events]:
        # Layers are unrolled. An operation without its number is one row for all layers.
        times_ns[re.sub(r"[._]\d+(?=$|[._])", "", event.name or "")].append(event.duration_ns)
    total_ns = sum(map(sum, times_ns.values()))
    longest = sorted(((sum(times), len(times), name) for name, times in times_ns.items()), reverse=True)[:20]
    return [
        [f"`{name}`", f"{calls / NUM_PROFILED:.0f}", f"{ns / NUM_PROFILED / 1e6:.2f}", f"{ns / total_ns:.1%}"]
        for ns, calls, name in longest
    ]


def time_tutorial(job: Job) -> dict[str, Any]:
    """Time the step of the Ray Train JAX GPT-2 tutorial: separate q, k, v; dense attention; the loss in one chunk."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    preset, rngs = PRESETS[job.preset], nnx.Rngs(0)
    width, heads, dtype = preset["embed_dim"], preset["num_heads"], jnp.dtype(preset["dtype"])

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.ln_1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(heads, width, dtype=dtype, decode=False, rngs=rngs)
            self.ln_2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.c_fc = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
            self.c_proj = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attn(self.ln_1(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
            return x + self.c_proj(nnx.gelu(self.c_fc(self.ln_2(x))))

    class Tutorial(nnx.Module):
        def __init__(self) -> None:
            self.wte = nnx.Embed(preset["vocab_size"], width, dtype=dtype, rngs=rngs)
            self.wpe = nnx.Embed(preset["seq_len"], width, dtype=dtype, rngs=rngs)
            self.h = nnx.List([Block() for _ in range(preset["num_layers"])])
            self.ln_f = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))[None]
            for block in self.h:
                x = block(x)
            return self.wte.attend(self.ln_f(x))

    def loss_fn(model: Tutorial, windows: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:]).mean()

    @nnx.jit
    def train_step(model: Tutorial, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, windows)
        optimizer.update(model, grads)
        return loss

    model = Tutorial()
    optimizer = nnx.Optimizer(model, optax.adamw(5e-4, weight_decay=0.1), wrt=nnx.Param)
    batches = random_windows(job).astype(np.int32)

    def step(i: int) -> Any:
        return jax.block_until_ready(train_step(model, optimizer, batches[i]))

    return timed(job, step, lambda: probe(job)["peak_bytes"], *JAX_PACKAGES)


def time_transformers(job: Job) -> dict[str, Any]:
    """Time the step of GPT-2 of transformers under torch, with the fastest settings for the device."""
    # Imported by name: pyright would look for packages that the workspace does not have.
    torch, transformers = (cast(Any, import_module(name)) for name in ("torch", "transformers"))

    preset, on_gpu = PRESETS[job.preset], job.platform != "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count())
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")  # TF32 on GPU, the default of XLA
    device = torch.device("cuda" if on_gpu else "cpu")
    config = transformers.GPT2Config(
        vocab_size=preset["vocab_size"], n_positions=preset["seq_len"], n_embd=preset["embed_dim"],
        n_layer=preset["num_layers"], n_head=preset["num_heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=on_gpu)
    batches = torch.randint(0, preset["vocab_size"], (job.steps + 1, job.batch_size, preset["seq_len"] + 1))

    def loss_fn(windows: Any) -> Any:
        logits_BTV, targets_BT = model(windows[:, :-1]).logits, windows[:, 1:]
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    compute_loss = torch.compile(loss_fn) if on_gpu else loss_fn

    def step(i: int) -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu and preset["dtype"] == "bfloat16"):
            loss = compute_loss(batches[i].to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        return loss.detach()

    return timed(job, step, torch.cuda.max_memory_allocated, "torch", "transformers")


WORKERS = {OURS: time_ours, TUTORIAL: time_tutorial, TRANSFORMERS: time_transformers, "probe": probe}


def run(worker: str, job: Job, huge_pages: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run this script as a worker in a fresh process, and read the last line that it prints."""
    tunables = {"GLIBC_TUNABLES": HUGE_PAGES if huge_pages == "on" else ""}
    environment = dict([MEMORY_FRACTION]) | dict(os.environ) | tunables
    python = options.torch_python or sys.executable if worker == TRANSFORMERS else sys.executable
    command = [python, __file__, "--worker", worker, json.dumps(asdict(job))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    error = MemoryError if re.search("RESOURCE_EXHAUSTED|out of ?memory", done.stderr, re.I) else RuntimeError
    raise error(f"{worker} with {job} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def largest_batch_size(name: str, job: Job, huge_pages: str, options: argparse.Namespace) -> int:
    """Return the largest power of two (times `--first-batch-size`) that fits into memory."""
    size = options.first_batch_size
    try:
        while True:
            run(name, replace(job, batch_size=size, steps=NUM_DISCARDED + 1), huge_pages, options)
            print(f"{name}: batch size {size} fits", flush=True)
            size *= 2
    except MemoryError:
        if size == options.first_batch_size:
            raise
        return size // 2


def make_rows(rounds: dict[tuple[str, str], list], jobs: dict[str, Job], peak_tokens_per_s: float | None) -> list:
    """Return a row per candidate and huge-page setting: medians over the rounds, and ratios of tokens/s."""
    rows = []
    for (name, huge_pages), found in rounds.items():
        job = jobs[name]
        row: dict[str, Any] = {"candidate": name, "huge_pages": huge_pages, "batch_size": job.batch_size}
        row |= {key: statistics.median(one[key] for one in found) for key in ("first_call_s", "step_s", "peak_bytes")}
        row["tokens_per_s"] = job.batch_size * PRESETS[job.preset]["seq_len"] / row["step_s"]
        row["mfu"] = row["tokens_per_s"] / peak_tokens_per_s if peak_tokens_per_s else None
        rows.append(row | {"rounds": found})
    for row in rows:
        others = [other for other in rows if other["huge_pages"] == row["huge_pages"] and other is not row]
        row["ratio_to"] = {other["candidate"]: row["tokens_per_s"] / other["tokens_per_s"] for other in others}
    return rows


def as_table(heads: list[str], rows: list[list[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows)]


def as_markdown(result: dict[str, Any], baselines: list[str]) -> str:
    """Return the tables, and the configuration to repeat the run."""
    heads = ["candidate", "huge pages", "batch", "first call", "step", "by round", "tokens/s", "MFU", "peak memory"]
    rows = [
        [
            row["candidate"], row["huge_pages"], row["batch_size"], f"{row['first_call_s']:.1f} s",
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
        "above 1 if the row is faster than the baseline with the same pages. The first call is compilation and one\n"
        f"step. The next {NUM_DISCARDED} steps are discarded. Huge pages on: GLIBC_TUNABLES={HUGE_PAGES}. MFU is of\n"
        "the dense bfloat16 peak. Peak memory is the device's on GPU, the process's on CPU.\n\n## Configuration\n",
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
    add("--preset", choices=PRESETS, default="small-bytes", help="model (default: %(default)s)")
    add("--baseline", choices=(TUTORIAL, TRANSFORMERS, "none"), action="append",
        help="repeatable (default: tutorial, and with --torch-python also transformers)")  # fmt: skip
    add("--torch-python", help="interpreter with torch and transformers (default: this one)")
    add("--batch-size", default="8", help="number, or 'largest' (GPU only): doubled until a candidate's memory is full")
    add("--first-batch-size", type=int, default=1, help="first size that 'largest' tries")
    add("--rounds", type=int, default=3, help="turns of each candidate (default: %(default)s)")
    add("--steps", type=int, default=8, help=f"steps after the first call; {NUM_DISCARDED} are discarded")
    add("--remat", choices=("none", "dots", "full"), default="none", help="rematerialization in nnx-gpt2")
    add("--huge-pages", choices=("off", "on", "both"), help="default: both on CPU, off on GPU")
    add("--profile", type=Path, help="folder for a trace of nnx-gpt2 after the rounds")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    add("--stem", help="file name of the results (default: train_step_<preset>)")
    add("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= NUM_DISCARDED:
        parser.error(f"--steps must be above {NUM_DISCARDED}, got {options.steps}. Raise it.")
    return options


def main() -> None:
    """Run the rounds and write the results."""
    options = parse()
    if options.worker is not None:
        print(json.dumps(WORKERS[options.worker[0]](Job(**json.loads(options.worker[1])))))
        return

    from nnx_gpt2 import GPT2Config, OptimizerConfig, flops_per_token, peak_flops_per_s

    job = Job(preset=options.preset, batch_size=1, steps=options.steps)
    device = run("probe", job, "off", options)
    on_cpu, job = device["platform"] == "cpu", replace(job, platform=device["platform"])
    default = [TUTORIAL, TRANSFORMERS] if options.torch_python else [TUTORIAL]
    baselines = [name for name in (TUTORIAL, TRANSFORMERS) if name in (options.baseline or default)]
    options.huge_pages = options.huge_pages or ("both" if on_cpu else "off")
    settings = ["off", "on"] if options.huge_pages == "both" else [options.huge_pages]
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
        print(f"round {number + 1}, huge pages {setting}, {name}: {found['step_s'] * 1e3:.1f} ms", flush=True)

    config, peak = GPT2Config(**PRESETS[options.preset], remat=options.remat), peak_flops_per_s(device["device_kind"])
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    versions = {name: text for found in rounds.values() for name, text in found[0]["versions"].items()}
    result: dict[str, Any] = {
        "rows": make_rows(rounds, jobs, peak and peak / flops_per_token(config)),
        "hardware": ("" if on_cpu else f"{device['device_kind']}, ") + f"{processor[0]}, {os.cpu_count()} CPU cores",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
        "config": {name: getattr(options, name) for name in ("preset", "batch_size", "rounds", "steps", "huge_pages")}
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
