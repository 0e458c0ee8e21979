"""The sessions of noxfile.py: which run, and that the commands in the documentation name real ones."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

SESSIONS = re.compile(r"nox -s ((?:\"[^\"]+\"|[a-z_]+)(?: [a-z_]+)*)")


def nox(*args):
    """Run nox on the noxfile of this repository, reusing the sessions' environments."""
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "-R", *args]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def listed():
    """The description of every session, as `nox -l` prints it."""
    done = nox("--list")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^[*-] (\S+) -> (.*)$", done.stdout, re.M))


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv on PATH, which makes the session's environment")
def test_a_members_session_runs_that_member_alone(tmp_path):
    report = tmp_path / "report.json"
    done = nox("-s", "tests(nnx-gpt2)", "--report", str(report), "--", "--collect-only", "-q", "-n0", "-k", "loss")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/test_loss.py::" in done.stdout
    sessions = json.loads(report.read_text())["sessions"]
    assert [(session["signatures"], session["result"]) for session in sessions] == [(["tests(nnx-gpt2)"], "success")]


def test_the_test_command_runs_every_member_and_then_the_integration_tests():
    done = nox("--list", "--json", "-s", "tests")
    members = {path.parent.name for path in ROOT.glob("*/*/pyproject.toml")}
    *parts, last = [session["session"] for session in json.loads(done.stdout)]
    assert len(members) == 4
    assert set(parts) == {f"tests({member})" for member in members}
    assert last == "tests(integration)"


def test_every_session_says_in_one_sentence_what_it_does(listed):
    assert "tests(pretrain)" in listed
    for description in listed.values():
        assert re.fullmatch(r"[A-Z].*\.", description)
        assert ". " not in description


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", ".ci/run", ".github/workflows/ci.yml"])
def test_documented_sessions_exist(file, listed):
    known = listed.keys() | {name.partition("(")[0] for name in listed}
    named = [name for names in SESSIONS.findall((ROOT / file).read_text()) for name in re.findall(r'[^"\s]+', names)]
    assert named
    assert set(named) <= known
