"""Check that a cluster answers, and make the token of clusters on this machine."""

import contextlib
import os
import secrets
import socket
import struct
import time
from pathlib import Path

_ANSWER_TIMEOUT_S = 10.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Types and flags of frames: RFC 9113, section 6.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
# HPACK's codes of the statuses 204 to 500. gRPC answers with 200.
_OTHER_STATUSES = [bytes([code]) for code in range(0x89, 0x8F)]


def check_answers(host: str, port: int) -> None:
    """Call a method of a Ray cluster's control store, whose result does not matter.

    Ray itself would wait for minutes, or forever, for a port that accepts connections and says nothing. Each server of
    gRPC answers a call, if only that it has no such method.

    Raises:
        OSError: nothing answers, or something else than a server of gRPC.
    """
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
    with socket.create_connection((host, port), timeout=_ANSWER_TIMEOUT_S) as connection:
        path = b"/ray.rpc.NodeInfoGcsService/CheckAlive"
        # HPACK (RFC 7541): POST, http, and the path, host, type and `te` as literals.
        fields = b"\x83\x86" + b"".join(
            name + bytes([len(value)]) + value
            for name, value in (
                (b"\x04", path), (b"\x01", b"ray"), (b"\x0f\x10", b"application/grpc"), (b"\x00\x02te", b"trailers"),
            )
        )  # fmt: skip
        connection.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, fields)
            + _frame(_DATA, _END_STREAM, 1, bytes(5))  # an empty message
        )
        kind = None
        while kind not in (_HEADERS, _RST_STREAM, _GOAWAY):
            header = _receive(connection, 9, deadline_s)
            if kind is None and header[3] != _SETTINGS:
                raise ConnectionError("it is no Ray cluster")
            kind = header[3]
            payload = _receive(connection, int.from_bytes(header[:3]), deadline_s)
            if kind == _HEADERS and payload[:1] in _OTHER_STATUSES:
                raise ConnectionError("it is no Ray cluster")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _receive(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received


def protect_token() -> None:
    """Make the file of the token for clusters on this machine, which only this user can read.

    Ray 2.60 makes it readable by all users. Does nothing if the user has chosen another token, or none.
    """
    given = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or any(os.environ.get(name) for name in given):
        return
    try:
        folder = Path.home() / ".ray"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / "auth_token"
        if not path.exists():
            new = folder / f"auth_token.{os.getpid()}"
            new.touch(mode=0o600)
            new.write_text(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(new, path)
            new.unlink()
        for one, mode in ((folder, 0o700), (path, 0o600)):
            if one.stat().st_uid == os.getuid():
                one.chmod(mode)
    except (OSError, RuntimeError):  # the home cannot be written, or there is none
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
