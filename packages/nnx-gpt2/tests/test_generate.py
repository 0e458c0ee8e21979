import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_gpt2 import (
    GPT2,
    GPT2Config,
    abstract_train_state,
    create_train_state,
    generate,
    make_mesh,
    merge,
    replicated,
    split_params,
)
from nnx_gpt2 import _generate as generate_module
from nnx_gpt2._generate import _Draw, _draw_tokens, _draw_until, _gains_from_tiles, _Pace, _read, _tiles
from nnx_gpt2._target import Target

PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def model(tiny):
    return GPT2(tiny, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("context", "use_cache"), [(16, True), (16, False), (13, True)])
def test_greedy_is_the_likeliest_token_each_time_past_the_context_too(tiny, context, use_cache):
    """Beyond 16 tokens the model sees the last 8 tokens, until it has 16 again. Half of 13 is 6."""
    tiny = dataclasses.replace(tiny, seq_len=context)
    params = create_train_state(tiny, optax.sgd(1.0), jax.random.key(0)).params
    # Larger than GPT-2's initial values, to make the likeliest token depend on all visible tokens.
    model = merge(tiny, jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape), params))
    logits = jax.jit(model)
    for prompt in ([*range(context - 2)], [*range(20, 20 + context)], [7]):
        text, start = list(prompt), 0
        for _ in range(30):
            if len(text) - start > context:
                start = len(text) - context // 2
            seen = text[start:]
            padded = jnp.asarray([seen + [0] * (context - len(seen))])
            text.append(int(logits(padded)[0, len(seen) - 1].argmax()))
        assert generate(model, [prompt], 30, temperature=0.0, use_cache=use_cache) == [text]


def test_a_context_of_one_token_shows_the_last_token(tiny):
    config = dataclasses.replace(tiny, num_layers=1, seq_len=1)
    params = split_params(GPT2(config, rngs=nnx.Rngs(0)))
    model = merge(config, jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape), params))
    following = model(jnp.arange(65)[:, None])[:, 0].argmax(axis=-1)
    text = generate(model, [[3]], 5, temperature=0.0)[0]
    assert text[1:] == [int(following[token]) for token in text[:-1]]


def test_the_cache_has_room_for_the_new_tokens_of_the_longest_text():
    """50 positions, which is more than the smallest cache and less than the context."""
    config = GPT2Config(vocab_size=65, seq_len=128, num_layers=1, num_heads=2, embed_dim=32)
    params = split_params(GPT2(config, rngs=nnx.Rngs(0)))
    model = merge(config, jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape), params))
    prompts = [[7], [*range(30)]]
    assert generate(model, prompts, 20, temperature=0.0) == generate(
        model, prompts, 20, temperature=0.0, use_cache=False
    )


