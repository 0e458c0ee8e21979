import contextlib
import io
import os
import sys
import time

import pytest
from rich.console import Console

from pretrain._commands.progress_display import ProgressDisplay
from pretrain._output import Output


def test_the_time_left_is_that_of_the_steps_since_the_start():
    """A run that continues at step 1000 does not know how long the steps before it took."""
    out = io.StringIO()
    with ProgressDisplay(1010, Console(file=out, width=200)) as display:
        display.show({"step": 1000, "loss": 2.0})
        time.sleep(1.0)
        display.show({"step": 1001, "epoch": 1.3333, "loss": 1.5, "tokens_per_s": 1234.5})
    first, second = out.getvalue().splitlines()
    assert first == "step 1000/1010  loss 2.0000"
    assert second.startswith("step 1001/1010  epoch 1.33  loss 1.5000  1,234 tokens/s  left 0:")
    assert int(second.rpartition(":")[2]) >= 9  # nine steps of at least a second


def full():
    return open("/dev/full", "w")  # noqa: PTH123


def without_reader():
    read_end, write_end = os.pipe()
    os.close(read_end)
    return os.fdopen(write_end, "w")


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
@pytest.mark.parametrize("output", [full, without_reader])
def test_a_run_goes_on_without_standard_output(output, caplog, record_property):
    record_property("fault", f"standard output is {output.__name__.replace('_', ' a ')} while a run trains")
    record_property("lost", "the lines that the command prints")
    file = output()
    with ProgressDisplay(10, Output(file=file)) as display:
        display.show({"step": 1, "loss": 2.0})
        display.show({"step": 2, "loss": 2.0})
    (warning,) = caplog.messages
    assert warning.startswith("standard output cannot be written (")
    assert warning.endswith("); the run goes on without it")
    with contextlib.suppress(OSError):  # the file tries once more to write
        file.close()
