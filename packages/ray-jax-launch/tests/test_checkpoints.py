import re
import tarfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from pyarrow.fs import FileSelector

from ray_jax_launch import Checkpoints, MismatchedCheckpointError, intact_step, latest_step, open_uri
from ray_jax_launch._checkpoint.catalog import list_steps


@pytest.fixture
def tree():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return {
        "h": {0: {"w": jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, PartitionSpec("data")))}},
        "count": jnp.int32(3),
        "host": np.arange(5),
    }


def test_what_was_saved_comes_back_bit_for_bit(place, tree):
    with Checkpoints(place) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(7, {"params": tree, "extra": {"x": jnp.ones(2, jnp.bfloat16)}}, metadata={"seed": 1})
        checkpoints.wait()
    with Checkpoints(place) as checkpoints:
        assert checkpoints.latest_step() == 7
        assert checkpoints.metadata(7) == {"seed": 1}
        restored = checkpoints.restore(7, {"params": tree})
    assert set(restored) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, restored["params"], tree)
    assert restored["params"]["h"][0]["w"].sharding == tree["h"][0]["w"].sharding


def test_another_layout_can_be_restored_into(place, tree):
    on_one = SingleDeviceSharding(jax.devices()[1])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one), tree)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": tree}, metadata={})
        checkpoints.wait()
        restored = checkpoints.restore(1, {"params": like})["params"]
    assert restored["h"][0]["w"].devices() == {jax.devices()[1]}
    jax.tree.map(np.testing.assert_array_equal, restored, tree)


def test_keys_and_numbers_and_nothing_come_back_as_they_were(place):
    keys = jax.random.split(jax.random.key(3), 4)
    numbers = {
        "steps": np.int64(3),
        "rate": np.float32(0.5),
        "loss": np.float64(2),
        "done": np.bool_(True),
        "count": 2,
        "none": None,
    }
    state = {"keys": keys, **numbers}
    items = {"state": state, "opt_state": ((), {}), "average": None}
    abstract_key = jax.eval_shape(lambda: keys)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, items, metadata={})
        checkpoints.wait()
        restored = checkpoints.restore(1, {**items, "state": state | {"keys": abstract_key}})
    assert restored["state"]["keys"].dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(restored["state"]["keys"]), jax.random.key_data(keys))
    rest = {name: value for name, value in restored["state"].items() if name != "keys"}
    assert rest == numbers
    assert (restored["opt_state"], restored["average"]) == (((), {}), None)


def test_only_what_was_saved_can_be_restored(place):
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": {"h": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2)}]}}, metadata={})
        checkpoints.wait()
        for like, message in [
            ({"opt_state": {"mu": jnp.ones(2)}}, "opt_state.mu: not saved, wanted with shape (2,)"),
            ({"params": {}}, "params.h.0.b: saved with shape (2,), not wanted"),
            ({"params": {"h": [{"w": jnp.ones((3, 2))}]}}, "params.h.0.b: saved with shape (2,), not wanted"),
            (
                {"params": {"h": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2), "c": 1}]}},
                "params.h.0.c: not saved, wanted with shape ()",
            ),
            (
                {"params": {"h": [{"w": jnp.ones((2, 3)), "b": jnp.ones(2)}]}},
                "params.h.0.w: saved with shape (3, 2), wanted with shape (2, 3)",
            ),
        ]:
            with pytest.raises(MismatchedCheckpointError) as said:
                checkpoints.restore(1, like)
            assert str(said.value) == (
                f"the checkpoint must hold the arrays that are to be restored, got {message}. Restore into the model "
                "that wrote it, or read another checkpoint"
            )
        with pytest.raises(ValueError, match="expected a tree of arrays as the item params, got a single"):
            checkpoints.restore(1, {"params": jnp.ones(2)})
    with Checkpoints(place, read_only=True) as checkpoints, pytest.raises(MismatchedCheckpointError):
        checkpoints.restore_latest({"params": {"h": jnp.ones(2)}})


def test_a_buffer_may_be_reused_once_save_returns(place):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x = jnp.arange(4_000_000.0)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": {"x": x}}, metadata={})
        x = jax.block_until_ready(overwrite(x))
        checkpoints.wait()
        restored = checkpoints.restore(1, {"params": {"x": x}})["params"]["x"]
    np.testing.assert_array_equal(restored, np.arange(4_000_000.0))


