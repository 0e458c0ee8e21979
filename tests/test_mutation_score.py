"""Mutation score, from a real run of mutmut on a small package."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from mutation_score import main
from support import MEMBERS, ROOT

CODE = """
def larger(a, b):
    if a > b:
        return a
    return b


def double(a):
    return a * 2


def untested():
    return 1
"""
TESTS = """
from small.numbers import double, larger

def test_double():
    assert double(3) == 6

def test_larger():
    assert [larger(1, 2), larger(2, 1)] == [2, 2]
"""
CONFIG = '[tool.mutmut]\nsource_paths = ["src"]\npytest_add_cli_args_test_selection = ["tests"]\n'
ACCEPTED = """
[[mutant]]
function = "small.numbers.larger"
before = "if a > b:"
after = "if a >= b:"
reason = "of equal numbers, each is the larger one"
"""


def run_mutants(folder, *names):
    command = [sys.executable, "-m", "mutmut", "run", *names]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package whose mutants have run: one survives, one has no test, and two are noticed."""
    folder = tmp_path_factory.mktemp("package")
    for name, text in {
        "src/small/__init__.py": "",
        "src/small/numbers.py": CODE,
        "tests/test_larger.py": TESTS,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pyproject.toml").write_text(CONFIG)
    run_mutants(folder)
    return folder


def test_survivors_and_code_without_tests_count_against_the_score(package, capsys):
    assert main([str(package)]) == 1
    out, err = capsys.readouterr()
    assert "small.numbers.larger\n  - if a > b:\n  + if a >= b:\n" in out
    assert "small.numbers.untested\n  - return 1\n  + return 2\n" in out
    assert "| `small.numbers` | 4 | 4 | 2 | 0 | 50.0% |" in out
    assert err == "small.numbers: the tests must notice 90% of the mutants, got 50.0%\n"


def test_accepted_mutants_do_not_count(package, capsys):
    (package / "accepted_mutants.toml").write_text(ACCEPTED)
    main([str(package)])
    out, _ = capsys.readouterr()
    assert "if a >= b:" not in out
    assert "| `small.numbers` | 4 | 4 | 2 | 1 | 66.7% |" in out


def test_a_part_of_the_mutants_has_a_score_of_its_own(package, tmp_path, capsys):
    """The others are not rejected as survivors that the list of accepted mutants has."""
    for name in ("src", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(package / name)
    (tmp_path / "accepted_mutants.toml").write_text(ACCEPTED)
    run_mutants(tmp_path, "small.numbers.x_double*")
    assert main([str(tmp_path)]) == 0
    assert "| `small.numbers` | 4 | 2 | 2 | 0 | 100.0% |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("a >= b", "a < b"), 1, "must list survivors only, got small.numbers.larger: if a < b:. Remove it."),
        (('"of equal numbers, each is the larger one"', '""'), 2, "must give function, before, after and reason of"),
    ],
)
def test_a_wrong_list_of_accepted_mutants_is_rejected(package, capsys, change, code, message):
    (package / "accepted_mutants.toml").write_text(ACCEPTED.replace(*change))
    assert main([str(package)]) == code
    assert message in capsys.readouterr().err


def test_every_package_lists_the_modules_whose_mutants_run():
    assert all("[tool.mutmut]" in path.read_text() for path in ROOT.glob("*/*/pyproject.toml"))


def test_mutants_for_which_pytest_does_not_start_are_not_noticed(package, capsys):
    """As by a warning that is an error: mutmut has imported a plugin of pytest before."""
    for name in ("src", "tests"):
        shutil.copytree(package / name, package / "broken" / name)
    settings = 'process_isolation = "forkserver"\nforkserver_warmup = "import"\npreload_modules_file = "preload.txt"\n'
    options = '[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n'
    (package / "broken" / "pyproject.toml").write_text(CONFIG + settings + options)
    (package / "broken" / "preload.txt").write_text("jaxtyping\n")
    run_mutants(package / "broken")
    assert main([str(package / "broken")]) == 2
    assert capsys.readouterr().err.startswith("pytest must start for each mutant, got an error for small.numbers.x_")


@pytest.mark.parametrize("name", MEMBERS)
def test_the_files_of_a_mutation_session_exist(name):
    """A module or a test that was renamed would be left out."""
    settings = tomllib.loads((MEMBERS[name] / "pyproject.toml").read_text())["tool"]["mutmut"]
    files = [*settings["only_mutate"], *settings.get("pytest_add_cli_args_test_selection", [])]
    assert [file for file in files if not any(MEMBERS[name].glob(file))] == []
