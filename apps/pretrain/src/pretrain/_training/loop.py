"""The training loop that every worker runs.

The order at a step with a checkpoint or a validation: update, start the save, evaluate, sample, write the metrics,
report. The save continues in the background until the next one. A run that continues from a checkpoint writes the
record of that step again, from the checkpoint. After a stop request, the loop saves and returns.
"""

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
import ray.train
from numpy.typing import NDArray

from nnx_gpt2 import (
    TrainState,
    abstract_train_state,
    create_optimizer,
    create_train_state,
    has_bfloat16,
    make_mesh,
    make_train_step,
    put_batch,
)
from owt_data import DataError, TokenData, iter_steps, load_tokenizer, read_steps, step_windows
from pretrain._config import PretrainConfig
from pretrain._run.description import RUN, RunDescription
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import Record, rounded
from pretrain._training.compilation import keep_programs
from pretrain._training.device_memory import check_memory
from pretrain._training.host_memory import keep_freed_memory
from pretrain._training.profiling import Profiling
from pretrain._training.run_log import RunLog
from pretrain._training.sampling import Sampler
from pretrain._training.step_meter import StepMeter
from pretrain._training.validation import Validation
from ray_jax_launch import Checkpoints, LaunchError, log_metrics, mark_finished, stop_requested

# Counters of the state in a checkpoint's metadata, beside the step.
_COUNTERS = ("num_skipped", "num_skipped_in_a_row")
# Steps of a start whose batches the process reads itself. Ray Data starts processes and needs seconds for its first
# batch. It does this after the first step, which therefore comes sooner.
_STEPS_BEFORE_RAY_DATA = 200

_logger = logging.getLogger("pretrain")


