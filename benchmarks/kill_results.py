"""The numbers of a run that `kill_matrix.py` compares, and its tables."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from watched_run import WatchedRun

from nnx_gpt2 import abstract_train_state, create_optimizer, tensor_digests
from pretrain._run.find import find_run
from ray_jax_launch import Checkpoints

# What depends on the time, in the records of metrics.
TIMES = ("time_s", "step_s", "tokens_per_s", "data_wait_s", "mfu", "memory_bytes")


def numbers(run: WatchedRun) -> dict[str, Any]:
    """Return the metrics without times, the samples, and the digest of each array of the last checkpoint."""
    metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in run.lines("metrics.jsonl")]
    folder, description = find_run(str(run.folder))
    config = description.config
    like = abstract_train_state(config.model, create_optimizer(config.optimizer, config.train.max_steps))
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore_latest({"params": like.params, "opt_state": like.opt_state})
    assert restored is not None, "a finished run has a checkpoint"
    result = json.loads((run.folder / "result.json").read_text())
    return {
        "metrics": metrics,
        "samples": [run.lines("samples.jsonl"), (run.folder / "sample.txt").read_text()],
        "parameters": (restored.step, tensor_digests(restored.items)),
        "result": {key: result[key] for key in ("steps", "tokens", "full_val_loss", "best_val_loss", "best_val_step")},
    }


def write(out: Path, result: dict[str, Any]) -> bool:
    """Write the results. Return whether all is as it must be."""
    kills, runs = result["kills"], result["runs"]
    same = ("metrics", "samples", "parameters", "result")
    bad = [row for row in runs if not all(row[what] for what in same) or row["left_running"]]
    faults = [kill for kill in kills if kill["faults"]]
    sent = [kill for kill in kills if kill["outcome"] != "not found"]
    victims = Counter(kill["victim"] for kill in sent)
    phases = Counter(kill["at_phase"] for kill in sent)
    rows = "".join(
        f"| {kill['hardware']} | {kill['at_phase']} | {kill['at_step']} | {kill['victim']} | {kill['signal']} | "
        f"{kill['outcome']} | {'' if kill['next_step_s'] is None else kill['next_step_s']} | {kill['lost_steps']} | "
        f"{'; '.join(kill['faults']) or 'no'} |\n"
        for kill in sent
    )
    table = "".join(
        f"| {row['hardware']} | {row['run']} | {row['kills']} | {row['commands']} | "
        + " | ".join("yes" if row[what] else "NO" for what in same)
        + f" | {', '.join(row['left_running']) or 'none'} |\n"
        for row in runs
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "kill_matrix.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "kill_matrix.md").write_text(
        "# Kills and stops in each phase, against undisturbed runs\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        f"{len(sent)} kills in {len(runs)} runs. Runs with other numbers, or with processes left: {len(bad)}. "
        f"Kills with a fault: {len(faults)}.\n\n"
        f"By victim: {', '.join(f'{name} {number}' for name, number in sorted(victims.items()))}.\n\n"
        f"By phase: {', '.join(f'{name} {number}' for name, number in phases.most_common())}.\n\n"
        "The same to the bit as the undisturbed run of the same hardware:\n\n"
        "| hardware | run | kills | commands | metrics | samples | parameters, state | result | left running |"
        f"\n|---|---|---|---|---|---|---|---|---|\n{table}\n"
        "An exit code of 0 after a kill says that the command went on to the end of the run. After any other code the "
        "same command was given again.\n\n"
        "| hardware | phase | step | victim | signal | outcome | seconds to the next step | steps lost | fault |\n"
        f"|---|---|---|---|---|---|---|---|---|\n{rows}"
    )
    return not bad and not faults
