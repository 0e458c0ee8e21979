"""The candidates of `train_step.py`, each timed in a process of its own: `train_step_candidates.py NAME JOB`.

The process prints one line of JSON. Functions import jax, flax, nnx_gpt2 and torch where they use them: the interpreter
with torch has none of the other packages, and the parent process must not hold the device.
"""

import json
import os
import re
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

OURS, TUTORIAL, TRANSFORMERS, PYTORCH = "nnx-gpt2", "tutorial", "transformers", "pytorch"
NUM_DISCARDED = 2  # steps after the first call, until allocators and clocks are stable
NUM_PROFILED = 3
JAX_PACKAGES = ("jax", "jaxlib", "flax", "optax")

# The fields of GPT2Config as plain numbers, for the process with torch too.
_SMALL = {"vocab_size": 257, "seq_len": 256, "num_layers": 6, "num_heads": 6, "embed_dim": 384, "dtype": "float32"}
_GPT2 = {"vocab_size": 50257, "seq_len": 1024, "num_layers": 12, "num_heads": 12, "embed_dim": 768, "dtype": "bfloat16"}
PRESETS: dict[str, dict[str, Any]] = {
    "baby": _SMALL | {"seq_len": 64, "num_layers": 4, "num_heads": 4, "embed_dim": 128},
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
    transformers: Any = import_module("transformers")
    preset = PRESETS[job.preset]
    config = transformers.GPT2Config(
        vocab_size=preset["vocab_size"], n_positions=preset["seq_len"], n_embd=preset["embed_dim"],
        n_layer=preset["num_layers"], n_head=preset["num_heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    return _time_torch(job, model, lambda windows: model(windows[:, :-1]).logits, "transformers")


def time_pytorch(job: Job) -> dict[str, Any]:
    """Time the step of the plain model of `torch_gpt.py`, with the fastest settings for the device."""
    model = import_module("torch_gpt").GPT(PRESETS[job.preset])
    return _time_torch(job, model, lambda windows: model(windows[:, :-1]))


def _time_torch(job: Job, model: Any, logits: Callable[[Any], Any], *packages: str) -> dict[str, Any]:
    # Imported by name: pyright would look for packages that the workspace does not have.
    torch = cast(Any, import_module("torch"))
    preset, on_gpu = PRESETS[job.preset], job.platform != "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count())
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")  # TF32 on GPU, the default of XLA
    device = torch.device("cuda" if on_gpu else "cpu")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=on_gpu)
    batches = torch.randint(0, preset["vocab_size"], (job.steps + 1, job.batch_size, preset["seq_len"] + 1))

    def loss_fn(windows: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits(windows).flatten(0, 1), windows[:, 1:].flatten())

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

    return timed(job, step, torch.cuda.max_memory_allocated, "torch", *packages)


CANDIDATES = {
    OURS: time_ours, TUTORIAL: time_tutorial, TRANSFORMERS: time_transformers, PYTORCH: time_pytorch, "probe": probe
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(CANDIDATES[sys.argv[1]](Job(**json.loads(sys.argv[2])))))
