"""The train step of nnx-gpt2 against its peers, in turns, each candidate in a fresh process every round.

    uv run benchmarks/train_step.py --preset small-bytes --torch-python PATH
    PYTHONPATH=packages/nnx-gpt2/src python benchmarks/train_step.py --preset gpt2 --batch-size largest

The peers are the model of the Ray Train JAX GPT-2 tutorial, and transformers' GPT-2 under torch. Random windows in
memory, no Ray and no data pipeline. The process that starts the others imports neither jax nor torch: it must not
hold the device, and its own memory must stay out of theirs. Writes benchmarks/results/train_step_<preset>.md and .json.
"""

# jax, flax and nnx_gpt2 are imported inside the functions that use them: the interpreter with torch has none of them.

import argparse
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
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nnx_gpt2 import GPT2Config

ROOT = Path(__file__).parent.parent
OURS, TUTORIAL, TRANSFORMERS = "nnx-gpt2", "tutorial", "transformers"
NUM_DISCARDED = 2  # steps after the first call, while allocators and clocks settle
NUM_PROFILED = 3
MEMORY_FRACTION = "0.95"  # jax takes 0.75 of a GPU by default, torch all of it
PEER_SETTINGS = {
    TUTORIAL: "separate q, k, v, dense causal mask, full logits, adamw(5e-4, weight_decay=0.1), no clipping, no remat",
    TRANSFORMERS: "GPT2LMHeadModel, sdpa, no dropout, AdamW(6e-4, weight_decay=0.1), clipping at 1.0, no remat; "
    "on CPU eager with a thread per core; on GPU torch.compile, fused AdamW, autocast where dtype is bfloat16",
}


