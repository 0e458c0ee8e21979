"""Sampling from the model, with a cache of keys and values.

Prompts of any length are padded to a few sizes, and the tokens that follow are drawn in one compiled loop, so
that few programs are ever compiled. Every array has a fixed size: a token costs the same at any position.

Shapes: B prompts, P padded prompt, T context, C width, N heads, H head width, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from nnx_gpt2._attention import causal_attention
from nnx_gpt2._model import GPT2, Block

# Prompts are padded to this many tokens, or a power of two above.
_SMALLEST_PROMPT = 32

# Below it a division by the temperature could overflow, or be one by zero. The likeliest token is then the only one.
_SMALLEST_TEMPERATURE = 1e-30


class _Draw(NamedTuple):
    """How a token is drawn: what the compiler must know."""

    greedy: bool
    top_k: int | None
    nucleus: bool
    vocab_size: int


class _Progress(NamedTuple):
    """Where a loop of draws stands."""

    tokens_BT: Int[Array, "B T+1"]
    lengths_B: Int[Array, " B"]
    is_done_B: Bool[Array, " B"]
    num_drawn: Int[Array, ""]
    logits_BP: Float[Array, "B P"]
    cache: Any


def generate(
    model: GPT2,
    prompts: Sequence[Sequence[int]] | np.ndarray | Array,
    max_new_tokens: int,
    *,
    key: PRNGKeyArray | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end_of_text: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    Where a text reaches the context length, the model goes on with the later half of the context in view.

    Args:
        model: the model.
        prompts: token ids of each, of any lengths from 1 to `model.config.seq_len`.
        max_new_tokens: how many to add.
        key: makes the draw reproducible; needed unless `temperature` is 0.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: draw among the `top_k` likeliest tokens only; None draws among all.
        top_p: draw among the likeliest tokens that together have this probability (Holtzman et al., 2020,
            arXiv:1904.09751, section 3.1), after `temperature` and `top_k`; None draws among all.
        end_of_text: stop a text after this token.
        vocab_size: draw only ids below this number: the tokenizer's, where the model's vocabulary is larger, since a
            tokenizer cannot decode the ids beyond its own. None draws among all ids of the model.
        use_cache: keep each layer's keys and values. Without it every token computes its full context again: the
            same tokens, slowly (in bfloat16 up to its rounding, which may decide between two likely ones).

    Returns:
        Each prompt and what follows it.

    Raises:
        ValueError: an argument is out of its range, or a prompt is empty, too long, or holds an unknown id.
    """
    rows = [_token_ids(prompt) for prompt in prompts]
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    _check(model, rows, max_new_tokens, key, temperature, top_k, top_p, vocab_size)
    context = model.config.seq_len
    draw = _Draw(
        greedy=temperature < _SMALLEST_TEMPERATURE,
        top_k=top_k and min(top_k, vocab_size),
        nucleus=top_p is not None,
        vocab_size=vocab_size,
    )
    settings = (
        jax.random.key(0) if key is None else key,
        jnp.float32(temperature),
        jnp.float32(1.0 if top_p is None else top_p),
        jnp.int32(-1 if end_of_text is None else end_of_text),
    )
    graphdef, state = nnx.split(model)
    texts, is_done, num_drawn = [list(row) for row in rows], np.zeros(len(rows), bool), 0
    starts = [0] * len(rows)
    while num_drawn < max_new_tokens and not is_done.all():
        for i, text in enumerate(texts):
            if len(text) - starts[i] > context:
                starts[i] = len(text) - max(context // 2, 1)
        seen = [text[start:] for text, start in zip(texts, starts, strict=True)]
        lengths = np.array([len(text) for text in seen], np.int32)
        prompt_BP = np.zeros((len(seen), _padded_size(int(lengths.max()), context)), np.int32)
        for row, text in zip(prompt_BP, seen, strict=True):
            row[: len(text)] = text
        end = _continue(
            graphdef, state, prompt_BP, lengths, is_done, np.int32(num_drawn), np.int32(max_new_tokens), *settings,
            draw=draw, use_cache=use_cache,
        )  # fmt: skip
        tokens_BT, ends_B, is_done, num_drawn = jax.device_get(end)
        for text, row, first, last in zip(texts, tokens_BT, lengths, ends_B, strict=True):
            text += row[first:last].tolist()
    return texts


def _token_ids(prompt: Any) -> list[int]:
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"expected each prompt to be a sequence of whole numbers, token ids, got {str(prompt)[:60]}: for "
            "one prompt pass a list that holds it"
        )
    return ids.tolist()


