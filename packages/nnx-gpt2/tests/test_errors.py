"""The wording of errors: one line, of limited length, from one module."""

import re
from pathlib import Path

import pytest

import nnx_gpt2
from nnx_gpt2._errors import require, shown, value_error


def test_every_error_for_a_value_is_worded_in_one_module():
    sources = {path.name: path.read_text() for path in Path(nnx_gpt2.__file__).parent.glob("*.py")}
    raisers = {name for name, text in sources.items() if re.search(r"raise (ValueError|TypeError)|!r}|\brepr\(", text)}
    assert raisers <= {"_errors.py"}


def test_a_value_is_shown_on_one_line_of_at_most_80_characters():
    assert shown("a\nb") == r"'a\nb'"
    assert shown("x" * 5000) == "'" + "x" * 56 + "..." + "x" * 19 + "'"
    assert len(shown(list(range(10_000)))) == 80
    assert shown(10**5000) == "a number of more than 4,300 digits"


def test_an_error_is_one_line_whatever_its_parts_are():
    error = value_error("a file\nwith\x1b[31m", "be short", "text\n" * 1000, "Shorten it.")
    assert str(error).isprintable()
    assert len(str(error)) < 600
    assert str(error).endswith(". Shorten it.")


def test_nothing_is_raised_if_the_constraint_holds():
    require(True, "x", "be 1", 1)
    with pytest.raises(ValueError, match=r"^x must be 1, got 2\.$"):
        require(False, "x", "be 1", 2)
