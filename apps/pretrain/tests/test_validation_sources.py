"""The sources of validation tokens: properties with odd lengths, and the losses against those of each token."""

import dataclasses

import jax
import numpy as np
import pytest

from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, make_eval_step, make_mesh
from owt_data import TokenSequence, TokenSpan, load_tokenizer
from pretrain._run.metrics import rounded
from pretrain._training.validation import Validation
from pretrain._training.validation_sources import LEAST_WINDOWS, ValidationSources

MODEL = GPT2Config(vocab_size=257, seq_len=8, num_layers=1, num_heads=2, embed_dim=16)
NUM_TOKENS = 1 + 60 * 8 + 3  # sixty windows, and three tokens more
SPANS = {
    "two": [("web", 301), ("code", NUM_TOKENS - 301)],
    "a border of windows": [("web", 8 * 20), ("code", NUM_TOKENS - 160)],
    "many in a window": [("a", 3), ("b", 2), ("c", 470), ("d", 1), ("e", 2), ("f", NUM_TOKENS - 478)],
    "ranges": [("web", 99), ("code", 201), ("web", 101), ("code", NUM_TOKENS - 401)],
    "one token": [("web", 1), ("code", NUM_TOKENS - 2), ("more", 1)],
}


@pytest.fixture(scope="module")
def params():
    return create_train_state(MODEL, create_optimizer(OptimizerConfig(), 10), jax.random.key(0)).params


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "val.bin"
    np.random.default_rng(0).integers(0, 257, NUM_TOKENS).astype("<u2").tofile(path)
    return TokenSequence((TokenSpan(path=str(path), start=0, stop=NUM_TOKENS),))


def names_of(spans):
    """The source of each token."""
    return np.repeat([name for name, _ in spans], [length for _, length in spans])


def token_losses(params, tokens, starts):
    """The loss of each target of the windows that begin at some tokens."""
    return np.asarray(make_eval_step(MODEL)(params, tokens.read_windows(np.array(starts), 8)), np.float64)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_token_has_its_source(spans):
    sources = ValidationSources(spans)
    found = np.array(sources.names)[sources.of(np.arange(NUM_TOKENS))]
    assert found.tolist() == names_of(spans).tolist()


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_losses_of_sources_are_the_means_over_their_tokens(spans, batch_size, params, tokens):
    losses = token_losses(params, tokens, [*range(0, 480, 8), NUM_TOKENS - 9])
    predicted = np.append(losses[:-1].ravel(), losses[-1, -3:])
    names = names_of(spans)[1:]
    expected = {name: predicted[names == name].mean() for name in dict.fromkeys(names.tolist())}
    validation = Validation(MODEL, tokens, num_tokens=None, batch_size=batch_size, sources=spans)
    loss, found = validation.evaluate(params)
    assert found.of_sources == pytest.approx(expected, rel=1e-5)
    without, of_windows = Validation(MODEL, tokens, num_tokens=None, batch_size=batch_size).evaluate(params)
    assert (without, of_windows.of_sources) == (loss, {})
    assert found.losses.tolist() == of_windows.losses.tolist()


