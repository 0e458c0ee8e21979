"""Pictures of a terminal for the documentation: run a command in a terminal of 80 columns, and draw its last screens.

    uv run --with pyte docs/record.py docs/assets/verify.svg -- uv run apps/pretrain verify

The picture is an SVG file that loads nothing. Lines that have scrolled out of the screen are in it too.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 80, 40
PYTE_NAMES = {"brown": "yellow", "default": None}


def main() -> int:
    """Run the command of the command line and write its picture; return the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the SVG file")
    parser.add_argument("--title", help="the title of the window; default: the command")
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args()
    screen, code = record(options.command)
    title = options.title or " ".join(options.command)
    options.picture.write_text(picture(lines(screen), title))
    return code


def record(command: list[str]) -> tuple[pyte.HistoryScreen, int]:
    """Run a command in a terminal, show its output here too, and return its screen and its exit code."""
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    while True:
        try:
            output = os.read(ours, 65_536)
        except OSError:  # Linux: all ends of the terminal are closed
            output = b""
        if not output:
            break
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
        stream.feed(output)
    os.close(ours)
    return screen, process.wait()


def lines(screen: pyte.HistoryScreen) -> list[Text]:
    """Return the lines of a screen, with their colors, up to the last one with text."""
    found = []
    for row in [*screen.history.top, *(screen.buffer[y] for y in range(screen.lines))]:
        line = Text()
        for x in range(screen.columns):
            character = row[x]
            color = PYTE_NAMES.get(character.fg, character.fg)
            color = f"#{color}" if color and re.fullmatch(r"[0-9a-f]{6}", color) else color
            color = re.sub(r"^bright", "bright_", color) if color else ""
            line.append(character.data, f"{'bold ' if character.bold else ''}{color}".strip())
        line.rstrip()
        found.append(line)
    while found and not found[-1].plain:
        found.pop()
    return found


def picture(found: list[Text], title: str) -> str:
    """Return lines of text as SVG, in the reader's own monospaced font."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in found:
        console.print(line, no_wrap=True, crop=True)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.S)
    return svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    sys.exit(main())
