"""Score of the mutation tests of a package, from the results of mutmut.

    python tests/mutation_score.py FOLDER

FOLDER is the folder of a package, where `mutmut run` has ended, of all mutants or of some. Its file
`accepted_mutants.toml` lists the mutants that change no behavior, each with the reason:

    [[mutant]]
    function = "owt_data._tokens.window_order.window_order"
    before = "if number < 0:"
    after = "if number <= 0:"
    reason = "number is never 0 here"

Prints a table of the modules, and each survivor that is not in that file. Exits with code 1 if the tests notice less
than 90 % of the other mutants of a module, or if the file lists a mutant that does not survive.
"""

import argparse
import contextlib
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

LEAST_SCORE = 0.9
ACCEPTED = "accepted_mutants.toml"
_SURVIVED, _NO_TESTS, _ALSO_NO_TESTS = 0, 5, 33  # exit codes of pytest, and mutmut's own
# pytest could not start in the process of the fork server. mutmut shows it as a timeout.
_NOT_STARTED = 255


@dataclass(frozen=True, order=True, slots=True)
class Mutant:
    """A changed function."""

    function: str
    """Its name, with module and class."""
    before: str
    """Lines that the change removes, without indentation."""
    after: str
    """Lines that the change adds."""


@dataclass(kw_only=True, slots=True)
class ModuleScore:
    """Mutants of a module."""

    module: str
    num_mutants: int = 0
    """All mutants of the module. Some may not have run."""
    num_noticed: int = 0
    accepted: list[Mutant] = field(default_factory=list)
    """Mutants that change no behavior."""
    survivors: list[Mutant] = field(default_factory=list)
    """Mutants that no test noticed, or that no test ran, without the accepted ones."""

    @property
    def num_run(self) -> int:
        """The number of mutants that the tests have run."""
        return self.num_noticed + len(self.accepted) + len(self.survivors)

    @property
    def score(self) -> float:
        """The share of the mutants that the tests notice. The accepted ones do not count."""
        num = self.num_noticed + len(self.survivors)
        return self.num_noticed / num if num else 1.0


def read_scores(accepted: set[Mutant]) -> list[ModuleScore]:
    """Read the results of `mutmut run` in the working folder.

    Raises:
        ValueError: pytest could not start for a mutant.
    """
    scores = []
    for path in sorted(Path("mutants").rglob("*.meta")):
        exit_codes = json.loads(path.read_text())["exit_code_by_key"]
        source = path.relative_to("mutants").with_suffix("")
        score = ModuleScore(module=".".join(source.with_suffix("").parts[1:]), num_mutants=len(exit_codes))
        for name, code in exit_codes.items():
            if code is None:
                continue
            if code == _NOT_STARTED:
                raise ValueError(
                    f"pytest must start for each mutant, got an error for {name}. Correct the configuration of pytest "
                    "or of mutmut, and delete the folder mutants."
                )
            if code not in (_SURVIVED, _NO_TESTS, _ALSO_NO_TESTS):
                score.num_noticed += 1
            elif (mutant := _describe(score.module, name, source)) in accepted:
                score.accepted.append(mutant)
            else:
                score.survivors.append(mutant)
        if score.num_run:
            scores.append(score)
    return scores


def _describe(module: str, name: str, source: Path) -> Mutant:
    function, of_class = orig_function_and_class_names_from_key(name)
    lines = get_diff_for_mutant(name, path=source).splitlines()[2:]  # the first two name the files
    before, after = ("\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return Mutant(".".join(filter(None, (module, of_class, function))), before, after)


def read_accepted() -> set[Mutant]:
    """Read the accepted mutants of the working folder.

    Raises:
        ValueError: the file is no list of mutants with a reason.
    """
    path = Path(ACCEPTED)
    entries = tomllib.loads(path.read_text()).get("mutant", []) if path.exists() else []
    for entry in entries:
        if entry.keys() != {"function", "before", "after", "reason"} or not all(entry.values()):
            found = f"got {entry}. Add what is missing"
            raise ValueError(f"{path} must give function, before, after and reason of each mutant, {found}.")
    return {Mutant(entry["function"], entry["before"].strip(), entry["after"].strip()) for entry in entries}


def format_table(scores: Sequence[ModuleScore]) -> str:
    """Return the table in Markdown."""
    lines = ["| module | mutants | run | noticed | accepted | score |", "|---|---|---|---|---|---|"]
    for one in scores:
        numbers = f"{one.num_mutants} | {one.num_run} | {one.num_noticed} | {len(one.accepted)}"
        lines.append(f"| `{one.module}` | {numbers} | {one.score:.1%} |")
    return "\n".join(lines)


def _problems(scores: Sequence[ModuleScore], accepted: set[Mutant]) -> Iterator[str]:
    if not scores:
        yield "there are no mutants: run mutmut first"
    for one in scores:
        if one.score < LEAST_SCORE:
            yield f"{one.module}: the tests must notice {LEAST_SCORE:.0%} of the mutants, got {one.score:.1%}"
    # Of a module whose mutants have not all run, the others may survive.
    modules = tuple(f"{one.module}." for one in scores if one.num_run == one.num_mutants)
    for mutant in sorted(accepted - {mutant for one in scores for mutant in one.accepted}):
        if mutant.function.startswith(modules):
            yield f"{ACCEPTED} must list survivors only, got {mutant.function}: {mutant.after}. Remove it."


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the survivors, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args(argv).folder
    with contextlib.chdir(folder):
        try:
            accepted = read_accepted()
            scores = read_scores(accepted)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        problems = list(_problems(scores, accepted))
    for one in scores:
        for mutant in one.survivors:
            print(f"{mutant.function}\n  - {mutant.before}\n  + {mutant.after}")
    print(format_table(scores))
    for problem in problems:
        print(problem, file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
