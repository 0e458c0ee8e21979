"""Log-likelihoods and continuations of tokens, over all devices of this process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx_gpt2 import GPT2, generate, make_mesh, make_score_step, merge, put_batch, replicated, split_params
from pretrain._judge.row_batches import Batch, Row, batches

# About as many tokens as a device computes in the time in which it compiles a program: 1 to 2 s for gpt2 on two cores.
# The number of accelerators is an estimate from their peak rates.
_PROGRAM_TOKENS = {"cpu": 1 << 11}
_PROGRAM_TOKENS_OF_ACCELERATORS = 1 << 23
# Lengths of rows are multiples of it. The splash kernel of TPUs needs the larger one.
_LENGTH_MULTIPLE = {"cpu": 8}
_LENGTH_MULTIPLE_OF_ACCELERATORS = 128

# Texts that a device draws at once. More texts share each read of the weights: on two cores, 100 texts of gpt2 take a
# third of the time of those in batches of 16.
_FEWEST_TEXTS, _MOST_TEXTS = 16, 128
# Positions of their keys and values, which take 1.2 GB for 2^14 positions of gpt2 in float32.
_TEXT_POSITIONS = {"cpu": 1 << 14}
_TEXT_POSITIONS_OF_ACCELERATORS = 1 << 16


class Score(NamedTuple):
    """The score of the tokens at the end of a row."""

    log_likelihood: float
    """Sum of their log-probabilities, in nats."""

    is_greedy: bool
    """True if each of them is the likeliest."""


class _AllStopped(Exception):
    """All texts of a batch have ended."""


class Scorer:
    """A model with a copy on each device of this process. The devices share the rows.

    Args:
        model: the model.
        batch_size: windows of the model's context that are computed at once; shorter rows are more.
    """

    def __init__(self, model: GPT2, *, batch_size: int) -> None:
        self.config, self._batch_size = model.config, batch_size
        self._mesh = make_mesh(devices=jax.local_devices()) if jax.local_device_count() > 1 else None
        self._num_devices, self._platform = jax.local_device_count(), jax.local_devices()[0].platform
        params = split_params(model)
        self._params = params if self._mesh is None else jax.device_put(params, replicated(self._mesh))
        self._step = make_score_step(self.config, self._mesh)

    def scores(self, rows: Sequence[Row], done: Callable[[int], object] = lambda number: None) -> list[Score]:
        """Score rows.

        Args:
            rows: the rows. A row without scored tokens has the score 0, and is greedy.
            done: called with the number of rows that were scored.
        """
        found: dict[int, Score] = {}
        most_tokens = self._batch_size * self.config.seq_len
        planned = batches(
            rows,
            most_tokens=most_tokens,
            context=self.config.seq_len,
            multiple=self._num_devices,
            length_multiple=_LENGTH_MULTIPLE.get(self._platform, _LENGTH_MULTIPLE_OF_ACCELERATORS),
            program_tokens=_PROGRAM_TOKENS.get(self._platform, _PROGRAM_TOKENS_OF_ACCELERATORS),
        )
        running: tuple[Batch, Any] | None = None
        for batch in planned:  # the devices compute a batch while the one before it is read
            started = batch, self._step(self._params, *self._arrays(rows, batch))
            if running is not None:
                found |= _read(rows, *running, done)
            running = started
        if running is not None:
            found |= _read(rows, *running, done)
        return [found[number] for number in range(len(rows))]

    def _arrays(self, rows: Sequence[Row], batch: Batch) -> list[Any]:
        tokens = np.zeros((batch.size, batch.length), np.int32)
        positions, targets = (np.zeros((batch.size, batch.num_scored), np.int32) for _ in range(2))
        for place, shared in enumerate(batch.rows):
            inputs = rows[shared[0]].inputs
            tokens[place, : len(inputs)] = inputs
            for number, scored in _places(rows, shared):
                row = rows[number].tokens
                first = len(row) - rows[number].num_scored
                positions[place, scored] = np.arange(first - 1, len(row) - 1)
                targets[place, scored] = row[first:]
        arrays = (tokens, positions, targets)
        return [*arrays] if self._mesh is None else [put_batch(array, self._mesh) for array in arrays]

    def texts_at_once(self, num_texts: int, length: int) -> int:
        """Return the number of texts that a device draws at once: about the same in each of its batches.

        Args:
            num_texts: the number of all texts.
            length: tokens of the longest one, with the new ones.
        """
        positions = _TEXT_POSITIONS.get(self._platform, _TEXT_POSITIONS_OF_ACCELERATORS)
        most = max(_FEWEST_TEXTS, min(_MOST_TEXTS, positions // min(length, self.config.seq_len)))
        of_device = -(-num_texts // self._num_devices)
        return -(-of_device // -(-of_device // most))

    def continue_texts(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        *,
        has_ended: Callable[[list[int]], bool],
        rows_at_once: int,
        done: Callable[[int], object] = lambda number: None,
        **options: Any,
    ) -> list[list[int]]:
        """Generate a continuation of each prompt, the longest prompts first. Each device draws texts of its own.

        Args:
            prompts: token ids, at least one and at most the model's context.
            max_new_tokens: number of tokens to add at most.
            has_ended: tells from the new tokens of a text whether more are needed.
            rows_at_once: texts of a device that are drawn at once.
            done: called with the number of texts that are complete.
            options: other arguments of `nnx_gpt2.generate`.

        Returns:
            The new tokens of each prompt, without those after its end by more than some steps.
        """
        order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number), reverse=True)
        chunks = [order[first : first + rows_at_once] for first in range(0, len(order), rows_at_once)]
        models = [merge(self.config, params) for params in self._params_of_devices()]
        found: dict[int, list[int]] = {}

        def work(device: int) -> None:
            for chunk in chunks[device :: len(models)]:
                texts = _continued(
                    models[device], [prompts[number] for number in chunk], max_new_tokens, has_ended, rows_at_once,
                    options,
                )  # fmt: skip
                found.update(zip(chunk, texts, strict=True))
                done(len(chunk))

        with ThreadPoolExecutor(len(models)) as threads:
            for _ in threads.map(work, range(len(models))):
                pass
        return [found[number] for number in range(len(prompts))]

    def _params_of_devices(self) -> list[Any]:
        if self._mesh is None:
            return [self._params]
        return [
            jax.tree.map(lambda x, i=i: x.addressable_data(i), self._params)  # the copy of a device, without a copy
            for i in range(self._num_devices)
        ]


def _places(rows: Sequence[Row], shared: list[int]) -> Iterator[tuple[int, slice]]:
    """Iterate over rows that share a row of the arrays, with the places of their scored tokens in it."""
    first = 0
    for number in shared:
        yield number, slice(first, first + rows[number].num_scored)
        first += rows[number].num_scored


def _read(rows: Sequence[Row], batch: Batch, arrays: Any, done: Callable[[int], object]) -> dict[int, Score]:
    losses, is_likeliest = jax.device_get(arrays)
    found: dict[int, Score] = {}
    for place, shared in enumerate(batch.rows):
        for number, scored in _places(rows, shared):
            total = -float(losses[place, scored].sum(dtype=np.float64))
            found[number] = Score(total, bool(is_likeliest[place, scored].all()))
    done(len(found))
    return found


def _continued(
    model: GPT2,
    prompts: list[list[int]],
    max_new_tokens: int,
    has_ended: Callable[[list[int]], bool],
    size: int,
    options: dict[str, Any],
) -> list[list[int]]:
    """Continue prompts until all have ended. They are filled up to `size`: one program then serves all batches."""
    texts: list[list[int]] = [[] for _ in prompts]

    def add(new: list[list[int]]) -> None:
        for text, tokens in zip(texts, new, strict=False):
            text += tokens
        if all(has_ended(text) for text in texts):
            raise _AllStopped

    filled = prompts + prompts[:1] * (size - len(prompts))
    with contextlib.suppress(_AllStopped):
        generate(model, filled, max_new_tokens, on_tokens=add, **options)
    return texts
