"""Support of bfloat16 by a device."""

import re
from typing import Any

# Ampere is NVIDIA's first generation with bfloat16: CUDA C++ Programming Guide, "Compute Capabilities".
_FIRST_CAPABILITY = 8.0


def compute_capability(device: Any) -> float | None:
    """Return the compute capability of an NVIDIA GPU, such as 7.5, or None for another device.

    Args:
        device: a device of jax.
    """
    # AMD's GPUs have a name here, such as gfx90a. Other devices lack the attribute.
    text = getattr(device, "compute_capability", "")
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else None


def has_bfloat16(device: Any) -> bool:
    """Return whether a device computes bfloat16 in hardware: every device but NVIDIA GPUs below compute capability 8.

    The older GPUs emulate it, and cuDNN has no flash attention for them.

    Args:
        device: a device of jax.
    """
    capability = compute_capability(device)
    return capability is None or capability >= _FIRST_CAPABILITY
