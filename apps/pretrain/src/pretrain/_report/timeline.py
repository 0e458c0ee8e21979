"""The time line of a run: the length of each phase, without the time in which no command ran."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from pretrain._formats import duration
from pretrain._report.curves import Array
from pretrain._run.history import ENDS, Phase

_LEAST_WIDTH = 0.15  # percent of the time line


class WorkTime:
    """Seconds of work since the beginning of a run: time in which no command ran does not count.

    >>> phases = [(0.0, "training"), (10.0, "stopped"), (100.0, "training")]
    >>> work_time = WorkTime([Phase(step=0, time_s=time_s, phase=name) for time_s, name in phases], 0.0)
    >>> work_time(np.array([4.0, 10.0, 55.0, 102.0])).tolist()
    [4.0, 10.0, 10.0, 12.0]

    Args:
        phases: the run's phases, in the order of time.
        began_s: Unix time of the beginning.
    """

    def __init__(self, phases: Sequence[Phase], began_s: float) -> None:
        self._began_s = began_s
        self._stops = [(phase.time_s, following.time_s) for phase, following in pairwise(phases) if phase.phase in ENDS]

    def __call__(self, times_s: Array) -> Array:
        """Return the seconds of work until Unix times."""
        idle_s = np.zeros_like(times_s)
        for start, end in self._stops:
            idle_s += np.clip(times_s, start, end) - start
        return times_s - self._began_s - idle_s


def draw_timeline(phases: Sequence[Phase], *, label: str, end_s: float, scale_s: float, max_bars: int = 1000) -> Markup:
    """Draw the phases of a run as bars, and a line where the run was stopped. The shortest of many are left out.

    Args:
        phases: the run's phases, in the order of time; at least one.
        label: name of the run.
        end_s: Unix time at which the last phase ends.
        scale_s: seconds of the full width.
        max_bars: bars to draw at most.
    """
    work_time = WorkTime(phases, phases[0].time_s)
    end = Phase(step=phases[-1].step, time_s=max(end_s, phases[-1].time_s), phase="finished")
    starts = work_time(np.array([phase.time_s for phase in phases]))
    bars = []
    for (phase, following), start in zip(pairwise([*phases, end]), starts, strict=True):
        seconds = following.time_s - phase.time_s
        words = f"{phase.phase} from step {phase.step:,}, {duration(max(0.0, seconds), decimals=1)}"
        if phase.phase in ("stopped", "failed"):
            bars.append((seconds, start, 0.0, "stopped", words))
        elif seconds > 0:
            bars.append((seconds, start, seconds, phase.phase, words))
    chosen = sorted(bars, key=lambda bar: (bar[3] in ("restarting", "stopped"), bar[0]), reverse=True)[:max_bars]
    # Short bars are above long ones, of which they would be a part at their least width.
    chosen.sort(key=lambda bar: bar[2], reverse=True)
    parts = [Markup('<svg class="timeline" role="img" aria-label="{}">').format(f"Time line of {label}")]
    for _, start, seconds, name, words in chosen:
        width = max(100 * seconds / scale_s, _LEAST_WIDTH)
        parts.append(
            Markup('<rect class="{}" x="{}%" width="{}%" height="100%"><title>{}</title></rect>').format(
                name, f"{100 * start / scale_s:.3f}", f"{width:.3f}", words
            )
        )
    return Markup("").join([*parts, Markup("</svg>")])
