"""The command line, as one types it."""

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


def typed_arguments(command: str) -> str:
    """Return the arguments of this command line. From Python, the command alone."""
    arguments = sys.argv[1:]
    return shlex.join(arguments if arguments[:1] == [command] else [command])