def test_a_model_with_a_kernel_for_long_windows_continues_a_short_prompt(tiny):
    splash, plain = (dataclasses.replace(tiny, seq_len=128, attention=kind) for kind in ("splash", "xla"))
    params = create_train_state(plain, optax.sgd(1.0), jax.random.key(0)).params
    texts = [generate(merge(config, params), [[1, 2, 3]], 3, temperature=0.0) for config in (splash, plain)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_in_bfloat16_are_the_likeliest_by_exact_sums(use_cache):
    """Logits are near -100, where neighbouring bfloat16 numbers differ by a half.

    The blocks add nothing: the activations of a token at a position are the same with and without the cache.
    """
    config = GPT2Config(vocab_size=1000, seq_len=16, num_layers=1, num_heads=1, embed_dim=64, dtype="bfloat16")
    params = jax.tree.map(
        lambda x: jnp.zeros(x.shape), abstract_train_state(dataclasses.replace(config), optax.sgd(1.0)).params
    )
    draw = lambda seed, rows: jax.random.normal(jax.random.key(seed), (rows, 64))  # noqa: E731
    # The first column, which the final norm makes large, has the same weight for each token.
    params["wte"]["embedding"] = draw(0, config.padded_vocab_size).at[:, 0].set(-10.0)
    params["wpe"]["embedding"] = draw(1, 16)
    params["ln_f"] = {"scale": jnp.full(64, 0.1), "bias": jnp.zeros(64).at[0].set(10.0)}
    model = merge(config, params)
    texts = np.array(generate(model, [[token] for token in range(32)], 15, temperature=0.0, use_cache=use_cache))
    x_MC = np.asarray(model.final_activations(jnp.asarray(texts)), np.float64)
    head_VC = np.asarray(params["wte"]["embedding"][:1000].astype(jnp.bfloat16), np.float64)
    logits = (x_MC @ head_VC.T).reshape(32, 16, 1000)
    assert -110 < logits.max(axis=-1).min() < logits.max() < -80
    np.testing.assert_array_equal(texts[:, 1:], logits[:, :-1].argmax(axis=-1))


def test_prompts_of_unequal_length_do_not_affect_each_other(tiny):
    model = GPT2(dataclasses.replace(tiny, scan_layers=True), rngs=nnx.Rngs(0))
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
    together = generate(model, prompts, 20, temperature=0.0)
    assert together == [generate(model, [prompt], 20, temperature=0.0)[0] for prompt in prompts]


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17])
def test_weights_in_tiles_have_the_same_greedy_tokens(tiny, monkeypatch, num_rows):
    """2 to 16 rows use tiles. Widths of 48, 144, 192 and 100 do not fill tiles of 64."""
    copies: list[int] = []
    copy: Any = vars(_tiles)["__wrapped__"]
    monkeypatch.setattr("nnx_gpt2._generate._tiles", lambda *arguments: copies.append(1) or copy(*arguments))
    config = dataclasses.replace(tiny, vocab_size=100, num_heads=3, embed_dim=48)
    model = GPT2(config, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), split_params(model))
    model = merge(config, params)
    prompts = np.random.default_rng(0).integers(0, 100, (num_rows, 5)).tolist()
    texts = generate(model, prompts, 40, temperature=0.0)
    assert len(copies) == (1 if 2 <= num_rows <= 16 else 0)
    assert texts == generate(model, prompts, 40, temperature=0.0, use_cache=False)
    assert len({tuple(text[5:]) for text in texts}) == num_rows
    generate(model, prompts, 31, temperature=0.0)
    assert len(copies) == (1 if 2 <= num_rows <= 16 else 0)


def test_float32_models_on_one_cpu_alone_gain_from_tiles(tiny, monkeypatch):
    tiny = dataclasses.replace(tiny, num_layers=1)
    model = GPT2(tiny, rngs=nnx.Rngs(0))
    assert _gains_from_tiles(model, 2)
    for types in ({"dtype": "bfloat16"}, {"param_dtype": "bfloat16"}):
        assert not _gains_from_tiles(GPT2(dataclasses.replace(tiny, **types), rngs=nnx.Rngs(0)), 2)
    spread = jax.device_put(split_params(model), replicated(make_mesh()))
    assert not _gains_from_tiles(merge(tiny, spread), 2)
    monkeypatch.setattr("nnx_gpt2._generate.target_for", lambda x: Target(SimpleNamespace(platform="gpu"), 1))
    assert not _gains_from_tiles(model, 2)


def test_a_key_reproduces_the_draw(model):
    one = generate(model, PROMPTS, 10, key=jax.random.key(0))
    assert one == generate(model, PROMPTS, 10, key=jax.random.key(0))
    assert one != generate(model, PROMPTS, 10, key=jax.random.key(1))
    assert one == generate(model, PROMPTS, 10, key=jax.random.key(0), use_cache=False)
    assert one[0] == generate(model, PROMPTS[:1], 10, key=jax.random.key(0))[0]
    assert max(map(max, one)) < model.config.vocab_size
    assert [text[:3] for text in one] == PROMPTS
    same = generate(model, [PROMPTS[0]] * 2, 10, key=jax.random.key(0))
    assert same[0] != same[1]


