"""Shared fixtures of the integration tests: the application as a command, a small corpus, an S3 server."""

import logging
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem
from support import COMMAND


@pytest.fixture(scope="session")
def s3(environment) -> Iterator[str]:
    """URI of an empty bucket on a local S3 server. This process and `environment` have its address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    access = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    environment.update(access)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in access.items():
            patch.setenv(name, value)
        storage = S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True)
        storage.create_dir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """Environment of commands: CPUs only, empty caches for token files and for programs that jax compiles."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A text of 300 000 bytes from the source of Python's standard library."""
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
