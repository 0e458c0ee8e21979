"""The command `plan`: the needs of a run, before anything starts."""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from nnx_gpt2 import (
    MemoryEstimate,
    abstract_train_state,
    create_optimizer,
    create_train_state,
    flops_per_token,
    has_bfloat16,
    make_mesh,
    num_params,
    put_batch,
)
from nnx_gpt2 import peak_flops_per_s as known_peak
from owt_data import TokenMixture, Tokens, vocab_size
from pretrain._config import PretrainConfig, TrainConfig
from pretrain._data import find_texts, open_prepared
from pretrain._data_names import labels_of
from pretrain._errors import UsageError
from pretrain._resolve.devices import check_shares, data_devices, given_hardware, with_microbatches
from pretrain._resolve.origin import find_origin, resolve_anneal
from pretrain._resolve.settings import DataFacts, resolve_from_data, resolve_order
from pretrain._resolve.step_memory import StepMemory, largest_microbatch, step_memory
from pretrain._resolve.target_devices import Target, find_target, missing_compiler
from pretrain._screen.plan_table import MFU_RANGE, Plan
from pretrain._screen.printing import waiting
from pretrain._training.configured_step import train_step_of
from pretrain._training.process import keep_freed_memory
from pretrain._training.setup import warn_of_bfloat16

_OPENWEBTEXT = (9_035_582_198, 4_434_897)
"""Training and validation tokens of OpenWebText by nanoGPT's preparation, from its data/openwebtext/readme.md."""

_FINEWEB = (10_350_000_000, 5_000_000)
"""About the training and validation tokens of the sample of 10B tokens of FineWeb. llm.c's epoch of it is 19 560 steps
of 524 288 tokens, besides its validation shard of 100 million: KellerJordan/modded-nanogpt,
records/track_1_short/2024-10-13_llmc."""

_KNOWN = {"openwebtext": _OPENWEBTEXT, "fineweb": _FINEWEB}
"""Tokens of datasets by the tokenizer gpt2."""

_BYTES_PER_RECORD = 700
"""Of `metrics.jsonl` and of TensorBoard's file: 220 and 440 on a small run."""

# Steps of --measure: the first compile, and fill the caches.
_NUM_WARM_STEPS, _NUM_MEASURED_STEPS = 3, 20
_HOUR_S = 3600


