"""The command `doctor`: what of this machine, its storage and its network would keep a run from working?"""

import dataclasses
import json
import textwrap

from rich.console import Console
from rich.text import Text

from owt_data import vocab_size
from pretrain._data_names import names_of, parse_data
from pretrain._doctor.examine import checks_of, run_checks
from pretrain._doctor.finding import Finding
from pretrain._errors import one_line
from ray_jax_launch import as_storage_path, parse_hardware

_WIDTH = 80
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_NAME_WIDTH, _STATE_WIDTH = 12, 6


def doctor(
    *, hardware: str, storage_path: str, data: str | None, tokenizer: str | None, as_json: bool, console: Console
) -> bool:
    """Check what a run would use, and print each finding as soon as it is there. No file stays.

    Args:
        hardware: as for the command `train`.
        storage_path: as for the command `train`.
        data: as for the command `train`; None checks no data.
        tokenizer: as for the command `train`; None looks for the files of `gpt2`, which a run may not need.
        as_json: print one line of JSON.
        console: the output.

    Returns:
        False if a check has failed.

    Raises:
        UsageError: the data has no valid form.
        LaunchError: the hardware or the storage path has no valid form.
        DataError: there is no such tokenizer.
    """
    checks = checks_of(
        hardware=None if hardware == "auto" else parse_hardware(hardware),
        storage_path=str(as_storage_path(storage_path)),
        data=() if data is None else tuple(names_of(parse_data(data))),
        tokenizer=tokenizer,
    )
    if tokenizer is not None:
        vocab_size(tokenizer)
    findings: list[Finding] = []
    for finding in run_checks(checks):
        findings.append(finding)
        if not as_json:
            _show(finding, console)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
    if as_json:
        found = {"checks": [dataclasses.asdict(finding) for finding in findings], "ok": not counts["fail"]}
        console.file.write(f"{json.dumps(found)}\n")
    else:
        console.print(", ".join(f"{number} {state}" for state, number in counts.items()), highlight=False)
    return not counts["fail"]


def _show(finding: Finding, console: Console) -> None:
    """Print a finding in 80 columns: its state, its name, and the texts beside. A path is not broken."""
    indent = " " * (_STATE_WIDTH + _NAME_WIDTH)
    line = Text(finding.state.ljust(_STATE_WIDTH), style=_STYLES[finding.state])
    line.append(finding.name.ljust(_NAME_WIDTH), style="default")
    texts = [_wrapped(finding.found, indent), *([_wrapped(finding.remedy, indent)] if finding.remedy else [])]
    line.append(texts[0].removeprefix(indent), style="default")
    for text in texts[1:]:
        line.append(f"\n{text}", style="bold")
    console.print(line, soft_wrap=True, highlight=False)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        one_line(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
