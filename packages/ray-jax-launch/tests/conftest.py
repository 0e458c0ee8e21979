"""Every test that computes here sees two CPU devices; workers see one. Object storage is a server of this machine."""

import http.client
import http.server
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
# The tests, and what they start, answer signals also where the parent ignores them, as `nohup` does.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def s3():
    """The URI of an empty bucket on an S3 server of this machine, which this process's children know as well."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    yield "s3://bucket"
    server.stop()


class S3Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to the S3 server, answers some of them with 503, and records the others."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.failing = ""
        """Requests are answered with 503 if their path contains this text."""
        self.num_failures = 0
        """Number of the requests to answer with 503."""
        self.changes: list[tuple[str, str]] = []
        """Method and path of each request that wrote or deleted, in the order of the answers."""
        self.requests: set[tuple[str, str]] = set()
        """Method and path, with its query, of the requests that were passed on. A repeated request counts once."""
        self.downloads: list[tuple[str, int]] = []
        """Path and size of each answer to a GET request."""

    def uri(self, uri):
        """The same place, reached through this server."""
        return f"{uri}?scheme=http&endpoint_override=127.0.0.1:{self.server_port}"

    def downloaded_bytes(self, name=""):
        """Return the number of bytes downloaded from objects whose paths end in a text."""
        return sum(size for path, size in self.downloads if path.endswith(name))


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        proxy = self.server
        assert isinstance(proxy, S3Proxy)
        if proxy.num_failures > 0 and proxy.failing in self.path:
            proxy.num_failures -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"), timeout=60)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while (line := self.rfile.readline()) != b"\r\n":
                size = int(line, 16)
                body += line + self.rfile.read(size + 2 if size else 0)
            body += line
        upstream.request(self.command, self.path, body, dict(self.headers))
        response = upstream.getresponse()
        content = response.read()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if response.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        path = self.path.partition("?")[0]
        proxy.requests.add((self.command, self.path))
        if self.command in ("PUT", "POST", "DELETE"):
            proxy.changes.append((self.command, path))
        if self.command == "GET":
            proxy.downloads.append((path, len(content)))
        if self.command != "HEAD":
            self.wfile.write(content)
        upstream.close()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, format, *args):
        pass


@pytest.fixture
def proxy(s3):
    """A server in front of the S3 server."""
    server = S3Proxy()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run_ranks():
    """Run two processes, and return what each prints after the word `found`."""

    def run(code, places, *args, prefix=()):
        """Arguments of the code: a place for checkpoints, the rank, a port, and others. Rank 1 has the prefix."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        processes = [
            subprocess.Popen(
                [*(prefix if rank else ()), sys.executable, "-c", code, str(place), str(rank), port, *args],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank, place in enumerate(places)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors
        return [output[output.index("found ") + 6 :].strip() for output, _ in outputs]

    return run


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path):
    """A place for checkpoints: a folder, and a URI."""
    if request.param == "folder":
        return tmp_path
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


@pytest.fixture(scope="module")
def cluster(s3):
    """A Ray cluster on this machine, of four logical CPUs. Other modules make their own."""
    from ray_jax_launch import connect, cpu

    # The workers inherit the environment of the cluster; theirs is to have one device each.
    flags = os.environ.pop("XLA_FLAGS")
    connect(cpu(2))
    os.environ["XLA_FLAGS"] = flags
    yield
    ray.shutdown()


@pytest.fixture
def temporary():
    """A folder for temporary files with a short name: the paths of sockets are limited."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def nodes(temporary, monkeypatch):
    """A cluster whose head has no CPUs, and nodes of one CPU each that are added to it."""
    # Ray notes the address of the cluster in its temporary folder. Other programs would find it there.
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    flags = os.environ.pop("XLA_FLAGS", None)
    # By default Ray tries one port, which another cluster of this machine may have, and does not close the socket.
    head = {"num_cpus": 0, "include_dashboard": False, "dashboard_port": None}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags
