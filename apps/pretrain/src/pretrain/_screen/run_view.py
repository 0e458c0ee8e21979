"""The state of a run that the screen shows. Records and phases feed it, during `train` or from the run's files."""

import bisect
import time
from collections.abc import Callable

from owt_data import Progress
from pretrain._run.history import RECENT_PHASES, Phase, PhaseName, RunHistory, seconds_by_phase
from pretrain._run.metrics import Record, of_sources
from pretrain._screen.ending import as_typed
from pretrain._surroundings.typed_command import application

Clock = Callable[[], float]
"""Function that returns the Unix time in seconds."""

_MOST_POINTS = 256

_LABELS: dict[PhaseName, str] = {"loading": "loading the model"}
_AT_WORK: tuple[PhaseName, ...] = ("loading", "compiling", "training", "evaluating", "saving", "sampling")


class Tokenizing:
    """The last progress of a preparation in another thread."""

    def __init__(self) -> None:
        self.last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Note the progress."""
        self.last = progress

    def summary(self) -> str:
        """Return the share of the text that is tokenized; an empty text after the end."""
        if self.last is None or self.last.stage not in ("checking", "tokenizing") or self.last.fraction == 1:
            return ""
        if self.last.fraction is None:
            return f"{self.last.num_tokens:,} tokens tokenized"
        return f"{self.last.fraction:.0%} tokenized"


class Curve:
    """Some points of a curve, about evenly spread over the steps, and the newest one.

    Args:
        gap: fewest steps between two points, but for the newest. It grows with the length of the curve.
    """

    def __init__(self, gap: float = 0.0) -> None:
        self.points: list[tuple[int, float]] = []
        """Steps and values, in the order of steps."""
        self._gap = gap

    def add(self, step: int, value: float) -> None:
        """Add a point after the others."""
        if len(self.points) > 1 and self.points[-1][0] - self.points[-2][0] < self._gap:
            self.points.pop()
        self.points.append((step, value))
        if len(self.points) > _MOST_POINTS:
            points, self.points = self.points, []
            self._gap = 2 * (step - points[0][0]) / _MOST_POINTS
            for point in points:
                self.add(*point)

    def cut(self, step: int) -> None:
        """Drop the points of a step and of later ones."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()


