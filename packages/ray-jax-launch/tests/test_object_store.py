"""Checkpoints in object storage: contents, damage, downloads and servers that fail."""

import io
import json
import logging
import tarfile
import time
import zlib
from importlib.metadata import version

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch import (
    Checkpoints,
    DamagedCheckpointError,
    LaunchError,
    intact_step,
)
from ray_jax_launch._checkpoint.checksums import to_json
from ray_jax_launch._checkpoint.object_store import ObjectStore
from ray_jax_launch._storage import join_path, open_uri

TREE = {"w": jnp.arange(1000.0)}
FILES = {"parts/0.json", "process-0.tar", "process-0.params.tar"}
"""Names of the objects of a save."""


@pytest.fixture
def uri(s3, tmp_path):
    """Checkpoints 10, 20 and 30, with different values."""
    uri = join_path(s3, tmp_path.name, "checkpoints")
    with Checkpoints(uri, num_to_keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": {"w": TREE["w"] + step}}, metadata={"step": step})
            checkpoints.wait()
    return uri


def read(uri, name):
    filesystem, root = open_uri(uri)
    with filesystem.open_input_stream(f"{root}/{name}") as stream:
        return stream.read()


def write(uri, name, content):
    filesystem, root = open_uri(uri)
    with filesystem.open_output_stream(f"{root}/{name}") as stream:
        stream.write(content)


def names(uri):
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info(FileSelector(root, recursive=True))
    return {info.path[len(root) + 1 :] for info in infos if info.is_file}


def save_of(uri, step):
    """The folder of the archives of a checkpoint, such as 30.<save>."""
    return f"{step}.{json.loads(read(uri, f'{step}.json'))['save']}"


def change_archive(uri, archive, checksum):
    """Write a description with another checksum of an archive."""
    name = f"{save_of(uri, 30)}/parts/0.json"
    part = json.loads(read(uri, name))
    part["archives"][archive] = checksum
    write(uri, name, to_json(part).encode())


def flip_a_byte(uri, archive="process-0.params.tar", step=30):
    path = f"{save_of(uri, step)}/{archive}"
    content = bytearray(read(uri, path))
    content[len(content) // 2] ^= 1
    write(uri, path, bytes(content))
    return f"{archive} does not have the checksum it was written with"


def cut_short(uri):
    path = f"{save_of(uri, 30)}/process-0.params.tar"
    content = read(uri, path)
    write(uri, path, content[:-1])
    return f"process-0.params.tar has {len(content) - 1} bytes, not {len(content)}"


def remove_an_archive(uri):
    filesystem, root = open_uri(uri)
    filesystem.delete_file(f"{root}/{save_of(uri, 30)}/process-0.params.tar")
    return "process-0.params.tar is missing"


def spoil_the_listing(uri):
    write(uri, "30.json", b"{")
    return "30.json cannot be read"


def spoil_a_part(uri):
    name = f"{save_of(uri, 30)}/parts/0.json"
    write(uri, name, read(uri, name)[:-1])
    return f"{name} cannot be read"


def remove_a_part(uri):
    filesystem, root = open_uri(uri)
    name = f"{save_of(uri, 30)}/parts/0.json"
    filesystem.delete_file(f"{root}/{name}")
    return f"{name} is missing"


@pytest.mark.fault
@pytest.mark.parametrize(
    "damage", [flip_a_byte, cut_short, remove_an_archive, spoil_the_listing, spoil_a_part, remove_a_part]
)
def test_the_checkpoint_before_a_damaged_checkpoint_is_restored_with_a_warning(uri, caplog, damage, record_property):
    problem = damage(uri)
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), Checkpoints(uri, num_to_keep=3) as checkpoints:
        assert checkpoints.latest_step() == 20
        restored = checkpoints.restore(20, {"params": TREE})["params"]["w"]
        np.testing.assert_array_equal(restored, TREE["w"] + 20)
        assert checkpoints.broadcast_metadata(20) == {"step": 20}
        # The number is free again.
        checkpoints.save(30, {"params": TREE}, metadata={})
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore(30, {"params": TREE})["params"]["w"], TREE["w"])
    expected = f"checkpoint 30 in {uri} is damaged ({problem}): going back to checkpoint 20"
    assert [record.message for record in caplog.records if record.name == "ray_jax_launch"] == [expected]
    assert intact_step(uri) == 30
    record_property("fault", f"newest checkpoint in object storage: {damage.__name__.replace('_', ' ')}")
    record_property("lost", "steps since the checkpoint before it")


