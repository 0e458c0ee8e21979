"""Result of a launch: Ray Train's, with more in it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray.train

from ray_jax_launch._control.control_actor import ControlHandle, answer
from ray_jax_launch._numbers import check_number
from ray_jax_launch._storage import StoragePath, join_path, open_uri


class SavedCheckpoint(ray.train.Checkpoint):
    """The newest checkpoint that the loop has saved by `Checkpoints`.

    Attributes:
        step: number of the checkpoint.
        folder: folder or URI of the run's checkpoints.

    Raises:
        LaunchError: the step is no whole number, or object storage cannot be reached.
    """

    def __init__(self, folder: StoragePath, step: int) -> None:
        step = check_number("step", step, at_least=0)
        self.step, self.folder = step, folder
        place = join_path(folder, str(step))
        if isinstance(place, Path):
            super().__init__(place)
        else:
            filesystem, path = open_uri(place)
            super().__init__(path, filesystem)

    def restore(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read items of the checkpoint. See `Checkpoints.restore`, for `like` and the exceptions."""
        from ray_jax_launch._checkpoint.checkpoints import Checkpoints  # imports jax

        with Checkpoints(self.folder, read_only=True) as checkpoints:
            return checkpoints.restore(self.step, like)


@dataclass
class Result(ray.train.Result):
    """Result of a launch.

    Attributes:
        return_value: value that the loop returned on rank 0.
        metrics: last value of each metric that rank 0 logged (`log_metrics`) or reported (`ray.train.report`).
        checkpoint: the newest checkpoint that the loop reported; if it reported none, the newest one that it saved by
            `Checkpoints` (`SavedCheckpoint`, with `step` and `restore(like)`).
        best_checkpoints: reported checkpoints that are kept, with their metrics.
        path: folder of the run: the name in the storage path. From `launch`, a `Path` or a URI; from `JaxTrainer`, a
            path in `filesystem`, as Ray's.
        error: None, because a failed run raises.
        log_folder: folder of Ray's full logs on each node: the output of workers, and Ray Train's own logs.
    """

    path: Any
    return_value: Any = None
    log_folder: str = ""


def make_result(
    result: ray.train.Result,
    control: ControlHandle,
    return_value: Any,
    log_folder: str,
    path: StoragePath | None = None,
) -> Result:
    """Return Ray's result with what the control actor knows, and with this path, unless it is None."""
    state = answer(control.state.remote())
    given = {field.name: getattr(result, field.name) for field in fields(result)}
    given |= {
        "metrics": {**(result.metrics or {}), **state.latest},
        "checkpoint": result.checkpoint or (SavedCheckpoint(*state.saved) if state.saved is not None else None),
        "error": None,
        "return_value": return_value,
        "path": result.path if path is None else path,
    }
    return Result(**given, log_folder=log_folder)