def run(
    config: PretrainConfig,
    data: TokenData,
    folder: RunFolder,
    description: RunDescription,
    *,
    reads_itself: bool,
    began_s: float,
) -> str:
    """Train from the newest checkpoint, or from the start, to the last step.

    Args:
        config: the resolved configuration.
        data: the tokens.
        folder: the run's folder.
        description: the run's description. Each checkpoint gets a copy.
        reads_itself: True if a thread of each process reads all training tokens, False if tasks of Ray Data read those
            after the first steps of a start.
        began_s: Unix time at which the command began.

    Returns:
        On rank 0, a sample from the trained model; an empty text on other ranks, and after a stop request.
    """
    train, max_steps = config.train, config.train.max_steps
    keep_programs()
    keep_freed_memory()
    mesh = make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    check_memory(config, mesh)
    device = mesh.local_devices[0]
    warn_of_bfloat16(config, device)
    optimizer = create_optimizer(config.optimizer, max_steps)
    tokenizer = None
    with contextlib.suppress(DataError):  # samples and bits per byte need the tokenizer; a run without it has neither
        tokenizer = load_tokenizer(data.tokenizer)  # it stays in memory: the network and the cache may fail later
    end_of_text = load_tokenizer(data.tokenizer).eot_token if train.mask_documents else None
    train_step = make_train_step(
        config.model, optimizer, mesh, grad_accum_steps=train.grad_accum_steps, end_of_text=end_of_text
    )
    _check_readable(data, config.model.seq_len)
    part, full = (
        Validation(
            config.model,
            data.val,
            num_tokens=num_tokens,
            batch_size=train.global_batch_size,
            fill_steps=True,
            mesh=mesh,
            end_of_text=end_of_text,
        )
        for num_tokens in (train.eval_tokens, None)
    )
    sampler = Sampler(config, tokenizer, mesh)
    key = jax.random.key(config.seed)
    is_first = jax.process_index() == 0

    with (
        RunLog(folder, config, description, send=log_metrics) as log,
        Checkpoints(folder.checkpoints, num_to_keep=train.checkpoints_to_keep) as checkpoints,
        Profiling(config.profile, log.folder.profiles) as profiling,
        ThreadPoolExecutor(1) as thread,
    ):

        def save_state(state: TrainState, record: Record, unrecorded: dict[str, Any]) -> None:
            log.phase(record["step"], "saving")
            log.push()  # a continued run expects the records before its checkpoint in the log
            checkpoints.save(
                record["step"],
                {"params": state.params, "opt_state": state.opt_state},
                metadata={
                    "record": record,
                    "unrecorded": unrecorded,
                    RUN: description.to_json(),
                    **{name: int(getattr(state, name)) for name in _COUNTERS},
                },
            )

        def evaluate(params: Any, record: Record) -> Record:
            """Return the record with the validation losses, and take the samples."""
            step = record["step"]
            log.phase(step, "evaluating")
            losses = measure(part, params)
            record |= losses
            if step == max_steps:
                losses = losses if part.is_full else measure(full, params)
                record |= {f"full_{name}": loss for name, loss in losses.items()}
            log.phase(step, "sampling")
            for sample in sampler.samples(params, step):
                log.write_sample(sample)
            return record

        def measure(validation: Validation, params: Any) -> Record:
            loss = validation.loss(params)
            bits = validation.bits_per_byte(loss, tokenizer) if is_first and tokenizer is not None else None
            return rounded({"val_loss": loss} | ({} if bits is None else {"val_bits_per_byte": bits}))

        def finish(state: TrainState, record: Record, *, is_evaluated: bool) -> None:
            if is_evaluated:
                record = evaluate(state.params, record)
            log.write(record)
            if is_evaluated:
                ray.train.report(record)

        def prepare_first_step() -> jax.Array:
            """Return the windows of the first step, once the step is compiled."""
            windows = put_batch(_checked(next(batches, None), start), mesh)
            # The compiler for GPUs times kernels, and nothing else may run on the GPU at that time.
            if device.platform != "gpu":
                train_step.lower(like, windows, key).compile()
            return windows

        meter = StepMeter(config, data.train, device, mesh.size)
        start = checkpoints.latest_step() or 0  # verified, and the same on every process
        log.begin(start, began_s)
        batches = _train_batches(config, data, start, reads_itself=reads_itself)
        like = abstract_train_state(config.model, optimizer, mesh)
        first_windows = thread.submit(prepare_first_step)
        if start:
            state, record, unrecorded = restore(checkpoints, start, like)
            meter.restore(unrecorded)
        else:
            state = create_train_state(config.model, optimizer, jax.random.fold_in(key, max_steps), mesh)
            record = {}
        log.open(device.device_kind, mesh.size)
        profiling.begin(start, max_steps)
        record = meter.progress(start) | record
        is_evaluated = start == 0 or is_due(start, train.eval_every, max_steps)
        if (
            is_evaluated
            or is_due(start, train.checkpoint_every, max_steps)
            or is_due(start, train.log_every, max_steps)
        ):
            finish(state, record, is_evaluated=is_evaluated)
        if start < max_steps:
            log.phase(start, "compiling")

        is_pending = False
        for step in range(start + 1, max_steps + 1):
            if step == start + 1:
                windows = first_windows.result()
            else:
                with meter.waiting_for_data():
                    batch = next(batches, None)
                windows = put_batch(_checked(batch, step - 1), mesh)
            profiling.before_step(step)
            state, metrics = train_step(state, windows, key)
            profiling.after_step(step, metrics)
            # The metrics of a step are read after the next step has started: the device never waits.
            if is_pending:
                log.write(meter.record(step - 1))
            meter.add(metrics)
            if step == start + 1:
                jax.block_until_ready(metrics)  # the time of a step excludes compilation
                log.phase(step, "training")
                meter.start()
            is_saved = is_due(step, train.checkpoint_every, max_steps)
            is_evaluated = is_due(step, train.eval_every, max_steps)
            is_pending = is_due(step, train.log_every, max_steps)
            if stop_requested(step):
                # The continued run does everything else that is due at this step. The end of the `with` block waits for
                # the save.
                is_recorded = is_saved or is_evaluated or is_pending
                record = meter.record(step) if is_recorded else meter.progress(step)
                save_state(state, record, meter.unrecorded())
                return ""
            if is_saved or is_evaluated:
                record = meter.record(step)
                meter.stop()
                if is_saved:
                    save_state(state, record, meter.unrecorded())
                finish(state, record, is_evaluated=is_evaluated)
                is_pending = False
                if step < max_steps:
                    log.phase(step, "training")
                    meter.start()

        checkpoints.wait()
        log.push()
        if is_first:
            mark_finished("")
        log.phase(max_steps, "sampling")
        text = sampler.text(state.params)
        log.write_text(text)
        log.phase(max_steps, "finished")
    return text


