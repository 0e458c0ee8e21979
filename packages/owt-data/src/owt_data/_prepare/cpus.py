"""CPUs of this machine."""

import os


def num_usable_cpus() -> int:
    """Return the number of CPUs in the affinity mask of this process, or of all CPUs if the system has no mask."""
    if hasattr(os, "sched_getaffinity"):  # missing on macOS
        return len(os.sched_getaffinity(0))  # pyright: ignore[reportAttributeAccessIssue] - missing on macOS
    return os.cpu_count() or 1
