"""Table of the faults that the tests marked `fault` inject, from pytest's JUnit XML reports.

    python tests/fault_table.py [--out TABLE.md] REPORT.xml ...

A report comes from `pytest -m fault -o junit_family=xunit1 --junitxml=REPORT.xml`, and its file name is the tested
package or `integration`. Each test records one row or more by pytest's `record_property`, in this order: `fault` (the
fault), `lost` (the loss), and `recovery_s` (seconds until the work continued), if the work continued by itself.

Prints the table. Writes it to TABLE.md only if every test passed and recorded a row; otherwise exits with code 1.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

PACKAGES = ("ray", "jax", "orbax-checkpoint", "nnx-gpt2", "owt-data", "ray-jax-launch", "pretrain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One fault."""

    package: str
    """Tested package, or `integration`."""
    test: str
    """Name of the test."""
    fault: str
    """The injected fault."""
    lost: str
    """The loss, or `nothing`."""
    recovery_s: str
    """Seconds until the work continued; empty if no recovery was necessary."""


@dataclass(kw_only=True, slots=True)
class Reports:
    """Content of all reports."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Skipped tests, each with its reason."""
    problems: list[str] = field(default_factory=list)
    """Tests that failed, and tests that passed but recorded no complete row."""


def read_reports(paths: Iterable[Path]) -> Reports:
    """Read JUnit XML reports of the family xunit1.

    Raises:
        OSError: If a report cannot be read.
        xml.etree.ElementTree.ParseError: If a report is not XML.
    """
    reports = Reports()
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            _read_case(case, path.stem, reports)
    return reports


def _read_case(case: ElementTree.Element, package: str, reports: Reports) -> None:
    test = case.get("name", "")
    skipped = case.find("skipped")
    if case.find("failure") is not None or case.find("error") is not None:
        reports.problems.append(f"{package}: {test} failed")
        return
    if skipped is not None:
        reports.skipped.append(f"{package}: {test} ({skipped.get('message')})")
        return
    found: list[dict[str, str]] = []
    for entry in case.iter("property"):
        name, value = entry.get("name", ""), entry.get("value", "")
        if name == "fault":
            found.append({})
        if found and name in ("fault", "lost", "recovery_s"):
            found[-1][name] = value
    if not found or any("lost" not in values for values in found):
        reports.problems.append(f"{package}: {test} must record the properties fault and lost, got {found}")
        return
    reports.rows += [
        Row(package=package, test=test, fault=row["fault"], lost=row["lost"], recovery_s=row.get("recovery_s", ""))
        for row in found
    ]


def format_table(reports: Reports, versions: dict[str, str]) -> str:
    """Return the Markdown table under a line that names the hardware, the date and the versions."""
    rows = reports.rows
    nothing = sum(row.lost == "nothing" for row in rows)
    lines = [
        "# Faults",
        "",
        f"{os.cpu_count()} CPU cores, {platform.machine()}; {datetime.now(UTC).date().isoformat()}; {versions}",
        "",
        f"{len(rows)} faults; {nothing} caused no loss. `nox -s faults` injects them and writes this table.",
        "",
        "| | fault | loss | seconds until recovery | package | test |",
        "|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(rows, start=1):
        cells = (str(number), row.fault, row.lost, row.recovery_s, row.package, f"`{row.test}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if reports.skipped:
        lines += ["", "Skipped tests:", "", *(f"- {test}" for test in reports.skipped)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the table if it is complete, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    parser.add_argument("--out", type=Path, metavar="TABLE.md")
    options = parser.parse_args(argv)
    try:
        reports = read_reports(options.reports)
    except (OSError, ElementTree.ParseError) as error:
        print(f"REPORT.xml must be a JUnit XML file, got {error}. Run `nox -s faults`.", file=sys.stderr)
        return 2
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    table = format_table(reports, versions)
    print(table)
    for problem in reports.problems:
        print(problem, file=sys.stderr)
    if reports.problems or not reports.rows:
        print(f"{len(reports.rows)} faults; {len(reports.problems)} tests without a valid row", file=sys.stderr)
        return 1
    if options.out is not None:
        options.out.write_text(table, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
