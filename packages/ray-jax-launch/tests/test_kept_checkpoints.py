"""The checkpoints that stay, and the reading of one of them."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch import (
    Checkpoints,
    DamagedCheckpointError,
    DeletedCheckpointError,
    LaunchError,
    MismatchedCheckpointError,
    checkpoint_steps,
    join_path,
)
from ray_jax_launch._checkpoint.writers import FolderWriter, ObjectWriter
from ray_jax_launch._storage import open_uri

# A loop that evaluates each checkpoint after its save, as an application does. The best step is in the metadata of the
# next checkpoint. The last argument is a step at whose deletion the process kills itself, or -1.
LOOP = """
import os, signal, sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints
from ray_jax_launch._checkpoint.folder_store import FolderStore
from ray_jax_launch._checkpoint.object_store import ObjectStore

folder, last, killed = sys.argv[1], *map(int, sys.argv[2:])
for store in (FolderStore, ObjectStore):
    def unlist(self, step, unlist=store.unlist):
        if step == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        unlist(self, step)

    store.unlist = unlist

losses = {1: 9.0, 2: 8.0, 3: 3.0, 4: 4.0, 5: 2.0, 6: 5.0, 7: 6.0, 8: 7.0, 9: 1.0, 10: 5.0}
best = {"step": 0, "loss": 1e9}
with Checkpoints(folder, num_to_keep=1, keep=lambda step: step % 4 == 0 or step == best["step"]) as checkpoints:
    start = checkpoints.latest_step() or 0
    if start:
        best = checkpoints.broadcast_metadata(start)
    for step in range(start, last):
        if step:  # the evaluation of the checkpoint before, also after a restart
            best = min(best, {"step": step, "loss": losses[step]}, key=lambda of: of["loss"])
        checkpoints.save(step + 1, {"params": {"w": jnp.full(7, step + 1.0)}}, metadata=best)
        checkpoints.wait()
"""
LIKE = {"w": jnp.zeros(7)}

TWO = """
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints

folder, rank, port = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
split = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
asked = []
with Checkpoints(folder, num_to_keep=1, keep=lambda step: asked.append(step) or step == 2) as checkpoints:
    for step in (1, 2, 3, 4):
        w = jax.make_array_from_callback((6,), split, lambda index: np.full(6, step, np.float32)[index])
        checkpoints.save(step, {"params": {"w": w}}, metadata={"step": step})
    checkpoints.wait()
    found = checkpoints.restore_step(2, {"params": {"w": w}})
    values = {float(x) for shard in found.items["params"]["w"].addressable_shards for x in shard.data}
    try:
        checkpoints.restore_step(1, {"params": {"w": w}})
    except ValueError as error:
        print("found", asked, found.step, found.metadata, values, str(error)[-20:].strip())
