"""GPT-2 as in Radford et al., 2019: the one file to read for what the network computes.

Shapes: B batch, T position, M = B * T (one row per token), C width, N heads, H head width,
V vocabulary, P vocabulary padded to a multiple of 128.

Activations stay `[M, C]` between attentions: on CPU, XLA would otherwise transpose every
`[B, T, C]` activation to form a weight's gradient, which costs more than the product itself.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nnx_gpt2._attention import causal_attention
from nnx_gpt2._config import GPT2Config
from nnx_gpt2._dropout import dropout, split_key

# GPT-2's own: the initial standard deviation, and the epsilon of its norms.
INIT_STD = 0.02
NORM_EPSILON = 1e-5


def _linear(config: GPT2Config, in_dim: int, out_dim: int, std: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        in_dim,
        out_dim,
        kernel_init=nnx.initializers.normal(std),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _norm(config: GPT2Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.embed_dim,
        epsilon=NORM_EPSILON,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _residual_std(config: GPT2Config) -> float:
    """Residual branches start smaller, so that the stream's variance does not grow with depth (section 2.3)."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


class Attention(nnx.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.c_attn = _linear(config, config.embed_dim, 3 * config.embed_dim, INIT_STD, rngs)
        self.c_proj = _linear(config, config.embed_dim, config.embed_dim, _residual_std(config), rngs)

    def __call__(
        self, x_MC: Float[Array, "M C"], num_positions: int, dropout_key: PRNGKeyArray | None
    ) -> Float[Array, "M C"]:
        """Mix each sequence's positions. `num_positions` is T, which says where sequences begin in M."""
        config = self.config
        weights_key, output_key = split_key(dropout_key, 2)
        heads_BTNH = (-1, num_positions, config.num_heads, config.head_dim)
        q_BTNH, k_BTNH, v_BTNH = (part.reshape(heads_BTNH) for part in jnp.split(self.c_attn(x_MC), 3, axis=-1))
        mixed_BTNH = causal_attention(q_BTNH, k_BTNH, v_BTNH, dropout_rate=config.dropout_rate, dropout_key=weights_key)
        return dropout(self.c_proj(mixed_BTNH.reshape(x_MC.shape)), config.dropout_rate, output_key)


class MLP(nnx.Module):
    """Feed-forward layer, four times as wide inside, with the tanh form of GELU."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.c_fc = _linear(config, config.embed_dim, 4 * config.embed_dim, INIT_STD, rngs)
        self.c_proj = _linear(config, 4 * config.embed_dim, config.embed_dim, _residual_std(config), rngs)

    def __call__(self, x_MC: Float[Array, "M C"], dropout_key: PRNGKeyArray | None) -> Float[Array, "M C"]:
        """Transform each position by itself."""
        hidden = jax.nn.gelu(self.c_fc(x_MC), approximate=True)
        return dropout(self.c_proj(hidden), self.config.dropout_rate, dropout_key)


class Block(nnx.Module):
    """One transformer block, its norms before its layers."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.ln_1 = _norm(config, rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x_MC: Float[Array, "M C"], num_positions: int, dropout_key: PRNGKeyArray | None
    ) -> Float[Array, "M C"]:
        """Add what attention and the feed-forward layer make of the stream to the stream."""
        attn_key, mlp_key = split_key(dropout_key, 2)
        x_MC = x_MC + self.attn(self.ln_1(x_MC), num_positions, attn_key)
        return x_MC + self.mlp(self.ln_2(x_MC), mlp_key)


class GPT2(nnx.Module):
    """GPT-2: tokens in, next-token logits out.

    Args:
        config: the shape.
        rngs: where the initial parameters come from.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from nnx_gpt2 import GPT2, GPT2Config
    >>> config = GPT2Config(vocab_size=257, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
    >>> model = GPT2(config, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 16), jnp.int32)).shape
    (3, 16, 257)
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        embed = partial(
            nnx.Embed,
            features=config.embed_dim,
            dtype=jnp.dtype(config.dtype),
            param_dtype=param_dtype,
            embedding_init=nnx.initializers.normal(INIT_STD),
            rngs=rngs,
        )
        self.config = config
        self.wte = embed(config.padded_vocab_size)
        self.wpe = embed(config.seq_len)
        self.h = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.ln_f = _norm(config, rngs)

    def __call__(self, tokens: Int[Array, "B T"], *, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "B T V"]:
        """Logits of the token after each position, over the true vocabulary.

        Args:
            tokens: ids below `config.vocab_size`; T is at most `config.seq_len`.
            dropout_key: trains with dropout when given; otherwise the result is deterministic.

        Raises:
            ValueError: T exceeds the context length.
        """
        logits_MP = self.padded_logits(self.hidden(tokens, dropout_key=dropout_key))
        return logits_MP[:, : self.config.vocab_size].reshape(*tokens.shape, -1)

    def hidden(self, tokens: Int[Array, "B T"], *, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "M C"]:
        """The final normed activations, one row per token: what the head multiplies."""
        num_positions = tokens.shape[1]
        if num_positions > self.config.seq_len:
            raise ValueError(
                f"expected at most {self.config.seq_len} tokens per sequence (model.seq_len), got {num_positions}: "
                "cut the sequences, or build a model with a longer context"
            )
        embed_key, *block_keys = split_key(dropout_key, 1 + self.config.num_layers)
        x_BTC = self.wte(tokens) + self.wpe(jnp.arange(num_positions))[None]
        x_MC = dropout(x_BTC.reshape(-1, self.config.embed_dim), self.config.dropout_rate, embed_key)
        for block, key in zip(self.h, block_keys, strict=True):
            x_MC = block(x_MC, num_positions, key)
        return self.ln_f(x_MC)

    def padded_logits(self, x_MC: Float[Array, "M C"]) -> Float[Array, "M P"]:
        """The tied head over the padded vocabulary. Columns from `vocab_size` on mean nothing."""
        return self.wte.attend(x_MC)
