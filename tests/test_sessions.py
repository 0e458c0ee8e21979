"""Sessions of noxfile.py, and their names in the documentation."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

SESSIONS = re.compile(r"nox -s ((?:\"[^\"]+\"|[a-z_]+)(?: [a-z_]+)*)")


def nox(*args):
    """Run nox on this repository, in the existing environments of its sessions."""
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "-R", *args]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def listed():
    """Descriptions of all sessions by name, from `nox -l`."""
    done = nox("--list")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^[*-] (\S+) -> (.*)$", done.stdout, re.M))


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv on PATH for the environment of the session")
def test_the_session_of_a_member_runs_only_this_member(tmp_path):
    report = tmp_path / "report.json"
    done = nox("-s", "tests(nnx-gpt2)", "--report", str(report), "--", "--collect-only", "-q", "-n0", "-k", "loss")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/test_loss.py::" in done.stdout
    sessions = json.loads(report.read_text())["sessions"]
    assert [(session["signatures"], session["result"]) for session in sessions] == [(["tests(nnx-gpt2)"], "success")]


def test_the_test_command_runs_each_member_and_then_the_integration_tests():
    done = nox("--list", "--json", "-s", "tests")
    members = {path.parent.name for path in ROOT.glob("*/*/pyproject.toml")}
    *first, last = [session["session"] for session in json.loads(done.stdout)]
    assert len(members) == 4
    assert set(first) == {f"tests({member})" for member in members}
    assert last == "tests(integration)"


def test_the_description_of_a_session_is_one_sentence(listed):
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


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv on PATH, which makes the session's environment")
@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("nnx-gpt2-v0.0.1", "the tag's version must be"),
        ("gpt2-v0.1.0", "the tag must be one of"),
    ],
)
def test_a_tag_that_is_not_the_version_of_a_package_is_not_released(tag, message):
    done = nox("-s", "release", "--", *tag.split())
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