def test_a_checkpoint_damaged_after_it_was_verified_is_not_restored(uri):
    with Checkpoints(uri, read_only=True) as checkpoints:
        flip_a_byte(uri)
        with pytest.raises(DamagedCheckpointError):
            checkpoints.restore(30, {"params": TREE})


def test_items_are_restored_one_by_one(uri):
    with Checkpoints(uri, num_to_keep=3) as checkpoints:
        checkpoints.save(40, {"params": TREE, "extra": {"x": jnp.ones(2)}}, metadata={})
        checkpoints.wait()
        assert set(checkpoints.restore(40, {"extra": {"x": jnp.zeros(2)}})) == {"extra"}


def test_a_checkpoint_is_its_archives_and_the_object_that_lists_them(uri):
    save = save_of(uri, 30)
    expected = {"30.json"} | {f"{save}/{name}" for name in FILES}
    assert {name for name in names(uri) if name.startswith("30.")} == expected
    part, listing = (json.loads(read(uri, name)) for name in (f"{save}/parts/0.json", "30.json"))
    assert part["archives"]["process-0.params.tar"][0] == len(read(uri, f"{save}/process-0.params.tar"))
    assert listing["metadata"] == {"step": 30}
    assert (listing["format"], listing["version"]) == (1, version("ray-jax-launch"))


@pytest.mark.fault
def test_a_step_can_be_quarantined_twice_and_written_again(uri, record_property):
    record_property("fault", "newest checkpoint in object storage: damaged, written again, and damaged again")
    record_property("lost", "steps since the checkpoint before it")
    before = set()
    for _ in range(2):
        before |= {f"{save_of(uri, 30)}/{name}" for name in FILES}
        flip_a_byte(uri)
        with Checkpoints(uri, num_to_keep=3) as checkpoints:
            assert checkpoints.latest_step() == 20
            checkpoints.save(30, {"params": TREE}, metadata={})
        assert intact_step(uri) == 30
    listings = {f"30.json{suffix}" for suffix in ("", ".damaged", ".damaged2")}
    expected = listings | before | {f"{save_of(uri, 30)}/{name}" for name in FILES}
    assert {name for name in names(uri) if name.startswith("30.")} == expected


def test_a_quarantined_checkpoint_keeps_its_archives(uri, monkeypatch):
    path = f"{save_of(uri, 30)}/process-0.params.tar"
    flip_a_byte(uri)
    archive, before = read(uri, path), names(uri)
    with Checkpoints(uri, num_to_keep=1) as checkpoints:
        for step in (30, 40):
            checkpoints.save(step, {"params": TREE}, metadata={})
    monkeypatch.setattr("ray_jax_launch._checkpoint.object_store._ABANDONED_AFTER_S", -60.0)
    with Checkpoints(uri):
        pass
    assert {name for name in names(uri) if not name.startswith("40.")} == {
        name.replace("30.json", "30.json.damaged") for name in before if name.startswith("30.")
    }
    assert read(uri, path) == archive


def test_an_archive_shorter_than_written_by_4_gib_is_damaged(uri):
    size = len(read(uri, f"{save_of(uri, 30)}/process-0.params.tar"))
    change_archive(uri, "process-0.params.tar", [size + (1 << 32), 1])
    assert ObjectStore(uri).find_damage(30) == f"process-0.params.tar has {size} bytes, not {size + (1 << 32)}"


STATE = {"params": {"w": jnp.arange(100_000.0)}, "opt_state": {"mu": jnp.ones(100_000), "nu": jnp.ones(100_000)}}
NUM_BYTES = 400_000  # of the parameters


@pytest.mark.parametrize("like", [{"params": STATE["params"]}, STATE], ids=["params", "all"])
def test_a_restore_downloads_the_items_that_are_asked_for(uri, proxy, like):
    with Checkpoints(uri) as checkpoints:
        checkpoints.save(40, STATE, metadata={})
    with Checkpoints(proxy.uri(uri), read_only=True) as checkpoints:
        found = checkpoints.restore_latest(like)
    assert found is not None
    np.testing.assert_array_equal(found.items["params"]["w"], np.arange(100_000.0))
    num_items = 1 if len(like) == 1 else 3
    assert num_items * NUM_BYTES <= proxy.downloaded_bytes() < num_items * NUM_BYTES * 1.2


def test_a_damaged_item_does_not_stop_the_restore_of_another_item(uri):
    with Checkpoints(uri, num_to_keep=4) as checkpoints:
        checkpoints.save(40, STATE, metadata={})
    flip_a_byte(uri, "process-0.opt_state.tar", 40)
    with Checkpoints(uri, read_only=True) as checkpoints:
        found = checkpoints.restore_latest({"params": STATE["params"]})
        assert found is not None
        assert found.step == 40
        with pytest.raises(DamagedCheckpointError, match=r"process-0\.opt_state\.tar does not have the checksum"):
            checkpoints.restore(40, STATE)
    assert intact_step(uri) == 30


# Two processes restore parameters whose shards are on both, and then another item, which may be damaged.
RESTORES = """
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints, DamagedCheckpointError

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
like = jax.ShapeDtypeStruct((100_000,), np.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
with Checkpoints(sys.argv[1], verify=False) as checkpoints:
    w = checkpoints.restore(40, {"params": {"w": like}})["params"]["w"]
    for shard in w.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(100_000.0)[shard.index])
    try:
        checkpoints.restore(40, {"opt_state": {"mu": like, "nu": like}})
        print("found", "restored")
    except DamagedCheckpointError as error:
        print("found", error)
"""


@pytest.mark.parametrize("num_nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_node_downloads_an_archive_once(run_ranks, uri, proxy, tmp_path, monkeypatch, num_nodes):
    with Checkpoints(uri) as checkpoints:
        checkpoints.save(40, STATE, metadata={})
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "node2").mkdir()
    prefix = ["env", f"TMPDIR={tmp_path}/node2"] if num_nodes == 2 else []
    assert run_ranks(RESTORES, [proxy.uri(uri)] * 2, prefix=prefix) == ["restored"] * 2
    size = len(read(uri, f"{save_of(uri, 40)}/process-0.params.tar"))
    assert proxy.downloaded_bytes("/process-0.params.tar") == num_nodes * size
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.fault
def test_all_processes_of_a_node_raise_the_error_of_its_download(
    run_ranks, uri, tmp_path, monkeypatch, record_property
):
    with Checkpoints(uri) as checkpoints:
        checkpoints.save(40, STATE, metadata={})
    problem = flip_a_byte(uri, "process-0.opt_state.tar", 40)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run_ranks(RESTORES, [uri] * 2) == [problem, f"process 0: {problem}"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    record_property("fault", "two processes of a node restore a damaged item from object storage")
    record_property("lost", "nothing: the restore is rejected by both")


@pytest.fixture
def busy(uri, proxy):
    """The checkpoints behind a server that can be made busy."""
    return proxy.uri(uri)


@pytest.mark.fault
def test_a_checkpoint_on_a_busy_server_is_quarantined_later(uri, busy, proxy, record_property):
    record_property("fault", "the object storage answers 503 to the copy of a damaged checkpoint's listing")
    record_property("lost", "nothing")
    proxy.failing = "/30.json.damaged"
    proxy.num_failures = 40  # more than pyarrow's client tries again, in 6 s
    ObjectStore(busy).quarantine(30)
    assert ObjectStore(uri).steps() == [10, 20]
    assert {name for name in names(uri) if name.startswith("30.json")} == {"30.json.damaged"}


@pytest.mark.fault
def test_a_checkpoint_on_a_busy_server_is_not_damaged(uri, busy, proxy, caplog, record_property):
    proxy.failing = f"/{save_of(uri, 30)}/process-0.params.tar"
    proxy.num_failures = 40  # more than pyarrow's client tries again, in 6 s
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), Checkpoints(busy, num_to_keep=3) as checkpoints:
        assert proxy.num_failures == 0
        assert checkpoints.latest_step() == 30
        assert "process-0.params.tar of checkpoint 30" in caplog.text
        assert "503" in caplog.text
        assert "damaged" not in caplog.text
    record_property("fault", "the object storage answers 503 forty times")
    record_property("lost", "nothing")
    record_property("recovery_s", round(time.monotonic() - began, 1))


