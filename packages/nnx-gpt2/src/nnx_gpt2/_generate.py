"""Sampling from the model, with a cache of keys and values.

Prompts are padded to a few sizes, which limits the number of compiled programs. One compiled loop draws the tokens: all
of them in one call, or some at a time for a caller that shows them. The loop is the same, and so are the tokens. All
arrays have a fixed size: a token of a call costs the same at each position. The cache has room for the prompts and the
new tokens, in a few sizes too. Its layout is that of the products, which read it without a copy.

Shapes: B prompts, Q positions of a padded prompt, T positions of the cache, W = context + 1 tokens, M = B * Q tokens,
C width, N heads, H head width, V vocabulary, P padded vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from nnx_gpt2._attention import causal_attention
from nnx_gpt2._dropout import check_key
from nnx_gpt2._errors import (
    FLOAT32_MAX,
    INT32_MAX,
    check_type,
    is_iterable,
    is_number,
    is_whole,
    kind,
    require,
    shown,
    value_error,
)
from nnx_gpt2._model import GPT2, Block
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._target import target_for
from nnx_gpt2._tiled_weights import TILED_ROWS, Tiles, tiled_product, tiled_weights, use_tiles
from nnx_gpt2._token_ids import check_end_of_text, check_ids

# Smallest length of a padded prompt, and of a cache. Larger lengths are powers of two.
_SMALLEST_LENGTH = 32

# To copy the weights into tiles takes the time of about ten tokens, and halves that of the products.
_MIN_TILED_TOKENS = 32

# Logits divided by a smaller temperature could overflow. Sampling then takes the likeliest token.
_SMALLEST_TEMPERATURE = 1e-30

# Seconds between two calls of `on_tokens`, and the largest share of the time that interruptions of the loop may take.
# An interruption costs a millisecond, but on a CPU the loop converts the weights of a bfloat16 model first.
_SHOWN_EVERY_S, _INTERRUPTED_SHARE = 0.1, 0.05


class _Structure:
    """The static part of a model. Its hash is computed once: a program looks it up, and it takes 0.3 ms."""

    def __init__(self, graphdef: nnx.GraphDef[GPT2]) -> None:
        self.graphdef, self._hash = graphdef, hash(graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.graphdef == other.graphdef


class _Draw(NamedTuple):
    """Static arguments of the draw of a token."""

    greedy: bool
    top_k: int | None
    nucleus: bool
    vocab_size: int


class _Settings(NamedTuple):
    """Arguments of the draw that change without a new compilation."""

    key: PRNGKeyArray
    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    end_of_text: Int[Array, ""]


class _Drawn(NamedTuple):
    """State of the texts before the model reads them."""

    lengths_B: Int[Any, " B"]
    is_done_B: Bool[Any, " B"]
    num_drawn: Int[Any, ""]


class _Progress(NamedTuple):
    """State of the loop that draws tokens."""

    tokens_BW: Int[Array, "B W"]
    lengths_B: Int[Array, " B"]
    is_done_B: Bool[Array, " B"]
    num_drawn: Int[Array, ""]
    logits_BP: Float[Array, "B P"]
    cache: Any


class _Pace:
    """The number of tokens to draw at once.

    Args:
        call_s: seconds of a call of the loop that draws no token.
    """

    def __init__(self, call_s: float) -> None:
        self.num_tokens, self._call_s = 1, call_s
        self._interval_s = max(_SHOWN_EVERY_S, call_s / _INTERRUPTED_SHARE)

    def adapt(self, elapsed_s: float) -> None:
        """Choose the next number from the seconds of the last call."""
        wanted = self.num_tokens * self._interval_s / max(elapsed_s - self._call_s, 1e-6)
        self.num_tokens = max(1, min(8 * self.num_tokens, int(wanted)))


def generate(  # noqa: PLR0913 - the arguments of a draw are independent
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
    on_tokens: Callable[[list[list[int]]], object] | None = None,
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    A text that exceeds the context length continues with the later half of the context in view.

    Args:
        model: the model.
        prompts: token ids of each prompt. A prompt has 1 to `model.config.seq_len` tokens.
        max_new_tokens: number of tokens to add.
        key: random key of the draw. Required unless `temperature` is 0.
        temperature: divisor of the logits. 0 takes the likeliest token.
        top_k: draw from the `top_k` likeliest tokens. None draws from all tokens.
        top_p: draw from the likeliest tokens that together have this probability (Holtzman et al., 2020,
            arXiv:1904.09751, section 3.1), after `temperature` and `top_k`. None draws from all tokens.
        end_of_text: stop a text after this token.
        vocab_size: draw only ids below this number. Use the tokenizer's if it is smaller than the model's: a
            tokenizer cannot decode larger ids. None draws from all ids of the model.
        use_cache: keep the keys and values of each layer. On a CPU, 2 to 16 prompts that are continued by 32 tokens
            or more need the memory of a float32 model twice. Without the cache each token recomputes its context: the
            tokens are the same, but slow (bfloat16 may round differently and decide between two likely tokens).
        on_tokens: called with the new tokens of each text while tokens are drawn: about ten times a second, or less
            often where the loop takes long to begin. A text that has ended has no new tokens. The tokens are the same
            with and without it. What it raises ends the call.

    Returns:
        Each prompt with its continuation.

    Raises:
        ValueError: an argument is out of its range, or a prompt is empty, too long, or has an unknown id.
    """
    check_type("model", model, GPT2)
    check_type("use_cache", use_cache, bool)
    require(on_tokens is None or callable(on_tokens), "on_tokens", "be a function, or None", kind(on_tokens))
    require(is_iterable(prompts), "prompts", "be of type Iterable", kind(prompts))
    rows = [_row(prompt) for prompt in prompts]
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    _check_prompts(model.config, rows)
    _check_sampling(
        model.config, key, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        vocab_size=vocab_size, end_of_text=end_of_text,
    )  # fmt: skip
    max_new_tokens, vocab_size = int(max_new_tokens), int(vocab_size)  # they may be numpy's
    context = model.config.seq_len
    draw = _Draw(
        greedy=temperature < _SMALLEST_TEMPERATURE,
        top_k=top_k and min(int(top_k), vocab_size),
        nucleus=top_p is not None,
        vocab_size=vocab_size,
    )
    settings = _Settings(
        key=jax.random.key(0) if key is None else key,
        temperature=jnp.float32(temperature),
        top_p=jnp.float32(1.0 if top_p is None else top_p),
        end_of_text=jnp.int32(-1 if end_of_text is None else end_of_text),
    )
    graphdef, state = nnx.split(model)
    structure = _Structure(graphdef)
    texts, starts = [row.tolist() for row in rows], [0] * len(rows)
    is_done_B, num_drawn, pace = np.zeros(len(rows), bool), 0, None
    has_tiles = use_cache and max_new_tokens >= _MIN_TILED_TOKENS and _gains_from_tiles(model, len(rows))
    tiles = _tiles(structure, state) if has_tiles else None
    draw_until = partial(_draw_until, structure, state, settings, tiles, draw=draw, use_cache=use_cache)
    while num_drawn < max_new_tokens and not is_done_B.all():
        for i, text in enumerate(texts):
            if len(text) - starts[i] > context:
                starts[i] = len(text) - max(context // 2, 1)
        seen = [text[start:] for text, start in zip(texts, starts, strict=True)]
        lengths_B = np.array([len(text) for text in seen], np.int32)
        prompt_BQ = np.zeros((len(seen), _padded_size(int(lengths_B.max()), context)), np.int32)
        for row, text in zip(prompt_BQ, seen, strict=True):
            row[: len(text)] = text
        before = _Drawn(lengths_B, is_done_B, np.int32(num_drawn))
        capacity = _padded_size(min(int(lengths_B.max()) + max_new_tokens - num_drawn, context), context)
        progress = _read(structure, state, prompt_BQ, before, capacity=capacity, use_cache=use_cache)
        if on_tokens and pace is None:
            progress, _ = _timed(draw_until, progress, 0)  # compiles
            progress, call_s = _timed(draw_until, progress, 0)
            pace = _Pace(call_s)
        while num_drawn < max_new_tokens and not is_done_B.all() and (is_done_B | (lengths_B <= context)).all():
            limit = max_new_tokens if pace is None else min(num_drawn + pace.num_tokens, max_new_tokens)
            progress, elapsed_s = _timed(draw_until, progress, limit)
            firsts_B = lengths_B
            tokens_BW, lengths_B, is_done_B, drawn = jax.device_get(progress[:4])
            num_drawn = int(drawn)
            new = [row[first:end].tolist() for row, first, end in zip(tokens_BW, firsts_B, lengths_B, strict=True)]
            for text, tokens in zip(texts, new, strict=True):
                text += tokens
            if on_tokens and pace:
                pace.adapt(elapsed_s)
                on_tokens(new)
    return texts


def _timed(draw_until: Callable[..., _Progress], progress: _Progress, limit: int) -> tuple[_Progress, float]:
    """Draw up to a number of tokens, and return the seconds too."""
    began_s = time.perf_counter()
    progress = jax.block_until_ready(draw_until(progress, np.int32(limit)))
    return progress, time.perf_counter() - began_s


def _row(prompt: Any) -> np.ndarray:
    try:
        return np.asarray(prompt)
    except ValueError as error:  # lists of several lengths
        raise value_error("each prompt", "be a list of token ids", kind(prompt)) from error


def _check_prompts(config: GPT2Config, rows: list[np.ndarray]) -> None:
    require(len(rows) > 0, "prompts", "be at least 1", 0)
    for row in rows:
        constraint = f"have 1 to {config.seq_len} tokens, the model's context"
        require(1 <= row.size <= config.seq_len, "each prompt", constraint, row.size)
        check_ids(row[None], config.vocab_size, "each prompt's token ids")


def _check_sampling(
    config: GPT2Config,
    key: PRNGKeyArray | None,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    vocab_size: int,
    end_of_text: int | None,
) -> None:
    size = config.vocab_size
    is_share = top_p is None or (is_number(top_p) and 0 < top_p <= 1)
    for name, value, constraint, holds in (
        ("max_new_tokens", max_new_tokens, f"be 0 to {INT32_MAX}", is_whole(max_new_tokens, 0, INT32_MAX)),
        ("temperature", temperature, f"be between 0 and {FLOAT32_MAX}", is_number(temperature) and temperature >= 0),
        ("top_k", top_k, "be at least 1, or None", top_k is None or is_whole(top_k, 1)),
        ("top_p", top_p, "be above 0 and at most 1, or None", is_share),
        ("vocab_size", vocab_size, f"be 1 to {size}, the model's", is_whole(vocab_size, 1, size)),
    ):
        require(holds, name, constraint, shown(value))
    check_end_of_text(end_of_text, size)
    if key is not None:
        check_key(key)
    needs_key = temperature > 0 and key is None
    require(not needs_key, "key", "be given to sample", key, "Pass key=jax.random.key(seed), or temperature=0.")


def _gains_from_tiles(model: GPT2, num_rows: int) -> bool:
    target = target_for(model.wte.embedding[...])
    is_one_cpu = target.platform == "cpu" and target.num_devices == 1
    is_float32 = model.config.dtype == model.config.param_dtype == "float32"
    return is_one_cpu and is_float32 and num_rows in TILED_ROWS


@partial(jax.jit, static_argnames="structure")
def _tiles(structure: _Structure, state: PyTree[Array]) -> Tiles:
    model = nnx.merge(structure.graphdef, state)
    return tiled_weights(_blocks(model), model.wte.embedding[...])


def _padded_size(num_tokens: int, context: int) -> int:
    return min(context, max(_SMALLEST_LENGTH, 1 << (num_tokens - 1).bit_length()))


@partial(jax.jit, static_argnames=("structure", "capacity", "use_cache"))
def _read(
    structure: _Structure,
    state: PyTree[Array],
    prompt_BQ: Int[Array, "B Q"],
    before: _Drawn,
    *,
    capacity: int,
    use_cache: bool,
) -> _Progress:
    """Read the texts so far. The logits and the cache allow to draw the next token of each."""
    model = nnx.merge(structure.graphdef, state)
    context = model.config.seq_len
    tokens_BW = jnp.pad(prompt_BQ, ((0, 0), (0, context + 1 - prompt_BQ.shape[1])))
    if use_cache:
        logits_BP, cache = _prefill(model, _blocks(model), prompt_BQ, before.lengths_B, capacity)
    else:
        logits_BP, cache = _full_logits(model, tokens_BW, before.lengths_B), None
    return _Progress(tokens_BW, *before, logits_BP, cache)


@partial(jax.jit, static_argnames=("structure", "draw", "use_cache"), donate_argnames="start")
def _draw_until(
    structure: _Structure,
    state: PyTree[Array],
    settings: _Settings,
    tiles: Tiles | None,
    start: _Progress,
    max_drawn: Int[Any, ""],
    *,
    draw: _Draw,
    use_cache: bool,
) -> _Progress:
    """Draw tokens until the limit is reached, all texts have ended, or a text exceeds the context."""
    model = nnx.merge(structure.graphdef, state)
    context, rows_B = model.config.seq_len, jnp.arange(len(start.tokens_BW))
    blocks, head = _blocks(model), model.padded_logits
    if tiles is not None:
        use_tiles(blocks, tiles)
        head = partial(tiled_product, tiles_GCL=tiles.head_GCL)

    def continues(now: _Progress) -> Array:
        fits = now.is_done_B | (now.lengths_B <= context)
        return (now.num_drawn < max_drawn) & ~now.is_done_B.all() & fits.all()

    def add_token(now: _Progress) -> _Progress:
        keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(settings.key, row), now.num_drawn))(rows_B)
        logits_BV = now.logits_BP[:, : draw.vocab_size].astype(jnp.float32)
        token_B = _draw_tokens(logits_BV, keys_B, settings.temperature, settings.top_p, draw)
        # The token of a finished text is written beyond the end, which drops it.
        index_B = jnp.where(now.is_done_B, context + 1, now.lengths_B)
        tokens_BW = now.tokens_BW.at[rows_B, index_B].set(token_B, mode="drop")
        lengths_B = now.lengths_B + ~now.is_done_B
        if use_cache:
            logits_BP, cache = _decode(model, blocks, head, token_B, now.lengths_B, now.cache)
        else:
            logits_BP, cache = _full_logits(model, tokens_BW, lengths_B), None
        is_done_B = now.is_done_B | (token_B == settings.end_of_text)
        return _Progress(tokens_BW, lengths_B, is_done_B, now.num_drawn + 1, logits_BP, cache)

    return jax.lax.while_loop(continues, add_token, start)


