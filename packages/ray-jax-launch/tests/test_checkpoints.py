import contextlib
import functools
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from pyarrow.fs import FileSelector

from ray_jax_launch import (
    Checkpoints,
    LaunchError,
    MismatchedCheckpointError,
    SavedCheckpoint,
    checkpoint_steps,
    intact_step,
    latest_step,
)
from ray_jax_launch._checkpoint import checkpoints as checkpoints_module
from ray_jax_launch._checkpoint.catalog import unsaved
from ray_jax_launch._checkpoint.pytree import to_restore
from ray_jax_launch._checkpoint.save_events import notify_of_saves
from ray_jax_launch._storage import open_uri


@pytest.fixture
def tree():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return {
        "h": {0: {"w": jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, PartitionSpec("data")))}},
        "count": jnp.int32(3),
        "host": np.arange(5),
    }


def test_arrays_are_restored_bit_for_bit(place, tree):
    with Checkpoints(place) as checkpoints:
        assert checkpoints.latest_step() is None
        # NumPy's kind of these two types is that of records.
        host = {"x": np.arange(3).astype(jnp.bfloat16), "y": np.arange(3).astype(jnp.float8_e4m3fn)}
        checkpoints.save(7, {"params": tree, "extra": host, "host": host}, metadata={"seed": 1})
        checkpoints.wait()
    with Checkpoints(place) as checkpoints:
        assert checkpoints.latest_step() == 7
        assert checkpoints.broadcast_metadata(7) == {"seed": 1}
        restored = checkpoints.restore(7, {"params": tree, "host": host})
    assert set(restored) == {"params", "host"}
    jax.tree.map(np.testing.assert_array_equal, restored["host"], host)
    jax.tree.map(np.testing.assert_array_equal, restored["params"], tree)
    assert restored["params"]["h"][0]["w"].sharding == tree["h"][0]["w"].sharding


def test_arrays_are_restored_into_another_sharding(place, tree):
    on_one = SingleDeviceSharding(jax.devices()[1])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one), tree)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": tree}, metadata={})
        checkpoints.wait()
        restored = checkpoints.restore(1, {"params": like})["params"]
    assert restored["h"][0]["w"].devices() == {jax.devices()[1]}
    jax.tree.map(np.testing.assert_array_equal, restored, tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_numbers_and_empty_items_are_restored(place, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    numbers = {
        "steps": np.int64(3),
        "rate": np.float32(0.5),
        "loss": np.float64(2),
        "done": np.bool_(True),
        "count": 2,
        "most": 2**64 - 1,
        "least": -(2**63),
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


@pytest.fixture
def saved(place):
    """Checkpoint 1."""
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": {"h": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2)}]}}, metadata={})
    return place


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"opt_state": {"mu": jnp.ones(2)}}, "opt_state.mu: not saved, wanted as floats with shape (2,)"),
        ({"params": {}}, "params.h.0.b: saved as floats with shape (2,), not wanted"),
        ({"params": {"h": [{"w": jnp.ones((3, 2))}]}}, "params.h.0.b: saved as floats with shape (2,), not wanted"),
        ({"params": {"h": [{"a": 1}]}}, "params.h.0.a: not saved, wanted as integers with shape ()"),
        (
            {"params": {"h": [{"w": jnp.ones((2, 3)), "b": jnp.ones(2)}]}},
            "params.h.0.w: saved as floats with shape (3, 2), wanted as floats with shape (2, 3)",
        ),
        (
            {"params": {"h": [{"w": jnp.ones((3, 2)), "b": jnp.ones(2, jnp.int32)}]}},
            "params.h.0.b: saved as floats with shape (2,), wanted as integers with shape (2,)",
        ),
        ({"params": jnp.ones(2)}, "params: not saved, wanted as floats with shape (2,)"),
    ],
    ids=["item", "no leaves", "missing leaf", "other leaf", "shape", "kind", "array"],
)
def test_a_restore_into_another_tree_is_rejected(saved, like, message):
    with Checkpoints(saved, read_only=True) as checkpoints:
        for restore in (lambda: checkpoints.restore(1, like), lambda: checkpoints.restore_latest(like)):
            with pytest.raises(MismatchedCheckpointError) as error:
                restore()
            assert str(error.value) == (
                f"the checkpoint must hold the arrays that are to be restored, got {message}. Restore into the model "
                "that wrote it, or read another checkpoint."
            )


