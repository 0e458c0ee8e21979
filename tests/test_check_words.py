"""The check of words that `nox -s lint` runs."""

import subprocess
import sys

import pytest
from check_words import find_violations
from support import ROOT


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a damaged checkpoint is\nSet aside.", 2),
        ("# They obey.", 1),
        ("It is set\naside.", 1),
        ("x = 1\n# It is set\n# aside.", 2),
        ('def f():\n    """What the step returned."""', 2),
        ('"""Which window comes when."""', 1),
        ("# A package\n\n[nox](https://py" + "pi.org/project/nox)", 3),
    ],
)
def test_a_banned_phrase_is_found_on_its_line(text, number):
    ((found, _),) = find_violations(text)
    assert found == number


@pytest.mark.parametrize("text", ["disobey", "obey-signal", '"""Whatever the order is."""', "What is this?"])
def test_other_words_are_not_found(text):
    assert list(find_violations(text)) == []


@pytest.mark.parametrize(("text", "code"), [("A shard.", 0), ("A shard is set aside.", 1)])
def test_the_exit_code_tells_of_a_banned_phrase(text, code, tmp_path):
    path = tmp_path / "text.md"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "check_words.py"), str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "must be written as 'quarantine'" in done.stdout) == (code, bool(code))
