"""The environment of a result: hardware, date and versions."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")  # Linux


def environment(*packages: str, device: str = "cpu") -> dict[str, Any]:
    """Return the hardware, today's date, and the versions of Python and of these packages.

    The hardware is the processor, the number of CPU cores, and the kind of the device if it is an accelerator.
    """
    names = re.findall(r"model name\s*: (.*)", CPU_INFO.read_text()) if CPU_INFO.exists() else []
    processor = names[0] if names else platform.processor() or platform.machine()
    return {
        "hardware": ("" if device == "cpu" else f"{device}, ") + f"{processor}, {os.cpu_count()} CPU cores",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }
