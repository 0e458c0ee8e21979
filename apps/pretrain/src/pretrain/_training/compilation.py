"""The cache of compiled programs, for later starts of a run and for restarts of its workers."""

import logging
import platform

import jax

from pretrain._errors import UsageError
from pretrain._surroundings.private_cache import private_cache

_logger = logging.getLogger("pretrain")

# Programs that compile faster are not kept.
_MIN_COMPILE_S = 0.2
# The least recently used programs are deleted.
_MAX_BYTES = 1 << 30


def keep_programs() -> None:
    """Keep compiled programs in the user's cache, in a folder for this host below `~/.cache/pretrain` on Linux.

    A program for the CPU of one host may use instructions that another host with the same home folder lacks.

    The folder is open to this user only. If it belongs to another user, programs are not kept.

    The environment variable `JAX_COMPILATION_CACHE_DIR` names another folder. It must be the user's own, because jax
    runs the code in it. If the folder cannot be written, jax warns and compiles.

    Several processes of GPUs share the work of a compilation, and only the first of them writes the cache. There,
    programs are not kept.
    """
    if jax.config.values["jax_compilation_cache_dir"] or (jax.process_count() > 1 and jax.default_backend() != "cpu"):
        return
    try:
        folder = private_cache("pretrain", "programs", platform.node())
    except (UsageError, OSError) as error:
        _logger.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