# GPT2Config's fields in plain numbers, which the torch process reads too.
_SMALL = {"vocab_size": 257, "seq_len": 256, "num_layers": 6, "num_heads": 6, "embed_dim": 384, "dtype": "float32"}
_GPT2 = {"vocab_size": 50257, "seq_len": 1024, "num_layers": 12, "num_heads": 12, "embed_dim": 768, "dtype": "bfloat16"}
PRESETS: dict[str, dict[str, Any]] = {
    "small-bytes": _SMALL,
    "small-gpt2": _SMALL | {"vocab_size": 50257},
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2 | {"num_layers": 24, "num_heads": 16, "embed_dim": 1024},
}
BATCH_SIZES = {"small-bytes": 8, "small-gpt2": 8, "gpt2": 16, "gpt2-medium": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one process is asked to time."""

    preset: str
    batch_size: int
    steps: int
    platform: str
    remat: Literal["none", "dots", "full"] = "none"
    profile: str | None = None


# The processes that measure.


def timed(step: Callable[[int], Any], job: Job) -> dict[str, Any]:
    """Call `step(i)`, which returns the loss once the device is done, and take the times."""
    times, losses = [], []
    for i in range(job.steps + 1):
        began = time.perf_counter()
        losses.append(step(i))
        times.append(time.perf_counter() - began)
    return {
        "compile_s": times[0],
        "step_s": statistics.median(times[1 + NUM_DISCARDED :]),
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }


def resident_peak_bytes() -> int:
    """The most memory that this process has had resident (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def jax_facts(job: Job) -> dict[str, Any]:
    """Peak memory and versions of a process that used jax."""
    import jax

    stats = jax.local_devices()[0].memory_stats() if job.platform != "cpu" else None
    return {
        "peak_bytes": stats["peak_bytes_in_use"] if stats else resident_peak_bytes(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")},
    }


def probe() -> dict[str, Any]:
    """What jax runs on here."""
    import jax

    return {"platform": jax.default_backend(), "device_kind": jax.devices()[0].device_kind}


def model_config(job: Job) -> "GPT2Config":
    """The preset as nnx-gpt2 has it. Imports no jax."""
    from nnx_gpt2 import GPT2Config

    return GPT2Config(**PRESETS[job.preset], remat=job.remat)


def random_windows(job: Job) -> Any:
    """As many batches as there are steps, in host memory: [steps, batch, seq_len + 1]."""
    import numpy as np

    preset = PRESETS[job.preset]
    shape = (job.steps + 1, job.batch_size, preset["seq_len"] + 1)
    return np.random.default_rng(0).integers(0, preset["vocab_size"], shape, np.uint16)


def time_ours(job: Job) -> dict[str, Any]:
    """The step as nnx-gpt2 has it, with its defaults."""
    import jax
    from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state, make_train_step

    config, key = model_config(job), jax.random.key(0)
    optimizer = create_optimizer(OptimizerConfig(), 1000)
    state = create_train_state(config, optimizer, key)
    train_step = make_train_step(config, optimizer)
    batches = random_windows(job)

    def step(i: int) -> Any:
        nonlocal state
        state, metrics = train_step(state, batches[i], key)
        return jax.block_until_ready(metrics)["loss"]

    result = timed(step, job) | jax_facts(job)
    if job.profile is not None:
        with jax.profiler.trace(job.profile):
            for i in range(NUM_PROFILED):
                step(i)
        result["operations"] = top_operations(Path(job.profile))
    return result


def top_operations(folder: Path) -> list[dict[str, Any]]:
    """The device operations that took longest in the newest trace of a folder; none where it saw no device."""
    from jax.profiler import ProfileData

    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    durations_ns, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for plane in ProfileData.from_file(str(newest)).planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        lines = list(plane.lines)
        # A stream's line has its kernels; other lines, where there are any, have the same time again by module or step.
        for line in [line for line in lines if (line.name or "").startswith("Stream")] or lines:
            for event in line.events:
                # Layers are unrolled: without its number an operation is one row for all of them.
                name = re.sub(r"[._]\d+(?=$|[._])", "", event.name or "")
                durations_ns[name] += event.duration_ns
                counts[name] += 1
    total_ns = sum(durations_ns.values())
    longest = sorted(durations_ns, key=lambda name: -durations_ns[name])[:20]
    return [
        {
            "name": name,
            "calls_per_step": counts[name] / NUM_PROFILED,
            "s_per_step": durations_ns[name] / NUM_PROFILED / 1e9,
            "share": durations_ns[name] / total_ns,
        }
        for name in longest
    ]


def time_tutorial(job: Job) -> dict[str, Any]:
    """The step as the Ray Train JAX GPT-2 tutorial has it: no fused q, k, v, no flash attention, the loss in one."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    preset, rngs = PRESETS[job.preset], nnx.Rngs(0)
    width, dtype = preset["embed_dim"], jnp.dtype(preset["dtype"])

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.ln_1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(
                preset["num_heads"], width, dtype=dtype, dropout_rate=0.0, decode=False, rngs=rngs
            )
            self.ln_2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.c_fc = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
            self.c_proj = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.attn(self.ln_1(x), mask=mask)
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

    return timed(step, job) | jax_facts(job)


def time_transformers(job: Job) -> dict[str, Any]:
    """The step of transformers' GPT-2 under torch, with what makes it fast on the device."""
    # By name, so that pyright does not look for packages that the workspace does not have.
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    preset, on_gpu = PRESETS[job.preset], job.platform != "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count())
    torch.set_float32_matmul_precision("high")  # TF32 on GPU, as XLA has it by default
    device = torch.device("cuda" if on_gpu else "cpu")
    config = transformers.GPT2Config(
        vocab_size=preset["vocab_size"], n_positions=preset["seq_len"], n_embd=preset["embed_dim"], n_layer=preset["num_layers"],
        n_head=preset["num_heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=on_gpu)
    batches = torch.randint(0, preset["vocab_size"], (job.steps + 1, job.batch_size, preset["seq_len"] + 1))

    def loss_fn(windows: Any) -> Any:
        logits = model(windows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

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

    return timed(step, job) | {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else resident_peak_bytes(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


WORKERS: dict[str, Callable[[Job], dict[str, Any]]] = {
    OURS: time_ours,
    TUTORIAL: time_tutorial,
    TRANSFORMERS: time_transformers,
}


# The process that starts them.


def run_process(python: str, huge_pages: str, *arguments: str) -> dict[str, Any]:
    """Run this script once more as a worker, and read the last line that it prints."""
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_FRACTION} | dict(os.environ)
    environment.pop("GLIBC_TUNABLES", None)
    if huge_pages == "on":
        # XLA allocates a step's temporaries anew each time on CPU, and most of that is page faults.
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    done = subprocess.run([python, __file__, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if re.search("RESOURCE_EXHAUSTED|out of ?memory", done.stderr, re.IGNORECASE):
        raise MemoryError(f"{arguments} ran out of memory:\n{done.stderr[-1000:]}")
    raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def run_job(name: str, job: Job, huge_pages: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time one candidate in a fresh process."""
    python = options.torch_python or sys.executable if name == TRANSFORMERS else sys.executable
    return run_process(python, huge_pages, "--worker", name, "--job", json.dumps(asdict(job)))


def largest_batch_size(name: str, job: Job, huge_pages: str, options: argparse.Namespace) -> int:
    """The largest power of two (times `--first-batch-size`) that a candidate has memory for."""
    fits, tried = 0, options.first_batch_size
    while True:
        try:
            run_job(name, replace(job, batch_size=tried, steps=NUM_DISCARDED + 1), huge_pages, options)
        except MemoryError:
            print(f"{name}: batch size {tried} is too large", flush=True)
            if not fits:
                raise
            return fits
        print(f"{name}: batch size {tried} fits", flush=True)
        fits, tried = tried, tried * 2


def make_rows(rounds: dict[tuple[str, str], list[dict[str, Any]]], jobs: dict[str, Job], peak: float | None) -> list:
    """One row per candidate and huge-page setting: medians over the rounds, and ratios of tokens/s of medians."""
    from nnx_gpt2 import flops_per_token

    rows = []
    for (name, huge_pages), parts in rounds.items():
        job = jobs[name]
        tokens = job.batch_size * PRESETS[job.preset].seq_len
        row: dict[str, Any] = {"candidate": name, "huge_pages": huge_pages, "batch_size": job.batch_size}
        row |= {key: statistics.median(part[key] for part in parts) for key in ("compile_s", "step_s", "peak_bytes")}
        row["tokens_per_s"] = tokens / row["step_s"]
        row["mfu"] = None if peak is None else row["tokens_per_s"] * flops_per_token(model_config(job)) / peak
        row["step_s_by_round"] = [part["step_s"] for part in parts]
        row |= {key: [part[key] for part in parts] for key in ("first_loss", "last_loss")}
        rows.append(row)
    speeds = {(row["candidate"], row["huge_pages"]): row["tokens_per_s"] for row in rows}
    for row in rows:
        peers = [name for name in jobs if name not in (OURS, row["candidate"])]
        row["ratio_to"] = {peer: row["tokens_per_s"] / speeds[peer, row["huge_pages"]] for peer in peers}
    return rows


def as_markdown(result: dict[str, Any], peers: list[str]) -> str:
    """The tables, and all that a reader needs to run them again."""
    heads = [
        "candidate",
        "huge pages",
        "batch",
        "first call",
        "step",
        "step by round",
        "tokens/s",
        "MFU",
        "peak memory",
    ]
    table = [[*heads, *(f"x {peer}" for peer in peers)]]
    for row in result["rows"]:
        table.append([
            row["candidate"], row["huge_pages"], str(row["batch_size"]), f"{row['compile_s']:.1f} s",
            f"{row['step_s'] * 1e3:.1f} ms", ", ".join(f"{step_s * 1e3:.1f}" for step_s in row["step_s_by_round"]),
            f"{row['tokens_per_s']:.0f}", "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
            *(f"{row['ratio_to'][peer]:.3f}" if peer in row["ratio_to"] else "" for peer in peers),
        ])  # fmt: skip
    lines = [" | ".join(row).join(("| ", " |")) for row in table]
    lines.insert(1, "|---" * len(table[0]) + "|")
    config = [f"- {name}: {value}" for name, value in result["config"].items()]
    text = [
        f"# The train step of nnx-gpt2, {result['config']['preset']}\n",
        f"{result['hardware']}; {result['date']}; {result['versions']}\n",
        *lines,
        "\nMedians over rounds of each round's median; the last columns are ratios of tokens/s, above 1 where the row is "
        "faster than the peer under the same huge-page setting. The first call has compilation and one step in it. MFU "
        "is of the dense bfloat16 peak. Peak memory is the device's on GPU, the whole process's on CPU.\n",
        "## Configuration\n",
        *config,
    ]
    if "operations" in result:
        text += [f"\n## Longest operations of nnx-gpt2, over {NUM_PROFILED} steps\n"]
        text += (
            ["| operation | calls a step | ms a step | share |", "|---|---|---|---|"] if result["operations"] else []
        )
        text += [
            f"| `{part['name']}` | {part['calls_per_step']:.0f} | {part['s_per_step'] * 1e3:.2f} | {part['share']:.1%} |"
            for part in result["operations"]
        ] or ["The trace has no events of a GPU."]
    return "\n".join(text) + "\n"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small-bytes")
    parser.add_argument(
        "--peer", choices=(TUTORIAL, TRANSFORMERS, "none"), action="append",
        help="repeatable; by default the tutorial, and transformers where --torch-python is given",
    )  # fmt: skip
    parser.add_argument("--torch-python", help="interpreter with torch and transformers; by default this one")
    parser.add_argument("--batch-size", help="a number, or 'largest' (GPU only), found for each candidate by doubling")
    parser.add_argument("--first-batch-size", type=int, default=1, help="where the doubling starts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help=f"after the first call; {NUM_DISCARDED} are discarded")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none", help="of nnx-gpt2 alone")
    parser.add_argument("--huge-pages", choices=("off", "on", "both"), help="by default both on CPU, off on GPU")
    parser.add_argument("--profile", type=Path, help="folder for a trace of nnx-gpt2, taken after the rounds")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--stem", help="the results' file name; by default train_step_<preset>")
    parser.add_argument("--worker", choices=("probe", *WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=lambda text: Job(**json.loads(text)), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= NUM_DISCARDED:
        parser.error(f"--steps must be above {NUM_DISCARDED}, since so many are discarded, got {options.steps}")
    return options


def main() -> None:
    """Run the rounds and write the results."""
    options = parse()
    if options.worker is not None:
        print(json.dumps(probe() if options.worker == "probe" else WORKERS[options.worker](options.job)))
        return

    from nnx_gpt2 import OptimizerConfig, peak_flops_per_s

    device = run_process(sys.executable, "off", "--worker", "probe")
    on_cpu, preset = device["platform"] == "cpu", PRESETS[options.preset]
    peers = options.peer or [TUTORIAL, *([TRANSFORMERS] if options.torch_python else [])]
    peers = [peer for peer in (TUTORIAL, TRANSFORMERS) if peer in peers]
    huge_pages = options.huge_pages or ("both" if on_cpu else "off")
    settings = ["off", "on"] if huge_pages == "both" else [huge_pages]
    job = Job(
        preset=options.preset, batch_size=preset["batch_size"], steps=options.steps, platform=device["platform"],
        remat=options.remat,
    )  # fmt: skip
    if options.batch_size == "largest":
        if on_cpu:
            sys.exit("--batch-size largest needs a GPU: on CPU the search would take the whole machine's memory")
        jobs = {
            name: replace(job, batch_size=largest_batch_size(name, job, settings[0], options))
            for name in (OURS, *peers)
        }
    else:
        jobs = dict.fromkeys((OURS, *peers), replace(job, batch_size=int(options.batch_size or preset["batch_size"])))

    rounds = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    versions = {"python": platform.python_version()}
    for number in range(options.rounds):
        for setting in settings:
            for name in jobs:
                began = time.monotonic()
                part = run_job(name, jobs[name], setting, options)
                versions |= part["versions"]
                rounds[name, setting].append(part)
                print(
                    f"round {number + 1}, huge pages {setting}, {name}: first call {part['compile_s']:.1f} s, step "
                    f"{part['step_s'] * 1e3:.1f} ms ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = cpu.group(1) if cpu else platform.machine()
    result: dict[str, Any] = {
        "rows": make_rows(rounds, jobs, peak_flops_per_s(device["device_kind"])),
        "hardware": ("" if on_cpu else f"{device['device_kind']}, ") + f"{processor}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
        "config": {
            "preset": options.preset,
            "batch size": options.batch_size or preset["batch_size"],
            "rounds": options.rounds,
            "steps": f"{options.steps} after the first call, of which {NUM_DISCARDED} are discarded",
            "huge pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1, of every process)": huge_pages,
            "model": asdict(model_config(job)),
            "optimizer": asdict(OptimizerConfig()),
            **{peer: PEER_SETTINGS[peer] for peer in peers},
        },
    }
    if not on_cpu:
        result["config"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] = MEMORY_FRACTION
    if options.profile is not None:
        traced = replace(jobs[OURS], profile=str(options.profile))
        result["operations"] = run_job(OURS, traced, settings[0], options)["operations"]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.stem or f"train_step_{options.preset}"
    (options.out / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / f"{stem}.md").write_text(as_markdown(result, peers))
    print((options.out / f"{stem}.md").read_text())


if __name__ == "__main__":
    main()
