"""Numbers about a model: parameters, floating-point operations, and what a device could do."""

from nnx_gpt2._model_config import GPT2Config

# Dense bfloat16 peak of one device as JAX names it, in FLOP/s, from the vendors' datasheets
# (NVIDIA: without sparsity; Google Cloud TPU: per chip, system architecture pages).
_PEAK_FLOPS_PER_S = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def num_params(config: GPT2Config) -> int:
    """Number of parameters, the tied head counted once and padding not at all."""
    width, inner = config.embed_dim, config.feed_forward_dim
    # c_attn 3 and c_proj 1 widths squared, c_fc and c_proj; their biases (3, 1, and the two last), two norms.
    per_block = 4 * width**2 + 2 * width * inner + 4 * width + inner + width + 4 * width
    return (config.vocab_size + config.seq_len) * width + config.num_layers * per_block + 2 * width


def flops_per_token(config: GPT2Config, *, attention: bool = True) -> int:
    """Floating-point operations of training on one token: forward and backward.

    Six per parameter that is multiplied (all but the positions), and with `attention` the products of
    queries, keys and values, as Chowdhery et al., 2022 (arXiv:2204.02311), appendix B count them.
    """
    multiplied = num_params(config) - config.seq_len * config.embed_dim
    products = 12 * config.num_layers * config.embed_dim * config.seq_len
    return 6 * multiplied + (products if attention else 0)


def peak_flops_per_s(device_kind: str) -> float | None:
    """A device's dense bfloat16 peak in FLOP/s, or None where it is not known: never a guess.

    Args:
        device_kind: what jax calls it, as in `jax.devices()[0].device_kind`.
    """
    return _PEAK_FLOPS_PER_S.get(device_kind)
