"""Settings of a process that computes: its cache of compiled programs, and the memory that it keeps."""

import ctypes
import logging
import os
import platform
import sys

import jax

from pretrain._errors import UsageError
from pretrain._surroundings.private_cache import private_cache

_logger = logging.getLogger("pretrain")

# Programs that compile faster are not kept.
_MIN_COMPILE_S = 0.2
# The least recently used programs are deleted.
_MAX_BYTES = 1 << 30
# Parameters of glibc's `mallopt`.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_programs() -> None:
    """Keep compiled programs in the user's cache, in a folder for this host below `~/.cache/pretrain` on Linux.

    A program for the CPU of one host may use instructions that another host with the same home folder lacks.

    The folder is open to this user only. If it belongs to another user, programs are not kept.

    The environment variable `JAX_COMPILATION_CACHE_DIR` names another folder. It must be the user's own, because jax
    runs the code in it. If the folder cannot be written, jax warns and compiles.

    Several processes of GPUs share the work of a compilation, and only the first of them writes the cache. There,
    programs are not kept.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
    if jax.config.values["jax_compilation_cache_dir"] or (jax.process_count() > 1 and jax.default_backend() != "cpu"):
        return
    try:
        folder = private_cache("pretrain", "programs", platform.node())
    except (UsageError, OSError) as error:
        _logger.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)


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
