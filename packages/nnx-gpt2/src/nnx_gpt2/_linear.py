"""Linear layers whose gradients are summed in float32: over positions, microbatches and devices.

Automatic differentiation of a product in bfloat16 rounds each device's share of a kernel's gradient to bfloat16, and
XLA sends and adds these numbers.

Shapes: M tokens, C width in, D dimensions out.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_gpt2._model_config import GradDType


class Linear(nnx.LinearGeneral):
    """`x @ kernel + bias`, computed in `dtype`. The kernel is `[C, *D]`, the bias `[*D]`."""

    def __init__(self, *args: Any, grad_dtype: GradDType, **options: Any) -> None:
        super().__init__(*args, **options)
        self.grad_dtype: GradDType = grad_dtype

    def __call__(self, x_MC: Float[Array, "M C"], out_sharding: None = None) -> Float[Array, "M ..."]:
        """Map each row."""
        assert self.bias is not None, "every layer of GPT-2 has a bias"
        return _linear(x_MC.astype(self.dtype), self.kernel[...], self.bias[...], self.grad_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x_MC: Array, kernel_CD: Array, bias_D: Array, grad_dtype: GradDType) -> Array:
    return _forward(x_MC, kernel_CD, bias_D, grad_dtype)[0]


def _forward(x_MC: Array, kernel_CD: Array, bias_D: Array, grad_dtype: GradDType) -> tuple[Array, Any]:
    cast_CD = kernel_CD.astype(x_MC.dtype)
    return jnp.tensordot(x_MC, cast_CD, 1) + bias_D.astype(x_MC.dtype)[None], (x_MC, cast_CD, bias_D)


def _backward(grad_dtype: GradDType, saved: tuple[Array, Array, Array], dy_MD: Array) -> tuple[Array, Array, Array]:
    x_MC, cast_CD, bias_D = saved
    dims_D = tuple(range(1, dy_MD.ndim))
    dx_MC = jnp.tensordot(dy_MD, cast_CD, (dims_D, dims_D))
    sum_dtype = jnp.promote_types(dy_MD.dtype, grad_dtype)
    dkernel_DC = jax.lax.dot_general(dy_MD, x_MC, (((0,), (0,)), ((), ())), preferred_element_type=sum_dtype)
    dbias_D = dy_MD.sum(0, dtype=jnp.promote_types(dy_MD.dtype, jnp.float32))
    return dx_MC, jnp.moveaxis(dkernel_DC, -1, 0).astype(bias_D.dtype), dbias_D.astype(bias_D.dtype)


_linear.defvjp(_forward, _backward)
