"""Which checkpoints a folder holds. Imports nothing, so that drivers can ask without touching jax."""

from pathlib import Path


def latest_step(folder: Path) -> int | None:
    """Number of the newest whole checkpoint in a folder, or None where there is none.

    A checkpoint under way has a temporary name, which is no number.
    """
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=None)
