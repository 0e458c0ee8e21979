"""Sampling from the model."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from nnx_gpt2._model import GPT2


def generate(
    model: GPT2,
    prompt: Int[Array, "B P"],
    max_new_tokens: int,
    *,
    key: PRNGKeyArray | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "B N"]:
    """Continue each prompt by `max_new_tokens` tokens.

    Past the context length the oldest tokens fall out of sight, as in a sliding window.

    Args:
        model: the model.
        prompt: token ids, at least one per row.
        max_new_tokens: how many to add.
        key: makes the draw reproducible; needed unless `temperature` is 0.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: draw among the `top_k` likeliest tokens only; None draws among all.

    Returns:
        The prompt and what follows it: `N = P + max_new_tokens`.

    Raises:
        ValueError: an argument is out of its range, or the prompt is empty or holds an unknown id.
    """
    vocab_size = model.config.vocab_size
    if prompt.shape[1] < 1 or max_new_tokens < 0:
        raise ValueError(
            "expected a prompt of at least 1 token and max_new_tokens of at least 0, "
            f"got {prompt.shape[1]} and {max_new_tokens}"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise ValueError(f"expected prompt ids in [0, {vocab_size}), got {int(prompt.min())} to {int(prompt.max())}")
    if not temperature >= 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"expected temperature >= 0 and top_k >= 1, got {temperature} and {top_k}")
    if temperature > 0 and key is None:
        raise ValueError("expected a key to draw with: pass key=jax.random.key(seed), or temperature=0")
    graphdef, state = nnx.split(model)
    return _generate(
        graphdef,
        state,
        prompt,
        jax.random.key(0) if key is None else key,
        jnp.float32(temperature),
        max_new_tokens=max_new_tokens,
        greedy=temperature == 0,
        top_k=None if top_k is None else min(top_k, vocab_size),
    )


@partial(jax.jit, static_argnames=("graphdef", "max_new_tokens", "greedy", "top_k"))
def _generate(
    graphdef: Any,
    state: PyTree[Array],
    prompt: Int[Array, "B P"],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    *,
    max_new_tokens: int,
    greedy: bool,
    top_k: int | None,
) -> Int[Array, "B N"]:
    model = nnx.merge(graphdef, state)
    prompt_len, context = prompt.shape[1], model.config.seq_len
    total_len = prompt_len + max_new_tokens

    def add_token(position: Int[Array, ""], tokens: Int[Array, "B L"]) -> Int[Array, "B L"]:
        start = jnp.maximum(position - context, 0)
        window = jax.lax.dynamic_slice_in_dim(tokens, start, context, axis=1)
        # What lies right of the last known token is not seen, attention being causal.
        logits_BV = model(window)[:, position - 1 - start].astype(jnp.float32)
        if greedy:
            token_B = logits_BV.argmax(axis=-1)
        else:
            if top_k is not None:
                smallest_kept = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
                logits_BV = jnp.where(logits_BV < smallest_kept, -jnp.inf, logits_BV)
            token_B = jax.random.categorical(jax.random.fold_in(key, position), logits_BV / temperature)
        return jax.lax.dynamic_update_slice_in_dim(tokens, token_B[:, None].astype(tokens.dtype), position, axis=1)

    padded = jnp.pad(prompt, ((0, 0), (0, max(total_len, context) - prompt_len)))
    return jax.lax.fori_loop(prompt_len, total_len, add_token, padded)[:, :total_len]
