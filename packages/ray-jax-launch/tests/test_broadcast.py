"""Messages between processes, which can see different listings of a folder on NFS."""

import shutil
import subprocess

import jax.numpy as jnp
import pytest

from ray_jax_launch import Checkpoints

# Rank 1 sees an old listing, as NFS may show it: without 20, and with 30. After 2 s, `late` becomes 20.
STALE = """
import json, sys, threading
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints

folder, rank, port, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
like = jax.ShapeDtypeStruct((10,), np.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
if rank == 1:
    threading.Timer(2, lambda: (folder / "late").rename(folder / "20")).start()
with Checkpoints(folder, num_to_keep=3, **json.loads(mode)) as checkpoints:
    step = checkpoints.latest_step()
    metadata = checkpoints.broadcast_metadata(step)
    w = checkpoints.restore(step, {"params": {"w": like}})["params"]["w"]
    print("found", step, metadata["step"], sorted({float(x) for shard in w.addressable_shards for x in shard.data}))
"""

# Both processes save 32 MB, and start again. Prints the bytes whose checksums each has computed.
READS_ONCE = """
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints
from ray_jax_launch._checkpoint.checksums import ChecksummedStream

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
split = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
w = jax.make_array_from_callback((8_000_000,), split, lambda index: np.arange(8e6, dtype=np.float32)[index])
add, num_bytes = ChecksummedStream._add, []
ChecksummedStream._add = lambda stream, block: num_bytes.append(len(block)) or add(stream, block)
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(20, {"params": {"w": w}}, metadata={})
saved = sum(num_bytes)
num_bytes.clear()
with Checkpoints(sys.argv[1]) as checkpoints:
    print("found", checkpoints.latest_step(), saved, sum(num_bytes))
"""

STARTS = """
import sys

import jax

from ray_jax_launch import Checkpoints

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
with Checkpoints(sys.argv[1]) as checkpoints:
    print("found", checkpoints.latest_step())
"""

DAMAGED = """
import sys

import jax

from ray_jax_launch import Checkpoints, DamagedCheckpointError

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
try:
    Checkpoints(sys.argv[1])
except DamagedCheckpointError as error:
    print("found", "30: params/manifest.ocdbt is missing" in str(error))
"""


LONG = """
import sys

import jax
from jax.experimental import multihost_utils

from ray_jax_launch import DeletedCheckpointError, LaunchError, StorageFullError
from ray_jax_launch._checkpoint.broadcast import from_leader, gather

rank = int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 3, rank)
sizes = [0, 1, 900, 5000]
assert [len(from_leader(lambda: "x" * size)) for size in sizes] == sizes
assert gather(["of", rank]) == [["of", 0], ["of", 1], ["of", 2]]
leader = [0, 2, 2][rank]  # ranks 1 and 2 are on one node
assert from_leader(lambda: f"of {rank}", leader) == f"of {leader}"


def fail():
    raise [None, KeyError, error][rank]("gone")


raised = []
for error in (DeletedCheckpointError, LaunchError, StorageFullError, FileNotFoundError):
    try:
        from_leader(fail if rank == 2 else lambda: 7, leader)
    except (OSError, ValueError, StorageFullError) as found:
        raised.append(f"{type(found).__name__}: {found}")
assert gather(rank) == [0, 1, 2]
# The rows are in the order of the devices, which may be another one than that of the processes.
allgather = multihost_utils.process_allgather
multihost_utils.process_allgather = lambda x: allgather(x)[::-1]
assert gather(rank) == [0, 1, 2]
print("found", raised)
"""

# Saves 1 KB, 16 MB and 1 KB of arrays whose shards are on both processes.
SAVES = """
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints, UnsavedCheckpointError, latest_step

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
with Checkpoints(sys.argv[1]) as checkpoints:
    for step, size in ((1, 256), (2, 4_000_000), (3, 256)):
        checkpoints.save(step, {"params": {"w": jax.jit(lambda: jnp.zeros(size), out_shardings=split)()}}, metadata={})
        try:
            checkpoints.wait()
        except UnsavedCheckpointError as error:
            assert step == 2
            assert checkpoints.latest_step() == latest_step(sys.argv[1]) == 1
            print("found", error.__cause__)
    assert checkpoints.latest_step() == latest_step(sys.argv[1]) == 3
"""

# Rank 1 uploads its shards a second after rank 0. Then rank 0 cannot list a checkpoint, and then it can.
LATE = """
import sys, time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints, UnsavedCheckpointError
from ray_jax_launch._checkpoint import writers

rank, writers._WRITE_TIMEOUT_S = int(sys.argv[2]), int(sys.argv[4])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, rank)
split = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
with Checkpoints(sys.argv[1]) as checkpoints:
    upload = checkpoints._store.upload
    checkpoints._store.upload = lambda *args: time.sleep(rank) or upload(*args)
    tree = {"w": jax.jit(lambda: jnp.zeros(256), out_shardings=split)()}
    checkpoints.save(1, {"params": tree}, metadata={})
    checkpoints.wait()
    assert checkpoints.durable_step() == 1
    saved = [checkpoints.latest_step()]
    checkpoints._store.upload, commit = upload, checkpoints._store.commit
    checkpoints._store.commit = lambda *args: {}["no listing"]
    checkpoints.save(2, {"params": tree}, metadata={})
    try:
        checkpoints.wait()
    except UnsavedCheckpointError as error:
        cause = str(error.__cause__)
    saved.append(checkpoints.latest_step())
    checkpoints._store.commit = lambda *args: time.sleep(1) or commit(*args)
    checkpoints.save(3, {"params": tree}, metadata={})
    checkpoints.wait()
    print("found", [*saved, checkpoints.latest_step()], cause)
"""


def save(folder, steps, size=10):
    with Checkpoints(folder, num_to_keep=len(steps)) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"params": {"w": jnp.full(size, float(step))}}, metadata={"step": step})


@pytest.mark.fault
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("{}", marks=pytest.mark.slow),
        '{"verify": false}',
        pytest.param('{"read_only": true}', marks=pytest.mark.slow),
    ],
)
def test_processes_start_at_one_step_despite_an_old_listing_on_one_host(run_ranks, tmp_path, mode, record_property):
    new, old = tmp_path / "new", tmp_path / "old"
    save(new, [10, 20, 30])
    shutil.copytree(new, old)
    (old / "20").rename(old / "late")
    shutil.rmtree(new / "30")
    assert run_ranks(STALE, [new, old], mode) == ["20 20 [20.0]"] * 2
    record_property("fault", f"one of two hosts sees an old listing of the checkpoints ({mode})")
    record_property("lost", "nothing")


def test_each_of_two_processes_computes_and_verifies_the_checksums_of_its_part(run_ranks, place):
    found = [[int(number) for number in output.split()] for output in run_ranks(READS_ONCE, [place] * 2)]
    for step, saved, verified in found:
        assert step == 20
        assert 16_000_000 < saved < 16_500_000
        assert 16_000_000 < verified < 16_500_000


@pytest.mark.fault
def test_damage_that_only_one_process_reads_is_damage_for_all(run_ranks, tmp_path, record_property):
    record_property("fault", "a byte of the part of process 1 of two is flipped in the newest checkpoint")
    record_property("lost", "steps since the checkpoint before it")
    save(tmp_path, [10])
    assert {output.split()[0] for output in run_ranks(READS_ONCE, [tmp_path] * 2)} == {"20"}
    path = max((tmp_path / "20/params/ocdbt.process_1/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert run_ranks(STARTS, [tmp_path] * 2) == ["10", "10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.damaged"]


@pytest.mark.fault
def test_what_one_host_does_not_see_is_no_damage(run_ranks, tmp_path, record_property):
    record_property("fault", "one of two hosts does not see the newest checkpoint when it is verified")
    record_property("lost", "nothing")
    new, old = tmp_path / "new", tmp_path / "old"
    save(new, [10, 20])
    shutil.copytree(new / "10", old / "10")
    assert run_ranks(STARTS, [new, old]) == ["20", "20"]


def test_messages_and_errors_of_each_leader_reach_its_processes(run_ranks, tmp_path):
    names = ["DeletedCheckpointError", "LaunchError", "StorageFullError"]
    own = [f"{name}: gone" for name in (*names, "FileNotFoundError")]
    others = [f"{name}: process 2: gone" for name in (*names, "LaunchError")]
    assert run_ranks(LONG, [tmp_path] * 3) == [str(others), str(others), str(own)]


@pytest.mark.fault
def test_all_processes_raise_if_every_checkpoint_is_damaged(run_ranks, tmp_path, record_property):
    save(tmp_path, [30])
    (tmp_path / "30" / "params" / "manifest.ocdbt").unlink()
    assert run_ranks(DAMAGED, [tmp_path] * 2) == ["True"] * 2
    record_property("fault", "every checkpoint of a run of two processes is damaged")
    record_property("lost", "nothing: the start is rejected with a list of the damage")


@pytest.mark.fault
def test_all_processes_raise_if_one_process_cannot_write_its_shards(run_ranks, s3, tmp_path, record_property):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("needs unshare, and the permission to mount")
    mount = f'mount -t tmpfs -o size=2m tmpfs {tmp_path}; export TMPDIR={tmp_path}; exec "$0" "$@"'
    outputs = run_ranks(SAVES, [f"{s3}/{tmp_path.name}"] * 2, prefix=["unshare", "-m", "sh", "-ec", mount])
    assert "process 1 has not uploaded its shards of checkpoint 2" in outputs[0]
    assert "No space left" in outputs[1]
    record_property("fault", "the local disk of one of two hosts is full while both save to object storage")
    record_property("lost", "steps since the last checkpoint")


def test_processes_wait_for_the_upload_and_the_listing_of_another(run_ranks, s3, tmp_path):
    assert run_ranks(LATE, [f"{s3}/{tmp_path.name}"] * 2, "60") == [
        "[1, 1, 3] 'no listing'",
        "[1, 1, 3] process 0 has not listed checkpoint 2. See its own error.",
    ]