def plan(
    config: PretrainConfig,
    *,
    price_per_hour: float | None = None,
    measure: bool = False,
    console: Console | None = None,
) -> Plan:
    """Say what a run needs, from the configuration and the compiler of its devices. Reads no text.

    Without that compiler, the memory is that of the state, and the plan only knows if this does not fit.

    Args:
        config: the run. TPUs, and GPUs with a type, need not be here: see `nnx_gpt2.absent_devices`. Elastic hardware
            is planned at its smallest.
        price_per_hour: the price of all planned devices.
        measure: run some steps on the devices, which must be here.
        console: shows that the compiler works; None shows nothing.

    Raises:
        UsageError: the number of steps depends on text that is not prepared, the price is negative, or the devices are
            unknown or do not fit the mesh, the model or the batch.
        DataError: the prepared tokens cannot be read, or the text does not exist.
    """
    if price_per_hour is not None and not 0 <= price_per_hour < float("inf"):
        raise UsageError(f"--price-per-hour must be a number of at least 0, got {price_per_hour}.")
    data = _find_data(config)
    if data.num_tokens is None and config.train.max_epochs is not None:
        raise UsageError(
            f"train.max_epochs must be none in a plan for text that is not prepared, got {config.train.max_epochs}. "
            "Give --train.max-epochs none and --train.max-steps or --train.max-tokens, or the folder that owt-data "
            "prepare makes of the text."
        )
    hardware = given_hardware(config)
    try:
        origin = find_origin(config)
        config = resolve_from_data(resolve_anneal(resolve_order(config), origin), data.facts)
        num_steps = config.train.max_steps - (0 if origin is None else origin.start_step)
        target = find_target(hardware, only_here=measure)
        warn_of_bfloat16(config, target.device)
        mesh = make_mesh(devices=target.devices, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
        if console is None or target.facts is not None:
            console = Console(quiet=True)
        with waiting(console, f"compiling for {target}"):
            num_devices = [mesh.size // config.mesh.tensor] if hardware is None else data_devices(config, hardware)
            found = _find_memory(config, mesh, target, num_devices)
        config, memory = found.config, found.estimate
        step_s = _measured_step_s(config, mesh) if measure and target.has(memory) else None
    except ValueError as error:
        raise UsageError(str(error)) from error
    summary = _summary(config, num_steps, target, mesh, data, memory, price_per_hour, step_s)
    counts: tuple[int, ...] = ()
    if hardware is not None and (hardware.is_elastic or hardware.allowed_counts is not None):
        counts = tuple(hardware.worker_counts)
    return dataclasses.replace(summary, worker_counts=counts, reason=_reason(target, memory, found.rejection))


class _Data(NamedTuple):
    """Facts about the data that are known without reading text."""

    facts: DataFacts
    num_tokens: int | None
    """None if the text is not prepared."""
    train: Tokens | None = None
    """The training tokens, if they are prepared."""


def _find_data(config: PretrainConfig) -> _Data:
    tokens = open_prepared(config)
    seq_len = config.model.seq_len
    tokenizer = config.prepare.tokenizer
    if tokens is not None:
        facts = DataFacts(tokens.tokenizer, tokens.vocab_size, tokens.train.num_windows(seq_len))
        return _Data(facts, len(tokens.train) + len(tokens.val), tokens.train)
    if config.data in _KNOWN and tokenizer == "gpt2":
        known = _KNOWN[config.data]
        return _Data(DataFacts(tokenizer, vocab_size(tokenizer), known[0] // seq_len), sum(known))
    find_texts(config)
    return _Data(DataFacts(tokenizer, vocab_size(tokenizer), 0), None)


def _find_memory(
    config: PretrainConfig, mesh: jax.sharding.Mesh, target: Target, num_devices: Sequence[int]
) -> StepMemory:
    """Return the memory of the step, or that of the state if its compiler is missing."""
    if config.train.micro_batch_size == "auto":
        return largest_microbatch(config, mesh, target, num_devices)
    config = with_microbatches(config, num_devices)
    if target.facts is None:
        return step_memory(config, mesh)
    check_shares(config, num_devices)
    estimate = MemoryEstimate(state_bytes=_state_bytes(config, mesh), temporary_bytes=0, code_bytes=0)
    return StepMemory(config=config, estimate=estimate)


def _state_bytes(config: PretrainConfig, mesh: jax.sharding.Mesh) -> int:
    """Return the bytes of the state on each device."""
    state = abstract_train_state(config.model, create_optimizer(config.optimizer, config.train.max_steps), mesh)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )


def _measured_step_s(config: PretrainConfig, mesh: jax.sharding.Mesh) -> float:
    """Return the median time of some steps on random tokens."""
    keep_freed_memory()
    train, model = config.train, config.model
    optimizer, key = create_optimizer(config.optimizer, train.max_steps), jax.random.key(config.seed)
    step = train_step_of(config, mesh, 0 if train.mask_documents else None)
    state = create_train_state(model, optimizer, key, mesh)
    shape = (train.global_batch_size, model.seq_len + 1)
    assert model.vocab_size is not None, "it is resolved"
    dtype = np.uint16 if model.vocab_size <= 2**16 else np.uint32
    windows = np.random.default_rng(0).integers(0, model.vocab_size, shape, dtype)
    ends_s: list[float] = []
    running = None
    for _ in range(_NUM_WARM_STEPS + _NUM_MEASURED_STEPS):
        state, metrics = step(state, put_batch(windows, mesh), key)
        if running is not None:
            ends_s.append(_end_of(running))
        running = metrics["loss"]  # as in a run, the next step is dispatched before this one ends
    ends_s.append(_end_of(running))
    return statistics.median(end_s - begin_s for begin_s, end_s in pairwise(ends_s[_NUM_WARM_STEPS - 1 :]))


def _end_of(loss: Any) -> float:
    """Wait for a step, and return the time."""
    loss.block_until_ready()
    return time.perf_counter()


def _peak(config: PretrainConfig, device: Any) -> float | None:
    """Return the peak of a device in FLOP/s, or None if it is not known. That of GPUs is known for 16 bits."""
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    is_of_type = device.platform == "tpu" or (config.model.dtype == "bfloat16" and has_bfloat16(device))
    return known_peak(device.device_kind) if is_of_type else None


def _summary(
    config: PretrainConfig,
    num_steps: int,
    target: Target,
    mesh: jax.sharding.Mesh,
    data: _Data,
    memory: MemoryEstimate | None,
    price_per_hour: float | None,
    step_s: float | None,
) -> Plan:
    train, model = config.train, config.model
    state = abstract_train_state(model, create_optimizer(config.optimizer, train.max_steps))
    saved_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    num_windows = num_steps * train.global_batch_size
    tokens = num_windows * model.seq_len
    flops = float(tokens * flops_per_token(model))
    num_devices = len(target.devices)
    peak = _peak(config, target.device)
    fits, is_compiled = target.has(memory), target.facts is None
    measured_hours = None if step_s is None else step_s * num_steps / _HOUR_S
    measured_price = None
    if measured_hours is not None and price_per_hour is not None:
        measured_price = measured_hours * price_per_hour
    hours = price = None
    if peak is not None:
        slow, fast = (flops / (share * peak * num_devices) / _HOUR_S for share in MFU_RANGE)
        hours = (fast, slow)
        price = None if price_per_hour is None else (fast * price_per_hour, slow * price_per_hour)
    return Plan(
        device=target.device.device_kind,
        num_devices=num_devices,
        mesh=dict(mesh.shape),
        worker_counts=(),
        num_parameters=num_params(model),
        tokens_per_step=train.global_batch_size * model.seq_len,
        num_steps=num_steps,
        num_tokens=tokens,
        epochs=None if data.num_tokens is None else num_windows / max(1, data.facts.num_windows),
        source_epochs=_source_epochs(config, num_steps, data.train),
        micro_batch_size=train.global_batch_size // train.grad_accum_steps // (mesh.size // config.mesh.tensor),
        grad_accum_steps=train.grad_accum_steps,
        flops=flops,
        tokens_bytes=None if data.num_tokens is None else data.facts.bytes_per_token * data.num_tokens,
        checkpoints_bytes=saved_bytes * _num_checkpoints(train),
        logs_bytes=num_steps // train.log_every * _BYTES_PER_RECORD,
        state_bytes=_state_bytes(config, mesh) if memory is None else memory.state_bytes,
        temporary_bytes=memory.temporary_bytes + memory.code_bytes if memory is not None and is_compiled else None,
        usable_bytes=target.usable_bytes,
        fits=fits if is_compiled or not fits else None,
        reason="",
        hours=hours,
        price_per_hour=price_per_hour,
        price=price,
        measured_step_s=step_s,
        measured_hours=measured_hours,
        measured_price=measured_price,
    )


def _source_epochs(config: PretrainConfig, num_steps: int, train: Tokens | None) -> dict[str, float]:
    """Return the epochs of each name of a mixture, by its label; none for other data, and text that is not prepared."""
    if not isinstance(train, TokenMixture):
        return {}
    last = config.train.max_steps
    first, stop = (
        train.counts(step * config.train.global_batch_size, config.seed) for step in (last - num_steps, last)
    )
    return {
        label: (after - before) / max(1, sequence.num_windows(config.model.seq_len))
        for label, before, after, sequence in zip(labels_of(config.data), first, stop, train.sequences, strict=True)
    }


def _reason(target: Target, memory: MemoryEstimate | None, rejection: str) -> str:
    """Return why a step does not fit, or why this is not known; an empty text if it fits."""
    if memory is None:
        return rejection
    if not target.has(memory):
        what = "step" if target.facts is None else "state"
        return f"the {what} needs {memory.peak_bytes} bytes on each device, which has {target.usable_bytes}"
    return "" if target.facts is None else missing_compiler(target)


def _num_checkpoints(train: TrainConfig) -> int:
    """Return the number of checkpoints that a run may have at once, with the one that is being written."""
    at_most = -(-train.max_steps // train.checkpoint_every)
    if train.checkpoints_to_keep is None:
        return at_most
    kept_for_good = (
        0 if train.keep_every is None else train.max_steps // math.lcm(train.keep_every, train.checkpoint_every)
    )
    to_score = 2 if train.eval_tasks and train.eval_tasks_every is not None else 0
    return min(at_most, train.checkpoints_to_keep + train.keep_best + kept_for_good + to_score + 1)
