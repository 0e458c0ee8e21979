"""Costs of checkpoints: their commit, their list, their deletion, their checksums, and their visibility on a node.

The store of the package writes to moto, an S3 server on loopback, which counts. Most ranks are simulated: one process
makes the calls of each rank, one after the other. A rank has two items of two arrays, as a model and its optimizer.
"""

import contextlib
import functools
import logging
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

from costs.measurement import Measurement
from ray_jax_launch._checkpoint.checksums import ChecksummedStream
from ray_jax_launch._checkpoint.folder_store import TEMPORARY, FolderStore
from ray_jax_launch._checkpoint.object_store import ObjectStore

ITEMS = ("params", "opt_state")
RANKS_OF_A_NODE = 8
SAVE, STEP = "0a-1", 1
FILE_BYTES = 4096

# Each of several processes saves shards of an array.
SAVES = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ray_jax_launch import Checkpoints

place, rank, num_processes, port = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", int(num_processes), int(rank))
mesh = jax.make_mesh((int(num_processes),), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
tree = jax.jit(lambda: {f"w{i}": jnp.zeros(64) for i in range(100)}, out_shardings=split)()
with Checkpoints(place, verify=False) as checkpoints:
    checkpoints.save(1, {"params": tree}, metadata={})
"""


class Server:
    """An S3 server in threads of this process, with a bucket. Counts requests, and the bytes that are downloaded."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app = DomainDispatcherApplication(create_backend_app)

        def count(environ: Any, start_response: Any) -> Any:
            self.num_requests += 1
            answer = b"".join(app(environ, start_response))
            if environ["REQUEST_METHOD"] == "GET":
                self.downloads.append((environ["PATH_INFO"], len(answer)))
            return [answer]

        self.num_requests = 0
        self.downloads: list[tuple[str, int]] = []
        server = make_server("127.0.0.1", 0, count, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test", AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
        )  # fmt: skip
        self.backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self.backend.create_bucket("bucket", "us-east-1")

    @contextlib.contextmanager
    def requests(self) -> Iterator[Callable[[], int]]:
        """Return a function that returns the number of requests since the beginning of the block."""
        before = self.num_requests
        yield lambda: self.num_requests - before

    def copy(self, root: str, step: int, to: int) -> None:
        """Copy the objects of a checkpoint to another number."""
        for name, key in [*self.backend.buckets["bucket"].keys.items()]:
            if name.startswith(f"{root}/{step}/") or name.startswith(f"{root}/{step}."):
                self.backend.put_object("bucket", f"{root}/{to}{name[len(root) + 1 + len(str(step)) :]}", key.value)


@functools.cache
def server() -> Server:
    """Return the server of this process."""
    return Server()


def write_shards(folder: Path, rank: int, num_ranks: int) -> None:
    """Write what Orbax writes in a process: a shard of each array, and what is equal in all processes."""
    for item in ITEMS:
        for leaf in ("a", "b"):
            path = folder / "items" / f"{item}.{leaf}"
            path.mkdir(parents=True)
            (path / ".zarray").write_text(f'{{"chunks": [1, 1], "shape": [{num_ranks}, 1]}}')
            (path / f"{rank}.0").write_bytes(bytes(FILE_BYTES))


def upload(root: str, num_ranks: int) -> ObjectStore:
    """Upload the shards of all ranks."""
    server()
    store = ObjectStore(f"s3://bucket/{root}")
    store.prepare()
    for rank in range(num_ranks):
        with tempfile.TemporaryDirectory() as folder:
            write_shards(Path(folder), rank, num_ranks)
            store.upload(STEP, rank, SAVE, Path(folder))
    return store


@functools.cache
def costs_of_a_save(num_ranks: int) -> dict[str, float]:
    """Return the costs of the commit of a checkpoint in object storage, and of its verification and deletion."""
    costs = dict[str, float]()
    store = upload(f"save-{num_ranks}", num_ranks)
    with server().requests() as num_requests:
        store.commit(STEP, num_ranks, SAVE, {})
    costs["commit"] = num_requests()
    verified: list[int] = []
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        server().downloads.clear()
        assert store.find_damage(STEP, (rank, num_ranks)) is None
        verified.append(sum(size for _, size in server().downloads))
    costs["verify"] = max(verified)
    server().downloads.clear()
    node = range(num_ranks // 2, min(num_ranks // 2 + RANKS_OF_A_NODE, num_ranks))
    with tempfile.TemporaryDirectory() as folder:
        needed = {f"items/params.{leaf}/{rank}.0" for leaf in ("a", "b") for rank in node}
        store.download(STEP, ["params"], Path(folder), lambda: needed, [(rank, num_ranks) for rank in node])
    costs["descriptions"] = sum(size for name, size in server().downloads if name.endswith(".json"))
    with server().requests() as num_requests:
        store.unlist(STEP)
    costs["delete"] = num_requests()
    with server().requests() as num_requests:
        store.sweep()
    costs["sweep"] = num_requests()
    assert store.steps() == []
    return costs


def of_a_save(name: str) -> Callable[[int, Path], float]:
    """Return a function that returns a cost of a save."""
    return lambda num_ranks, folder: costs_of_a_save(num_ranks)[name]


def listing_requests(num_checkpoints: int, folder: Path) -> float:
    """Return the requests for the list of the checkpoints, each of 100 ranks."""
    root = f"list-{num_checkpoints}"
    store = upload(root, 100)
    store.commit(STEP, 100, SAVE, {})
    for step in range(STEP + 1, STEP + num_checkpoints):
        server().copy(root, STEP, step)
    with server().requests() as num_requests:
        assert len(store.steps()) == num_checkpoints
    return num_requests()


def bytes_after_a_commit(num_ranks: int, folder: Path) -> float:
    """Return the bytes that the processes of a run download during a save."""
    server().downloads.clear()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = [sys.executable, "-c", SAVES, f"s3://bucket/bytes-{num_ranks}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(num_ranks), port], env=environment) for rank in range(num_ranks)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * num_ranks
    return sum(size for name, size in server().downloads if name.endswith(".json"))


def write_folder(folder: Path, num_ranks: int) -> tuple[FolderStore, float]:
    """Write a checkpoint, and return its store and the most bytes that one rank reads for the checksums."""
    checkpoint = folder / f"{STEP}{TEMPORARY}"
    for item in ITEMS:
        for rank in range(num_ranks):
            path = checkpoint / item / f"ocdbt.process_{rank}"
            path.mkdir(parents=True)
            for name in ("a", "b"):
                (path / name).write_bytes(bytes(FILE_BYTES))
        (checkpoint / item / "manifest.ocdbt").write_bytes(bytes(100))
    store, read = FolderStore(folder), list[int]()
    for rank in range(num_ranks):
        with checksummed_bytes() as num_bytes:
            store.write_part(STEP, rank)
        read.append(num_bytes())
    with checksummed_bytes() as num_bytes:
        store.write_checksums(STEP, num_ranks)
    most = max(read[0] + num_bytes(), *read)
    checkpoint.rename(folder / str(STEP))
    return store, most


@contextlib.contextmanager
def checksummed_bytes() -> Iterator[Callable[[], int]]:
    """Return a function that returns the number of bytes whose checksum was computed in the block."""
    add, total = ChecksummedStream._add, 0

    def count(self: ChecksummedStream, block: bytes) -> None:
        nonlocal total
        total += len(block)
        add(self, block)

    ChecksummedStream._add = count
    yield lambda: total
    ChecksummedStream._add = add


def bytes_of_checksums(num_ranks: int, folder: Path) -> float:
    """Return the most bytes that a process reads for the checksums of a save."""
    return write_folder(folder, num_ranks)[1]


def bytes_of_a_start(num_ranks: int, folder: Path) -> float:
    """Return the most bytes that a process reads to verify a checkpoint in a folder."""
    store, _ = write_folder(folder, num_ranks)
    read = list[int]()
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        with checksummed_bytes() as num_bytes:
            assert store.find_damage(STEP, (rank, num_ranks)) is None
        read.append(num_bytes())
    return max(read)


def stats_of_a_node(num_ranks: int, folder: Path) -> float:
    """Return the calls of stat with which the ranks of a node wait until they see a checkpoint of 64 ranks."""
    store, _ = write_folder(folder, 64)
    stat, total = pathlib.Path.stat, 0

    def count(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        nonlocal total
        total += 1
        return stat(self, follow_symlinks=follow_symlinks)

    pathlib.Path.stat = count
    for rank in range(num_ranks):
        assert store.find_missing(STEP, (rank, num_ranks)) is None
    pathlib.Path.stat = stat
    return total


WORKERS, SHORT = (10, 100, 1000), (4, 16)
MEASUREMENTS = [
    Measurement(
        name=name, what=what, unit=unit, size=size, sizes=sizes, short=short, cost=cost, goal=goal
    )
    for name, what, unit, size, sizes, short, cost, goal in [
        ("commit-requests", "requests of rank 0 to list a checkpoint in object storage", "requests", "workers",
         WORKERS, SHORT, of_a_save("commit"), 0.1),
        ("delete-requests", "requests to delete a checkpoint before the next save can begin", "requests", "workers",
         WORKERS, SHORT, of_a_save("delete"), 0.1),
        ("sweep-requests", "requests to delete the archives of a checkpoint in the background", "requests", "workers",
         WORKERS, SHORT, of_a_save("sweep"), 1.1),
        ("listed-bytes", "all ranks learn that a checkpoint in object storage is listed: downloads", "bytes", "workers",
         (2, 4, 8), (2, 4), bytes_after_a_commit, 0.1),
        ("steps-requests", "requests for the list of the checkpoints in object storage", "requests",
         "kept checkpoints of 100 workers", (10, 30, 100), (3, 10), listing_requests, 0.1),
        ("checksum-bytes", "checksums of a save to a folder: bytes that the slowest process reads", "bytes", "workers",
         WORKERS, SHORT, bytes_of_checksums, 0.1),
        ("verify-folder-bytes", "a start from a folder: bytes that the slowest process verifies", "bytes", "workers",
         WORKERS, SHORT, bytes_of_a_start, 0.1),
        ("verify-bytes", "a start from object storage: bytes that the slowest process verifies", "bytes", "workers",
         WORKERS, SHORT, of_a_save("verify"), 0.1),
        ("description-bytes", "a node finds its shards in object storage: bytes of descriptions", "bytes", "workers",
         WORKERS, SHORT, of_a_save("descriptions"), 0.1),
        ("visible-stats", "a node waits until it sees a checkpoint of 64 ranks: calls of stat", "calls",
         "ranks of the node", (1, 8, 64), (1, 8), stats_of_a_node, 0.1),
    ]
]  # fmt: skip
