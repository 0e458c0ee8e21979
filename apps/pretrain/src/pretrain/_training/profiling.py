"""A profile of some steps, in the layout of TensorBoard's profiler."""

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from pretrain._best_effort import best_effort
from pretrain._config import profiled_steps

_LOST = "the profile"
_logger = logging.getLogger("pretrain")


class Profiling:
    """A trace of some steps on rank 0. Other ranks do nothing.

    Args:
        profile: the steps, as in the configuration, or None.
        folder: the folder of TensorBoard's files.
    """

    def __init__(self, profile: str | None, folder: Path) -> None:
        is_profiled = profile is not None and jax.process_index() == 0
        self._steps = profiled_steps(profile) if is_profiled and profile else range(0)
        self._folder = folder
        self._trace, self._step = contextlib.ExitStack(), contextlib.ExitStack()
        self._outputs: Any = None

    def __enter__(self) -> "Profiling":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def limit_steps(self, start: int, max_steps: int) -> None:
        """Leave out the steps that will not run. Log a warning if all are left out, unless an earlier start ran them.

        Args:
            start: the steps of the run before this start.
            max_steps: the last step.
        """
        steps = range(max(self._steps.start, start + 1), min(self._steps.stop, max_steps + 1))
        if self._steps and not steps and next(self._folder.glob("plugins/profile/*"), None) is None:
            _logger.warning(
                "nothing is profiled: --profile %d:%d must name steps from %d to %d",
                self._steps.start,
                self._steps.stop,
                start + 1,
                max_steps,
            )
        self._steps = steps

    def before_step(self, step: int) -> None:
        """Start the trace if the step is the first of the profile. Call this before a step is dispatched."""
        if step not in self._steps:
            return
        if step == self._steps.start:
            with best_effort(_LOST):
                self._start()
        self._step.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def after_step(self, step: int, outputs: Any) -> None:
        """End the trace if the step is the last of the profile. Call this after a step is dispatched.

        Args:
            step: the step.
            outputs: arrays of the step. The trace begins and ends when the steps before are computed.
        """
        if step == self._steps.start - 1:
            jax.block_until_ready(outputs)
        if step not in self._steps:
            return
        self._outputs = outputs
        self._step.close()
        if step == self._steps.stop - 1:
            self._stop()

    def _start(self) -> None:
        # JAX cannot end a trace that it cannot write.
        (self._folder / "plugins" / "profile").mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions would slow the steps, and are no operations
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._trace.callback(jax.profiler.stop_trace)
        self._trace.callback(lambda: jax.block_until_ready(self._outputs))

    def _stop(self) -> None:
        self._step.close()
        with best_effort(_LOST):
            self._trace.close()
