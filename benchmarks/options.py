"""Types of the scripts' options. A wrong value ends a script with one sentence and exit code 2."""

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path


def count(text: str) -> int:
    """Return a number that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def text_file(text: str) -> Path:
    """Return the path of a file that exists and is not empty."""
    path = Path(text)
    if not path.is_file() or not path.stat().st_size:
        raise argparse.ArgumentTypeError(f"must be a text file that is not empty, got {text!r}")
    return path


def python_with(*modules: str) -> Callable[[str], str]:
    """Return a type for an interpreter that can import these modules."""

    def interpreter(text: str) -> str:
        names = ", ".join(modules)
        try:
            subprocess.run([text, "-c", f"import {names}"], check=True, capture_output=True, text=True)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"must be a Python interpreter, got {text!r}: {error.strerror}") from error
        except subprocess.CalledProcessError as error:
            why = error.stderr.strip().rpartition("\n")[2]
            raise argparse.ArgumentTypeError(f"must be an interpreter with {names}, got {text!r}: {why}") from error
        return text

    return interpreter
