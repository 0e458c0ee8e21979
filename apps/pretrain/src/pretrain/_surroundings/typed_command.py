"""The beginning of the command line, as one types it."""

import shlex
import sys
from pathlib import Path


def application() -> str:
    """Return the beginning of this command line. From Python, the installed command."""
    program = Path(sys.argv[0])
    if program.name == "pretrain" and program.is_dir():
        return f"uv run {shlex.quote(str(program))}"
    if program.parts[-2:] == ("pretrain", "__main__.py"):
        return "python -m pretrain"
    return "pretrain"
