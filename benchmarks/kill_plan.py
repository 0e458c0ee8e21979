"""The kills of `kill_matrix.py`, as a fixed list that a seed makes."""

import random
from dataclasses import dataclass, field

from watched_run import COMMAND, PATTERNS, PHASES, REAPER, SECOND_RAYLET, SECOND_WORKER, TASK

HARDWARE = ("local", "cpu:1", "cpu:2", "nodes")
# `ray start` starts them. A cluster of this machine alone has none of them.
_OF_NODES = ("monitor.py", "log_monitor.py", "dashboard.py")
# They are there once Ray Data has started; the last two always on nodes.
_OF_RAY_DATA = ("ray::_StatsActor", TASK, "ray::_AutoscalingCoordinatorActor", "ray::IDLE")
SIGNALS = ("SIGKILL", "SIGINT", "SIGTERM", "SIGTERM twice to the group", "SIGHUP", "Ctrl-C twice")


@dataclass
class Kill:
    """A kill of the plan, and what came of it."""

    hardware: str
    phase: str
    victim: str
    signal: str
    run: int = 0
    at_phase: str = ""
    at_step: int = 0
    at_s: float = 0.0
    outcome: str = ""
    said: str = ""
    """The last line that the command printed, if it ended."""
    next_step_s: float | None = None
    lost_steps: int = 0
    faults: list[str] = field(default_factory=list)
    num_tries: int = 0
    _log_begin: int = 0
    _num_starts: int = 0


def _has(cluster: str, name: str) -> bool:
    return name != REAPER if cluster == "nodes" else name not in _OF_NODES


def plan(num_kills: int, hardware: list[str], seed: int) -> list[Kill]:
    """Return the kills. Each process is a victim twice, on different hardware, if there are kills enough."""
    rng, clusters = random.Random(seed), [one for one in hardware if one != "local"]
    victims: list[tuple[str, str, str]] = []
    for _ in range(2 if clusters else 0):
        names = rng.sample(list(PATTERNS), len(PATTERNS))
        for number, name in enumerate(names):
            places = [one for one in clusters if _has(one, name)]
            if places:
                victims.append((places[(number + len(victims)) % len(places)], name, "SIGKILL"))
        if "nodes" in clusters:
            victims += [("nodes", SECOND_RAYLET, "SIGKILL"), ("nodes", SECOND_WORKER, "SIGKILL")]
    # On `local` only the command can be killed.
    num_local = (num_kills // 5 if clusters else num_kills) if "local" in hardware else 0
    del victims[num_kills - num_local :]
    signals = {one: [name for _ in range(num_kills) for name in rng.sample(SIGNALS, len(SIGNALS))] for one in hardware}
    for number in range(num_kills - len(victims)):
        place = "local" if number < num_local else clusters[(number - num_local) % len(clusters)]
        victims.append((place, COMMAND, signals[place].pop()))
    kills = []
    for one in hardware:
        mine = [kill for kill in victims if kill[0] == one]
        phases = [name for _ in mine for name in rng.sample(PHASES, len(PHASES))]
        for phase, (_, victim, number) in zip(phases, mine, strict=False):
            is_late = victim in (_OF_RAY_DATA[:2] if one == "nodes" else _OF_RAY_DATA)
            kills.append(Kill(one, "training" if is_late else phase, victim, number))
    return kills
