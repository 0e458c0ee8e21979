"""The GPT-2 network of Radford et al., 2019.

Shapes: B batch, T position, M = B * T tokens, C width, F width inside the feed-forward layer, N heads, H head width,
V vocabulary, P padded vocabulary, L layers.

Activations stay `[M, C]` between attentions. On CPU, XLA would otherwise transpose each `[B, T, C]` activation to
compute a weight's gradient, which costs more than the product itself. `constrain` shards an array on a mesh, and does
nothing without a mesh.
"""

import math
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from nnx_gpt2._attention import causal_attention
from nnx_gpt2._dropout import check_key, dropout, split_key
from nnx_gpt2._embedding import add_positions, logits, lookup
from nnx_gpt2._errors import check_type, is_whole, plain, require, shown, value_error
from nnx_gpt2._linear import Linear
from nnx_gpt2._model_config import DType, GPT2Config, SavedDType
from nnx_gpt2._params import GivenParams, Params, check_layers, dotted_name
from nnx_gpt2._pretrained import MODEL_FILES, read_params, write_pretrained
from nnx_gpt2._pretrained_config import check_changes, locate_pretrained, read_config, with_changes
from nnx_gpt2._sharding import BATCH_AXES, TENSOR_AXIS, constrain
from nnx_gpt2._token_ids import as_native, check_ids, check_range

# The standard deviation of GPT-2's initial weights.
INIT_STD = 0.02


def _linear(config: GPT2Config, in_dim: int, out_dims: int | tuple[int, ...], std: float, rngs: nnx.Rngs) -> Any:
    return Linear(
        in_dim,
        out_dims,
        kernel_init=nnx.initializers.normal(std),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        grad_dtype=config.grad_dtype,
        rngs=rngs,
    )


class _Norm(nnx.LayerNorm):
    """Layer normalization in float32, as under PyTorch's autocast. Its gradients are float32 sums over devices too."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs) -> None:
        super().__init__(
            config.embed_dim,
            epsilon=config.norm_epsilon,
            dtype=jnp.promote_types(config.dtype, jnp.float32),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        self.output_dtype = jnp.dtype(config.dtype)

    def __call__(self, x: Float[Array, "... C"], *, mask: Array | None = None) -> Float[Array, "... C"]:
        """Normalize the last axis."""
        return super().__call__(x, mask=mask).astype(self.output_dtype)


def _residual_std(config: GPT2Config) -> float:
    """Return the initial standard deviation of residual branches, scaled down with depth (section 2.3)."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


class Attention(nnx.Module):
    """Multi-head causal self-attention. `c_attn` maps `[C]` to `[3, C]`: queries, keys and values."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.c_attn = _linear(config, config.embed_dim, (3, config.embed_dim), INIT_STD, rngs)
        self.c_proj = _linear(config, config.embed_dim, config.embed_dim, _residual_std(config), rngs)

    def __call__(
        self,
        x_MC: Float[Array, "M C"],
        num_positions: int,
        segment_ids_BT: Int[Array, "B T"] | None,
        dropout_key: PRNGKeyArray | None,
    ) -> Float[Array, "M C"]:
        """Mix the positions of each sequence. `num_positions` is T."""
        config = self.config
        weights_key, output_key = split_key(dropout_key, 2)
        mixed_BTNH = causal_attention(
            *self.heads(x_MC, num_positions),
            segment_ids_BT=segment_ids_BT,
            dropout_rate=config.dropout_rate,
            dropout_key=weights_key,
            backend=config.attention,
        )
        return dropout(self.c_proj(mixed_BTNH.reshape(x_MC.shape)), config.dropout_rate, output_key)

    def heads(self, x_MC: Float[Array, "M C"], num_positions: int) -> list[Float[Array, "B T N H"]]:
        """Return queries, keys and values."""
        qkv_M3C = constrain(self.c_attn(x_MC), BATCH_AXES, None, TENSOR_AXIS)
        shape = (-1, num_positions, self.config.num_heads, self.config.head_dim)
        return [qkv_M3C[:, i].reshape(shape) for i in range(3)]


class MLP(nnx.Module):
    """Feed-forward layer with the tanh form of GELU."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.c_fc = _linear(config, config.embed_dim, config.feed_forward_dim, INIT_STD, rngs)
        self.c_proj = _linear(config, config.feed_forward_dim, config.embed_dim, _residual_std(config), rngs)

    def __call__(self, x_MC: Float[Array, "M C"], dropout_key: PRNGKeyArray | None) -> Float[Array, "M C"]:
        """Transform each position separately."""
        inner_MF = jax.nn.gelu(constrain(self.c_fc(x_MC), BATCH_AXES, TENSOR_AXIS), approximate=True)
        return dropout(self.c_proj(inner_MF), self.config.dropout_rate, dropout_key)


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.ln_1 = _Norm(config, rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _Norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x_MC: Float[Array, "M C"],
        num_positions: int,
        segment_ids_BT: Int[Array, "B T"] | None,
        dropout_key: PRNGKeyArray | None,
    ) -> Float[Array, "M C"]:
        """Add the outputs of attention and of the feed-forward layer to the residual stream."""
        attn_key, mlp_key = split_key(dropout_key, 2)
        x_MC = constrain(x_MC + self.attn(self.ln_1(x_MC), num_positions, segment_ids_BT, attn_key), BATCH_AXES, None)
        return constrain(x_MC + self.mlp(self.ln_2(x_MC), mlp_key), BATCH_AXES, None)


