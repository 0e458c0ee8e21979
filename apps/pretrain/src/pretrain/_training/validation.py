"""The loss on validation tokens, in nats per token and in bits per byte of text."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import GPT2Config, make_eval_step, make_tree_eval_step, put_batch
from owt_data import Tokenizer, Tokens
from pretrain._run.metrics import Record, rounded
from pretrain._run.step_losses import ValLosses
from pretrain._training.device_memory import compile_what_fits
from pretrain._training.validation_sources import ValidationSources

# Windows that are read at once to count the bytes of their text.
_WINDOWS_AT_ONCE = 256


class Validation:
    """Evaluation of parameters on the same tokens each time, whatever the batch size and the number of processes.

    Args:
        model: the model's configuration.
        val: the validation tokens, at least one window.
        num_tokens: number of tokens to predict, as windows spread evenly over all tokens, at least one window. None, or
            a number that is too large, predicts each token except the first once: windows follow each other, and the
            last one, which ends with the tokens, counts only the tokens that the one before it has not predicted.
        batch_size: windows per step, over all processes.
        fill_steps: True raises the batch size to a multiple, to at most `model.loss_chunk_tokens` tokens. The steps of
            small batches leave a device idle.
        mesh: the mesh of the parameters; None for a single device.
        num_shards: shards of a batch, whose losses are computed alone, on a mesh; None computes those of a device
            together.
        end_of_text: the last token of each document, to restrict attention to a document; None does not.
        sources: name and number of the tokens of each part of `val`, in order, to compute the loss of each name beside
            that of all. A part of the tokens then has some more windows, which do not count in the loss of all, where
            a name would have few or none.
    """

    def __init__(  # noqa: PLR0913 - the settings of a validation are independent
        self,
        model: GPT2Config,
        val: Tokens,
        *,
        num_tokens: int | None,
        batch_size: int,
        fill_steps: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        num_shards: int | None = None,
        end_of_text: int | None = None,
        sources: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._val = val
        self._seq_len = model.seq_len
        self._batch_size = batch_size
        self._mesh = mesh
        self._step: Any
        if mesh is None or num_shards is None:
            self._step = make_eval_step(model, mesh, end_of_text=end_of_text)
        else:
            self._step = make_tree_eval_step(model, mesh, num_shards=num_shards, end_of_text=end_of_text)
        num_predicted, complete = len(val) - 1, val.num_windows(model.seq_len)
        self.is_full = num_tokens is None or num_tokens >= num_predicted
        rest = num_predicted - complete * model.seq_len
        if num_tokens is None or self.is_full:
            self._indices, self._rest = np.arange(complete + (rest > 0)), rest
        else:
            count = max(1, num_tokens // model.seq_len)
            self._indices, self._rest = np.arange(count) * complete // count, 0
        self._sources = ValidationSources(sources)
        more = self._sources.more_windows(self._indices, complete, self._seq_len) if not self.is_full else []
        self._read_indices = np.append(self._indices, more).astype(np.int64)
        if fill_steps:
            most = model.loss_chunk_tokens // (batch_size * model.seq_len)
            self._batch_size *= max(1, min(most, len(self._indices) // batch_size))
        self._last_window = last_tokens(val, model.seq_len + 1) if self._rest else None
        self.num_tokens = num_predicted if self.is_full else len(self._indices) * model.seq_len
        """Number of predicted tokens."""
        self._num_bytes: int | None = None

    def fit(self, params: Any) -> None:
        """Lower the batch size until a step fits the memory of this process's device. For a single device.

        Args:
            params: the parameters.
        """
        largest = min(self._batch_size, len(self._read_indices))
        self._step, self._batch_size = compile_what_fits(
            self._step, params, largest, self._seq_len, self._read(np.arange(1)).dtype
        )

    def evaluate(self, params: Any, track: Callable[[range], Iterable[int]] = iter) -> tuple[float, ValLosses]:
        """Return the mean loss in nats per token, and those of the windows and of the sources.

        Args:
            params: the parameters.
            track: wraps the steps, to show progress.
        """
        local = self._batch_size // jax.process_count()
        num_rows, sums, parts = len(self._read_indices), [], []
        counts = np.zeros(len(self._sources.names), np.int64)  # predicted tokens of each source
        for first in track(range(0, num_rows, self._batch_size)):
            # The last batch is filled up with the first windows, which count nothing.
            rows = np.arange(first, first + self._batch_size)
            mine = rows[jax.process_index() * local :][:local] % num_rows
            windows = self._read(mine)
            batch = jax.device_put(windows) if self._mesh is None else put_batch(windows, self._mesh)
            losses = self._step(params, batch)
            sums.append(_sum_last(losses, np.where(rows < len(self._indices), self._counts(rows), 0)))
            if self._sources.names:
                ids, num_sources = self._source_ids(rows), len(self._sources.names)
                counts += np.bincount(ids[ids >= 0], minlength=num_sources)
                parts.append(_sum_sources(losses, ids, num_sources=num_sources))
        sums = [np.asarray(of_batch, np.float64) for of_batch in sums]
        rows = np.arange(len(self._indices))
        losses = (np.concatenate(sums)[: len(rows)] / self._counts(rows)).astype(np.float32)
        total = sum(float(of_batch.sum()) for of_batch in sums)
        of_windows = ValLosses(
            losses=losses, last_count=self._rest or self._seq_len, of_sources=self._source_losses(parts, counts)
        )
        return total / self.num_tokens, of_windows

    def measure(self, params: Any, tokenizer: Tokenizer | None) -> tuple[Record, ValLosses]:
        """Return the losses as a record has them, and those of the windows. A collective on a mesh: see `evaluate`.

        Args:
            params: the parameters.
            tokenizer: the tokenizer of the tokens, for bits per byte, which rank 0 alone computes; None without it.
        """
        loss, of_windows = self.evaluate(params)
        bits = None
        if jax.process_index() == 0 and tokenizer is not None:
            bits = self.bits_per_byte(loss, tokenizer)
        losses = {"val_loss": loss} | ({} if bits is None else {"val_bits_per_byte": bits})
        of_sources = {f"val_loss/{name}": of_one for name, of_one in of_windows.of_sources.items()}
        return rounded(losses | of_sources), of_windows

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> float | None:
        """Return a loss in bits per byte of the text of the predicted tokens, or None if this text is empty.

        End-of-text tokens count in the loss, and have no bytes.

        Args:
            loss: mean loss in nats per token.
            tokenizer: the tokenizer of the tokens.
        """
        if self._num_bytes is None:
            lengths = np.zeros(tokenizer.n_vocab, np.int64)
            for token_id in range(tokenizer.n_vocab):
                if not tokenizer.is_special_token(token_id):
                    lengths[token_id] = len(tokenizer.decode_single_token_bytes(token_id))
            self._num_bytes = 0
            for first in range(0, len(self._indices), _WINDOWS_AT_ONCE):
                rows = np.arange(first, min(first + _WINDOWS_AT_ONCE, len(self._indices)))
                is_predicted = np.arange(self._seq_len) >= self._seq_len - self._counts(rows)[:, None]
                self._num_bytes += int(lengths[self._read(rows)[:, 1:]][is_predicted].sum())
        return loss * self.num_tokens / (math.log(2) * self._num_bytes) if self._num_bytes else None

    def _source_ids(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of the source of each target of these windows, `int32[N, seq_len]`; -1 if it counts not."""
        is_read = rows < len(self._read_indices)
        indices = self._read_indices[np.where(is_read, rows, 0)]
        starts = np.where(self._is_last(rows), len(self._val) - self._seq_len - 1, indices * self._seq_len)
        ids = self._sources.of(starts[:, None] + np.arange(1, self._seq_len + 1))
        is_counted = np.arange(self._seq_len) >= self._seq_len - self._counts(rows)[:, None]
        return np.where(is_counted & is_read[:, None], ids, -1).astype(np.int32)

    def _source_losses(self, parts: Sequence[jax.Array], counts: NDArray[np.int64]) -> dict[str, float]:
        """Return the mean loss of each source with predicted tokens, from the sums of batches, `float32[B, S]` each."""
        sums = np.zeros(len(counts))
        for part in parts:
            sums += np.asarray(part, np.float64).sum(axis=0)
        named = zip(self._sources.names, sums.tolist(), counts.tolist(), strict=True)
        return {name: of_one / count for name, of_one, count in named if count}

    def _is_last(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether these windows are the one that ends with the tokens."""
        return (rows == len(self._indices) - 1) & (self._rest > 0)

    def _counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens, from the end, count in each of these windows."""
        return np.where(self._is_last(rows), self._rest, self._seq_len)

    def _read(self, rows: NDArray[np.int64]) -> NDArray[np.integer]:
        """Read windows, `uint16[N, seq_len + 1]`."""
        is_last = self._is_last(rows)
        indices = np.where(is_last, 0, self._read_indices[rows])
        windows = self._val.windows(indices, seq_len=self._seq_len, order="sequential", seed=0)
        if self._last_window is not None:
            windows[is_last] = self._last_window
        return windows


def last_tokens(tokens: Tokens, count: int) -> NDArray[np.integer]:
    """Read the last tokens, at least two, as windows of a single input."""
    pairs = tokens.windows(np.arange(len(tokens) - count, len(tokens) - 1), seq_len=1, order="sequential", seed=0)
    return np.append(pairs[:, 0], pairs[-1:, 1])


@jax.jit
def _sum_last(losses: jax.Array, counts: jax.Array | NDArray[np.int64]) -> jax.Array:
    """Sum the last `counts[i]` losses of each row, `float32[B, T]` to `float32[B]`."""
    is_counted = jnp.arange(losses.shape[1]) >= losses.shape[1] - counts[:, None]
    return jnp.where(is_counted, losses, 0).sum(axis=1)


@partial(jax.jit, static_argnames="num_sources")
def _sum_sources(losses: jax.Array, ids: NDArray[np.int32], *, num_sources: int) -> jax.Array:
    """Sum the losses of each row by the source of their targets, `float32[B, T]` to `float32[B, S]`."""
    return jnp.stack([jnp.where(ids == number, losses, 0).sum(axis=1) for number in range(num_sources)], axis=1)