@pytest.mark.parametrize("border", range(14, 27))
def test_the_windows_of_a_source_have_its_targets_alone(border):
    """The first token of a window is no target of it."""
    spans = [("web", border), ("code", 100 - border)]
    elsewhere = np.arange(100, 116)  # a part that has no window of the sources
    found = ValidationSources(spans).more_windows(elsewhere, 12, 8)
    names = names_of(spans)
    assert found.tolist() == [one for one in range(12) if len({*names[8 * one + 1 : 8 * one + 9].tolist()}) == 1]


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("num_tokens", [8, 97, 320])
def test_a_part_has_windows_of_each_source_and_the_loss_of_before(spans, num_tokens, params, tokens):
    validation = Validation(MODEL, tokens, num_tokens=num_tokens, batch_size=7, sources=spans)
    loss, found = validation.evaluate(params)
    plain, tokenizer = Validation(MODEL, tokens, num_tokens=num_tokens, batch_size=7), load_tokenizer("bytes")
    without, of_windows = plain.evaluate(params)
    assert loss == without
    assert validation.bits_per_byte(loss, tokenizer) == plain.bits_per_byte(loss, tokenizer)
    assert found.losses.tolist() == of_windows.losses.tolist()
    part = np.arange(num_tokens // 8) * 60 // (num_tokens // 8)
    read = np.append(part, ValidationSources(spans).more_windows(part, 60, 8))
    assert len(read) == len(set(read.tolist()))
    losses = token_losses(params, tokens, read * 8)
    names = names_of(spans)[read[:, None] * 8 + np.arange(1, 9)]
    assert found.of_sources == pytest.approx(
        {name: losses[names == name].mean() for name in dict.fromkeys(names.ravel().tolist())}, rel=1e-5
    )
    # A source is missing only if all of its targets are in the tokens after the last window, or it has none.
    assert {*found.of_sources} == {*names_of(spans)[1:481].tolist()}


@pytest.mark.parametrize("count", [1, 5, 20, 60])
def test_a_small_source_has_as_many_windows_as_the_part_or_as_it_has(count):
    spans = [("large", 20 * 8 + 5), ("small", 4 * 8 + 2), ("large", 10 * 8), ("other", 26 * 8 - 3)]
    part = np.arange(count) * 60 // count
    read = np.append(part, ValidationSources(spans).more_windows(part, 60, 8))
    assert len(read) == len(set(read.tolist())) <= count + 3 * LEAST_WINDOWS
    names = names_of([*spans, ("rest", 9)])[read[:, None] * 8 + np.arange(1, 9)]
    own = {name: int((names == name).all(axis=1).sum()) for name in ("large", "small", "other")}
    assert all(
        own[name] >= min(LEAST_WINDOWS, count, most) for name, most in (("large", 29), ("small", 3), ("other", 25))
    )


def test_the_windows_of_a_small_source_are_spread_over_its_tokens():
    source, num_windows = [("web", 100_000), ("code", 5_000)], 105_000 // 8
    more = ValidationSources(source).more_windows(np.arange(20) * 600, num_windows, 8)
    own = more[more >= 100_000 // 8]
    assert len(own) == LEAST_WINDOWS
    assert np.ptp(np.diff(own)) <= 1
    assert own[0] - 100_000 // 8 < np.diff(own)[0] >= num_windows - 1 - own[-1]


def test_the_losses_of_sources_on_a_mesh_and_with_masks_are_those_of_one_device(params, tokens):
    for end_of_text in (None, 5):
        alone, meshed = (
            Validation(
                MODEL, tokens, num_tokens=100, batch_size=8, sources=SPANS["ranges"], end_of_text=end_of_text, mesh=mesh
            )
            for mesh in (None, make_mesh())
        )
        expected = alone.evaluate(params)[1].of_sources
        assert meshed.evaluate(params)[1].of_sources == pytest.approx(expected, rel=1e-6)


def test_a_record_has_the_losses_under_the_names_of_the_sources(params, tokens):
    validation = Validation(MODEL, tokens, num_tokens=None, batch_size=7, sources=SPANS["two"])
    loss, found = validation.evaluate(params)
    record, of_windows = validation.measure(params, load_tokenizer("bytes"))
    bits = validation.bits_per_byte(loss, load_tokenizer("bytes"))
    expected = {f"val_loss/{name}": value for name, value in found.of_sources.items()}
    assert record == rounded({"val_loss": loss, "val_bits_per_byte": bits} | expected)
    assert dataclasses.asdict(of_windows).keys() == dataclasses.asdict(found).keys()
    assert validation.measure(params, None)[0] == rounded({"val_loss": loss} | expected)
