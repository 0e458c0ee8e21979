"""Fixtures of all tests: a cache of its own for each test, and a local S3 server."""

import gc
import logging
import os
import signal

import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_package
from many_runs import FEWER_OPTIMIZATIONS

# Check the types of all calls in the package. Must precede its first import.
beartype_package("pretrain", conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
# The tests, and what they start, answer signals also where the parent ignores them, as `nohup` does.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The programs of the tests, and of the processes that they start, have fewer optimizations than those of users. The
# integration tests, the READMEs and the benchmarks run the same code fully optimized.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FEWER_OPTIMIZATIONS}".strip()


# A trace makes millions of objects, few of them in cycles: see the tests of nnx-gpt2.
gc.set_threshold(20_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def shared_caches(tmp_path_factory):
    """Processes share compiled programs and the list of fonts, which cost more than a short run itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_COMPILATION_CACHE_DIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("shared")))
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Tests write nothing into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def no_setting_of_ray(monkeypatch):
    """The cluster of an earlier test has left a setting, which every command would check in a child process."""
    monkeypatch.delenv("RAY_worker_niceness", raising=False)


@pytest.fixture(scope="module")
def s3():
    """URI of an empty bucket on a local S3 server. This process has its address in the environment."""
    # Both take a second, and most tests need neither.
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        storage = S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True)
        storage.create_dir("bucket")
        yield "s3://bucket"
    server.stop()
