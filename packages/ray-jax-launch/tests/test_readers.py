"""Readers of checkpoints while a run writes and deletes them."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from ray_jax_launch import (
    Checkpoints,
    DeletedCheckpointError,
    LaunchError,
    MismatchedCheckpointError,
    checkpoint_steps,
    intact_step,
    latest_step,
    newest_metadata,
)
from ray_jax_launch._checkpoint import checkpoints as checkpoints_module
from ray_jax_launch._checkpoint.folder_store import FolderStore
from ray_jax_launch._checkpoint.object_store import ObjectStore

WRITER = """
import sys, time
import jax.numpy as jnp
from ray_jax_launch import Checkpoints

with Checkpoints(sys.argv[1], num_to_keep=1) as checkpoints:
    for step in range(1, 1_000_000):
        checkpoints.save(
            step, {"params": {name: jnp.full(1000, float(step)) for name in "abcdef"}}, metadata={"step": step}
        )
        time.sleep(0.05)
"""
LIKE = {name: jnp.zeros(1000) for name in "abcdef"}


@pytest.fixture
def writer(place):
    """A process that saves every 50 ms, and keeps one checkpoint."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(place)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while latest_step(place) is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.fault
def test_a_reader_takes_a_newer_checkpoint_if_the_run_deletes_the_one_it_reads(place, writer, record_property):
    steps = []
    while len(steps) < 10 or len(set(steps)) < 4:
        with Checkpoints(place, read_only=True) as checkpoints:
            found = checkpoints.restore_latest({"params": LIKE})
        assert found is not None
        for leaf in found.items["params"].values():
            np.testing.assert_array_equal(leaf, np.full(1000, found.step))
        assert found.metadata == {"step": found.step}
        steps.append(found.step)
        assert len(steps) < 100
    assert steps == sorted(steps)
    kind = "object storage" if "://" in str(place) else "a folder"
    record_property("fault", f"a run deletes the checkpoints in {kind} while another process reads them")
    record_property("lost", "nothing")


@pytest.mark.parametrize(("num_deleted", "patience_s"), [(4, 0.0), (5, 0.0), (7, 60.0)])
def test_a_reader_gives_up_when_five_checkpoints_were_deleted_under_it(tmp_path, monkeypatch, num_deleted, patience_s):
    """It goes on for a minute if they are deleted faster."""
    copy_items = FolderStore.copy_items
    with Checkpoints(tmp_path, num_to_keep=1) as writer, Checkpoints(tmp_path, read_only=True) as reader:

        def save(step):
            writer.save(step, {"params": LIKE}, metadata={"step": step})
            writer.wait()

        def copy_late(store, step, *args):
            if step <= num_deleted:
                save(step + 1)
            return copy_items(store, step, *args)

        save(1)
        monkeypatch.setattr(FolderStore, "copy_items", copy_late)
        monkeypatch.setattr("ray_jax_launch._checkpoint.checkpoints._PATIENCE_S", patience_s)
        if num_deleted == 5:
            with pytest.raises(LaunchError, match=r"5 checkpoints in .* were deleted while they were read"):
                reader.restore_latest({"params": LIKE})
        else:
            found = reader.restore_latest({"params": LIKE})
            assert found is not None
            assert (found.step, found.metadata) == (num_deleted + 1, {"step": num_deleted + 1})


def test_a_checkpoint_that_the_run_deletes_while_it_is_checked_is_not_damaged(place, monkeypatch, caplog):
    store = ObjectStore if "://" in str(place) else FolderStore
    find_damage, checked = store.find_damage, []
    with Checkpoints(place, num_to_keep=1) as checkpoints:
        checkpoints.save(1, {"params": LIKE}, metadata={})
        checkpoints.wait()

        def find_damage_later(self, step):
            checked.append(step)
            if step == 1:
                checkpoints.save(2, {"params": LIKE}, metadata={})
                checkpoints.wait()
            return find_damage(self, step)

        monkeypatch.setattr(store, "find_damage", find_damage_later)
        assert intact_step(place) == 2
    assert checked == [1, 2]
    assert not [record for record in caplog.records if "damaged" in record.message]


def test_metadata_is_found_while_a_run_deletes_checkpoints(place, writer):
    found = [(newest_metadata(place) or {}).get("step", 0) for _ in range(50)]
    assert found == sorted(found)
    assert found[0] > 0


def test_a_deleted_checkpoint_is_reported_as_deleted(place):
    with Checkpoints(place, num_to_keep=1) as checkpoints:
        checkpoints.save(1, {"params": LIKE}, metadata={})
        checkpoints.wait()
        with Checkpoints(place, read_only=True) as reader:
            checkpoints.save(2, {"params": LIKE}, metadata={"step": 2})
            checkpoints.wait()
            for read in (lambda: reader.restore(1, {"params": LIKE}), lambda: reader.broadcast_metadata(1)):
                with pytest.raises(DeletedCheckpointError, match=r"has deleted checkpoint 1 in .* while it was read"):
                    read()
            # Checkpoint 2 was saved after the reader was opened.
            assert reader.broadcast_metadata(2) == {"step": 2}
            assert reader.latest_step() == 2


def test_the_run_itself_can_restore_its_newest_checkpoint(place):
    with Checkpoints(place) as checkpoints:
        assert checkpoints.restore_latest({"params": LIKE}) is None
        checkpoints.save(3, {"params": LIKE}, metadata={"step": 3})
        found = checkpoints.restore_latest({"params": LIKE})
        assert found is not None
        assert (found.step, found.metadata) == (3, {"step": 3})
    with Checkpoints(place, read_only=True) as checkpoints, pytest.raises(MismatchedCheckpointError):
        checkpoints.restore_latest({"opt_state": LIKE})


def test_processes_that_read_together_take_the_list_of_the_first_one(place, monkeypatch, caplog):
    """They see what a run has saved since they were opened, and skip what is damaged. This process is one of two."""
    inside: list[int] = []

    def in_the_first_one(compute, leader=0):
        inside.append(leader)
        try:
            return compute()
        finally:
            inside.pop()

    two = SimpleNamespace(process_count=lambda: 2, process_index=lambda: 0)
    with Checkpoints(place, num_to_keep=None) as run, monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, "from_leader", in_the_first_one)
        with Checkpoints(place, read_only=True) as reader:
            patch.setattr(checkpoints_module, "jax", two)
            store, steps = reader._store, reader._store.steps
            patch.setattr(store, "steps", lambda: steps() if inside else pytest.fail("each process has its own list"))
            assert reader.restore_latest({"params": LIKE}) is None
            for step in (1, 2, 3):
                run.save(step, {"params": LIKE}, metadata={"step": step})
            run.wait()
            assert reader.restore_step(2, {"params": LIKE}).metadata == {"step": 2}
            found = reader.restore_latest({"params": LIKE})
            assert found is not None
            assert (found.step, found.metadata) == (3, {"step": 3})
            damage = store.find_damage
            patch.setattr(store, "find_damage", lambda step, share: "broken" if step == 3 else damage(step, share))
            found = reader.restore_latest({"params": LIKE})
            assert found is not None
            assert (found.step, found.metadata) == (2, {"step": 2})
    assert f"checkpoint 3 in {place} is damaged (broken): going back to checkpoint 2" in caplog.messages
    assert checkpoint_steps(place) == [1, 2, 3]