def _check(
    model: GPT2,
    rows: list[list[int]],
    max_new_tokens: int,
    key: PRNGKeyArray | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    num_ids: int,
) -> None:
    vocab_size, context = model.config.vocab_size, model.config.seq_len
    if not rows:
        raise ValueError("expected at least one prompt, got none")
    for row in rows:
        if not 1 <= len(row) <= context:
            raise ValueError(
                f"expected prompts of 1 to {context} tokens, the model's context, got one of {len(row)}: "
                f"{'cut it' if row else 'give it a token to begin with'}"
            )
        if min(row) < 0 or max(row) >= vocab_size:
            raise ValueError(f"expected prompt ids in [0, {vocab_size}), got {min(row)} to {max(row)}")
    for name, value, holds, constraint in (
        ("max_new_tokens", max_new_tokens, _is_whole(max_new_tokens, 0), "a whole number, not negative"),
        ("temperature", temperature, 0 <= temperature < math.inf, "finite and not negative"),
        ("top_k", top_k, top_k is None or _is_whole(top_k, 1), "a whole number of at least 1, or None"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or None"),
        ("vocab_size", num_ids, _is_whole(num_ids, 1, vocab_size), f"a whole number of 1 to {vocab_size}, the model's"),
    ):
        if not holds:
            raise ValueError(f"{name} must be {constraint}, got {value}.")
    if temperature > 0 and key is None:
        raise ValueError("expected a key to draw with: pass key=jax.random.key(seed), or temperature=0")


def _is_whole(value: Any, low: int, high: int | None = None) -> bool:
    return isinstance(value, int | np.integer) and bool(low <= value) and (high is None or bool(value <= high))


def _padded_size(num_tokens: int, context: int) -> int:
    return min(context, max(_SMALLEST_PROMPT, 1 << (num_tokens - 1).bit_length()))


@partial(jax.jit, static_argnames=("graphdef", "draw", "use_cache"))
def _continue(
    graphdef: Any,
    state: PyTree[Array],
    prompt_BP: Int[Array, "B P"],
    lengths_B: Int[Array, " B"],
    is_done_B: Bool[Array, " B"],
    num_drawn: Int[Array, ""],
    max_drawn: Int[Array, ""],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    end_of_text: Int[Array, ""],
    *,
    draw: _Draw,
    use_cache: bool,
) -> tuple[Int[Array, "B L"], Int[Array, " B"], Bool[Array, " B"], Int[Array, ""]]:
    """Draw until all is drawn, every text has ended, or one no longer fits the context."""
    model = nnx.merge(graphdef, state)
    context, rows_B = model.config.seq_len, jnp.arange(len(prompt_BP))
    blocks = [model.block(i) for i in range(model.config.num_layers)]

    def whole(tokens_BT: Array, lengths_B: Array) -> Array:
        x_BTC = model.final_activations(tokens_BT).reshape(*tokens_BT.shape, -1)
        return model.padded_logits(x_BTC[rows_B, lengths_B - 1])

    def go_on(now: _Progress) -> Array:
        fits = now.is_done_B | (now.lengths_B <= context)
        return (now.num_drawn < max_drawn) & ~now.is_done_B.all() & fits.all()

    def add_token(now: _Progress) -> _Progress:
        keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), now.num_drawn))(rows_B)
        logits_BV = now.logits_BP[:, : draw.vocab_size].astype(jnp.float32)
        token_B = _draw_tokens(logits_BV, keys_B, temperature, top_p, draw)
        # Where a text is done, the token goes beyond the end and is dropped.
        index_B = jnp.where(now.is_done_B, context + 1, now.lengths_B)
        tokens_BT = now.tokens_BT.at[rows_B, index_B].set(token_B, mode="drop")
        lengths_B = now.lengths_B + ~now.is_done_B
        if use_cache:
            logits_BP, cache = _decode(model, blocks, token_B, now.lengths_B, now.cache)
        else:
            logits_BP, cache = whole(tokens_BT[:, :context], lengths_B), None
        is_done_B = now.is_done_B | (token_B == end_of_text)
        return _Progress(tokens_BT, lengths_B, is_done_B, now.num_drawn + 1, logits_BP, cache)

    tokens_BT = jnp.pad(prompt_BP, ((0, 0), (0, context + 1 - prompt_BP.shape[1])))
    if use_cache:
        logits_BP, cache = _prefill(model, blocks, prompt_BP, lengths_B)
    else:
        logits_BP, cache = whole(tokens_BT[:, :context], lengths_B), None
    start = _Progress(tokens_BT, lengths_B, is_done_B, num_drawn, logits_BP, cache)
    end = jax.lax.while_loop(go_on, add_token, start)
    return end.tokens_BT, end.lengths_B, end.is_done_B, end.num_drawn


