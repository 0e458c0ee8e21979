"""CPUs of this machine."""

import os


def num_usable_cpus() -> int:
    """Number of CPUs that this process may use: those of its affinity mask where the system has one, else all."""
    if hasattr(os, "sched_getaffinity"):  # which macOS lacks
        return len(os.sched_getaffinity(0))  # pyright: ignore[reportAttributeAccessIssue] - absent on macOS
    return os.cpu_count() or 1