@pytest.mark.fault
@pytest.mark.parametrize("name", ["process-0.params.tar", pytest.param("30.json", marks=pytest.mark.slow)])
def test_a_server_that_stays_busy_ends_the_start_and_changes_nothing(
    uri, busy, proxy, name, monkeypatch, record_property
):
    monkeypatch.setattr("ray_jax_launch._checkpoint.retry.DELAYS_S", ())  # pyarrow's client takes 6 s for each attempt
    before = names(uri)
    proxy.failing = f"/{name}" if name == "30.json" else f"/{save_of(uri, 30)}/{name}"
    proxy.num_failures = 1_000_000
    with pytest.raises(LaunchError, match=rf"{name} .* cannot be accessed: .*503"):
        Checkpoints(busy)
    proxy.num_failures = 0
    assert names(uri) == before
    assert intact_step(uri) == 30
    record_property("fault", f"the object storage answers 503 to every request for {name} of the newest checkpoint")
    record_property("lost", "nothing: the start is rejected, and succeeds when the storage works")


def link(name):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    return member


@pytest.mark.fault
@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("items/../../outside"),
        tarfile.TarInfo("/outside"),
        link("items/link"),
    ],
    ids=["parent", "hidden parent", "absolute", "link"],
)
def test_an_archive_that_names_files_elsewhere_is_rejected(uri, member, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if member.name == "/outside":
        member.name = str(tmp_path / "outside")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member.size = 0 if member.linkname else 4
        tar.addfile(member, io.BytesIO(b"evil"))
        tar.addfile(tarfile.TarInfo("items/link/file"))
    archive = content.getvalue()
    write(uri, f"{save_of(uri, 30)}/process-0.params.tar", archive)
    change_archive(uri, "process-0.params.tar", [len(archive), zlib.crc32(archive)])
    with Checkpoints(uri, read_only=True) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match="must be a tar file of files with relative names, got"):
            checkpoints.restore(30, {"params": TREE})
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert found.step == 20
    assert not [path for path in tmp_path.rglob("*") if path.name in ("outside", "link", "file")]
    record_property("fault", f"an object of a checkpoint names the file {member.name.replace(str(tmp_path), '')}")
    record_property("lost", "nothing: nothing is written elsewhere")


@pytest.mark.parametrize("uri", ["s3://no-such-bucket/x", "nowhere://x"])
def test_storage_that_cannot_be_opened_is_rejected(s3, uri):
    with pytest.raises(LaunchError, match=r"the storage must be .*bucket/path.* that can be reached, got"):
        Checkpoints(uri)


def test_join_path_keeps_the_options_of_a_uri_at_the_end():
    assert join_path("s3://bucket/runs/?scheme=http", "a", "b") == "s3://bucket/runs/a/b?scheme=http"
