"""The training loop that every worker runs. The one file of the application that computes.

At a step that is saved or validated the order is: update, save, evaluate, wait until the save is on disk,
write the metrics, report (where validated). A resume does everything after the save again, whether or not a
crash cut it off.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray.train
from numpy.typing import NDArray

from nnx_gpt2 import (
    TrainState,
    abstract_train_state,
    create_optimizer,
    create_train_state,
    generate,
    make_eval_step,
    make_mesh,
    make_train_step,
    merge,
    put_batch,
)
from owt_data import WINDOW_ORDER_VERSION, TokenData, Tokens, iter_steps, load_tokenizer
from pretrain._config import PretrainConfig
from pretrain._log import RunLog, StepTimer
from pretrain._run import RunFolder
from ray_jax_launch import Checkpoints

SAMPLE_TOKENS = 400
SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 40


def run(config: PretrainConfig, data: TokenData, folder: RunFolder) -> str:
    """Train from the newest checkpoint, or from the beginning, to the last step.

    Args:
        config: the resolved configuration.
        data: the tokens. (Those for training come through Ray Data, as the dataset `train`.)
        folder: the run's folder.

    Returns:
        On rank 0, text that the trained model generated.
    """
    train, max_steps = config.train, config.train.max_steps
    mesh = make_mesh()
    optimizer = create_optimizer(config.optimizer, max_steps)
    train_step = make_train_step(config.model, optimizer, grad_accum_steps=train.grad_accum_steps)
    validation = _Validation(config, data.val, mesh)
    key = jax.random.key(config.seed)

    with (
        Checkpoints(folder.checkpoints, num_to_keep=train.checkpoints_to_keep) as checkpoints,
        RunLog(folder) as log,
        ThreadPoolExecutor(1) as threads,
    ):

        def finish(state: TrainState, record: dict[str, Any], *, save: bool, evaluate: bool) -> None:
            if save:
                checkpoints.save(
                    record["step"],
                    {"params": state.params, "opt_state": state.opt_state},
                    metadata={"record": record, "data": data_identity(config, data)},
                )
            if evaluate:
                record = record | {"val_loss": validation.loss(state.params)}
            checkpoints.wait()
            log.write(record)
            if evaluate:
                ray.train.report(record)

        start = checkpoints.latest_step() or 0
        # Ray Data takes seconds to hand out its first batch: it begins before anything is compiled.
        batches = _train_batches(start, max_steps)
        first_batch = threads.submit(next, batches, None)
        if start:
            metadata = checkpoints.metadata(start)
            _check_identity(metadata["data"], data_identity(config, data))
            like = abstract_train_state(config.model, optimizer, mesh)
            items = checkpoints.restore(start, {"params": like.params, "opt_state": like.opt_state})
            state = TrainState(step=jax.device_put(jnp.int32(start), like.step.sharding), **items)
            record = metadata["record"]
        else:
            state = create_train_state(config.model, optimizer, jax.random.fold_in(key, max_steps), mesh)
            record = {"step": 0}
        log.begin(start)
        finish(state, record, save=False, evaluate=start == 0 or _due(start, train.eval_every, max_steps))

        timer = StepTimer(config, mesh)
        pending: tuple[int, dict[str, jax.Array]] | None = None
        for step in range(start + 1, max_steps + 1):
            with timer.waiting_for_data():
                batch = first_batch.result() if step == start + 1 else next(batches, None)
            windows = put_batch(_checked(batch, step - 1), mesh)
            state, metrics = train_step(state, windows, key)
            if step == start + 1:
                jax.block_until_ready(metrics)  # compiling is not part of a step's time
                timer.restart(step)
            # A step's metrics are fetched only once the next step is under way, so that devices never wait.
            if pending is not None:
                log.write(timer.record(*pending))
            save = _due(step, train.checkpoint_every, max_steps)
            evaluate = _due(step, train.eval_every, max_steps)
            pending = (step, metrics) if _due(step, train.log_every, max_steps) else None
            if save or evaluate:
                finish(state, timer.record(step, metrics), save=save, evaluate=evaluate)
                timer.restart(step)
                pending = None

    return _sample(config, data.tokenizer, state) if jax.process_index() == 0 else ""


def data_identity(config: PretrainConfig, data: TokenData) -> dict[str, Any]:
    """What decides which window comes when: a checkpoint is continued on no other."""
    return {
        **data.fingerprint,
        "order": config.train.order,
        "window_order_version": WINDOW_ORDER_VERSION,
        "seed": config.seed,
        "seq_len": config.model.seq_len,
        "global_batch_size": config.train.global_batch_size,
    }


def _check_identity(stored: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted(stored.keys() | now.keys()):
        if stored.get(name) != now.get(name):
            raise ValueError(
                f"expected the checkpoint's data, whose {name} is {stored.get(name)}, got {now.get(name)}: continue "
                "with the former data"
            )


def _due(step: int, every: int, max_steps: int) -> bool:
    return step % every == 0 or step == max_steps


def _train_batches(start: int, max_steps: int) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    if start < max_steps:
        shard = ray.train.get_dataset_shard("train")
        assert shard is not None, "the launch names the dataset"
        yield from iter_steps(shard)


def _checked(batch: tuple[int, NDArray[np.uint16]] | None, step: int) -> NDArray[np.uint16]:
    if batch is None or batch[0] != step:
        raise RuntimeError(f"expected the batch of step {step} from Ray Data, got {batch and batch[0]}")
    return batch[1]


class _Validation:
    """The mean loss over the first windows of the validation tokens, always the same."""

    def __init__(self, config: PretrainConfig, val: Tokens, mesh: jax.sharding.Mesh) -> None:
        self._config, self._val, self._mesh = config, val, mesh
        self._step = make_eval_step(config.model, mesh)

    def loss(self, params: Any) -> float:
        """In nats per token."""
        batch_size, seq_len = self._config.train.global_batch_size, self._config.model.seq_len
        count = min(self._val.num_windows(seq_len), self._config.train.eval_batches * batch_size)
        local = batch_size // jax.process_count()
        losses = []
        for first in range(jax.process_index() * local, -(-count // batch_size) * batch_size, batch_size):
            # The last batch goes round to the first windows, whose second losses are cut off below.
            indices = np.arange(first, first + local) % count
            windows = self._val.windows(indices, seq_len=seq_len, order="sequential", seed=0)
            losses.append(self._step(params, put_batch(windows, self._mesh)))
        return float(np.concatenate([np.asarray(loss) for loss in losses])[:count].mean(dtype=np.float64))


def _sample(config: PretrainConfig, tokenizer_name: str, state: TrainState) -> str:
    """Text by the trained model, computed on one device of this process."""
    tokenizer = load_tokenizer(tokenizer_name)
    params = jax.tree.map(lambda x: x.addressable_data(0), state.params)
    prompt = jnp.array([tokenizer.encode_ordinary(config.prompt)], jnp.int32)
    tokens = generate(
        merge(config.model, params),
        prompt,
        SAMPLE_TOKENS,
        key=jax.random.key(config.seed),
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
    )
    return tokenizer.decode(np.asarray(tokens)[0].tolist(), errors="replace")
