"""Ctrl-C while the command still imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain._early_interrupt import exit_at_interrupts, raise_interrupts

APPLICATION = str(Path(__file__).parent.parent)


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["--help"], "pretrain._errors"),
        (["--name", "new"], "rich.console"),
        (["--name", "new"], "pretrain._config"),
        (["--name", "new"], "numpy"),
        (["--name", "new"], "pyarrow"),
        (["sample", "nowhere"], "jax._src.config"),
        (["export", "nowhere", "out"], "flax"),
    ],
)
def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback(arguments, module, tmp_path):
    """The process reports each import on standard error. The signal comes when it has imported the module."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", APPLICATION, *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # The tests themselves may be a background job, which ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == module:
            os.kill(process.pid, signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out in ("", "loading JAX and Ray\n")
    assert [line for line in err.splitlines() if not line.startswith("import time:")] == []
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored():
    """A shell starts background jobs with an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        exit_at_interrupts()
        raise_interrupts()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
