"""Object storage that rejects connections, does not answer, or does not exist. Uses loopback only."""

import os
import socket
import subprocess
import sys

import pytest

OPENS = """
import sys, time
from ray_jax_launch import LaunchError, open_uri
began = time.monotonic()
try:
    open_uri(sys.argv[1])
except LaunchError as error:
    print(error)
print(time.monotonic() - began)
"""

CLOSED = "127.0.0.1:9"  # the port of the discard service, which is not running
REACHED = "the storage must be a folder, s3://bucket/path or gs://bucket/path that can be reached, got"
CASES = {
    "Google without credentials": ("gs://bucket/runs", {"GCE_METADATA_ROOT": CLOSED}, "Google Cloud authentication"),
    "Google silent": ("gs://bucket/runs", {"GCE_METADATA_ROOT": "SILENT"}, "no answer within 20 s"),
    "Google closed": (
        f"gs://anonymous@bucket/runs?scheme=http&endpoint_override={CLOSED}", {}, "Could not connect to server"
    ),
    "S3 closed": (f"s3://bucket/runs?region=r&scheme=http&endpoint_override={CLOSED}", {}, "Could not connect to"),
    "S3 nowhere": ("s3://bucket/runs?region=r&endpoint_override=nowhere.invalid", {}, "Could not resolve host"),
}  # fmt: skip


@pytest.fixture(scope="module")
def opening(tmp_path_factory):
    """Processes without credentials that open all cases at the same time, because they mostly wait."""
    hidden = ("AWS_", "GOOGLE_", "CLOUDSDK_", "GCE_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    inherited |= {"HOME": str(tmp_path_factory.mktemp("home")), "AWS_EC2_METADATA_DISABLED": "true"}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", OPENS, uri],
                env=inherited | {key: value.replace("SILENT", address) for key, value in environment.items()},
                stdout=subprocess.PIPE, text=True,
            )
            for name, (uri, environment, _) in CASES.items()
        }  # fmt: skip
        try:
            yield processes
        finally:
            for process in processes.values():
                process.kill()
                process.communicate()


@pytest.mark.fault
@pytest.mark.parametrize("name", CASES)
def test_unreachable_storage_is_reported_within_half_a_minute(opening, name, record_property):
    uri, _, reason = CASES[name]
    message, seconds = opening[name].communicate(timeout=300)[0].splitlines()
    assert message.startswith(f"{REACHED} {uri}: ")
    assert reason in message
    assert float(seconds) < 30
    record_property("fault", f"the object storage cannot be reached: {name}")
    record_property("lost", "nothing: the start is rejected")
