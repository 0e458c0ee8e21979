"""The help: what it shows, its width, and its time."""

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain import PRESETS, PretrainConfig, main
from pretrain._cli import parse_command
from pretrain._command_line.command_classes import COMMANDS, EXAMPLES, FREQUENT, GROUPS, PlanCommand, SweepCommand
from pretrain._command_line.help_page import shown_default
from pretrain._command_line.option_table import options_of, with_defaults

APPLICATION = str(Path(__file__).parent.parent)
PAGES = [["--help"], ["--help-all"], *([command, "--help"] for command in COMMANDS)]


@pytest.fixture
def page(monkeypatch, capsys):
    """Returns the help for arguments, at a width of the terminal."""

    def show(*arguments, width=80):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(arguments) == 0
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("arguments", PAGES, ids=" ".join)
def test_no_line_is_wider_than_the_terminal(page, arguments, width):
    lines = page(*arguments, width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)


@pytest.mark.parametrize("arguments", PAGES, ids=" ".join)
def test_lines_break_only_where_the_width_ends(page, arguments):
    """A line is as long as its width allows: the first word of the next line of a paragraph does not fit on it."""
    lines = page(*arguments).splitlines()
    for line, below in itertools.pairwise(lines):
        is_continued = line.startswith(" " * 6) and below.startswith(" " * 6) and below.split()[0] not in COMMANDS
        # A default is not broken.
        word = below.strip() if below.strip().startswith("(default: ") else below.split()[0] if below else ""
        assert not is_continued or len(f"{line} {word}") > 80, line


@pytest.mark.parametrize("arguments", PAGES, ids=" ".join)
def test_no_value_is_written_as_one_types_it(page, arguments):
    assert "None" not in page(*arguments)


def test_a_preset_in_the_value_of_another_option_is_no_preset(page):
    gpt2 = page("train", "--preset", "gpt2", "--help")
    assert page("train", "--preset=gpt2", "--help") == gpt2
    assert page("train", "--preset", "baby", "--preset", "gpt2", "--help") == gpt2
    assert page("train", "--prompts", "a --preset gpt2 b", "--help") == page("train", "--help") != gpt2


@pytest.mark.parametrize("arguments", [["--preset", "nosuch", "--help"], ["--preset=", "--help-all"]], ids=" ".join)
def test_help_of_an_unknown_preset_is_rejected(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: --preset must be quickstart, baby, ")


def test_the_usual_page_has_the_frequent_options_and_every_command(page):
    text = page("--help")
    options = {option.name: option.flags[0] for option in options_of(PretrainConfig)}
    shown = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    assert shown[: len(FREQUENT)] == [options.get(name, f"--{name.replace('_', '-')}") for name in FREQUENT]
    assert "--model.dropout-rate" not in text


def test_the_commands_are_on_one_screen_by_their_purpose(page):
    screen = page("--help").splitlines()[:24]
    start = screen.index("commands") + 1
    lines = screen[start : screen.index("", start)]
    assert [line[12:20].strip() for line in lines] == [*COMMANDS]
    purposes = {line[2:12].strip(): line[12:20].strip() for line in lines if line[2:12].strip()}
    assert purposes == {group: next(iter(commands)) for group, commands in GROUPS.items()}


def test_the_other_page_has_every_option(page):
    text = page("--help-all")
    assert [flag for option in options_of(PretrainConfig) for flag in option.flags if flag not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_two_examples_which_are_valid(page, command):
    text = " ".join(page(command, "--help").split())
    assert len(EXAMPLES[command]) == 2
    for line in EXAMPLES[command]:
        assert line in text
        if ".toml" not in line:
            expected = {"plan": PlanCommand, "sweep": SweepCommand}.get(command, COMMANDS[command])
            assert isinstance(parse_command(shlex.split(line)[1:]), expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("sample",), "An empty text starts a document. (default: $'\\n')"),
        ((), "(default: 'def ' 'import ')"),
        ((), "tokens. Default: 0.1 by position, 0.0005 by documents (0.05 for the built-in corpus). --split-seed"),
        ((), "TensorBoard with the package xprof shows the trace."),
        (("--preset", "gpt2"), "Number of transformer blocks. (default: 12)"),
        (("--preset=wikitext",), "(default: $'\\n')"),
        (("--preset=gpt2-xl", "--preset", "gpt2"), "Number of transformer blocks. (default: 12)"),
    ],
)
def test_defaults_are_shown_as_typed(page, arguments, text):
    shown = " ".join(page(*arguments, "--help-all").split())
    assert text.removeprefix("tokens. ") in shown
    assert "(default: None)" not in shown


