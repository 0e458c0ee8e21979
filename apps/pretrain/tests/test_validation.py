"""The validation loss is a number of the model and the tokens, not of the batch size."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
import tiktoken

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    evaluate_tokens,
    make_eval_step,
    make_mesh,
    merge,
)
from owt_data import TokenSequence, TokenSpan, load_tokenizer
from pretrain._training import validation as validation_module
from pretrain._training.validation import Validation, last_tokens

MODEL = GPT2Config(vocab_size=257, seq_len=8, num_layers=1, num_heads=2, embed_dim=16)
NUM_TOKENS = 1 + 20 * 8 + 3  # twenty windows, and three tokens more


@pytest.fixture(scope="module")
def params():
    return create_train_state(MODEL, create_optimizer(OptimizerConfig(), 10), jax.random.key(0)).params


@pytest.fixture
def tokens(tmp_path):
    values = np.random.default_rng(0).integers(0, 257, NUM_TOKENS).astype("<u2")
    values.tofile(tmp_path / "val.bin")
    return TokenSequence((TokenSpan(path=str(tmp_path / "val.bin"), start=0, stop=NUM_TOKENS),))


def window_loss(params, tokens, index):
    window = tokens.read_windows(np.array([index * 8]), 8)
    return float(np.asarray(make_eval_step(MODEL)(params, window), np.float64).mean())


@pytest.mark.parametrize("num_tokens", [None, NUM_TOKENS - 1, NUM_TOKENS + 100])
@pytest.mark.parametrize("batch_size", [1, 7, 21, 64])
def test_the_full_loss_predicts_each_token_once(params, tokens, num_tokens, batch_size):
    validation = Validation(MODEL, tokens, num_tokens=num_tokens, batch_size=batch_size)
    assert (validation.num_tokens, validation.is_full) == (NUM_TOKENS - 1, True)
    expected = evaluate_tokens(merge(MODEL, params), tokens.read())
    assert validation.evaluate(params)[0] == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_each_window_has_its_own_mean_loss(params, tokens, batch_size):
    _, found = Validation(MODEL, tokens, num_tokens=None, batch_size=batch_size).evaluate(params)
    last = np.asarray(make_eval_step(MODEL)(params, tokens.read_windows(np.array([NUM_TOKENS - 9]), 8)), np.float64)
    expected = [*(window_loss(params, tokens, index) for index in range(20)), last[0, -3:].mean()]
    np.testing.assert_allclose(found.losses, expected, rtol=1e-6)
    assert found.last_count == 3


@pytest.mark.parametrize("rest", [1, 7])
def test_the_last_window_counts_the_tokens_that_are_left_alone(params, tokens, rest):
    tokens = tokens.between(0, 1 + 3 * 8 + rest)
    validation = Validation(MODEL, tokens, num_tokens=None, batch_size=2)
    assert validation.num_tokens == 24 + rest
    assert validation.evaluate(params)[0] == pytest.approx(
        evaluate_tokens(merge(MODEL, params), tokens.read()).loss, rel=1e-6
    )


@pytest.mark.parametrize(("memory_bytes", "num_steps"), [(1 << 40, 1), (1, 21)])
def test_a_batch_that_was_made_smaller_to_fit_has_the_same_loss(params, tokens, monkeypatch, memory_bytes, num_steps):
    monkeypatch.setattr("pretrain._training.device_memory.device_memory_bytes", lambda: memory_bytes)
    validation, steps = Validation(MODEL, tokens, num_tokens=None, batch_size=64), []
    validation.fit(params)
    loss = validation.evaluate(params, lambda firsts: steps.extend(firsts) or firsts)[0]
    assert loss == pytest.approx(evaluate_tokens(merge(MODEL, params), tokens.read()).loss, rel=1e-6)
    assert len(steps) == num_steps


def test_tokens_of_whole_windows_have_no_last_window_of_their_own(params, tokens):
    tokens = tokens.between(0, 1 + 20 * 8)
    validation = Validation(MODEL, tokens, num_tokens=None, batch_size=4)
    assert validation.num_tokens == 160
    assert validation.evaluate(params)[0] == pytest.approx(
        evaluate_tokens(merge(MODEL, params), tokens.read()).loss, rel=1e-6
    )


@pytest.mark.parametrize(("num_tokens", "indices"), [(32, [0, 5, 10, 15]), (47, [0, 4, 8, 12, 16]), (1, [0])])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_a_part_is_windows_spread_evenly(params, tokens, num_tokens, indices, batch_size):
    validation = Validation(MODEL, tokens, num_tokens=num_tokens, batch_size=batch_size)
    assert (validation.num_tokens, validation.is_full) == (8 * len(indices), False)
    expected = np.mean([window_loss(params, tokens, index) for index in indices])
    assert validation.evaluate(params)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_tokens", [None, 32])
def test_the_loss_on_a_mesh_is_that_on_a_device(params, tokens, num_tokens):
    mesh = make_mesh()
    losses = {
        Validation(MODEL, tokens, num_tokens=num_tokens, batch_size=8, mesh=of).evaluate(params)[0]
        for of in (mesh, None)
    }
    assert max(losses) == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, 6), (3, 7), (4, 6), (21, 1)])
def test_small_batches_are_read_several_at_once(params, tokens, batch_size, num_steps):
    model = dataclasses.replace(MODEL, loss_chunk_tokens=4 * 8)  # four windows
    validation = Validation(model, tokens, num_tokens=None, batch_size=batch_size, fill_steps=True)
    steps = []
    expected = evaluate_tokens(merge(MODEL, params), tokens.read()).loss
    assert validation.evaluate(params, lambda firsts: steps.extend(firsts) or firsts)[0] == pytest.approx(
        expected, rel=1e-6
    )
    assert len(steps) == num_steps


# As in gpt2, longer pieces have higher ids, and the ids of single bytes are not in the order of the bytes.
PIECES = [bytes([255 - number]) for number in range(128)] + [b"ab" + b"c" * length for length in range(128)]
LONGER = tiktoken.Encoding(
    "longer",
    pat_str=".",
    mergeable_ranks=dict(zip(PIECES, range(256), strict=True)),
    special_tokens={"<|endoftext|>": 256},
)


@pytest.mark.parametrize("tokenizer", [load_tokenizer("bytes"), LONGER], ids=["bytes", "longer"])
def test_bits_per_byte_count_the_bytes_of_the_predicted_tokens(tokenizer, tokens, monkeypatch):
    """The windows are read in several parts, of which the last one is shorter."""
    monkeypatch.setattr(validation_module, "_WINDOWS_AT_ONCE", 4)
    for num_tokens, starts in ((None, [0]), (16, [0, 80]), (40, [0, 32, 64, 96, 128])):
        validation = Validation(MODEL, tokens, num_tokens=num_tokens, batch_size=4)
        predicted: Any = [tokens.read(start + 1, NUM_TOKENS if num_tokens is None else start + 9) for start in starts]
        texts = [token for token in np.concatenate(predicted).tolist() if token != 256]  # the end of a text
        num_bytes = sum(len(tokenizer.decode_bytes([token])) for token in texts)
        expected = 2.0 * validation.num_tokens / num_bytes / math.log(2)
        assert validation.bits_per_byte(2.0, tokenizer) == pytest.approx(expected)


def test_bits_per_byte_of_a_text_without_bytes_are_unknown(tmp_path):
    np.full(20, 256, "<u2").tofile(tmp_path / "val.bin")
    tokens = TokenSequence((TokenSpan(path=str(tmp_path / "val.bin"), start=0, stop=20),))
    assert Validation(MODEL, tokens, num_tokens=None, batch_size=4).bits_per_byte(2.0, load_tokenizer("bytes")) is None


def test_the_last_tokens_are_read_through_windows(tokens):
    assert last_tokens(tokens, 9).tolist() == tokens.read(NUM_TOKENS - 9).tolist()
