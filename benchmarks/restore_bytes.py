"""Bytes that a restore from object storage downloads, over the bytes of the checkpoint.

    uv run benchmarks/restore_bytes.py

Two processes save three items of 4 MB each, replicated, or sharded over both processes. Then one process, or two
processes on one or two nodes, restore one item or all items. The server is moto, on this machine, behind the proxy of
the tests, which counts. A node is a folder for temporary files of its own. The last column is the bytes of the shards
that the processes of a node hold, summed over the nodes. Writes benchmarks/results/restore_bytes.md and .json.
"""

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from environment import environment

sys.path.insert(0, str(Path(__file__).parent.parent / "packages/ray-jax-launch/tests"))

from conftest import S3Proxy  # pyright: ignore[reportMissingImports]  # pyright does not see `sys.path`
from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

ROOT = Path(__file__).parent.parent
ITEMS, LENGTH = ("params", "mu", "nu"), 1_000_000
CHECKPOINT_BYTES = len(ITEMS) * LENGTH * 4

PROCESS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ray_jax_launch import Checkpoints

place, rank, num_processes, port, layout, length, save, *items = sys.argv[1:]
if num_processes != "1":
    jax.distributed.initialize(f"127.0.0.1:{port}", int(num_processes), int(rank))
mesh = jax.make_mesh((int(num_processes),), ("fsdp",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp" if layout == "sharded" else None))
with Checkpoints(place, verify=False) as checkpoints:
    if save == "save":
        make = jax.jit(lambda: {"w": jnp.arange(float(length))}, out_shardings=sharding)
        checkpoints.save(1, {item: make() for item in items}, metadata={})
    else:
        like = {"w": jax.ShapeDtypeStruct((int(length),), np.float32, sharding=sharding)}
        restored = checkpoints.restore(1, dict.fromkeys(items, like))
        for item in items:
            for shard in restored[item]["w"].addressable_shards:
                np.testing.assert_array_equal(shard.data, np.arange(float(length))[shard.index])
"""


def run(place: str, num_processes: int, num_nodes: int, layout: str, action: str, items: tuple[str, ...]) -> None:
    """Save or restore items in processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_processes):
            node = Path(folder, str(rank % num_nodes))
            node.mkdir(exist_ok=True)
            arguments = [place, str(rank), str(num_processes), port, layout, str(LENGTH), action, *items]
            processes.append(
                subprocess.Popen([sys.executable, "-c", PROCESS, *arguments], env={**environment, "TMPDIR": str(node)})
            )
        assert [process.wait() for process in processes] == [0] * num_processes


def main() -> None:
    """Save and restore, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    results: Path = parser.parse_args().out
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
    )  # fmt: skip
    S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    proxy = S3Proxy()
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    cases = []
    for layout in ("replicated", "sharded"):
        place = f"s3://bucket/{layout}"
        run(place, 2, 1, layout, "save", ITEMS)
        for num_processes, num_nodes in ((1, 1), (2, 1), (2, 2)):
            for items in (ITEMS[:1], ITEMS):
                proxy.downloads.clear()
                run(proxy.uri(place), num_processes, num_nodes, layout, "restore", items)
                copies = 1 if layout == "sharded" else num_nodes
                case = {
                    "layout": layout, "processes": num_processes, "nodes": num_nodes, "items": len(items),
                    "bytes": proxy.downloaded_bytes(), "needed_bytes": len(items) * LENGTH * 4 * copies,
                }  # fmt: skip
                cases.append(case)
                print(case, flush=True)
    proxy.shutdown()
    server.stop()

    result = {
        "cases": cases,
        "checkpoint_bytes": CHECKPOINT_BYTES,
        "config": f"{len(ITEMS)} items of {LENGTH * 4 / 1e6:.0f} MB, saved by two processes",
        **environment("jax", "orbax-checkpoint", "ray-jax-launch"),
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / "restore_bytes.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = "".join(
        f"| {case['layout']} | {case['items']} of {len(ITEMS)} | {case['processes']} | {case['nodes']} "
        f"| {case['bytes'] / CHECKPOINT_BYTES:.2f} | {case['needed_bytes'] / CHECKPOINT_BYTES:.2f} |\n"
        for case in cases
    )
    (results / "restore_bytes.md").write_text(
        "# Bytes that a restore from object storage downloads\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "Both columns of bytes are over the bytes of the checkpoint, and count all nodes together.\n\n"
        "| state | items | processes | nodes | downloaded | needed |\n|---|---|---|---|---|---|\n" + rows
    )
    print((results / "restore_bytes.md").read_text())


if __name__ == "__main__":
    main()
