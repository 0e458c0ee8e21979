"""The network and cached decoding against GPT-2 in NumPy, in float64, with large weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_gpt2 import GPT2Config, abstract_train_state, document_ids, mean_loss, merge, stack_layers, token_losses
from nnx_gpt2._generate import _decode, _prefill
from nnx_gpt2._model import MLP

CONFIG = GPT2Config(
    vocab_size=29, seq_len=12, num_layers=2, num_heads=3, embed_dim=12, mlp_dim=20, norm_epsilon=1e-2,
    dropout_rate=0.5, dtype="float64", param_dtype="float64", loss_chunk_tokens=10,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 29, (3, 12))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def params():
    """Weights so large that activations leave the linear range of GELU, and attention prefers some positions."""
    shapes = abstract_train_state(CONFIG, optax.sgd(1.0)).params
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: rng.normal(0, 0.7, x.shape), shapes)
    params["wte"]["embedding"][CONFIG.vocab_size :] = 0
    return params


@pytest.fixture
def model(params):
    return merge(CONFIG, jax.tree.map(jnp.asarray, params))


def norm(x, params):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-2) * params["scale"] + params["bias"]


def linear(x, params):
    return np.tensordot(x, params["kernel"], 1) + params["bias"]


def gelu(x):
    """The tanh form: Hendrycks and Gimpel, 2016, arXiv:1606.08415, section 2."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(params, tokens, segments=None):
    """Return the logits of one sequence."""
    num_positions = len(tokens)
    visible = np.tril(np.ones((num_positions, num_positions), bool))
    if segments is not None:
        visible &= segments[:, None] == segments[None]
    x = params["wte"]["embedding"][tokens] + params["wpe"]["embedding"][:num_positions]
    for i in range(2):
        block = params["h"][i]
        qkv = linear(norm(x, block["ln_1"]), block["attn"]["c_attn"])
        mixed = []
        for head in range(3):
            q, k, v = (qkv[:, j, 4 * head : 4 * head + 4] for j in range(3))
            weights = np.where(visible, np.exp(q @ k.T / 2), 0)  # heads are 4 wide
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + linear(np.concatenate(mixed, axis=1), block["attn"]["c_proj"])
        x = x + linear(gelu(linear(norm(x, block["ln_2"]), block["mlp"]["c_fc"])), block["mlp"]["c_proj"])
    return norm(x, params["ln_f"]) @ params["wte"]["embedding"][:29].T


@pytest.mark.parametrize("masked", [False, True])
def test_logits_are_those_of_the_formulas(model, params, masked):
    segments = document_ids(jnp.asarray(TOKENS), 5) if masked else None
    found = model(jnp.asarray(TOKENS), segment_ids=segments)
    expected = [
        reference(params, row, None if segments is None else np.asarray(segments[i])) for i, row in enumerate(TOKENS)
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_losses_are_those_of_the_formulas(model, params):
    logits = np.stack([reference(params, row[:-1]) for row in TOKENS])
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, TOKENS[:, 1:, None], 2)[..., 0]
    np.testing.assert_allclose(token_losses(model, jnp.asarray(TOKENS)), expected, rtol=0, atol=1e-10)
    assert float(mean_loss(model, jnp.asarray(TOKENS))) == pytest.approx(expected.mean(), abs=1e-10)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_cached_decoding_has_the_logits_of_the_full_forward(params, scan_layers):
    """Five given tokens follow texts of 1, 4 and 7 tokens, one at a time."""
    arrays = jax.tree.map(jnp.asarray, params)
    config = dataclasses.replace(CONFIG, scan_layers=scan_layers)
    model = merge(config, stack_layers(arrays) if scan_layers else arrays)
    rows, lengths = np.arange(3), np.array([1, 4, 7])
    blocks = [model.block(i) for i in range(2)]
    prompt = np.where(np.arange(8) < lengths[:, None], TOKENS[:, :8], 0)
    expected = np.stack([reference(params, row) for row in TOKENS])
    logits, cache = _prefill(model, blocks, jnp.asarray(prompt), jnp.asarray(lengths), 12)
    np.testing.assert_allclose(logits[:, :29], expected[rows, lengths - 1], rtol=0, atol=1e-10)
    head = model.padded_logits
    decode = jax.jit(lambda token, position, cache: _decode(model, blocks, head, token, position, cache))
    for i in range(5):
        position = lengths + i
        logits, cache = decode(jnp.asarray(TOKENS[rows, position]), jnp.asarray(position), cache)
        np.testing.assert_allclose(logits[:, :29], expected[rows, position], rtol=0, atol=1e-10)


def test_gelu_is_its_tanh_form():
    """The form with erf differs in the fourth decimal: 0.841345 at 1, 1.954500 at 2."""
    with jax.enable_x64(False):
        mlp = MLP(GPT2Config(num_heads=1, embed_dim=4, mlp_dim=4), rngs=nnx.Rngs(0))
        mlp.c_fc.kernel[...] = mlp.c_proj.kernel[...] = jnp.eye(4)
        found = mlp(jnp.array([[-2.0, -1.0, 1.0, 2.0]]), None)
    np.testing.assert_allclose(found, [[-0.045402, -0.158808, 0.841192, 1.954598]], rtol=0, atol=2e-6)