def restore(checkpoints: Checkpoints, step: int, like: TrainState) -> tuple[TrainState, Record, dict[str, Any]]:
    """Read the state of a checkpoint, the record of its step, and what `StepMeter.unrecorded` returned.

    Args:
        checkpoints: the checkpoints of the run.
        step: the step of the checkpoint.
        like: the shapes, types and shardings of the state.
    """
    arrays = checkpoints.restore(step, {"params": like.params, "opt_state": like.opt_state})
    metadata = checkpoints.metadata(step)
    counters = {"step": step, **{name: metadata[name] for name in _COUNTERS}}
    state = TrainState(
        **{name: jax.device_put(jnp.int32(value), like.step.sharding) for name, value in counters.items()}, **arrays
    )
    return state, metadata["record"], metadata["unrecorded"]


def warn_of_bfloat16(config: PretrainConfig, device: Any) -> None:
    """Log a warning on rank 0 if the configuration computes in bfloat16 and the device has no units for it.

    Args:
        config: the configuration.
        device: a device of jax.
    """
    if config.model.dtype == "bfloat16" and not has_bfloat16(device) and jax.process_index() == 0:
        _logger.warning(
            "%s computes bfloat16 slowly (compute capability %s): --model.dtype float32 is faster, with another --name",
            device.device_kind,
            device.compute_capability,
        )


def is_due(step: int, every: int, max_steps: int) -> bool:
    """Return whether a step is a multiple of `every`, or the last step."""
    return step % every == 0 or step == max_steps


def _check_readable(data: TokenData, seq_len: int) -> None:
    """Read one window of each split, to find missing files before anything is computed.

    Raises:
        LaunchError: this node does not see the token files, or the text of a stream cannot be tokenized.
    """
    try:
        for tokens in (data.train, data.val):
            tokens.windows(np.zeros(1, np.int64), seq_len=seq_len, order="sequential-first", seed=0)
    except FileNotFoundError as error:
        raise LaunchError(
            f"data must be a folder that all nodes share, got {error.filename}, which node "
            f"{ray.util.get_node_ip_address()} does not see. Give --data a folder on a network file system, s3:// or "
            "gs://, or --prepare.cache-path one for prepared text."
        ) from error
    except DataError as error:
        raise LaunchError(str(error)) from error


def _train_batches(
    config: PretrainConfig, data: TokenData, start: int, *, reads_itself: bool
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Yield this process's rows of each step's batch. The reader does not change them.

    Raises:
        LaunchError: the tokens cannot be read, or the text of a stream cannot be tokenized.
    """
    stop = config.train.max_steps
    if start == stop:
        return
    middle = stop if reads_itself else min(start + _STEPS_BEFORE_RAY_DATA, stop)
    arguments: dict[str, Any] = {
        "seq_len": config.model.seq_len,
        "global_batch_size": config.train.global_batch_size,
        "rank": jax.process_index(),
        "world_size": jax.process_count(),
        "order": config.train.order,
        "seed": config.seed,
    }
    try:
        first_steps = read_steps(data.train, start_step=start, stop_step=middle, **arguments)
        yield next(first_steps)
        if middle == stop:
            yield from first_steps
            return
        with ThreadPoolExecutor(1) as thread:
            other_steps = iter_steps(step_windows(data.train, start_step=middle, stop_step=stop, **arguments))
            first = thread.submit(next, other_steps)
            yield from first_steps
            yield first.result()
            yield from other_steps
    except DataError as error:
        raise LaunchError(str(error)) from error


def _checked(batch: tuple[int, NDArray[np.uint16]] | None, step: int) -> NDArray[np.uint16]:
    if batch is None or batch[0] != step:
        raise RuntimeError(f"the next batch must be that of step {step}, got {batch and batch[0]}. Report this error.")
    return batch[1]