"""


def save(place, steps, **options):
    with Checkpoints(place, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"params": {"w": jnp.full(7, float(step))}}, metadata={"step": step})
            checkpoints.wait()


def run_loop(place, last, killed=-1):
    return subprocess.run([sys.executable, "-c", LOOP, str(place), str(last), str(killed)], check=False).returncode


def damage(place, step):
    """Replace the largest file of a checkpoint."""
    filesystem, root = open_uri(str(place))
    files = [
        info
        for info in filesystem.get_file_info(FileSelector(root, recursive=True))
        if re.match(rf"{step}\b", info.path[len(root) + 1 :]) and info.is_file and "params" in info.path
    ]
    with filesystem.open_output_stream(max(files, key=lambda info: info.size).path) as stream:
        stream.write(b"x")


@pytest.mark.parametrize(("num_to_keep", "kept"), [(1, [30]), (2, [20, 30]), (4, [10, 20, 30]), (None, [10, 20, 30])])
def test_only_the_newest_checkpoints_are_kept(place, num_to_keep, kept):
    save(place, (10, 20, 30), num_to_keep=num_to_keep)
    assert checkpoint_steps(place) == kept
    with Checkpoints(place, read_only=True) as checkpoints:
        assert checkpoints.latest_step() == 30


def test_steps_are_kept_beside_the_newest_as_long_as_the_caller_keeps_them(place):
    asked = []
    best = {3}

    def keep(step):
        asked.append(step)
        return step % 5 == 0 or step in best

    with Checkpoints(place, num_to_keep=2, keep=keep) as run:
        for step in range(1, 9):
            run.save(step, {"params": LIKE}, metadata={})
            run.wait()
        assert asked == [1, 2, 3, 3, 4, 3, 5, 3, 5, 6]  # no step that is one of the newest, or that is gone
        assert checkpoint_steps(place) == [3, 5, 7, 8]
        best = {7}
        run.save(9, {"params": LIKE}, metadata={})
        run.wait()
        assert checkpoint_steps(place) == [5, 7, 8, 9]
    save(place, (10,), num_to_keep=1, keep=lambda step: step < 8)  # the second start decides itself
    assert checkpoint_steps(place) == [5, 7, 10]


def test_two_processes_keep_and_read_the_same_steps(place, run_ranks):
    expected = "[1, 2, 2, 3] 2 {'step': 2} {2.0} Choose one of 2, 4."
    assert run_ranks(TWO, [place, place]) == [expected, expected]
    assert checkpoint_steps(place) == [2, 4]


def test_an_error_of_the_caller_leaves_the_checkpoints_as_they_are(place):
    save(place, (1, 2))
    with Checkpoints(place, keep=lambda step: 1 // (step - 1) > 0) as checkpoints:
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(3, {"params": LIKE}, metadata={})
        assert checkpoints.latest_step() == 2
    assert checkpoint_steps(place) == [1, 2]


@pytest.mark.fault
@pytest.mark.parametrize("killed", [1, 3, 5])
def test_a_kill_between_the_save_and_the_deletion_leaves_no_checkpoint_too_many(place, killed, record_property):
    """Step 3 is deleted only when step 5 is found to be better; 5 when 9 is."""
    last = {1: 2, 3: 6, 5: 10}[killed]
    assert run_loop(place, 11, killed) == -signal.SIGKILL
    listed = checkpoint_steps(place)
    assert {killed, last} <= {*listed}
    assert run_loop(place, 11) == 0
    assert checkpoint_steps(place) == [4, 8, 9, 11]
    with Checkpoints(place, read_only=True) as checkpoints:
        for step in (4, 8, 9, 11):
            np.testing.assert_array_equal(checkpoints.restore(step, {"params": LIKE})["params"]["w"], np.full(7, step))
        assert checkpoints.broadcast_metadata(11) == {"step": 9, "loss": 1.0}
    assert run_loop(place, 11) == 0  # finished: nothing changes
    assert checkpoint_steps(place) == [4, 8, 9, 11]
    record_property("fault", "a process is killed after a save, before it deletes an old checkpoint")
    record_property("lost", "nothing")


def test_the_steps_of_a_folder_are_listed_without_jax(place):
    assert checkpoint_steps(place) == []
    save(place, (2, 10, 1234), num_to_keep=None)
    code = (
        "import sys; from ray_jax_launch import checkpoint_steps; print(checkpoint_steps(sys.argv[1])); "
        "sys.exit('jax' in sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=True)
    assert listed.stdout == "[2, 10, 1234]\n"
    assert checkpoint_steps(join_path(str(place), "nowhere")) == []


@pytest.mark.parametrize("read_only", [True, False])
def test_one_step_is_read(place, read_only):
    save(place, (1, 2, 3), num_to_keep=3)
    with Checkpoints(place, read_only=read_only, num_to_keep=None) as checkpoints:
        for step in (2, 3, 1, 2):
            found = checkpoints.restore_step(step, {"params": LIKE})
            assert (found.step, found.metadata) == (step, {"step": step})
            np.testing.assert_array_equal(found.items["params"]["w"], np.full(7, step))
        with pytest.raises(MismatchedCheckpointError):
            checkpoints.restore_step(2, {"params": {"other": LIKE["w"]}})
    with pytest.raises(LaunchError, match=r"are closed\. Make a new"):
        checkpoints.restore_step(2, {"params": LIKE})


def test_a_step_that_was_saved_after_the_reader_was_opened_is_read(place):
    save(place, (1,))
    with Checkpoints(place, read_only=True) as checkpoints:
        save(place, (2,))
        assert checkpoints.restore_step(2, {"params": LIKE}).metadata == {"step": 2}


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("steps", "choices"),
    [
        ((), "There is none yet."),
        ((3,), "Choose one of 3."),
        ((2, 4), "Choose one of 2, 4."),
        (range(100, 122), f"Choose one of ..., {', '.join(str(step) for step in range(102, 122))}."),
    ],
)
def test_a_missing_step_is_answered_with_the_steps_that_exist(tmp_path, steps, choices, read_only):
    save(tmp_path, steps, num_to_keep=None)
    expected = f"step must be a checkpoint in {tmp_path}, got 5. {choices}"
    with Checkpoints(tmp_path, read_only=read_only) as checkpoints:
        for read in (
            lambda: checkpoints.restore_step(5, {"params": LIKE}),
            lambda: checkpoints.restore(5, {"params": LIKE}),
            lambda: checkpoints.broadcast_metadata(5),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
                read()
        with pytest.raises(LaunchError, match=r"^step must be a whole number of at least 0, got -1\."):
            checkpoints.restore_step(-1, {"params": LIKE})


@pytest.mark.fault
def test_a_chosen_step_that_is_damaged_is_an_error_and_no_other_is_read(place, record_property):
    save(place, (1, 2, 3), num_to_keep=3)
    damage(place, 2)
    with Checkpoints(place, read_only=True) as checkpoints:
        expected = rf"^checkpoint 2 in {re.escape(str(place))} is damaged \(.*\)\. Choose one of 1, 3\.$"
        with pytest.raises(DamagedCheckpointError, match=expected):
            checkpoints.restore_step(2, {"params": LIKE})
        assert checkpoints.restore_step(1, {"params": LIKE}).metadata == {"step": 1}
    assert checkpoint_steps(place) == [1, 2, 3]  # a reader changes nothing
    record_property("fault", "the checkpoint that an evaluation names is damaged")
    record_property("lost", "nothing: the command ends with one sentence")


@pytest.mark.fault
@pytest.mark.parametrize("method", ["restore_step", "restore"])
def test_a_chosen_step_that_the_run_deletes_is_an_error_and_no_other_is_read(
    method, place, monkeypatch, record_property
):
    save(place, (1, 2), num_to_keep=2)
    writer = FolderWriter if isinstance(place, Path) else ObjectWriter
    restore = writer.restore_copy if method == "restore_step" else writer.restore

    def restore_late(*args):
        found = restore(*args)
        save(place, (3,), num_to_keep=2)
        return found

    monkeypatch.setattr(writer, "restore_copy", restore_late)
    monkeypatch.setattr(writer, "restore", restore_late)
    with Checkpoints(place, read_only=True) as checkpoints:
        with pytest.raises(DeletedCheckpointError, match=r"^the run has deleted checkpoint 1 in .* while it was read"):
            getattr(checkpoints, method)(1, {"params": LIKE})
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"got 1\. Choose one of 2, 3\.$"):
            checkpoints.restore_step(1, {"params": LIKE})
    record_property("fault", "a run deletes the checkpoint that an evaluation names while it is read")
    record_property("lost", "nothing: the command ends with one sentence")