def test_each_token_has_an_independent_draw(tiny):
    """All tokens are equally likely in this model: a token depends on the draw only."""
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), abstract_train_state(tiny, optax.sgd(1.0)).params)
    texts = generate(merge(tiny, params), [[0], [0]], 40, key=jax.random.key(0))
    drawn = [token for text in texts for token in text[1:]]
    # 80 draws of 65 tokens: 46 different tokens are expected, with a standard deviation of 3.
    assert len(set(drawn)) == pytest.approx(46, abs=12)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("num_new", [12, 40])  # within the context of 16, and beyond it
def test_texts_stop_after_the_end_of_text(model, num_new):
    whole = generate(model, PROMPTS, num_new, key=jax.random.key(3))
    end = whole[0][6]
    assert end not in whole[0][:6]
    stopped = generate(model, PROMPTS, num_new, key=jax.random.key(3), end_of_text=end)
    assert stopped[0] == whole[0][:7]
    cut = whole[1].index(end, 3) + 1 if end in whole[1][3:] else len(whole[1])
    assert stopped[1] == whole[1][:cut]


def test_a_text_that_ends_beyond_a_full_context_does_not_stop_the_others(model, monkeypatch):
    calls, timed = [], generate_module._timed

    def count(*arguments):
        calls.append(arguments)
        assert len(calls) < 30, "it draws nothing more"
        return timed(*arguments)

    monkeypatch.setattr(generate_module, "_timed", count)
    prompts = [[*range(16)], [1, 2, 3]]  # of 16 positions
    whole = generate(model, prompts, 8, temperature=0.0)
    end = whole[0][16]
    cut = whole[1].index(end, 3) + 1 if end in whole[1][3:] else len(whole[1])
    assert cut > 4
    assert generate(model, prompts, 8, temperature=0.0, end_of_text=end) == [whole[0][:17], whole[1][:cut]]


def test_the_end_of_text_may_be_token_0(tiny):
    """All tokens are as likely, and the first one is drawn."""
    params = jax.tree.map(jnp.zeros_like, split_params(GPT2(tiny, rngs=nnx.Rngs(0))))
    assert generate(merge(tiny, params), [[1, 2, 3]], 5, temperature=0.0, end_of_text=0) == [[1, 2, 3, 0]]


def test_a_prompt_may_end_with_the_end_of_text(model):
    """As a text that has no beginning does."""
    prompts = [[1, 2, 64], [64, 3, 64]]
    whole = generate(model, prompts, 12, key=jax.random.key(3))
    stopped = generate(model, prompts, 12, key=jax.random.key(3), end_of_text=64)
    for text, cut in zip(whole, stopped, strict=True):
        assert cut == (text[: text.index(64, 3) + 1] if 64 in text[3:] else text)
        assert len(cut) > 3


def test_the_top_token_alone_is_greedy(model):
    greedy = generate(model, PROMPTS, 10, temperature=0.0)
    assert generate(model, PROMPTS, 10, key=jax.random.key(0), top_k=1) == greedy
    assert generate(model, PROMPTS, 10, key=jax.random.key(0), top_p=1e-9) == greedy


def test_a_temperature_near_zero_takes_the_likeliest_token(model):
    greedy = generate(model, PROMPTS, 10, temperature=0.0)
    for temperature in (1e-29, 1e-40):
        assert generate(model, PROMPTS, 10, key=jax.random.key(0), temperature=temperature, top_p=0.9) == greedy


def test_draws_follow_the_probabilities(model):
    drawn = np.array(generate(model, PROMPTS[:1] * 4000, 1, key=jax.random.key(0), temperature=0.5, top_k=5))[:, -1]
    logits = np.asarray(model(jnp.asarray(PROMPTS[:1]))[0, -1], np.float64) / 0.5
    top = np.argsort(logits)[-5:]
    probabilities = np.exp(logits[top]) / np.exp(logits[top]).sum()
    assert set(drawn) == set(top)
    np.testing.assert_allclose([(drawn == token).mean() for token in top], probabilities, atol=0.03)


