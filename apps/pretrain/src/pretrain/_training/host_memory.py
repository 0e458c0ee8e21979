"""Memory that glibc keeps for the next step, where XLA computes on the CPU."""

import ctypes
import os
import sys

import jax

# Parameters of glibc's `mallopt`.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Keep freed memory in the process if XLA computes on the CPU and the C library is glibc.

    XLA's CPU backend allocates the temporary arrays of each step again. By default glibc returns large arrays to the
    system, which clears the pages of the next ones: a fifth of the time of a small step. The process now keeps those
    of up to 64 MiB. glibc maps larger arrays of XLA's threads again each time. `GLIBC_TUNABLES` in the environment
    takes the place of this, as in the workers of `ray_jax_launch`. It can also ask for huge pages, which only the start
    of a process can.
    """
    if jax.default_backend() != "cpu" or not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never