def test_only_the_newest_are_kept(place, tree):
    with Checkpoints(place, num_to_keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": tree}, metadata={})
            checkpoints.wait()
    assert sorted(list_steps(place)) == [20, 30]


def test_the_best_are_kept_beside_the_newest(place, tree):
    scores = {10: jnp.float32(3.0), 20: 1.0, 30: np.float32(2.0), 40: 5.0, 50: float("nan"), 60: None}
    with Checkpoints(place, num_to_keep=2, num_best_to_keep=2) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, {"params": tree}, metadata={}, score=score)
            checkpoints.wait()
        assert checkpoints.latest_step() == 60
    assert sorted(list_steps(place)) == [20, 30, 50, 60]


def test_a_save_ends_and_old_checkpoints_are_deleted_though_nobody_waits(place, tree):
    with Checkpoints(place, num_to_keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": tree}, metadata={})
        assert checkpoints.latest_step() == 20
        deadline = time.monotonic() + 30
        while checkpoints.durable_step() != 30 or sorted(list_steps(place)) != [20, 30]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if isinstance(place, Path):
            while {path.name for path in place.iterdir()} != {"20", "30"}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert checkpoints.latest_step() == 20  # the same on every process, whichever is first to know
        checkpoints.wait()
        assert checkpoints.latest_step() == 30


def test_what_is_being_saved_can_be_restored(place, tree):
    with Checkpoints(place) as checkpoints:
        checkpoints.save(10, {"params": tree}, metadata={"seed": 2})
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(10, {"params": tree})["params"], tree)
        checkpoints.save(20, {"params": tree}, metadata={"seed": 3})
        assert checkpoints.metadata(20) == {"seed": 3}


