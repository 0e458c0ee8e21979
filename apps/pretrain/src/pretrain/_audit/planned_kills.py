"""The plan of the kills of a run: which process, and at which step."""

import random
from dataclasses import dataclass

# The last kill is before this share of the steps: a run that has ended cannot be killed.
_LAST = 0.9
# Longest random time from a step to the kill, which then comes in any phase: in a step, in a save, between two.
_LONGEST_DELAY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedKill:
    """A kill at a random place."""

    step: int
    """The step after which it comes."""

    delay_s: float
    """Seconds after the step."""

    is_of_command: bool
    """True to kill the command, False for one of its workers."""


def plan_kills(number: int, max_steps: int, *, has_workers: bool, rng: random.Random) -> list[PlannedKill]:
    """Return random kills, one in each of as many equal parts of a run.

    Args:
        number: number of kills, at least 1. If there are workers, half of the kills are theirs, rounded up.
        max_steps: steps of the run, at least twice the number of kills.
        has_workers: False if the command trains by itself.
        rng: the source of the places.
    """
    of_commands = [not has_workers or bool(index % 2) for index in range(number)]
    rng.shuffle(of_commands)
    return [
        PlannedKill(
            step=1 + int((index + rng.random()) * _LAST * (max_steps - 1) / number),
            delay_s=rng.uniform(0, _LONGEST_DELAY_S),
            is_of_command=is_of_command,
        )
        for index, is_of_command in enumerate(of_commands)
    ]