# What the forward pass saves: everything, the results of matrix products with weights, or the input of a block.
_REMAT: dict[str, Callable[[Callable[..., Array]], Callable[..., Array]]] = {
    "none": lambda block: block,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}


def _outer_modules(config: GPT2Config, rngs: nnx.Rngs) -> tuple[nnx.Embed, nnx.Embed, _Norm, Key[Array, " L"]]:
    """Return the modules outside the blocks, `wte`, `wpe` and `ln_f`, and the random key of each block."""
    embed = partial(
        nnx.Embed,
        features=config.embed_dim,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        embedding_init=nnx.initializers.normal(INIT_STD),
        rngs=rngs,
    )
    wte = embed(config.padded_vocab_size)
    # The padding has no effect. Zeros make a model equal to itself after saving and loading.
    is_token_P1 = jnp.arange(config.padded_vocab_size)[:, None] < config.vocab_size
    wte.embedding[...] = jnp.where(is_token_P1, wte.embedding[...], 0)
    wpe = embed(config.seq_len)
    keys = jax.random.split(rngs.params(), config.num_layers)
    return wte, wpe, _Norm(config, rngs), keys


class GPT2(nnx.Module):
    """GPT-2: maps tokens to next-token logits.

    Args:
        config: the shape.
        rngs: source of the initial parameters.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from nnx_gpt2 import GPT2, GPT2Config
    >>> config = GPT2Config(vocab_size=257, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
    >>> model = GPT2(config, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 16), jnp.int32)).shape
    (3, 16, 257)
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        check_type("config", config, GPT2Config)
        check_type("rngs", rngs, nnx.Rngs)
        self.config = config
        self.wte, self.wpe, ln_f, keys = _outer_modules(config, rngs)
        self.h: Any  # a list of blocks, or one block whose parameters are stacked
        if config.scan_layers:
            self.h = nnx.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(keys)
        else:
            self.h = nnx.List([Block(config, rngs=nnx.Rngs(key)) for key in keys])
        self.ln_f = ln_f

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | os.PathLike[str],
        *,
        dtype: DType = "float32",
        param_dtype: DType = "float32",
        revision: str | None = None,
        **changes: Any,
    ) -> "GPT2":
        """Load GPT-2 from Hugging Face's files: `config.json` and `*.safetensors`.

        Args:
            path_or_name: a folder, or a repository on the hub such as `gpt2-medium` (needs the extra `hub`).
            dtype: type of the computation.
            param_dtype: type of the parameters.
            revision: branch, tag or commit on the hub.
            changes: further fields of `GPT2Config` that do not describe the weights: `attention`, `remat`,
                `scan_layers`, `loss_chunk_tokens`, and `dropout_rate` (0 by default). `seq_len` shortens the context:
                the model has the first positions.

        Raises:
            ValueError: the files are not those of a GPT-2 that this class can compute. The message names the
                difference. Or a field describes the weights, or has a wrong value, or `seq_len` exceeds the saved
                positions.
        """
        fields = {"dtype": dtype, "param_dtype": param_dtype, **changes}
        check_changes(fields)
        folder = locate_pretrained(path_or_name, revision, MODEL_FILES)
        saved = read_config(folder)
        config = with_changes(saved, fields)

        def shapes() -> Any:
            return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))))

        return merge(config, read_params(folder, saved, config, shapes))

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        end_of_text: int | None = None,
        dtype: SavedDType | None = None,
        max_shard_bytes: int = 5 * 10**9,
    ) -> None:
        """Write the model for `from_pretrained`, transformers, vLLM and llama.cpp's converter.

        The files are `config.json`, `generation_config.json`, which ends a generation at the last position, and
        `model.safetensors`. Those of a tokenizer are not among them.

        Args:
            path: a folder, created if it is missing. A file gets its name only after it is complete.
            end_of_text: the token that begins and ends documents, for `config.json`. None is 50256 if the
                vocabulary is GPT-2's.
            dtype: type of the weights in the files. None is that of the parameters.
            max_shard_bytes: larger weights are split into several files with an index. A tensor is never split.

        Raises:
            ValueError: `end_of_text` is no id of the model, `dtype` is no such type, a weight is too large for float16,
                `max_shard_bytes` is below 1, or `path` has a `config.json` that is not a model's, such as that of a
                training run.
            OSError: `path` is a file, is below a file, or cannot be written.
        """
        write_pretrained(
            path,
            self.config,
            split_params(self),
            end_of_text=end_of_text,
            dtype=self.config.param_dtype if dtype is None else dtype,
            max_shard_bytes=max_shard_bytes,
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "B T V"]:
        """Return the logits of the token after each position, without the padding of the vocabulary.

        They are float32 for a model in bfloat16 or float32, and float64 for a model in float64.

        Args:
            tokens: ids below `config.vocab_size`. T is at most `config.seq_len`.
            segment_ids: if given, attention stays within positions of the same segment (document).
            dropout_key: random key of the dropout. None disables dropout.

        Raises:
            ValueError: tokens or segments have another type or shape, B or T is 0, T exceeds the context length, or,
                outside jit, ids lie outside the vocabulary.
        """
        logits_MP = self.padded_logits(self.final_activations(tokens, segment_ids=segment_ids, dropout_key=dropout_key))
        return logits_MP[:, : self.config.vocab_size].reshape(*tokens.shape, -1)

    def final_activations(
        self,
        tokens: Int[Array, "B T"],
        *,
        wte_BTC: Float[Array, "B T C"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "M C"]:
        """Return the input of the head: activations after the final norm, one row per token.

        Args:
            tokens: see `GPT2.__call__`.
            wte_BTC: the embeddings of the tokens, if they have been looked up.
            segment_ids: see `GPT2.__call__`.
            dropout_key: see `GPT2.__call__`.

        Raises:
            ValueError: see `GPT2.__call__`.
        """
        check_ids(tokens, self.config.vocab_size)
        if dropout_key is not None:
            check_key(dropout_key, "dropout_key")
        config, num_positions = self.config, tokens.shape[1]
        is_in_context = num_positions <= config.seq_len
        require(is_in_context, "sequences", f"have at most {config.seq_len} tokens (seq_len)", num_positions)
        embed_key, blocks_key = split_key(dropout_key, 2)
        if wte_BTC is None:
            wte_BTC, _ = lookup(self.wte.embedding[...], as_native(tokens), config.dtype)
        x_BTC = add_positions(wte_BTC.astype(config.stream_dtype), self.wpe.embedding[...])
        x_MC = dropout(x_BTC.reshape(-1, config.embed_dim), config.dropout_rate, embed_key)
        x_MC = constrain(x_MC, BATCH_AXES, None)
        keys = None if blocks_key is None else jax.random.split(blocks_key, config.num_layers)

        graphdef, _ = nnx.split(self.h if config.scan_layers else self.h[0])

        def apply(state: Any, x_MC: Array, key: PRNGKeyArray | None) -> Array:
            return nnx.merge(graphdef, state)(x_MC, num_positions, segment_ids, key)

        # jax traces and lowers a jitted function once for all layers.
        layer = jax.jit(_REMAT[config.remat](apply))
        if config.scan_layers:
            states = nnx.state(self.h)
            x_MC, _ = jax.lax.scan(lambda x_MC, rest: (layer(rest[0], x_MC, rest[1]), None), x_MC, (states, keys))
        else:
            for i in range(config.num_layers):
                x_MC = layer(nnx.state(self.h[i]), x_MC, None if keys is None else keys[i])
        return self.ln_f(x_MC)

    def embed(self, tokens: Int[Array, "*shape"], positions: Int[Array, "..."]) -> Float[Array, "*shape C"]:
        """Return the sum of token and position embeddings.

        Raises:
            ValueError: tokens or positions are no integers, positions have a shape that does not broadcast to that of
                the tokens, or, outside jit, they lie outside the model's tables.
        """
        check_range(positions, self.config.seq_len, "positions")
        check_range(tokens, self.config.vocab_size, "token ids")
        shape = tokens.shape
        sizes = zip(positions.shape[::-1], shape[::-1], strict=False)
        fits = positions.ndim <= len(shape) and all(size in (1, want) for size, want in sizes)
        require(fits, "positions", f"have the shape {list(shape)} of the tokens, or sizes of 1", str(positions.shape))
        wte, _ = lookup(self.wte.embedding[...], as_native(tokens), self.config.dtype)
        dtype = self.config.stream_dtype
        return wte.astype(dtype) + self.wpe.embedding[...].astype(dtype)[as_native(positions)]

    def padded_logits(self, x_MC: Float[Array, "M C"]) -> Float[Array, "M P"]:
        """Apply the tied head. The logits are float32 at least. The columns from `vocab_size` on are padding."""
        return logits(x_MC, self.wte.embedding[...])

    def block(self, i: int) -> Block:
        """Return the block of layer `i`, from separate or stacked layers.

        Raises:
            ValueError: there is no such layer.
        """
        last = self.config.num_layers - 1
        i = plain(i)
        require(is_whole(i, 0, last), "the index of a layer", f"be 0 to {last}", shown(i))
        if not self.config.scan_layers:
            return self.h[i]
        graphdef, states = nnx.split(self.h)
        return nnx.merge(graphdef, jax.tree.map(lambda x: x[i], states))


_POSITIONS = "wpe.embedding"


@cache
def _structure(config: GPT2Config) -> tuple[nnx.GraphDef, dict[str, tuple[int, ...]]]:
    """Return the graph of a model, and the shapes of its parameters by dotted name."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))
    return graphdef, _shapes(nnx.to_pure_dict(state))


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {dotted_name(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def check_params(config: GPT2Config, params: GivenParams, *, has_more_positions: bool = False) -> None:
    """Check the layout, names and shapes of parameters.

    Args:
        config: the model's shape.
        params: the parameters.
        has_more_positions: whether `wpe` may have more positions than the model.

    Raises:
        ValueError: the message names a parameter that does not fit.
    """
    check_layers(params, config.scan_layers, config.num_layers)
    expected, found = _structure(config)[1], _shapes(params)
    if has_more_positions and (num_positions := found.get(_POSITIONS, ())[:1]) > (config.seq_len,):
        expected = {**expected, _POSITIONS: (*num_positions, config.embed_dim)}
    if found != expected:
        name = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        shape, wanted = (shapes.get(name, "no such parameter") for shapes in (found, expected))
        raise value_error(f"params.{name}", f"be {wanted}, as in the config", str(shape))


def merge(config: GPT2Config, params: Params) -> GPT2:
    """Build a model from the parameters of a `TrainState`, without a copy.

    Raises:
        ValueError: the parameters have another layout, number of layers, names or shapes than those of `config`. (Sizes
            of the vocabulary with the same padded size have the same shapes.)
    """
    check_type("config", config, GPT2Config)
    check_params(config, params)
    return nnx.merge(_structure(config)[0], params)


def split_params(model: GPT2) -> Params:
    """Return the parameters of a model in the form of a `TrainState`, without a copy."""
    check_type("model", model, GPT2, "Call merge with a config and parameters to make a model.")
    return nnx.to_pure_dict(nnx.state(model))


def outer_params(config: GPT2Config, key: PRNGKeyArray) -> tuple[Params, Any]:
    """Return the initial parameters outside the blocks, and the key of each block: a list, or an array if stacked."""
    wte, wpe, ln_f, keys = _outer_modules(config, nnx.Rngs(key))
    modules = {"wte": wte, "wpe": wpe, "ln_f": ln_f}
    params = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}
    return params, keys if config.scan_layers else list(keys)


def block_params(config: GPT2Config, key: Key[Array, "..."]) -> Params:
    """Return the initial parameters of the block of a key, or those of the blocks of an array of keys, stacked."""
    make = lambda key: nnx.to_pure_dict(nnx.state(Block(config, rngs=nnx.Rngs(key))))  # noqa: E731
    return jax.vmap(make)(key) if key.ndim else make(key)
