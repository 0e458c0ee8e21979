"""The size of a model in parameters and floating-point operations, and the peak rates of devices."""

from nnx_gpt2._errors import check_type
from nnx_gpt2._model_config import GPT2Config

# Dense peak of one device by its name in JAX, in FLOP/s: bfloat16 with float32 sums, from the vendors' datasheets
# (NVIDIA: without sparsity; Google Cloud TPU: system architecture pages). T4 has no bfloat16: its peak is that of
# float16. A chip of TPU v2, v3 and 7x is two devices, each with half of the chip's peak.
_PEAK_FLOPS_PER_S = {
    "Tesla T4": 65e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "TPU v2": 45e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
}


def num_params(config: GPT2Config) -> int:
    """Return the number of parameters, with the tied head counted once and without padding."""
    check_type("config", config, GPT2Config)
    width, inner = config.embed_dim, config.feed_forward_dim
    # Kernels of attn (3 + 1 widths squared) and mlp; their biases (3 + 1 widths, the inner width, 1 width); 2 norms.
    per_block = 4 * width**2 + 2 * width * inner + 4 * width + inner + width + 4 * width
    return (config.vocab_size + config.seq_len) * width + config.num_layers * per_block + 2 * width


def flops_per_token(config: GPT2Config, *, attention: bool = True) -> int:
    """Return the floating-point operations of training on one token: forward and backward.

    Each multiplied parameter counts six (all parameters except the position embeddings). With `attention` the
    products of queries, keys and values are added, as in Chowdhery et al., 2022 (arXiv:2204.02311), appendix B.
    """
    check_type("attention", attention, bool)
    multiplied = num_params(config) - config.seq_len * config.embed_dim
    products = 12 * config.num_layers * config.embed_dim * config.seq_len
    return 6 * multiplied + (products if attention else 0)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, or None if it is not known. For T4, that of float16.

    Args:
        device_kind: its name in jax, as in `jax.devices()[0].device_kind`.

    Raises:
        ValueError: it is no text.
    """
    check_type("device_kind", device_kind, str)
    return _PEAK_FLOPS_PER_S.get(device_kind)