def test_the_nucleus_holds_the_likeliest_tokens_up_to_its_probability():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.05, 0.3, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 4000)
    for top_p, kept in ((0.4, {1}), (0.79, {1, 3}), (0.85, {0, 1, 3}), (1.0, {0, 1, 2, 3, 4})):
        drawn = _draw_tokens(
            jnp.tile(logits, (4000, 1)), keys, jnp.float32(1), jnp.float32(top_p), _Draw(False, None, True, 5)
        )
        assert set(np.asarray(drawn).tolist()) == kept
    share = float((drawn == 1).mean())
    assert share == pytest.approx(0.5, abs=0.03)


# The probabilities are 0.03, 0.70, 0.01, 0.25, 0.01 at temperature 0.5 and 0.16, 0.35, 0.11, 0.27, 0.11 at 2.
# With top_k=2 they are 0.63 and 0.37.
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [(0.5, None, 0.6, {1}), (2.0, None, 0.6, {1, 3}), (2.0, None, 0.7, {0, 1, 3}), (1.0, 2, 0.6, {1})],
)
def test_the_nucleus_is_taken_after_temperature_and_top_k(temperature, top_k, top_p, kept):
    logits = jnp.tile(jnp.log(jnp.array([[0.1, 0.5, 0.05, 0.3, 0.05]])), (500, 1))
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = _draw_tokens(
        logits, keys, jnp.float32(temperature), jnp.float32(top_p), _Draw(False, top_k, top_p is not None, 5)
    )
    assert set(np.asarray(drawn).tolist()) == kept


def test_one_program_serves_many_lengths():
    config = GPT2Config(vocab_size=31, seq_len=64, num_layers=1, num_heads=1, embed_dim=8)
    model = GPT2(config, rngs=nnx.Rngs(0))

    def num_programs() -> tuple[int, int]:
        found: Any = [getattr(function, "_cache_size")() for function in (_read, _draw_until)]  # noqa: B009 - untyped
        return tuple(found)

    before = num_programs()
    for length, num_new in ((1, 3), (7, 20), (31, 1), (20, 11)):
        generate(model, [[1] * length], num_new, temperature=0.0)
        generate(model, [[1] * length], num_new, temperature=0.0, on_tokens=lambda new: None)
    assert num_programs() == (before[0] + 1, before[1] + 1)
    generate(model, [[1] * 32], 1, temperature=0.0)  # a longer cache
    assert num_programs() == (before[0] + 2, before[1] + 2)
    generate(model, [[1] * 33], 5, temperature=0.0)  # a longer prompt
    assert num_programs() == (before[0] + 3, before[1] + 2)


@pytest.mark.fault
def test_ids_beyond_the_tokenizers_are_never_drawn(model, record_property):
    """The model's vocabulary has 65 ids and likes the last of them best; the tokenizer can decode 60."""
    record_property("fault", "a vocabulary that is padded beyond the tokenizer's ids")
    record_property("lost", "nothing")
    bias = jnp.zeros_like(model.wte.embedding[...]).at[60:].set(5.0)
    model.wte.embedding[...] += bias
    model.ln_f.bias[...] += 1.0
    assert min(generate(model, [[1]], 20, temperature=0.0)[0][1:]) >= 60
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"key": jax.random.key(0)}, {"key": jax.random.key(0), "top_k": 63},
    ]  # fmt: skip
    for options in ways:
        texts = generate(model, PROMPTS, 40, vocab_size=60, **options)
        assert max(map(max, texts)) < 60
        assert texts == generate(model, PROMPTS, 40, vocab_size=60, use_cache=False, **options)


