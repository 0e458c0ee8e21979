"""Scripts that complete commands, options and choices in a shell. Other words are completed as files."""

import shlex
from collections.abc import Iterator, Sequence
from typing import get_args

from pretrain._command_line.arguments import command_options
from pretrain._command_line.command_classes import COMMANDS, Shell
from pretrain._command_line.option_table import Option
from pretrain._errors import UsageError, short

_BASH = """\
_pretrain() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=train options values
    # An equals sign is a word of its own.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case ${{COMP_WORDS[1]}} in
        {commands}) command=${{COMP_WORDS[1]}} ;;
    esac
    case $command in
{options}
    esac
    case "$command $prev" in
{values}
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    elif [[ $COMP_CWORD == 1 || ${{COMP_WORDS[1]}} == help ]]; then
        COMPREPLY=($(compgen -W {words} -- "$cur"))
    else
        local IFS=$'\\n'
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$cur"))
    fi
}}
complete -F _pretrain pretrain
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def completion_script(arguments: Sequence[str]) -> str:
    """Return the script for a shell.

    Args:
        arguments: the name of the shell.

    Raises:
        UsageError: it is another shell, or none.
    """
    shells = get_args(Shell)
    match arguments:
        case ["bash"]:
            return _bash()
        case ["zsh"]:
            return _ZSH + _bash()
        case ["fish"]:
            return "\n".join(_fish()) + "\n"
    given = short(" ".join(arguments)) if arguments else "nothing"
    raise UsageError(f"--completion must be {', '.join(shells[:-1])} or {shells[-1]}, got {given}.")


def _flagged(command: str) -> list[Option]:
    return [option for option in command_options(command) if option.placeholder is None]


def _words(option: Option) -> list[str]:
    """Return the values to offer, if they are few: those of a list, or what stands for a number."""
    words = [*option.choices, *([option.word] if option.word else [])]
    return [*words, "none"] if words and option.allows_none else words


def _bash() -> str:
    options, values = [], []
    for command in COMMANDS:
        flags = [flag for option in _flagged(command) for flag in (*option.flags, *option.off_flags)]
        flags += ["--help", "--help-all"] if command == "train" else ["--help"]
        options.append(f"        {command}) options={shlex.quote(' '.join(flags))} ;;")
        for option in _flagged(command):
            if words := _words(option):
                names = "|".join(shlex.quote(f"{command} {flag}") for flag in option.flags)
                values.append(f"        {names}) values={shlex.quote(' '.join(words))} ;;")
    values.append(f"        *' --completion') values={shlex.quote(' '.join(get_args(Shell)))} ;;")
    return _BASH.format(
        commands="|".join(COMMANDS),
        options="\n".join(options),
        values="\n".join(values),
        words=shlex.quote(" ".join((*COMMANDS, "help"))),
    )


def _fish() -> Iterator[str]:
    others = " ".join(command for command in COMMANDS if command != "train")
    for command, kind in COMMANDS.items():
        summary = shlex.quote((kind.__doc__ or "").partition("\n")[0])
        yield f"complete -c pretrain -f -n __fish_use_subcommand -a {command} -d {summary}"
        is_chosen = f"not __fish_seen_subcommand_from {others}" if command == "train" else ""
        is_chosen = shlex.quote(is_chosen or f"__fish_seen_subcommand_from {command}")
        for option in _flagged(command):
            words = f" -f -a {shlex.quote(' '.join(_words(option)))}" if _words(option) else ""
            needs_value = "" if option.type is bool else " -r"
            doc = shlex.quote(option.doc.partition(". ")[0])
            for flag in (*option.flags, *option.off_flags):
                name = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                yield f"complete -c pretrain -n {is_chosen} {name}{needs_value}{words} -d {doc}"
    yield f"complete -c pretrain -l completion -x -a {shlex.quote(' '.join(get_args(Shell)))} -d 'Print a script'"
