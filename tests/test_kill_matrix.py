"""The matrix of kills in a short form: real commands are killed, and the numbers stay the same."""

import json
import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.slow
@pytest.mark.fault
def test_kills_of_a_local_run_change_no_number(tmp_path, record_property):
    record_property("fault", "two kills of the kill matrix, on `local`")
    record_property("lost", "steps since the last checkpoint")
    script = ROOT / "benchmarks" / "kill_matrix.py"
    command = [sys.executable, str(script), "--kills", "10", "--hardware", "local", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    results = json.loads((tmp_path / "kill_matrix.json").read_text())
    assert [kill["faults"] for kill in results["kills"]] == [[], []]
    assert all(run["metrics"] and run["samples"] and run["parameters"] for run in results["runs"])