# The context is 16. A text beyond it is read again, in the middle of the calls.
@pytest.mark.parametrize(("num_new", "num_at_once"), [(1, 1), (7, 3), (45, 1), (45, 4), (45, None)])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 9}, {"use_cache": False}, {"end_of_text": None}])
def test_tokens_are_shown_while_they_are_drawn_and_are_the_same(model, monkeypatch, num_new, num_at_once, options):
    """With the end of text, the first text ends after four tokens: it has no new tokens from then on."""
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
    if num_at_once:
        monkeypatch.setattr(_Pace, "adapt", lambda pace, elapsed_s: setattr(pace, "num_tokens", num_at_once))
    options = {"key": jax.random.key(5)} | options
    if "end_of_text" in options:
        options["end_of_text"] = generate(model, prompts, 4, **options)[0][-1]
    whole = generate(model, prompts, num_new, **options)
    calls: list[list[list[int]]] = []
    assert generate(model, prompts, num_new, on_tokens=calls.append, **options) == whole
    shown = [sum((call[i] for call in calls), prompt) for i, prompt in enumerate(prompts)]
    assert shown == whole
    assert max(map(len, calls[0])) == 1
    assert all(any(call) for call in calls)
    if num_at_once:
        assert max(len(new) for call in calls for new in call) <= num_at_once


def test_an_exception_of_the_caller_ends_the_drawing(model):
    calls = []

    def stop(new: list[list[int]]) -> None:
        calls.append(new)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generate(model, PROMPTS, 1000, temperature=0.0, on_tokens=stop)
    assert len(calls) == 1


def test_tokens_are_shown_ten_times_a_second_unless_the_calls_cost_much():
    fast, slow = _Pace(call_s=0.001), _Pace(call_s=1.0)
    numbers = []
    for pace, token_s in ((fast, 0.002), (slow, 0.5), (_Pace(call_s=0.0), 0.06), (_Pace(call_s=0.0), 3.0)):
        for _ in range(9):
            pace.adapt(pace._call_s + pace.num_tokens * token_s)
        numbers.append(pace.num_tokens)
    # A call of a second may take a twentieth of the time: 20 seconds of tokens follow it.
    assert numbers == [50, 40, 1, 1]


def test_no_new_tokens_is_the_prompt(model):
    assert generate(model, PROMPTS, 0, temperature=0.0) == PROMPTS


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {"temperature": 0.0}, "prompts must be at least 1, got 0."),
        ([[1], []], {"temperature": 0.0}, "each prompt must have 1 to 16 tokens, the model's context, got 0."),
        ([[1] * 17], {"temperature": 0.0}, "each prompt must have 1 to 16 tokens, the model's context, got 17."),
        ([[61, 66]], {"temperature": 0.0}, "each prompt's token ids must lie in [0, 65), got 61 to 66."),
        ([[-1]], {"temperature": 0.0}, "each prompt's token ids must lie in [0, 65), got -1 to -1."),
        (PROMPTS, {"temperature": -1.0}, "temperature must be between 0 and 3.4028234663852886e+38, got -1.0."),
        (PROMPTS, {"temperature": float("nan")}, "temperature must be between 0 and 3.4028234663852886e+38, got nan."),
        (PROMPTS, {"temperature": 0.0, "top_k": 0}, "top_k must be at least 1, or None, got 0."),
        (PROMPTS, {"temperature": 0.0, "top_p": 1.5}, "top_p must be above 0 and at most 1, or None, got 1.5."),
        (
            PROMPTS,
            {"temperature": 0.0, "vocab_size": 66},
            "vocab_size must be 1 to 65, the model's, got",
        ),
        (
            PROMPTS,
            {"temperature": 0.0, "vocab_size": 0},
            "vocab_size must be 1 to 65, the model's, got",
        ),
        (PROMPTS, {}, "key must be given to sample, got None. Pass key=jax.random.key(seed), or temperature=0."),
    ],
)
def test_bad_arguments_are_rejected(model, prompts, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(model, prompts, 1, **options)


def test_a_negative_number_of_tokens_is_rejected(model):
    with pytest.raises(ValueError, match=r"max_new_tokens must be 0 to 2147483647, got -1\."):
        generate(model, PROMPTS, -1, temperature=0.0)
