"""Runs on 1, 2, 4 and 8 workers and in one process, with `--train.num-shards 8`: the digests of each checkpoint.

    uv run benchmarks/layouts.py --steps 300

The models are that of the preset `baby`, and one of 2 layers of width 384 with dropout 0.1 and microbatches. Each
layout is a command of its own that trains from step 0 and keeps a checkpoint every 50 steps. The reference is the run
with `local`. Compared are the digests of the parameters and of the optimizer state of each checkpoint, and the losses
of all steps. Writes benchmarks/results/layouts.md and layouts.json. Exits with 1 if a bit differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment
from options import count

from pretrain._run.checkpoint_digests import roots
from ray_jax_launch import checkpoint_metadata, checkpoint_steps

ROOT = Path(__file__).parent.parent
LAYOUTS = ("local", "cpu:1", "cpu:2", "cpu:4", "cpu:8")
CHECKPOINT_EVERY = 50
OPTIONS = {
    "--data": "builtin", "--train.num-shards": 8, "--train.checkpoint-every": CHECKPOINT_EVERY,
    "--train.checkpoints-to-keep": "none", "--train.eval-every": 100, "--train.eval-tokens": 5000,
    "--train.sample-tokens": 0,
}  # fmt: skip
MODELS = {
    "baby": {"--preset": "baby", "--train.global-batch-size": 16},
    "2 layers of width 384, dropout 0.1, 2 microbatches": {
        "--preset": "baby", "--model.num-layers": 2, "--model.num-heads": 6, "--model.embed-dim": 384,
        "--model.seq-len": 64, "--model.dropout-rate": 0.1, "--train.global-batch-size": 16,
        "--train.grad-accum-steps": 2,
    },
}  # fmt: skip


def train(model: str, layout: str, num_steps: int, folder: Path) -> dict[str, Any]:
    """Train one run. Return its digests by step, that of its losses, and the seconds of the command."""
    name = f"{list(MODELS).index(model)}-{layout.replace(':', '-')}"
    options = OPTIONS | MODELS[model] | {"--train.max-steps": num_steps, "--hardware": layout, "--name": name}
    arguments = [str(part) for option in options.items() for part in option]
    began_s = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        command = [sys.executable, str(ROOT / "apps" / "pretrain"), *arguments]
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=True)
    took_s = time.monotonic() - began_s
    run = folder / "runs" / name
    steps = checkpoint_steps(run / "checkpoints")
    if steps != [*range(CHECKPOINT_EVERY, num_steps, CHECKPOINT_EVERY), num_steps]:
        raise RuntimeError(f"{name} must have a checkpoint every {CHECKPOINT_EVERY} steps, got {steps}")
    losses = (run / "step_losses.f32").read_bytes()
    if len(losses) != 4 * num_steps:
        raise RuntimeError(f"{name} must have {num_steps} losses, got {len(losses) // 4}")
    return {
        "model": model,
        "layout": layout,
        "digests": {step: roots(checkpoint_metadata(run / "checkpoints", step)) for step in steps},
        "losses": hashlib.sha256(losses).hexdigest(),
        "seconds": took_s,
    }


def main() -> int:
    """Train all runs, write the results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=300, help="steps of a run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"JAX_PLATFORMS": "cpu", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    runs = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="layouts") as folder:
        for model in MODELS:
            for layout in LAYOUTS:
                runs.append(train(model, layout, options.steps, Path(folder)))
                print(f"{model}, {layout}: {runs[-1]['seconds']:.0f} s, losses {runs[-1]['losses'][:16]}", flush=True)
    results = {
        **environment("pretrain", "nnx-gpt2", "ray-jax-launch", "jax", "ray"),
        "configuration": f"{options.steps} steps of 16 windows as 8 shards, a checkpoint every {CHECKPOINT_EVERY}",
        "runs": runs,
    }
    (options.out / "layouts.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "# One process, and 1, 2, 4 and 8 workers: the same bits",
        "",
        f"{results['configuration']}; {results['hardware']}; {results['date']}; {results['versions']}",
        "",
    ]
    all_equal = True
    for model in MODELS:
        reference, *others = [run for run in runs if run["model"] == model]
        lines += [
            f"## {model}",
            "",
            "| step | digest of params | of opt_state | layouts that differ |",
            "|---|---|---|---|",
        ]
        rows = [(str(step), of, [run["digests"][step] for run in others]) for step, of in reference["digests"].items()]
        for step, of, found in rows:
            differ = [run["layout"] for run, other in zip(others, found, strict=True) if other != of]
            lines.append(
                f"| {step} | `{of['params'][:16]}` | `{of['opt_state'][:16]}` | {', '.join(differ) or 'none'} |"
            )
            all_equal &= not differ
        differ = [run["layout"] for run in others if run["losses"] != reference["losses"]]
        all_equal &= not differ
        seconds = ", ".join(f"{run['layout']} {run['seconds']:.0f} s" for run in [reference, *others])
        lines += ["", f"The losses of all steps differ with: {', '.join(differ) or 'none'}. Commands: {seconds}.", ""]
    (options.out / "layouts.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0 if all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
