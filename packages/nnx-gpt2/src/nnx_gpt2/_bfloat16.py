"""Support of bfloat16 by a device."""

from typing import Any

# NVIDIA's first generation with bfloat16, Ampere: CUDA C++ Programming Guide, "Compute Capabilities".
_FIRST_CAPABILITY = 8.0


def has_bfloat16(device: Any) -> bool:
    """Return whether a device computes bfloat16 in hardware: all but NVIDIA GPUs below compute capability 8.

    The older GPUs emulate it, and cuDNN has no flash attention for them.

    Args:
        device: a device of jax.
    """
    is_nvidia = "NVIDIA" in device.device_kind.upper()
    return not is_nvidia or float(device.compute_capability) >= _FIRST_CAPABILITY
