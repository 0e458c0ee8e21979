"""The mean loss on the first windows of the validation tokens."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from nnx_gpt2 import GPT2Config, make_eval_step, put_batch
from owt_data import Tokens
from pretrain._training.device_memory import compile_what_fits


class Validation:
    """Evaluation of parameters on the same windows each time.

    Args:
        model: the model's configuration.
        val: the validation tokens.
        num_windows: number of windows, from the first. Fewer are used if the tokens have fewer.
        batch_size: windows per step, over all processes.
        mesh: the mesh of the parameters; None for a single device.
        end_of_text: the last token of each document, to restrict attention to a document; None does not.
    """

    def __init__(
        self,
        model: GPT2Config,
        val: Tokens,
        *,
        num_windows: int,
        batch_size: int,
        mesh: jax.sharding.Mesh | None = None,
        end_of_text: int | None = None,
    ) -> None:
        self._val, self._seq_len, self._batch_size, self._mesh = val, model.seq_len, batch_size, mesh
        self.num_windows = min(val.num_windows(model.seq_len), num_windows)
        self._step: Any = make_eval_step(model, mesh, end_of_text=end_of_text)

    def fit(self, params: Any) -> None:
        """Lower the batch size until a step fits the memory of this process's device. For a single device.

        Args:
            params: the parameters.
        """
        largest = min(self._batch_size, self.num_windows)
        self._step, self._batch_size = compile_what_fits(self._step, params, largest, self._seq_len)

    def loss(self, params: Any, track: Callable[[range], Iterable[int]] = iter) -> float:
        """Return the mean loss in nats per token.

        Args:
            params: the parameters.
            track: wraps the steps, to show progress.
        """
        local = self._batch_size // jax.process_count()
        sums = []
        for first in track(range(0, self.num_windows, self._batch_size)):
            # The last batch is filled up with the first windows, whose second losses are dropped below.
            mine = np.arange(first, first + local) + jax.process_index() * local
            windows = self._val.windows(mine % self.num_windows, seq_len=self._seq_len, order="sequential", seed=0)
            batch = jax.device_put(windows) if self._mesh is None else put_batch(windows, self._mesh)
            sums.append(self._step(params, batch).mean(axis=1))
        losses = np.concatenate([np.asarray(batch_losses) for batch_losses in sums])
        return float(losses[: self.num_windows].mean(dtype=np.float64))
