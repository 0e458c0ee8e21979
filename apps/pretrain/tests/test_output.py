import contextlib
import io
import logging
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.live import Live

from pretrain import main
from pretrain._cli import standard_output
from pretrain._output import log_lines
from pretrain._screen.printing import print_facts, print_line


def test_information_of_the_launcher_is_shown(caplog):
    lines = []
    logger = logging.getLogger("ray_jax_launch")
    with log_lines(lines.append):
        logger.info("worker %d of 2: node 10.0.0.1, 1 device ([cpu])", 0)
        logger.warning("a warning goes to standard error")
        logger.debug("a detail")
    logger.info("after the run")
    second = []
    with log_lines(second.append):
        logger.info("the next run")
    assert lines == ["worker 0 of 2: node 10.0.0.1, 1 device ([cpu])"]
    assert second == ["the next run"]
    assert "a warning goes to standard error" in caplog.messages


def test_a_program_that_wants_warnings_gets_no_information():
    """Some libraries give the root logger a handler for every level, and notebooks show what it gets."""
    code = """
import logging
from pretrain._output import log_lines

logging.basicConfig(format="%(levelname)s:%(message)s")
with log_lines(print):
    logging.getLogger("ray_jax_launch").info("a line of the display")
    logging.getLogger("ray_jax_launch").warning("checkpoint 3 is damaged")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a line of the display\n", "WARNING:checkpoint 3 is damaged\n")


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("INFO", ["lib: told", "lib: warned", "absl: told", "absl: warned", "ray_jax_launch: warned", "lib: failed"]),
        ("ERROR", ["failed"]),
    ],
)
def test_a_level_shows_what_libraries_log_and_no_line_of_the_display_twice(level, expected):
    code = f"""
import logging
from pretrain._output import set_log_level, show_warnings

show_warnings()
set_log_level(logging.{level})
for name in ("lib", "absl", "ray_jax_launch"):
    logging.getLogger(name).info("told")
    logging.getLogger(name).warning("warned")
logging.getLogger("lib").debug("a detail")
logging.getLogger("lib").error("failed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.splitlines()) == ("", expected)


def test_warnings_keep_their_form_after_a_library_has_chosen_another():
    code = """
import logging
from pretrain._output import log_lines, show_warnings

show_warnings()
logging.basicConfig(format="%(levelname)s:%(name)s:%(message)s", level=logging.INFO)
logging.getLogger("ray_jax_launch").warning("checkpoint %d is damaged", 3)
logging.getLogger("ray_jax_launch").info("a detail")
logging.getLogger("absl").warning("Couldn't find sharding info under RestoreArgs.")
with log_lines(print):
    logging.getLogger("ray_jax_launch").info("a line of the display")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a line of the display\n", "checkpoint 3 is damaged\n")


def test_the_console_writes_while_a_tracker_replaces_standard_output(capsys):
    """As trackio does in the process of a run with the hardware `local`, whose view another thread draws."""
    console = standard_output()
    with Live("a view", console=console), contextlib.redirect_stdout(io.StringIO()):
        console.print("a line :+1:")
    assert "a line :+1:\n" in capsys.readouterr().out


def test_a_name_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    """`:b:` is the name of an emoji, and a configuration of a dataset of the hub."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", "x:fire:b:y"]) == 2
    assert "x:fire:b:y" in capsys.readouterr().err


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.ERROR])
def test_the_launcher_has_its_level_and_its_handlers_again_after_a_run(level):
    logger = logging.getLogger("ray_jax_launch")
    before, filters, lines = logger.level, [*logger.filters], []
    logger.setLevel(level)
    try:
        with contextlib.suppress(KeyboardInterrupt), log_lines(lines.append):
            logger.info("a line")
            raise KeyboardInterrupt
        assert (logger.level, logger.filters, lines) == (level, filters, ["a line"])
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("COLUMNS", "0", None),
        ("COLUMNS", "00", None),
        ("COLUMNS", "", None),
        ("COLUMNS", "100", "100"),
        ("XDG_CACHE_HOME", "relative/cache", None),
        ("XDG_CONFIG_HOME", "relative", None),
        ("XDG_CONFIG_HOME", "/absolute", "/absolute"),
        ("DATASETS_VERBOSITY", "debug", "debug"),
        ("DATASETS_VERBOSITY", None, "critical"),
    ],
)
def test_a_variable_that_libraries_would_misread_is_unset(name, value, left, monkeypatch, capsys):
    monkeypatch.setenv(name, "to restore it")
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    assert main(["--version"]) == 0
    assert os.environ.get(name) == left


def test_an_error_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "a [red]run[/red] [/]"]) == 2
    assert "got a [red]run[/red] [/]." in capsys.readouterr().err


CONTROLS = "a\x1b[31mb\rc\x07\x08\x0b\x0c\x00\x7f\x9bd\te\nf"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"{CONTROLS}\n"),
        ({"quiet": True}, ""),
        ({"force_terminal": True}, r"a\x1b[31mb\x0dc\x07\x08\x0b\x0c\x00\x7f\x9bd" + "    e\nf\n"),
    ],
)
def test_a_file_gets_the_exact_text_and_a_terminal_no_control_characters(options, expected):
    file = io.StringIO(newline="")
    console = Console(file=file, width=80, record=True, **options)
    print_line(console, CONTROLS)
    assert file.getvalue() == console.export_text() == expected
    print_line(console, long := "a line without end " * 40)
    assert console.export_text() == ("" if console.quiet else f"{long}\n")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_fact_has_its_control_characters_in_a_visible_form(is_terminal):
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
    print_facts(console, [("data", "a\x1b[31mred.txt"), ("", "two\nlines")])
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["data  a\\x1b[31mred.txt", "      two", "      lines"]
