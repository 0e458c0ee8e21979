"""Weights in tiles, for products with a few rows on a CPU.

In each product with a few rows, XLA's CPU backend copies the weights into tiles, which takes most of the time. If they
lie in tiles already, a product with 2 to 8 rows takes about half the time. One row needs no tiles, and 32 rows gain
nothing.

Shapes: M rows, C width in, D dimensions out, G tiles, L = 64 outputs of a tile, P padded vocabulary.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_gpt2._model import Block

# Outputs of a tile. With half or twice as many, a product takes about 1.4 times as long.
_TILE_SIZE = 64

# The numbers of rows that gain from tiles.
TILED_ROWS = range(2, 17)


class Tiles(NamedTuple):
    """The weights of a model."""

    kernels: list[list[Float[Array, "G C L"]]]
    """For each block, in the order of `_linears`."""

    head_GCL: Float[Array, "G C L"]


class TiledLinear(nnx.Module):
    """`x @ kernel + bias`, from a kernel in tiles."""

    def __init__(self, tiles_GCL: Float[Array, "G C L"], bias_D: Float[Array, "*D"]) -> None:
        self.tiles, self.bias = nnx.Param(tiles_GCL), nnx.Param(bias_D)

    def __call__(self, x_MC: Float[Array, "M C"]) -> Float[Array, "M ..."]:
        """Map each row."""
        bias_D = self.bias[...]
        y_MD = tiled_product(x_MC, self.tiles[...])[:, : bias_D.size].reshape(-1, *bias_D.shape)
        return y_MD + bias_D[None]


def tiled(kernel_CD: Float[Array, "C ..."]) -> Float[Array, "G C L"]:
    """Copy a kernel into tiles. Zeros fill the last one."""
    flat_CD = kernel_CD.reshape(len(kernel_CD), -1)
    flat_CD = jnp.pad(flat_CD, ((0, 0), (0, -flat_CD.shape[1] % _TILE_SIZE)))
    return flat_CD.reshape(len(flat_CD), -1, _TILE_SIZE).swapaxes(0, 1)


def tiled_product(x_MC: Float[Array, "M C"], tiles_GCL: Float[Array, "G C L"]) -> Float[Array, "M GL"]:
    """Return the product of `x_MC` with a kernel in tiles. The last columns may be padding."""
    x_GMC = jnp.broadcast_to(x_MC[None], (len(tiles_GCL), *x_MC.shape))
    return jnp.einsum("GMC,GCL->GML", x_GMC, tiles_GCL).swapaxes(0, 1).reshape(len(x_MC), -1)


def tiled_weights(blocks: list[Block], head_PC: Float[Array, "P C"]) -> Tiles:
    """Copy the kernels of the blocks and the head into tiles."""
    return Tiles([[tiled(linear.kernel[...]) for linear in _linears(block)] for block in blocks], tiled(head_PC.T))


def use_tiles(blocks: list[Block], tiles: Tiles) -> None:
    """Replace the linear layers of blocks by those with tiles."""
    for block, kernels in zip(blocks, tiles.kernels, strict=True):
        new: Any = [TiledLinear(x, linear.bias[...]) for x, linear in zip(kernels, _linears(block), strict=True)]
        block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj = new


def _linears(block: Block) -> list[Any]:
    return [block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj]
