"""The processor of this machine."""

import contextlib
import platform
import re
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")  # Linux


def processor_name() -> str:
    """Return the name of the processor, such as `AMD EPYC 9654`. XLA compiles other code for another one."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = re.findall(r"model name\s*: (.*)", _CPU_INFO.read_text())
    return (names[0] if names else platform.processor() or platform.machine()).strip()