def _blocks(model: GPT2) -> list[Block]:
    return [model.block(i) for i in range(model.config.num_layers)]


def _full_logits(model: GPT2, tokens_BW: Array, lengths_B: Array) -> Array:
    """Return the logits after each text, without a cache."""
    tokens_BT = tokens_BW[:, : model.config.seq_len]
    x_BTC = model.final_activations(tokens_BT).reshape(*tokens_BT.shape, -1)
    return model.padded_logits(x_BTC[jnp.arange(len(tokens_BT)), lengths_B - 1])


def _prefill(model: GPT2, blocks: list[Block], prompt_BQ: Array, lengths_B: Array, capacity: int) -> tuple[Array, Any]:
    """Return the logits after each prompt, and a cache of `capacity` positions.

    Attention does not see the padding on the right.
    """
    config = model.config
    backend = "xla" if config.attention == "xla" else "auto"  # other kernels do not take prompts of any length
    num_positions = prompt_BQ.shape[1]
    x_BQC = model.embed(prompt_BQ, jnp.arange(num_positions)[None])
    x_MC = x_BQC.reshape(-1, config.embed_dim)
    cache = []
    for block in blocks:
        q_BQNH, k_BQNH, v_BQNH = block.attn.heads(block.ln_1(x_MC), num_positions)
        mixed_BQNH = causal_attention(q_BQNH, k_BQNH, v_BQNH, backend=backend)
        x_MC = x_MC + block.attn.c_proj(mixed_BQNH.reshape(x_MC.shape))
        x_MC = x_MC + block.mlp(block.ln_2(x_MC), None)
        padding = ((0, 0), (0, 0), (0, capacity - num_positions), (0, 0))
        cache.append(tuple(jnp.pad(x_BQNH.swapaxes(1, 2), padding) for x_BQNH in (k_BQNH, v_BQNH)))
    x_BQC = model.ln_f(x_MC).reshape(x_BQC.shape)
    return model.padded_logits(x_BQC[jnp.arange(len(prompt_BQ)), lengths_B - 1]), cache