@pytest.mark.parametrize("preset", PRESETS)
def test_a_shell_reads_the_defaults_of_a_preset(preset):
    """The defaults, typed as options into bash, give the preset. Options that others replace are left out."""
    options = with_defaults(options_of(PretrainConfig), PRESETS[preset]())
    train = PRESETS[preset]().train
    replaced = {"--train.max-steps"} if train.max_epochs else set()
    replaced |= {"--train.grad-accum-steps"} if train.micro_batch_size else set()
    words = [
        f"{option.flags[0]} {shown}"
        for option in options
        if (shown := shown_default(option)) is not None and option.flags[0] not in replaced
    ]
    assert len(words) > 40
    line = f"printf '%s\\0' {' '.join(words)}"
    typed = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert parse_command(["--preset", "baby", *typed.split("\0")[:-1]]) == PRESETS[preset]()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_imports_nothing_that_takes_seconds(command):
    code = f"import sys; from pretrain import main; main(['{command}', '--help']); print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = shown.splitlines()[-1]
    assert not any(f"'{name}'" in modules for name in ("jax", "ray", "numpy", "datasets", "matplotlib", "pydantic"))


def test_the_help_of_a_process_ends_with_success():
    done = subprocess.run(
        [sys.executable, APPLICATION, "--help"], capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": "40"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    shown = "".join(done.stdout.split())  # A long path of the application breaks anywhere.
    assert shown.startswith("".join(f"usage: uv run {APPLICATION} [COMMAND] [OPTIONS]".split()))
    assert "--completion" not in shown  # which completes the installed command


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("train", "pretrain train [OPTIONS]"),
        ("export", "pretrain export RUN OUT [OPTIONS]"),
        ("report", "pretrain report RUN... [OPTIONS]"),
        ("runs", "pretrain runs [STORAGE_PATH] [GLOB...] [OPTIONS]"),
        ("sweep", "pretrain sweep [FILE] [OPTIONS]"),
    ],
)
def test_a_page_begins_with_the_usage(page, command, usage):
    assert page(command, "--help").startswith(f"usage: {usage}\n\n")


def test_an_empty_list_is_no_default_to_show(page):
    assert "(default: )" not in page("sweep", "--help") + page("runs", "--help")


def test_an_option_is_shown_with_the_kind_of_its_value(page):
    lines = page("--help-all", width=200).splitlines()
    assert {
        "  --train.max-steps INTEGER", "  --optimizer.learning-rate NUMBER", "  --name TEXT", "  --prompts TEXT ...",
        "  --train.micro-batch-size INTEGER|auto",
        "  --dashboard, --no-dashboard", "  --data-mode prepared|stream", "  --preset TEXT",
        "  --tokenizer, --prepare.tokenizer TEXT",
    } <= {*lines}  # fmt: skip
    assert any("One of quickstart, baby, tutorial, wikitext" in line for line in lines)


def test_the_command_help_is_the_option_help(page):
    assert page("help") == page("--help")
    for command in COMMANDS:
        assert page("help", command) == page(command, "--help")
    assert page("help", "train", "--preset", "gpt2") == page("train", "--help", "--preset", "gpt2")
