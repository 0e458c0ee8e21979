"""Table of faults, from reports of real pytest runs."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from fault_table import main
from support import MEMBERS, ROOT

SOUND = """
    import pytest

    @pytest.mark.fault
    def test_a_kill_loses_the_last_steps(record_property):
        record_property("fault", "SIGKILL of a worker | of two")
        record_property("lost", "steps since the last checkpoint")
        record_property("recovery_s", 12.3)

    @pytest.mark.fault
    @pytest.mark.slow
    @pytest.mark.parametrize("error", ["EIO", "ESTALE"])
    def test_a_read_error_loses_nothing(error, record_property):
        record_property("fault", f"{error} while a checkpoint is read")
        record_property("lost", "nothing")

    @pytest.mark.fault
    def test_two_faults(record_property):
        for place in ("a folder", "a bucket"):
            record_property("fault", f"{place} is full")
            record_property("lost", "nothing")

    @pytest.mark.fault
    @pytest.mark.skip(reason="needs unshare")
    def test_skipped():
        pass

    def test_unmarked():
        pass
"""


@pytest.fixture
def report(tmp_path):
    """Run pytest on a source like `nox -s faults`, and return the report."""

    def run(source, name="package.xml"):
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\naddopts = --strict-markers -m 'not slow'\nmarkers =\n    fault: a fault\n    slow: slow\n"
        )
        lines = [line.removeprefix("    ") for line in source.splitlines()]
        (tmp_path / "test_it.py").write_text("\n".join(lines) + "\n")
        command = [
            sys.executable, "-m", "pytest", "-q", "-m", "fault", "-o", "junit_family=xunit1",
            f"--junitxml={tmp_path / name}",
        ]  # fmt: skip
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to load
        subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
        return tmp_path / name

    return run


def test_the_table_has_a_row_for_each_fault(report, tmp_path, capsys):
    out = tmp_path / "faults.md"
    assert main(["--out", str(out), str(report(SOUND, "owt-data.xml"))]) == 0
    table = out.read_text()
    assert capsys.readouterr().out.strip() == table.strip()
    assert "5 faults; 4 caused no loss." in table
    assert re.search(r"\d+ CPU cores, \w+; \d{4}-\d\d-\d\d; \{'python': '3\.", table)
    assert [line for line in table.splitlines() if re.match(r"\| \d", line)] == [
        "| 1 | SIGKILL of a worker \\| of two | steps since the last checkpoint | 12.3 | owt-data"
        " | `test_a_kill_loses_the_last_steps` |",
        "| 2 | EIO while a checkpoint is read | nothing |  | owt-data | `test_a_read_error_loses_nothing[EIO]` |",
        "| 3 | ESTALE while a checkpoint is read | nothing |  | owt-data | `test_a_read_error_loses_nothing[ESTALE]` |",
        "| 4 | a folder is full | nothing |  | owt-data | `test_two_faults` |",
        "| 5 | a bucket is full | nothing |  | owt-data | `test_two_faults` |",
    ]
    assert table.endswith("Skipped tests:\n\n- owt-data: test_skipped (needs unshare)\n")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("pass", "package: test_it must record the properties fault and lost, got []"),
        (
            "record_property('fault', 'a')",
            "package: test_it must record the properties fault and lost, got [{'fault': 'a'}]",
        ),
        ("record_property('fault', 'a'); record_property('lost', 'b'); assert False", "package: test_it failed"),
    ],
)
def test_a_test_that_fails_or_records_no_row_fails_the_table(body, problem, report, tmp_path, capsys):
    out = tmp_path / "faults.md"
    out.write_text("the former table")
    incomplete = f"{SOUND}\n    @pytest.mark.fault\n    def test_it(record_property):\n        {body}\n"
    assert main(["--out", str(out), str(report(incomplete))]) == 1
    captured = capsys.readouterr()
    assert "5 faults" in captured.out
    assert captured.err.splitlines() == [problem, "5 faults; 1 tests without a valid row"]
    assert out.read_text() == "the former table"


def test_a_test_that_cannot_be_imported_fails_the_table(report, capsys):
    assert main([str(report("    import nothing_of_this_name\n"))]) == 1
    assert "package: test_it failed" in capsys.readouterr().err


def test_reports_without_a_fault_fail_the_table(report, capsys):
    assert main([str(report("    def test_unmarked():\n        pass\n"))]) == 1
    assert capsys.readouterr().err == "0 faults; 0 tests without a valid row\n"


def test_a_missing_report_ends_with_an_error_message(tmp_path, capsys):
    assert main([str(tmp_path / "missing.xml")]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"REPORT.xml must be a JUnit XML file, got .*No such file.*\. Run `nox -s faults`\.\n", error)


@pytest.mark.parametrize("folder", [ROOT, *MEMBERS.values()], ids=lambda folder: folder.name)
def test_a_project_registers_the_markers(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    assert {"fault", "shared_data"} <= {marker.partition(":")[0] for marker in markers}
