"""The memory that a process may map. The check comes before the imports that need more."""

import resource

# Orbax could start no thread within 3 GiB, and a run with Ray needs less than 16.
_LEAST_BYTES = 4 << 30


def lack_of_address_space() -> str | None:
    """Return the sentence about a limit that is too small, or None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= _LEAST_BYTES:
        return None
    return (
        f"a process must be allowed to map at least {_LEAST_BYTES >> 30} GiB of memory, got {limit >> 20} MiB. Raise "
        "the limit with `ulimit -v`."
    )