KINDS = {"floats": jnp.bfloat16, "integers": np.uint8, "complex numbers": np.complex64, "booleans": np.bool_}


@pytest.mark.parametrize("saved_as", KINDS)
@pytest.mark.parametrize("wanted_as", KINDS)
def test_numbers_are_restored_as_numbers_of_their_kind_alone(saved_as, wanted_as):
    like, saved = ({"params": {"w": jax.ShapeDtypeStruct((3,), KINDS[kind])}} for kind in (wanted_as, saved_as))
    if saved_as == wanted_as:
        assert to_restore(like, saved) == like
        return
    message = f"params.w: saved as {saved_as} with shape (3,), wanted as {wanted_as} with shape (3,). Restore"
    with pytest.raises(MismatchedCheckpointError, match=re.escape(message)):
        to_restore(like, saved)


def test_an_array_can_be_overwritten_when_save_returns(place):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x = jnp.arange(4_000_000.0)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": {"x": x}}, metadata={})
        x = jax.block_until_ready(overwrite(x))
        checkpoints.wait()
        restored = checkpoints.restore(1, {"params": {"x": x}})["params"]["x"]
    np.testing.assert_array_equal(restored, np.arange(4_000_000.0))


def test_metadata_can_be_changed_when_save_returns(place, tree):
    position = {"step": 40, "of": {"train": [1, 2]}}
    with Checkpoints(place) as checkpoints:
        checkpoints.save(40, {"params": tree}, metadata=position)
        position["step"] = 41
        position["of"]["train"].append(3)
        checkpoints.wait()
    with Checkpoints(place, read_only=True) as checkpoints:
        assert checkpoints.broadcast_metadata(40) == {"step": 40, "of": {"train": [1, 2]}}


def test_a_save_ends_and_old_checkpoints_are_deleted_in_the_background(place, tree):
    with Checkpoints(place, num_to_keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": tree}, metadata={})
        assert checkpoints.latest_step() == 20
        deadline = time.monotonic() + 30
        while checkpoints.durable_step() != 30 or checkpoint_steps(place) != [20, 30]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if isinstance(place, Path):
            while {path.name for path in place.iterdir()} != {"20", "30"}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert checkpoints.latest_step() == 20  # equal on all processes until they wait
        checkpoints.wait()
        assert checkpoints.latest_step() == 30


def test_a_checkpoint_that_is_being_saved_can_be_restored(place, tree):
    with Checkpoints(place) as checkpoints:
        checkpoints.save(10, {"params": tree}, metadata={"seed": 2})
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(10, {"params": tree})["params"], tree)
        checkpoints.save(20, {"params": tree}, metadata={"seed": 3})
        assert checkpoints.broadcast_metadata(20) == {"seed": 3}


