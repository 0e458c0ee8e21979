"""What the tests of the whole share: the application as a command, and a small corpus."""

import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from support import COMMAND


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """The environment of commands: on CPUs, with caches of its own, among them one of what jax has compiled."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A text of 300 000 bytes: some of Python's own source."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(errors="replace") for path in sorted(library.glob("*.py")))
    path = tmp_path_factory.mktemp("corpus") / "source.txt"
    path.write_text(text[:300_000])
    return path


@pytest.fixture(scope="session")
def pretrain(environment, tmp_path_factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the application with these arguments."""

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("work")
        return subprocess.run(
            [*COMMAND, *map(str, args)], env=environment, cwd=folder, capture_output=True, text=True, check=False
        )

    return run
