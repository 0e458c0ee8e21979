"""Completion in a shell: real shells complete words by the script that the command prints."""

import shutil
import subprocess

import pytest

from pretrain import main
from pretrain._command_line.arguments import command_options
from pretrain._command_line.command_classes import COMMANDS

# Completes the last word of a line as bash does at the key Tab.
BASH = r"""
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
complete -p pretrain >/dev/null || exit 1
_pretrain
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    """Writes the script for a shell, and returns its path."""

    def write(shell):
        assert main(["--completion", shell]) == 0
        path = tmp_path / f"pretrain.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.fixture
def completed(script, tmp_path):
    """Completes words in a folder with a few files."""
    place = tmp_path / "place"
    (place / "runs" / "a first").mkdir(parents=True)
    (place / "book.txt").touch()
    path = script("bash")

    def complete(*words):
        done = subprocess.run(
            ["bash", "-c", BASH, "bash", str(path), "pretrain", *words], cwd=place, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0
        assert "compopt" not in done.stderr
        return done.stdout.splitlines()

    return complete


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid(script, shell):
    path = script(shell)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([shell, "-n", str(path)], check=False, capture_output=True).stderr == b""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("tr",), ["train"]),
        (("",), [*COMMANDS, "help"]),
        (("help", "e"), ["eval", "export"]),
        (("--preset", "gpt2-"), ["gpt2-medium", "gpt2-large", "gpt2-xl"]),
        (("--preset", "=", "ba"), ["baby"]),
        (("train", "--preset", "=", "tu"), ["tutorial"]),
        (("plan", "--data-mode", ""), ["prepared", "stream"]),
        (("--trackers", "wan"), ["wandb"]),
        (("eval", "run", "--split", ""), ["val", "all", "none"]),
        (("--train.micro-batch-size", ""), ["auto", "none"]),
        (("sample", "run", "--top"), ["--top-k", "--top-p"]),
        (("--train.max-s",), ["--train.max-steps"]),
        (("--no-da",), ["--no-dashboard"]),
        (("--completion", "f"), ["fish"]),
        (("sample", "runs/a"), ["runs/a first"]),
        (("--data", "bo"), ["book.txt"]),
        (("export", "nothing"), []),
    ],
)
def test_bash_completes(completed, words, found):
    assert [line for line in completed(*words) if line] == found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command_is_completed(completed, command):
    flags = [
        flag
        for option in command_options(command)
        if option.placeholder is None
        for flag in (*option.flags, *option.off_flags)
    ]
    found = completed(command, "-")
    assert set(flags) <= set(found)
    assert set(found) - set(flags) == {"--help", *({"--help-all"} if command == "train" else set())}


@pytest.mark.parametrize("words", [["--completion"], ["--completion", "csh"], ["--completion", "bash", "zsh"]])
def test_another_shell_is_rejected(capsys, words):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: --completion must be bash, zsh or fish, got ")