def _decode(
    model: GPT2, blocks: list[Block], head: Callable[[Array], Array], token_B: Array, position_B: Array, cache: Any
) -> tuple[Array, Any]:
    """Return the logits after one more token of each text, and the cache with its keys and values."""
    config = model.config
    x_BC = model.embed(token_B, position_B)
    new_cache = []
    for block, (k_BNTH, v_BNTH) in zip(blocks, cache, strict=True):
        q_BNH, k_BNH, v_BNH = (x_B1NH[:, 0] for x_B1NH in block.attn.heads(block.ln_1(x_BC), 1))
        k_BNTH, v_BNTH = _with_token(k_BNTH, k_BNH, position_B), _with_token(v_BNTH, v_BNH, position_B)
        new_cache.append((k_BNTH, v_BNTH))
        is_seen_BT = jnp.arange(k_BNTH.shape[2])[None] <= position_B[:, None]
        accumulate = jnp.promote_types(q_BNH.dtype, jnp.float32)
        scores_BNT = jnp.einsum(
            "BNTH,BNH->BNT", k_BNTH, q_BNH * config.head_dim**-0.5, preferred_element_type=accumulate
        )
        scores_BNT = jnp.where(is_seen_BT[:, None], scores_BNT, jnp.finfo(accumulate).min)
        weights_BNT = jax.nn.softmax(scores_BNT, axis=-1).astype(v_BNTH.dtype)
        mixed_BNH = jnp.einsum("BNT,BNTH->BNH", weights_BNT, v_BNTH)
        x_BC = x_BC + block.attn.c_proj(mixed_BNH.reshape(x_BC.shape))
        x_BC = x_BC + block.mlp(block.ln_2(x_BC), None)
    return head(model.ln_f(x_BC)), new_cache


def _with_token(x_BNTH: Array, x_BNH: Array, position_B: Array) -> Array:
    """Write the keys or values of a token of each text. A finished text, which nobody reads, may lose its last ones.

    Each head has an index of its own: XLA's CPU backend would copy the cache three times to write at a single index.
    """
    rows_B, heads_N = jnp.arange(x_BNH.shape[0]), jnp.arange(x_BNH.shape[1])
    return x_BNTH.at[rows_B[:, None], heads_N[None], position_B[:, None]].set(x_BNH, mode="clip")


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
        # A token is kept if the likelier tokens do not reach top_p. The likeliest token is always kept.
        is_kept_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV < top_p
        smallest_kept_B1 = jnp.where(is_kept_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < smallest_kept_B1, -jnp.inf, logits_BV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
