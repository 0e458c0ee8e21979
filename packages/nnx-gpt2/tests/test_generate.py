import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import GPT2, generate

PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)


@pytest.fixture
def model(tiny):
    return GPT2(tiny, rngs=nnx.Rngs(0))


def test_greedy_is_the_likeliest_token_each_time_past_the_context_too(model):
    prompt = np.tile(np.asarray(PROMPT), 5)[:, :14]
    tokens = prompt
    for _ in range(8):
        logits = model(jnp.asarray(tokens[:, -16:]))
        tokens = np.append(tokens, np.asarray(logits[:, -1].argmax(-1))[:, None], axis=1)
    np.testing.assert_array_equal(generate(model, jnp.asarray(prompt), 8, temperature=0.0), tokens)


def test_a_key_reproduces_the_draw(model):
    one = generate(model, PROMPT, 10, key=jax.random.key(0))
    np.testing.assert_array_equal(one, generate(model, PROMPT, 10, key=jax.random.key(0)))
    assert not np.array_equal(one, generate(model, PROMPT, 10, key=jax.random.key(1)))
    assert one.max() < model.config.vocab_size
    np.testing.assert_array_equal(one[:, :3], PROMPT)


def test_the_top_token_alone_is_greedy(model):
    drawn = generate(model, PROMPT, 10, key=jax.random.key(0), top_k=1)
    np.testing.assert_array_equal(drawn, generate(model, PROMPT, 10, temperature=0.0))


def test_draws_follow_the_probabilities(model):
    prompt = jnp.tile(PROMPT[:1], (4000, 1))
    drawn = np.asarray(generate(model, prompt, 1, key=jax.random.key(0), temperature=0.5, top_k=5))[:, -1]
    logits = np.asarray(model(PROMPT[:1])[0, -1], np.float64) / 0.5
    top = np.argsort(logits)[-5:]
    probabilities = np.exp(logits[top]) / np.exp(logits[top]).sum()
    assert set(drawn) == set(top)
    np.testing.assert_allclose([(drawn == token).mean() for token in top], probabilities, atol=0.03)


def test_no_new_tokens_is_the_prompt(model):
    np.testing.assert_array_equal(generate(model, PROMPT, 0, temperature=0.0), PROMPT)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PROMPT[:, :0], {"temperature": 0.0}, "expected a prompt of at least 1 token"),
        (PROMPT + 60, {"temperature": 0.0}, "expected prompt ids in [0, 65), got 61 to 66"),
        (PROMPT, {"temperature": -1.0}, "expected temperature >= 0 and top_k >= 1, got -1.0 and None"),
        (PROMPT, {"temperature": 0.0, "top_k": 0}, "expected temperature >= 0 and top_k >= 1, got 0.0 and 0"),
        (PROMPT, {}, "expected a key to draw with"),
    ],
)
def test_bad_arguments_are_refused(model, prompt, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(model, prompt, 1, **options)
