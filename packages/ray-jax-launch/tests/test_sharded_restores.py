"""Restores of sharded items from object storage: the archives that each node downloads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch._checkpoint.pytree import _chunks, needed_files
from ray_jax_launch._storage import join_path, open_uri


class Device(NamedTuple):
    number: int
    process_index: int


def split(**slices: slice) -> Any:
    """An array of 6 rows and 4 columns of which the processes 0, 1, ... hold some rows each."""
    indices = {Device(rank, rank): (rows, slice(None)) for rank, rows in enumerate(slices.values())}
    return SimpleNamespace(shape=(6, 4), sharding=SimpleNamespace(devices_indices_map=lambda shape: indices))


@pytest.mark.parametrize(
    ("ranks", "rows"), [([0], [0, 1]), ([1], [1, 2]), ([2], [2]), ([0, 2], [0, 1, 2]), ([1, 2], [1, 2])]
)
def test_the_processes_of_a_node_need_the_chunks_of_all_their_shards(
    tmp_path: Path, ranks: list[int], rows: list[int]
) -> None:
    for leaf, shape, chunks in (("w", [6, 4], [2, 2]), ("host", [6, 4], [3, 4]), ("count", [], [])):
        folder = tmp_path / "items" / f"params.h.{leaf}"
        folder.mkdir(parents=True)
        (folder / ".zarray").write_text(json.dumps({"shape": shape, "chunks": chunks}))
    of_w = {f"items/params.h.w/{row}.{column}" for row in rows for column in (0, 1)}
    of_all = {"items/params.h.host/0.0", "items/params.h.host/1.0", "items/params.h.count/0"}
    w = split(a=slice(0, 3), b=slice(2, 6), c=slice(4, 5))
    like = {"params": {"h": {"w": w, "host": np.zeros((6, 4)), "count": 7, "missing": np.zeros(3)}}}
    assert needed_files(tmp_path, like, ranks) == of_w | of_all


# Two processes save an item of which each holds a half, and restore it with the axes of the mesh given by an argument.
SHARDS = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
spec = PartitionSpec(*(axis or None for axis in sys.argv[4].split(",")))
values = {"w": np.arange(100_000.0, dtype=np.float32).reshape(200, 500), "norm": np.ones(500, np.float32), "count": 7}


def tree(spec):
    specs = dict.fromkeys(["norm", "count", "key"], PartitionSpec()) | {"w": spec}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    make = lambda: {name: jnp.array(x) for name, x in values.items()} | {"key": jax.random.key(3)}
    return jax.jit(make, out_shardings=shardings)()


with Checkpoints(sys.argv[1], verify=False) as checkpoints:
    checkpoints.save(40, {"params": tree(PartitionSpec("fsdp", None))}, metadata={})
    checkpoints.wait()
    restored = checkpoints.restore(40, {"params": tree(spec)})["params"]
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    for name, value in values.items():
        for shard in restored[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(value)[shard.index])
print("found", "restored")
"""


@pytest.mark.parametrize(
    ("axes", "num_downloads"),
    [
        pytest.param("fsdp,", 1, id="same", marks=pytest.mark.slow),
        pytest.param(",fsdp", 2, id="other"),
        pytest.param(",", 2, id="all", marks=pytest.mark.slow),
    ],
)
def test_a_node_downloads_only_the_archives_with_shards_of_its_processes(
    run_ranks, s3, proxy, tmp_path, monkeypatch, axes, num_downloads
):
    uri = join_path(s3, tmp_path.name, "checkpoints")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "node2").mkdir()
    prefix = ["env", f"TMPDIR={tmp_path}/node2"]
    assert run_ranks(SHARDS, [proxy.uri(uri)] * 2, axes, prefix=prefix) == ["restored"] * 2
    filesystem, root = open_uri(str(uri))
    files = filesystem.get_file_info(FileSelector(root, recursive=True))
    sizes = {info.base_name: info.size for info in files if info.extension == "tar"}
    # The archive of process 0 also holds what is equal in all processes.
    assert proxy.downloaded_bytes("/process-0.params.tar") == 2 * sizes["process-0.params.tar"]
    assert proxy.downloaded_bytes("/process-1.params.tar") == num_downloads * sizes["process-1.params.tar"]


# Rank 1 begins to read when rank 0 has read everything.
SLOW_RANK = """
import time
from ray_jax_launch._checkpoint import writers

saved_tree = writers._saved_tree
writers._saved_tree = lambda folder: (time.sleep(3 * int(sys.argv[2])), saved_tree(folder))[1]
"""


def test_a_download_stays_until_the_slowest_process_of_the_node_has_read_it(run_ranks, s3, tmp_path):
    uri = join_path(s3, tmp_path.name, "checkpoints")
    code = SHARDS.replace("\njax.distributed", f"{SLOW_RANK}\njax.distributed", 1)
    assert run_ranks(code, [uri] * 2, "fsdp,") == ["restored"] * 2


@pytest.mark.parametrize(
    ("num_saved", "num_restored", "chunks"),
    [
        (3, 2, [[0, 1], [1, 2]]),
        (2, 3, [[0], [0, 1], [1]]),
        (4, 2, [[0, 1], [2, 3]]),
        (1, 2, [[0], [0]]),
        (12, 1, [[*range(12)]]),
    ],
)
def test_a_shard_needs_each_chunk_that_it_touches(num_saved, num_restored, chunks):
    size, shard = 12, 12 // num_restored
    indices = [slice(start, start + shard) for start in range(0, size, shard)]
    assert [[*_chunks(index, size, size // num_saved)] for index in indices] == chunks
    assert [*_chunks(slice(None), size, size // num_saved)] == [*range(num_saved)]
