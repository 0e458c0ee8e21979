"""Text from a model."""

import codecs
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from nnx_gpt2 import GPT2, generate, merge, num_params, replicated
from owt_data import Tokenizer
from pretrain._best_effort import best_effort
from pretrain._config import PretrainConfig
from pretrain._resolve.target_devices import device_memory_bytes
from pretrain._run.history import Sample

_END_TOKENS = 400
_TEMPERATURE = 0.8
_TOP_K = 40
# The largest share of a device's memory that a copy of sharded parameters may take while the run goes on.
_COPY_SHARE = 0.1


class Sampler:
    """Samples of a run, from the same prompts and keys each time. Rank 0 takes them, on one device.

    Args:
        config: the run's configuration.
        tokenizer: the run's tokenizer; None for no samples.
        mesh: the devices of the parameters.
    """

    def __init__(self, config: PretrainConfig, tokenizer: Tokenizer | None, mesh: jax.sharding.Mesh) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._gather = jax.jit(lambda params: params, out_shardings=replicated(mesh))
        self._is_sharded = config.mesh.fsdp * config.mesh.tensor > 1
        copy_bytes = num_params(config.model) * jnp.dtype(config.model.param_dtype).itemsize
        fits = not self._is_sharded or copy_bytes < _COPY_SHARE * device_memory_bytes()
        has_text = tokenizer is not None and config.train.sample_tokens > 0
        # Gathering needs every rank, and rank 0 decides: another machine may lack the tokenizer's files, or memory.
        decisions = multihost_utils.broadcast_one_to_all(np.array([has_text and fits, has_text]))
        self._takes_samples, self._has_text = map(bool, decisions)

    def samples(self, params: Any, step: int) -> list[Sample]:
        """Return a sample from each prompt on rank 0, and an empty list on other ranks. Every rank must call this.

        Parameters that are sharded are gathered first, and no sample is taken if they are too large for this.

        Args:
            params: the parameters.
            step: the step of the parameters.
        """
        if not self._takes_samples:
            return []
        return [
            Sample(step=step, prompt=prompt, text=text)
            for prompt, text in zip(
                self._config.prompts,
                self._texts(params, self._config.prompts, self._config.train.sample_tokens),
                strict=False,  # without texts, after a failure and on other ranks
            )
        ]

    def text(self, params: Any) -> str:
        """Return the text at the end of a run on rank 0, and an empty one on other ranks. Every rank must call this."""
        if not self._has_text:
            return ""
        return next(iter(self._texts(params, self._config.prompts[:1], _END_TOKENS)), "")

    def _texts(self, params: Any, prompts: tuple[str, ...], num_tokens: int) -> list[str]:
        params = self._gather(params) if self._is_sharded else params
        texts: list[str] = []
        if jax.process_index() == 0 and self._tokenizer is not None:
            with best_effort("a sample"):
                key = jax.random.key(self._config.seed)
                model = merge(self._config.model, jax.tree.map(lambda x: x.addressable_data(0), params))
                for number, prompt in enumerate(prompts):
                    texts += continue_prompt(
                        model,
                        self._tokenizer,
                        prompt,
                        num_samples=1,
                        max_new_tokens=num_tokens,
                        key=jax.random.fold_in(key, number) if number else key,
                        temperature=_TEMPERATURE,
                        top_k=_TOP_K,
                    )
        return texts


class _Pieces:
    """The pieces of a text, as its tokens come. The bytes of an incomplete character wait for the others."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[int], *, is_last: bool = False) -> None:
        """Write the text of tokens."""
        if piece := self._decoder.decode(self._tokenizer.decode_bytes(tokens), final=is_last):
            self._write(piece)


def continue_prompt(
    model: GPT2,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_samples: int,
    max_new_tokens: int,
    write: Callable[[str], object] | None = None,
    **options: Any,
) -> list[str]:
    """Generate continuations of a prompt. An empty prompt starts a document, after an end of text.

    Args:
        model: the model.
        tokenizer: the tokenizer of the model's training text.
        prompt: the beginning of each text.
        num_samples: number of texts.
        max_new_tokens: number of tokens to add.
        write: called with each piece of the first text, as soon as its tokens are drawn. The pieces make up the text.
        options: other arguments of `nnx_gpt2.generate`.

    Returns:
        The texts, each with the prompt.
    """
    prompt_tokens = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    # The model reads the last tokens of a prompt that is longer than its context.
    unseen, seen = prompt_tokens[: -model.config.seq_len], prompt_tokens[-model.config.seq_len :]
    # The model may have more ids than the tokenizer can decode.
    vocab_size = min(tokenizer.n_vocab, model.config.vocab_size)
    first = 0 if prompt else 1  # the end of text before an empty prompt is no part of the text
    pieces = None if write is None else _Pieces(tokenizer, write)
    if pieces:
        pieces.add(prompt_tokens[first:])
    texts = generate(
        model,
        [seen] * num_samples,
        max_new_tokens,
        vocab_size=vocab_size,
        on_tokens=None if pieces is None else lambda tokens: pieces.add(tokens[0]),
        **options,
    )
    if pieces:
        pieces.add([], is_last=True)
    return [tokenizer.decode((unseen + text)[first:], errors="replace") for text in texts]