def _prefill(model: GPT2, blocks: list[Block], prompt_BP: Array, lengths_B: Array) -> tuple[Array, Any]:
    """Logits after each prompt, and the keys and values of its positions. Padding is to the right, unseen."""
    config = model.config
    num_positions = prompt_BP.shape[1]
    x_BPC = model.embed(prompt_BP, jnp.arange(num_positions)[None])
    x_MC = x_BPC.reshape(-1, config.embed_dim)
    cache = []
    for block in blocks:
        q_BPNH, k_BPNH, v_BPNH = block.attn.heads(block.ln_1(x_MC), num_positions)
        mixed_BPNH = causal_attention(q_BPNH, k_BPNH, v_BPNH, backend=config.attention)
        x_MC = x_MC + block.attn.c_proj(mixed_BPNH.reshape(x_MC.shape))
        x_MC = x_MC + block.mlp(block.ln_2(x_MC), None)
        padding = ((0, 0), (0, config.seq_len - num_positions), (0, 0), (0, 0))
        cache.append((jnp.pad(k_BPNH, padding), jnp.pad(v_BPNH, padding)))
    x_BPC = model.ln_f(x_MC).reshape(x_BPC.shape)
    return model.padded_logits(x_BPC[jnp.arange(len(prompt_BP)), lengths_B - 1]), cache


def _decode(model: GPT2, blocks: list[Block], token_B: Array, position_B: Array, cache: Any) -> tuple[Array, Any]:
    """Logits after one more token of each text, which is put into the cache at its position."""
    config, rows_B = model.config, jnp.arange(len(token_B))
    x_BC = model.embed(token_B, position_B)
    is_seen_BT = jnp.arange(config.seq_len)[None] <= position_B[:, None]
    new_cache = []
    for block, (k_BTNH, v_BTNH) in zip(blocks, cache, strict=True):
        q_BNH, k_BNH, v_BNH = (x_B1NH[:, 0] for x_B1NH in block.attn.heads(block.ln_1(x_BC), 1))
        k_BTNH = k_BTNH.at[rows_B, position_B].set(k_BNH, mode="drop")
        v_BTNH = v_BTNH.at[rows_B, position_B].set(v_BNH, mode="drop")
        new_cache.append((k_BTNH, v_BTNH))
        accumulate = jnp.promote_types(q_BNH.dtype, jnp.float32)
        scores_BNT = jnp.einsum(
            "BNH,BTNH->BNT", q_BNH * config.head_dim**-0.5, k_BTNH, preferred_element_type=accumulate
        )
        scores_BNT = jnp.where(is_seen_BT[:, None], scores_BNT, jnp.finfo(accumulate).min)
        weights_BNT = jax.nn.softmax(scores_BNT, axis=-1).astype(v_BTNH.dtype)
        mixed_BNH = jnp.einsum("BNT,BTNH->BNH", weights_BNT, v_BTNH)
        x_BC = x_BC + block.attn.c_proj(mixed_BNH.reshape(x_BC.shape))
        x_BC = x_BC + block.mlp(block.ln_2(x_BC), None)
    return model.padded_logits(model.ln_f(x_BC)), new_cache


def _draw_tokens(
    logits_BV: Array, keys_B: Key[Array, " B"], temperature: Array, top_p: Array, draw: _Draw
) -> Int[Array, " B"]:
    if draw.greedy:
        return logits_BV.argmax(axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / temperature
    if draw.top_k is not None:
        smallest_kept_B1 = jax.lax.top_k(logits_BV, draw.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < smallest_kept_B1, -jnp.inf, logits_BV)
    if draw.nucleus:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # A token belongs to the nucleus if those before it do not reach top_p: the first always does.
        is_kept_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV < top_p
        smallest_kept_B1 = jnp.where(is_kept_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < smallest_kept_B1, -jnp.inf, logits_BV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
