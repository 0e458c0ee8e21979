"""`RAY_ADDRESS` of what is no Ray cluster: one sentence, within 30 s. Real servers."""

import contextlib
import errno
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_jax_launch import LaunchError, connect
from ray_jax_launch._cluster_security import _receive, check_answers

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def headers(status: int) -> bytes:
    """Return the headers of an answer, with the code of its status in HPACK."""
    return bytes([0, 0, 1, 1, 4, 0, 0, 0, 1, status])


NOT_FOUND = headers(0x8D)  # 404
RESET, GOODBYE = bytes([0, 0, 0, 3, 0, 0, 0, 0, 1]), bytes([0, 0, 0, 7, 0, 0, 0, 0, 0])


@contextlib.contextmanager
def serving(answer):
    """A server that sends each client an answer and nothing more. Yields its port."""
    with socket.create_server(("0.0.0.0", 0)) as server, contextlib.ExitStack() as clients:

        def accept():
            while True:
                client, _ = server.accept()
                if ended:
                    client.close()
                    return
                clients.enter_context(client).sendall(answer)

        ended = False
        thread = threading.Thread(target=accept)
        thread.start()
        port = server.getsockname()[1]
        yield port
        ended = True
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


@pytest.mark.fault
@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(b"", "timed out", id="says nothing"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "it is no Ray cluster", id="HTTP"),
        pytest.param(SETTINGS, "timed out", id="HTTP/2 without an answer"),
        pytest.param(SETTINGS + NOT_FOUND, "it is no Ray cluster", id="another server of HTTP/2"),
    ],
)
def test_a_port_that_is_no_cluster_is_reported_in_time(monkeypatch, scheme, answer, reason, record_property):
    record_property("fault", f"RAY_ADDRESS={scheme}... of a port that is no Ray cluster: {reason}")
    record_property("lost", "nothing: rejected before the start")
    with serving(answer) as port:
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
        monkeypatch.setattr("ray_jax_launch._cluster_security._ANSWER_TIMEOUT_S", 2.0)
        began_s = time.monotonic()
        with pytest.raises(LaunchError, match=rf"^RAY_ADDRESS must be a Ray cluster .* \(({reason})\)\. Start it, or "):
            connect()
    assert time.monotonic() - began_s < 12  # of a limit of 2 s, on a loaded machine
    assert not ray.is_initialized()


@pytest.mark.parametrize("answer", [headers(0x88), RESET, GOODBYE], ids=["200", "reset", "goodbye"])
def test_an_answer_of_grpc_may_come_after_other_frames(answer: bytes) -> None:
    ping = bytes([0, 0, 3, 6, 0, 0, 0, 0, 0]) + NOT_FOUND[:3]  # its content looks like the begin of another frame
    with serving(SETTINGS + ping + answer) as port:
        check_answers("127.0.0.1", port)


@pytest.mark.parametrize("status", range(0x89, 0x8F), ids=hex)
def test_no_other_status_than_200_is_that_of_grpc(status: int) -> None:
    with serving(SETTINGS + headers(status)) as port, pytest.raises(ConnectionError, match="it is no Ray cluster"):
        check_answers("127.0.0.1", port)


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])  # a part for each call, and all at once
def test_an_answer_in_parts_is_put_together_and_nothing_more_is_read(kind: socket.SocketKind) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, kind)
    with here, there:
        for part in (b"abc", b"d", b"efghi", b"jkl"):
            there.send(part)
        assert _receive(here, 9, time.monotonic() + 9) == b"abcdefghi"
        assert here.recv(9) == b"jkl"


def test_the_time_for_an_answer_is_that_of_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timeouts = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s), []

    def receive(size: int) -> bytes:
        clock.now_s += 4
        return b"a"

    monkeypatch.setattr("ray_jax_launch._cluster_security.time", clock)
    connection: Any = SimpleNamespace(settimeout=timeouts.append, recv=receive)
    assert _receive(connection, 4, clock.now_s + 9) == b"aaaa"
    assert timeouts == [9, 5, 1, 0.001]


def test_a_web_server_is_no_cluster(monkeypatch):
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.server_port}")
    with pytest.raises(LaunchError, match=r"^RAY_ADDRESS must be a Ray cluster that answers, got .*it is no Ray clust"):
        connect()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("address", ["foo", "1:2:3", "a\nb:3", "127.0.0.1:99999", "127.0.0.1:x", "x" * 5000, "ray://"])
def test_an_address_that_is_none_is_reported_in_one_short_sentence(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(LaunchError, match=r"^RAY_ADDRESS must be a Ray cluster that answers, got ") as raised:
        connect()
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("address", ["auto", None])
def test_the_file_of_a_cluster_that_is_gone_is_not_waited_for(address, temporary, tmp_path):
    """`ray start` leaves a file with its address, which Ray reads for the address `auto`, and `ray.init()` always."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (temporary / "ray").mkdir()
    (temporary / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
    # Ray prefers a cluster whose process it finds, such as that of another test.
    code = """
from ray._private import services
services.find_gcs_addresses = lambda: set()
services.find_gcs_addresses.cache_clear = lambda: None
from ray_jax_launch import JaxTrainer
print(JaxTrainer(lambda: "trained", hardware="cpu:1").fit().return_value)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": str(temporary), "HOME": str(tmp_path)}
    if address is not None:
        environment["RAY_ADDRESS"] = address
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    if address is None:
        assert done.stdout == "trained\n", done.stderr
    else:
        assert "LaunchError: RAY_ADDRESS must be a Ray cluster that answers, got 'auto' (" in done.stderr
        assert f"[Errno {errno.ECONNREFUSED}]" in done.stderr


def test_a_deleted_working_folder_is_reported(tmp_path):
    code = (
        "import os, sys; from ray_jax_launch import connect; os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]);"
        "os.rmdir(sys.argv[1]); connect()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ray_jax_launch._errors.LaunchError: the working folder was deleted")