def test_an_error_in_the_loop_keeps_what_was_saved_before_it(place, tree):
    def loop():
        with Checkpoints(place) as checkpoints:
            checkpoints.save(10, {"params": tree}, metadata={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert latest_step(place) == 10


OLD_ITEMS = {
    "params": {"h": [{"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(2, jnp.bfloat16)}], "count": np.int64(3)},
    "rng": {"key": jax.random.key(7)},
}


@pytest.fixture(params=["folder 0.3", "objects 0.3", "objects 0.5"])
def old_checkpoints(request, tmp_path):
    """Checkpoint 7, which an older version wrote. Two processes wrote that of version 0.5."""
    kind, version = request.param.split()
    unpacked = tmp_path / "unpacked"
    with tarfile.open(Path(__file__).with_name(f"checkpoints-{version}.tar.gz")) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            path, content = unpacked / member.name, tar.extractfile(member)
            assert content is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    if kind == "folder":
        return unpacked / "folder"
    uri = f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    filesystem, root = open_uri(uri)
    for path in (unpacked / "objects" / "7").iterdir():
        with filesystem.open_output_stream(f"{root}/7/{path.name}") as stream:
            stream.write(path.read_bytes())
    return uri


@pytest.mark.parametrize("read_only", [False, True])
def test_checkpoints_of_older_versions_can_be_restored(old_checkpoints, read_only):
    assert intact_step(old_checkpoints) == 7
    with Checkpoints(old_checkpoints, read_only=read_only) as checkpoints:
        found = checkpoints.restore_latest(
            jax.tree.map(jnp.zeros_like, {"params": OLD_ITEMS["params"]}) | {"rng": OLD_ITEMS["rng"]}
        )
    assert found is not None
    assert (found.step, found.metadata) == (7, {"seed": 1})
    jax.tree.map(np.testing.assert_array_equal, found.items["params"], OLD_ITEMS["params"])
    key = found.items["rng"]["key"]
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(OLD_ITEMS["rng"]["key"]))


def test_scores_of_older_versions_count(old_checkpoints):
    with Checkpoints(old_checkpoints, num_to_keep=1, num_best_to_keep=1) as checkpoints:
        for step, score in ((8, 3.0), (9, 4.0)):
            checkpoints.save(step, {"params": OLD_ITEMS["params"]}, metadata={}, score=score)
    assert sorted(list_steps(old_checkpoints)) == [7, 9]


def test_checkpoints_of_older_versions_are_deleted(old_checkpoints):
    with Checkpoints(old_checkpoints, num_to_keep=1) as checkpoints:
        checkpoints.save(8, {"params": OLD_ITEMS["params"]}, metadata={})
    if isinstance(old_checkpoints, Path):
        assert [path.name for path in old_checkpoints.iterdir()] == ["8"]
    else:
        filesystem, root = open_uri(old_checkpoints)
        paths = [info.path for info in filesystem.get_file_info(FileSelector(root, recursive=True)) if info.is_file]
        assert {path[len(root) :].split("/")[1] for path in paths} == {"8"}


@pytest.mark.fault
@pytest.mark.parametrize("old_checkpoints", ["objects 0.3", "objects 0.5"], indirect=True)
def test_a_damaged_checkpoint_of_an_older_version_is_quarantined(old_checkpoints, record_property):
    filesystem, root = open_uri(old_checkpoints)
    for info in filesystem.get_file_info(FileSelector(f"{root}/7")):
        filesystem.copy_file(info.path, f"{root}/3/{info.base_name}")
    filesystem.copy_file(f"{root}/7/checkpoint.json", f"{root}/7/process-0.tar")
    assert intact_step(old_checkpoints, quarantine=True) == 3
    assert list_steps(old_checkpoints) == [3]
    with Checkpoints(old_checkpoints) as checkpoints:
        checkpoints.save(7, {"params": OLD_ITEMS["params"]}, metadata={})
    assert intact_step(old_checkpoints) == 7
    record_property("fault", "newest checkpoint in object storage, of an older version: an archive has other bytes")
    record_property("lost", "steps since the checkpoint before it")


def test_a_checkpoint_under_way_is_not_listed(tmp_path):
    assert latest_step(tmp_path / "nowhere") is None
    (tmp_path / "10").mkdir()
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    assert latest_step(tmp_path) == 10


@pytest.mark.fault
def test_what_a_kill_left_half_written_is_deleted_and_written_again(tmp_path, tree, record_property):
    record_property("fault", "a process was killed while it wrote a checkpoint to a folder")
    record_property("lost", "steps since the last checkpoint")
    half = tmp_path / "20.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "torn").write_text("x")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(20, {"params": tree}, metadata={})
        checkpoints.wait()
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(20, {"params": tree})["params"], tree)
    assert [path.name for path in tmp_path.iterdir()] == ["20"]


def test_reading_changes_nothing(tmp_path, tree):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, {"params": tree}, metadata={})
        checkpoints.wait()
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        checkpoints.restore(10, {"params": tree})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.orbax-checkpoint-tmp"]


def test_what_cannot_be_saved_or_restored_is_said(place, tree):
    with Checkpoints(place) as checkpoints:
        checkpoints.save(0, {"params": tree}, metadata={})
        checkpoints.wait()
        checkpoints.save(10, {"params": tree}, metadata={})
        checkpoints.wait()
        for step in (10, 5, -1):
            with pytest.raises(ValueError, match=rf"must be a whole number of at least 11, got {step}\. Continue from"):
                checkpoints.save(step, {"params": tree}, metadata={})
        for name in ("metadata", "metrics", "a/b", ".x", "", "checksums.json", "a\0", "_CHECKPOINT_METADATA"):
            with pytest.raises(
                ValueError, match=r"expected names of items in letters, digits, - and _, .*, got"
            ) as said:
                checkpoints.save(20, {name: tree}, metadata={})
            assert str(said.value).endswith(repr(name))
        for items, message in [
            ({"params": {"h": "text"}}, "expected arrays and numbers to save, got 'text' at params['h']"),
            ({"params": {"h": np.array(["text"])}}, "expected arrays and numbers to save, got array(['text']"),
            ({"params": {"h": jnp.zeros((0, 3))}}, "something in them, got one of shape (0, 3) at params['h']"),
            ({"params": jnp.ones(2)}, "expected a tree of arrays as the item params, got a single ArrayImpl"),
            ({"params": {}}, "expected an array or a number to save, got none in the items ['params']"),
        ]:
            with pytest.raises(ValueError, match=re.escape(message)):
                checkpoints.save(20, items, metadata={})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(20, {"params": tree}, metadata={"x": jnp.ones(1)})
        for read in (lambda step: checkpoints.restore(step, {"params": tree}), checkpoints.metadata):
            with pytest.raises(ValueError, match=r"expected one of the checkpoints \[0, 10\] in .*, got 7"):
                read(7)
    with pytest.raises(ValueError, match=r"open for writing, but these in .* are closed"):
        checkpoints.save(20, {"params": tree}, metadata={})
    with Checkpoints(place, read_only=True) as checkpoints, pytest.raises(ValueError, match="are opened read-only"):
        checkpoints.save(20, {"params": tree}, metadata={})