class RunView:
    """The state of a run.

    Args:
        max_steps: the last step.
        is_local: True if the process of the command trains, without workers.
        tokenizing: the preparation of the tokens, if it goes on during the run.
        blame: the command that looks into a step, without its step.
        clock: returns the Unix time.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        is_local: bool = False,
        tokenizing: Tokenizing | None = None,
        blame: str = "pretrain blame RUN",
        clock: Clock = time.time,
    ) -> None:
        self.max_steps = max_steps
        self.blame = blame
        self.clock = clock
        self.tokenizing = tokenizing
        self.last: Record = {}
        """The newest record."""
        self.losses = Curve()
        """Training losses of the records."""
        self.val_losses = Curve()
        """Validation losses."""
        self.source_losses: dict[str, float] = {}
        """The last validation loss of each name of a mixture."""
        self.num_restarts = 0
        """Starts of the workers after the first."""
        self.start_step: int | None = None
        """Step from which the workers of the last start have continued; None before they have."""
        self.notice = ""
        """Text that replaces the phase."""
        self._starting = "starting" if is_local else "starting the workers"
        self._phases: list[Phase] = []  # the last ones
        self._before_s = 0.0  # of the phases before them
        self._loaded_s = 0.0
        self._timed: list[Record] = []  # the first and the newest record with a time since the last start

    @classmethod
    def of(
        cls, history: RunHistory, *, is_local: bool, tokenizing: Tokenizing | None = None, clock: Clock = time.time
    ) -> "RunView":
        """Return the state of a run from its files. The other arguments are those of the class."""
        max_steps = history.description.config.train.max_steps
        blame = f"{application()} blame {as_typed(history.folder)}"
        view = cls(max_steps, is_local=is_local, tokenizing=tokenizing, blame=blame, clock=clock)
        if history.records:  # they may be more at some steps than at others
            gap = 2 * (history.records[-1]["step"] - history.records[0]["step"]) / _MOST_POINTS
            view.losses, view.val_losses = Curve(gap), Curve(gap)
        for phase in history.phases:
            view.add_phase(phase)
        for record in history.records:
            view.add_record(record)
        view.num_restarts = max(0, len(history.starts) - 1)
        return view

    def add_record(self, record: Record) -> None:
        """Add a record. After a restart, its step may be an earlier one."""
        step = record["step"]
        if self.last and step < self.last["step"]:
            self._timed = []
        self.last = record
        self.source_losses = of_sources(record) or self.source_losses
        for name, curve in (("loss", self.losses), ("val_loss", self.val_losses)):
            curve.cut(step)
            if name in record:
                curve.add(step, record[name])
        # The record of a restored checkpoint has the times of the former workers.
        if "step_s" in record and record.get("time_s", self._loaded_s) >= self._loaded_s:
            self._timed = [*self._timed[:1], record]

    def add_phase(self, phase: Phase) -> None:
        """Add a phase of worker 0."""
        if phase.phase in ("starting", "restarting"):
            self._start_again()
        elif self.start_step is None and phase.phase in _AT_WORK:
            self.start_step, self._loaded_s = phase.step, phase.time_s
        if phase.phase == "restarting":
            self.num_restarts += 1
        self._insert(phase)

    def enter(self, phase: PhaseName, time_s: float | None = None) -> None:
        """Begin a phase that the workers cannot tell, because they do not run: now, or at a time."""
        self._start_again()
        time_s = self.clock() if time_s is None else time_s
        self._insert(Phase(step=self.step, time_s=time_s, phase=phase))

    def _insert(self, phase: Phase) -> None:
        """Insert a phase in the order of time, and count the time of the phases that are too many to keep."""
        if not self._phases:
            self._before_s = phase.before_s
        bisect.insort(self._phases, phase, key=lambda phase: phase.time_s)
        while len(self._phases) > RECENT_PHASES:
            first = self._phases.pop(0)
            self._before_s += sum(seconds_by_phase([first], self._phases[0].time_s).values())

    @property
    def step(self) -> int:
        """The step of the newest record."""
        return self.last.get("step", 0)

    @property
    def has_validated(self) -> bool:
        """True if the last validation is that of the run: at step 0, it is of the untrained model."""
        return bool(self.val_losses.points) and (self.val_losses.points[-1][0] > 0 or self.step == 0)

    @property
    def phase(self) -> PhaseName:
        """The phase of the run. Damaged files may have records, but no phases."""
        if self._phases:
            return self._phases[-1].phase
        return "training" if self.last else "starting"

    @property
    def phase_began_s(self) -> float | None:
        """Unix time of the beginning of the phase; None without phases."""
        began_s = None
        for phase in reversed(self._phases):
            if phase.phase != self.phase:
                break
            began_s = phase.time_s
        return began_s

    def phase_s(self) -> float:
        """Return the seconds since the beginning of the phase; 0 without phases."""
        return 0.0 if self.phase_began_s is None else max(0.0, self.clock() - self.phase_began_s)

    def label(self) -> str:
        """Return the phase as text, without its time."""
        if self.notice:
            return self.notice
        return self._starting if self.phase == "starting" else _LABELS.get(self.phase, self.phase)

    def elapsed_s(self) -> float | None:
        """Return the seconds of all phases of the run, or None without phases."""
        if not self._phases:
            return None
        return self._before_s + sum(seconds_by_phase(self._phases, self.clock()).values())

    def left_s(self) -> float | None:
        """Return the estimated seconds until the last step; None before the first time of a step."""
        if not self._timed:
            return None
        first, newest = self._timed[0], self._timed[-1]
        num_steps, step_s = newest["step"] - first["step"], newest["step_s"]
        if num_steps and "time_s" in newest and "time_s" in first:
            step_s = (newest["time_s"] - first["time_s"]) / num_steps  # evaluations and saves count too
        since_s = max(0.0, self.clock() - newest["time_s"]) if "time_s" in newest else 0.0
        return max(0.0, (self.max_steps - newest["step"]) * step_s - since_s)

    def _start_again(self) -> None:
        self.start_step, self._timed = None, []
