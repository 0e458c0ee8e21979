"""Checks of the limits of this machine: open files, and shared memory."""

import math
import os
import resource
import sys
from pathlib import Path

from pretrain._doctor.finding import Finding, fail, ok, warn
from pretrain._formats import gibibytes
from ray_jax_launch import Hardware

FEWEST_OPEN_FILES = 256
"""A run with Ray on two CPU cores needs more than 128. `train` raises its limit to 4,096 where it may."""

_OPEN_FILES = 4096
# Ray keeps objects in 30 % of the memory, and takes 10 GB for enough of /dev/shm: `resolve_object_store_memory` in
# ray/_private/utils.py of Ray 2.60. Where /dev/shm is smaller, it keeps them in files of its temporary folder.
_SHARE_OF_MEMORY, _ENOUGH_BYTES = 0.3, 10**10
# What NVIDIA advises for containers with NCCL, as `docker run --shm-size=1g`.
_NCCL_BYTES = 2**30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_open_files() -> list[Finding]:
    """Check how many files a process may open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _OPEN_FILES:
        text = "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
        return [ok("open files", f"a process may open {text}")]
    remedy = f"As root, run `ulimit -n {_OPEN_FILES}`; else set nofile in /etc/security/limits.conf and log in again."
    found = f"a process may open {most:,}, and a run needs {FEWEST_OPEN_FILES} to {_OPEN_FILES:,}"
    return [(fail if most < FEWEST_OPEN_FILES else warn)("open files", found, remedy)]


def check_shared_memory(hardware: Hardware | None) -> list[Finding]:
    """Check that the shared memory is large enough for Ray's objects, and for NCCL between GPUs."""
    name = "/dev/shm"
    if sys.platform != "linux" or (hardware is not None and hardware.kind == "local"):
        return [ok(name, "not needed for --hardware local" if sys.platform == "linux" else "only Linux needs it")]
    try:
        state = os.statvfs(name)
    except OSError as error:
        return [fail(name, f"cannot be used: {error.strerror}", "Mount a tmpfs on /dev/shm.")]
    free, memory = state.f_bavail * state.f_frsize, _memory_bytes()
    wanted = min(_SHARE_OF_MEMORY * memory, _ENOUGH_BYTES)
    remedy = f"Start the container with --shm-size={math.ceil(max(wanted, _NCCL_BYTES) / 2**30)}g, or remount /dev/shm."
    if hardware is not None and hardware.kind == "gpu" and hardware.num_devices > 1 and free < _NCCL_BYTES:
        return [fail(name, f"{gibibytes(free)} free, and NCCL needs {gibibytes(_NCCL_BYTES)} between GPUs", remedy)]
    if free < wanted:
        found = f"{gibibytes(free)} free of the {gibibytes(wanted)} that Ray takes; the rest is on disk, and slow"
        return [warn(name, found, remedy)]
    return [ok(name, f"{gibibytes(free)} free")]


def _memory_bytes() -> int:
    """Return the memory of this machine, or of this container."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory
