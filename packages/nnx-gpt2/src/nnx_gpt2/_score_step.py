"""The step that scores given tokens: their losses, and whether each is the likeliest.

Only the rows that are asked for reach the head, whose product is most of the work of a small model.

Shapes: B rows, T positions, K scored positions of a row, C width, P padded vocabulary, M = B * R tokens of a chunk.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from nnx_gpt2._embedding import logits
from nnx_gpt2._errors import check_type, require
from nnx_gpt2._model import merge
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._params import Params
from nnx_gpt2._sharding import (
    BATCH_AXES,
    FSDP_AXIS,
    TENSOR_AXIS,
    check_axis_names,
    num_batch_shards,
    over_mesh,
    replicated,
)
from nnx_gpt2._target import compiled_for
from nnx_gpt2._token_ids import check_ids
from nnx_gpt2._train_step import check_batch_size

_BATCH_SPEC = PartitionSpec(BATCH_AXES)


def make_score_step(config: GPT2Config, mesh: Mesh | None = None) -> jax.stages.Wrapped:
    """Return the jitted step that scores tokens, `step(params, tokens, positions, targets) -> (losses, is_likeliest)`.

    `tokens` is `int[B, T]` with T at most `config.seq_len`; a row may be padded on its right. `positions` and `targets`
    are `int[B, K]`: a target is the token after a position of its row. `losses` is `float32[B, K]`, in nats, and
    `is_likeliest` is `bool[B, K]`: no other token of the vocabulary is more likely than the target. There is no
    dropout. Ids must lie in the vocabulary, and positions in the row: the step does not check them.

    Args:
        config: the model's shape.
        mesh: the devices, each with a copy of the parameters; they share the rows. None is a single device.

    Raises:
        ValueError: an argument has another type, the mesh shards parameters, or the devices do not divide the rows.
    """
    check_type("config", config, GPT2Config)
    if mesh is not None:
        check_axis_names(mesh)
        sizes = mesh.shape[FSDP_AXIS], mesh.shape[TENSOR_AXIS]
        require(sizes == (1, 1), "mesh", "have fsdp = tensor = 1: each device has all parameters", str(sizes))
    return _make_score_step(config, mesh)


@lru_cache(maxsize=32)
def _make_score_step(config: GPT2Config, mesh: Mesh | None) -> jax.stages.Wrapped:
    def score_step(
        params: Params, tokens_BT: Int[Array, "B T"], positions_BK: Int[Array, "B K"], targets_BK: Int[Array, "B K"]
    ) -> tuple[Float[Array, "B K"], Bool[Array, "B K"]]:
        check_ids(tokens_BT, config.vocab_size, "tokens")
        check_batch_size(tokens_BT.shape[0], num_batch_shards(mesh), 1)
        with compiled_for(mesh):
            model = merge(config, params)
            x_BTC = model.final_activations(tokens_BT).reshape(*tokens_BT.shape, -1)
            score = over_mesh(
                lambda *shards: _scores(config, *shards),
                (_BATCH_SPEC, PartitionSpec(), _BATCH_SPEC, _BATCH_SPEC),
                _BATCH_SPEC,
            )
            return score(x_BTC, model.wte.embedding[...], positions_BK, targets_BK)

    return jax.jit(score_step) if mesh is None else jax.jit(score_step, out_shardings=replicated(mesh))


def _scores(
    config: GPT2Config, x_BTC: Array, head_PC: Array, positions_BK: Array, targets_BK: Array
) -> tuple[Array, Array]:
    """Score the rows of a device, some positions at a time: the logits are the largest array."""
    batch_size, num_scored = targets_BK.shape
    num_chunks = -(-num_scored // max(1, config.loss_chunk_tokens // batch_size))
    length = -(-num_scored // num_chunks)
    padding = ((0, 0), (0, num_chunks * length - num_scored))

    def chunk(rest: tuple[Array, Array]) -> tuple[Array, Array]:
        positions_BR, targets_BR = rest
        x_MC = jnp.take_along_axis(x_BTC, positions_BR[..., None], axis=1).reshape(-1, x_BTC.shape[-1])
        logits_MP = logits(x_MC, head_PC)
        is_token_P = jnp.arange(len(head_PC)) < config.vocab_size
        logits_MP = jnp.where(is_token_P[None], logits_MP, jnp.finfo(logits_MP.dtype).min)
        target_M = jnp.take_along_axis(logits_MP, targets_BR.reshape(-1, 1), axis=1)[:, 0]
        losses_M = jax.nn.logsumexp(logits_MP, axis=1) - target_M
        is_likeliest_M = target_M >= logits_MP.max(axis=1)
        return losses_M.astype(jnp.float32).reshape(targets_BR.shape), is_likeliest_M.reshape(targets_BR.shape)

    def chunks(x_BK: Array) -> Array:
        return jnp.pad(x_BK, padding).reshape(batch_size, num_chunks, length).swapaxes(0, 1)

    found = jax.lax.map(chunk, (chunks(positions_BK), chunks(targets_BK)))
    losses_BK, is_likeliest_BK = (x.swapaxes(0, 1).reshape(batch_size, -1)[:, :num_scored] for x in found)
    return losses_BK, is_likeliest_BK