def test_an_error_in_the_loop_keeps_the_save_before_it(place, tree):
    def loop():
        with Checkpoints(place) as checkpoints:
            checkpoints.save(10, {"params": tree}, metadata={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert latest_step(place) == 10


# Ctrl-C, three times, while the end of the `with` block waits for a save.
INTERRUPTED = """
import os, signal, sys, threading, time
import jax.numpy as jnp
from ray_jax_launch import Checkpoints

saved, handled = threading.Event(), threading.Semaphore(0)

def interrupt(*args):
    handled.release()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
try:
    with Checkpoints(sys.argv[1]) as checkpoints:
        write = checkpoints._store.write_checksums

        def write_after_the_signals(*args):
            assert saved.wait(60)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                assert handled.acquire(timeout=60)
                time.sleep(0.2)
            write(*args)

        checkpoints._store.write_checksums = write_after_the_signals
        checkpoints.save(1, {"params": {"w": jnp.ones(1000)}}, metadata={})
        saved.set()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_repeated_interrupts_do_not_break_off_the_save_before_them(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)
    assert intact_step(tmp_path) == 1


def test_an_incomplete_checkpoint_is_not_listed(tmp_path):
    assert latest_step(tmp_path / "nowhere") is None
    (tmp_path / "10").mkdir()
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    assert latest_step(tmp_path) == 10


@pytest.mark.fault
def test_a_checkpoint_that_a_kill_left_incomplete_is_deleted_and_written_again(tmp_path, tree, record_property):
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


def test_a_reader_changes_nothing(tmp_path, tree):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, {"params": tree}, metadata={})
        checkpoints.wait()
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        checkpoints.restore(10, {"params": tree})
    SavedCheckpoint(tmp_path, 10).restore({"params": tree})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.orbax-checkpoint-tmp"]


def test_each_call_that_may_take_long_is_work_that_must_end(tmp_path, tree, monkeypatch):
    open_blocks, told = [], []

    @contextlib.contextmanager
    def saving():
        open_blocks.append(1)
        yield
        open_blocks.pop()

    def note(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (told.append((name, bool(open_blocks))), function(*args))[1])

    heartbeat = SimpleNamespace(saving=saving)
    monkeypatch.setattr("ray_jax_launch._control.session._session", SimpleNamespace(heartbeat=heartbeat))
    with Checkpoints(tmp_path) as checkpoints:
        note(checkpoints._writer, "begin")
        checkpoints.save(10, {"params": tree}, metadata={})
        assert not open_blocks
        pending = checkpoints._pending
        assert pending is not None
        done: Any = SimpleNamespace(exception=pending.done.exception)
        note(done, "exception")
        checkpoints._pending = pending._replace(done=done)
        checkpoints.wait()
        note(checkpoints._writer, "restore")
        checkpoints.restore(10, {"params": tree})
        checkpoints.restore_latest({"params": tree})
        note(checkpoints_module, "complete")
    assert told == [(name, True) for name in ("begin", "exception", "restore", "restore", "complete")]
    assert not open_blocks


def test_the_checkpoint_of_a_result_is_read_from_any_storage(place, tree):
    with Checkpoints(place, num_to_keep=None) as checkpoints:
        for step in (7, 9):
            checkpoints.save(step, {"params": {"n": step}}, metadata={})
    found = SavedCheckpoint(place, 7)
    assert (found.step, found.folder, found.restore({"params": {"n": 0}})) == (7, place, {"params": {"n": 7}})
    assert found.filesystem is not None
    path = str(place / "7") if isinstance(place, Path) else f"{place.removeprefix('s3://')}/7"
    assert (found.path, found.filesystem.type_name) == (path, "local" if isinstance(place, Path) else "s3")


def test_only_a_writer_tells_the_launch_its_newest_checkpoint(place, tree):
    """A loop may read the checkpoints of another run."""
    announced = []
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": tree}, metadata={})
    with notify_of_saves(lambda folder, step: announced.append(step), announced.append):
        with Checkpoints(place, read_only=True) as reader:
            assert reader.restore_latest({"params": tree}) is not None
        assert announced == []
        with Checkpoints(place):
            assert announced == [1]


def test_each_of_several_damaged_checkpoints_is_quarantined(place, tree):
    with Checkpoints(place, num_to_keep=4) as checkpoints:
        for step in (10, 20, 30, 40):
            checkpoints.save(step, {"params": tree}, metadata={})
    filesystem, root = open_uri(str(place))
    for step in (20, 30, 40):
        files = [
            info
            for info in filesystem.get_file_info(FileSelector(root, recursive=True))
            if re.match(rf"{step}\b", info.path[len(root) + 1 :]) and info.is_file and info.extension != "json"
        ]
        with filesystem.open_output_stream(max(files, key=lambda info: info.size).path) as stream:
            stream.write(b"x")
    assert intact_step(place, quarantine=True) == 10
    with Checkpoints(place, read_only=True) as reader:
        assert reader.latest_step() == 10


@pytest.mark.parametrize("step", [1, 0, -1, 2.5, float("nan"), "2"])
def test_a_step_that_is_not_greater_than_the_newest_is_rejected(saved, step):
    expected = re.escape(f"must be a whole number of at least 2, got {step!r}. Continue from")
    with Checkpoints(saved) as checkpoints, pytest.raises(ValueError, match=expected):
        checkpoints.save(step, {"params": {"w": jnp.ones(2)}}, metadata={})


@pytest.mark.parametrize("name", ["metadata", "a/b", ".x", "", "checksums.json", "a\0", "_CHECKPOINT_METADATA"])
def test_a_name_that_cannot_be_a_folder_of_an_item_is_rejected(place, name):
    expected = re.escape(
        f"the name of an item must be a letter followed by letters, digits, - and _, and not metadata, "
        f"got {name!r}. Rename the item."
    )
    with Checkpoints(place) as checkpoints, pytest.raises(ValueError, match=expected):
        checkpoints.save(1, {name: {"w": jnp.ones(2)}}, metadata={})


NUMBERS = "must be a number, or an array of numbers that is not empty, got"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"params": {"h": "text"}}, f"params['h'] {NUMBERS} 'text'. Leave it out"),
        ({"params": {"h": np.array(["text"])}}, f"params['h'] {NUMBERS} array(['text']"),
        ({"params": {"h": jnp.zeros((0, 3))}}, f"params['h'] {NUMBERS} Array([], shape=(0, 3)"),
        ({"params": jnp.ones(2)}, "item params must be a tree of arrays, got one ArrayImpl. Put it into a dict."),
        ({"params": {"n": 2**64}}, "params['n'] must be a number of at most 64 bits, got 18446744073709551616. Put it"),
        ({"params": {"n": -(2**63) - 1}}, "must be a number of at most 64 bits, got -9223372036854775809. Put it"),
        (
            {"params": {"a.b": 1, "a": {"b": 2}}},
            "joined by dots, must be different UTF-8 texts, got 'a.b' twice.",
        ),
        ({"params": {"\ud800": 1}}, "joined by dots, must be different UTF-8 texts, got '\\ud800'. Rename one."),
        ({"params": {}}, "items must hold an array or a number, got none in ['params']. Save at least one."),
    ],
    ids=["text", "texts", "empty array", "array", "65 bits", "-65 bits", "same name", "half a character", "no leaves"],
)
def test_items_that_are_not_trees_of_numbers_are_rejected(place, items, message):
    with Checkpoints(place) as checkpoints, pytest.raises(ValueError, match=re.escape(message)):
        checkpoints.save(1, items, metadata={})


@pytest.mark.parametrize("metadata", [{1: 2}, {"a": [{"b": {None: 1}}]}, {"a": ({1: 2},)}])
def test_metadata_whose_keys_would_change_are_rejected(place, metadata):
    with Checkpoints(place) as checkpoints, pytest.raises(LaunchError, match=r"not \(a key that is no text\)\.$"):
        checkpoints.save(1, {"params": {"w": jnp.ones(2)}}, metadata=metadata)


@pytest.mark.parametrize("value", [np.ones(2, np.longdouble), np.array(["2026-01-01"], "M8[D]")])
def test_numbers_that_cannot_be_written_are_rejected_at_once(place, value):
    with (
        Checkpoints(place) as checkpoints,
        pytest.raises(ValueError, match=r"w'.* must be a number, or an array of "),
    ):
        checkpoints.save(1, {"params": {"w": value}}, metadata={})


def test_metadata_that_is_not_json_is_rejected(place):
    with Checkpoints(place) as checkpoints, pytest.raises(LaunchError, match="not JSON serializable"):
        checkpoints.save(1, {"params": {"w": jnp.ones(2)}}, metadata={"x": jnp.ones(1)})


def test_a_step_without_a_checkpoint_cannot_be_read(saved):
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(LaunchError, match=r"step must be a whole number of at least 0, got 1\.0\."):
            checkpoints.restore(1.0, {"params": {"w": jnp.ones(2)}})  # pyright: ignore[reportArgumentType]
        restore = functools.partial(checkpoints.restore, 7, {"params": {"w": jnp.ones(2)}})
        for read in (restore, lambda: checkpoints.broadcast_metadata(7)):
            with pytest.raises(ValueError, match=r"step must be a checkpoint in .*, got 7\. Choose one of 1\."):
                read()


@pytest.mark.parametrize("read_only", [False, True])
def test_closed_and_read_only_checkpoints_cannot_be_saved(saved, read_only):
    with Checkpoints(saved, read_only=read_only) as checkpoints:
        if read_only:
            with pytest.raises(ValueError, match=r"are read-only\. Make a new"):
                checkpoints.save(20, {"params": {"w": jnp.ones(2)}}, metadata={})
    with pytest.raises(ValueError, match=r"are closed\. Make a new"):
        checkpoints.save(20, {"params": {"w": jnp.ones(2)}}, metadata={})


def test_a_long_cause_of_a_failed_save_keeps_its_end():
    error = unsaved(Path("runs"), 2, OSError(f"{'folder/' * 100}file: input/output error."))
    assert "file: input/output error. The checkpoints before it are unchanged." in str(error)
    assert len(str(error)) < 500
