"""Many short runs in one process, for tests that compare them: a script, and what it prints as JSON."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Short runs spend most of their time compiling. Without most optimizations that takes half of the time or less.
FEWER_OPTIMIZATIONS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

PLANTED = "params.h.0.mlp.c_fc.kernel"
"""The array that `plant` changes."""

# A digest is that of all arrays of a checkpoint.
SCRIPT = """
import dataclasses, gc, json, os, shutil, signal, time
from pathlib import Path

gc.set_threshold(20_000, 20, 100)  # see conftest.py

import jax
import numpy as np

from nnx_gpt2 import abstract_train_state, create_optimizer, root_digest, split_params, tensor_digests
import pretrain._training.loop as loop
from pretrain import PRESETS, load_trained, train
from pretrain._run.description import read_description
from pretrain._run.checkpoint_digests import DIGESTS
from pretrain._run.metrics import read_records
from pretrain._run.folder import RunFolder
from pretrain._training.load_state import digests_of
from ray_jax_launch import Checkpoints, checkpoint_steps

quickstart = PRESETS["quickstart"]()
BASE = dataclasses.replace(
    quickstart, data="train=book.txt,val=end.txt", hardware="local", prompts=("a",), trackers=(),
    model=dataclasses.replace(quickstart.model, num_layers=1, num_heads=2, embed_dim=16, seq_len=24, dropout_rate=0.1),
    train=dataclasses.replace(
        quickstart.train, global_batch_size=6, max_steps=13, log_every=1, eval_every=4, eval_tokens=120,
        sample_tokens=0, checkpoint_every=4, checkpoints_to_keep=None,
    ),
    optimizer=dataclasses.replace(quickstart.optimizer, schedule="constant", warmup_steps=3),
)

def changed(config, **changes):
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        if section:
            value, field = dataclasses.replace(getattr(config, section), **{field: value}), section
        config = dataclasses.replace(config, **{field: value})
    return config

def arrays(name, step):
    folder = RunFolder(Path("runs", name).absolute())
    config = read_description(folder).config
    like = abstract_train_state(config.model, create_optimizer(config.optimizer, config.train.max_steps))
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        return checkpoints.restore(step, {"params": like.params, "opt_state": like.opt_state})

def digest(name, step):
    return params_digest(arrays(name, step))

def params_digest(params):
    return root_digest(tensor_digests(params))

def losses(name):
    kept = ("step", "loss", "learning_rate", "grad_norm_max", "val_loss", "tokens")
    lines = read_records(Path("runs", name, "metrics.jsonl"))
    return [{key: line[key] for key in kept if key in line} for line in lines]

def steps(name):
    return checkpoint_steps(Path("runs", name, "checkpoints"))

def plant(name, step):
    "Change an element of a checkpoint by one ulp: the largest of the array of PLANTED."
    state = jax.tree.map(np.array, arrays(name, step))
    folder = RunFolder(Path("runs", name).absolute())
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        metadata = checkpoints.broadcast_metadata(step)
    shutil.rmtree(folder.path / "checkpoints" / str(step))
    kernel = state["params"]["h"][0]["mlp"]["c_fc"]["kernel"]
    place = np.unravel_index(np.argmax(np.abs(kernel)), kernel.shape)
    kernel[place] = np.nextafter(kernel[place], np.float32(np.inf))
    with Checkpoints(folder.checkpoints, num_to_keep=None) as checkpoints:
        checkpoints.save(step, state, metadata=metadata | {DIGESTS: digests_of(state)})

def rewind(name, step):
    "Make the run what a kill after a checkpoint leaves."
    Path("runs", name, "result.json").unlink()
    for number in steps(name):
        if number > step:
            shutil.rmtree(Path("runs", name, "checkpoints", str(number)))

def stop_in(step, config):
    "Train, with a Ctrl-C during a step."
    asks = loop.stop_requested

    def stop_requested(number, *arrays):
        if number == step:
            os.kill(os.getpid(), signal.SIGINT)
            while not asks(number, *arrays):
                time.sleep(0.01)
        return asks(number, *arrays)

    loop.stop_requested = stop_requested
    try:
        train(config)
        raise RuntimeError("it was not stopped")
    except KeyboardInterrupt:
        assert steps(config.name)[-1] == step
    finally:
        loop.stop_requested = asks

def rejection(config):
    try:
        train(config)
    except ValueError as error:
        return str(error)
    return "accepted"

found = {}
"""


def results(script: str, place: Path, *, is_optimized: bool = False) -> dict[str, Any]:
    """Run a script after `SCRIPT` in a folder with two texts, and return the object that it found."""
    (place / "book.txt").write_text("A short book, of some words. " * 600)
    (place / "end.txt").write_text("The end of a short book, of some words. " * 60)
    done = subprocess.run(
        [sys.executable, "-"],
        input=f"{SCRIPT}{script}\nprint(json.dumps(found))\n",
        cwd=place,
        env=environment(place, is_optimized=is_optimized),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment(place: Path, *, is_optimized: bool = False) -> dict[str, str]:
    """Return the variables of a process that trains in a folder, with a cache of its own."""
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(place / "cache")}
    return optimized(variables) if is_optimized else variables


def optimized(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process whose programs have the optimizations of users, as those that compute long."""
    return {**variables, "XLA_FLAGS": variables["XLA_FLAGS"].replace(FEWER_OPTIMIZATIONS, "").strip()}


def kill_after(command: list[str], place: Path, run: str, step: int) -> None:
    """Start a command in a folder, and kill its process when the run has recorded a step."""
    process = subprocess.Popen(command, cwd=place, env=environment(place), stdout=subprocess.DEVNULL)
    records, deadline = place / "runs" / run / "metrics.jsonl", time.monotonic() + 120
    try:
        while time.monotonic() < deadline and process.poll() is None:
            lines = records.read_text().splitlines() if records.exists() else []
            if any(f'"step": {number},' in line for line in lines[-3:] for number in range(step, step + 500)):
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before the kill"
    finally:
        process.kill()
        process.wait()
