"""Damaged checkpoints in a folder."""

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ray_jax_launch import (
    Checkpoints,
    DamagedCheckpointError,
    LaunchError,
    UnsavedCheckpointError,
    checkpoint_steps,
    intact_step,
    newest_metadata,
)
from ray_jax_launch._checkpoint.checksums import to_json
from ray_jax_launch._checkpoint.folder_store import FolderStore
from ray_jax_launch._checkpoint.save_events import notify_of_saves
from ray_jax_launch._checkpoint.writers import FolderWriter, make_writer

TREE = {"w": jnp.arange(1000.0)}


def flip_a_byte(checkpoint):
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{file.relative_to(checkpoint)} does not have the checksum it was written with"


def cut_short(checkpoint):
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file.relative_to(checkpoint)} has {size - 1} bytes, not {size}"


def remove_a_file(checkpoint):
    file = next(path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.parent != checkpoint)
    file.unlink()
    return f"{file.relative_to(checkpoint)} is missing"


def spoil_the_checksums(checkpoint):
    (checkpoint / "checksums.json").write_text("{")
    return "checksums.json cannot be read"


def empty_the_folder(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return "checksums.json is missing"


def remove_the_checksums(checkpoint):
    (checkpoint / "checksums.json").unlink()
    return "checksums.json is missing"


DAMAGES = [
    flip_a_byte, cut_short, remove_a_file, spoil_the_checksums, empty_the_folder, remove_the_checksums
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Checkpoints 10, 20 and 30, with different values."""
    with Checkpoints(tmp_path, num_to_keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": jax.tree.map(lambda x, n=step: x + n, TREE)}, metadata={"step": step})
            checkpoints.wait()
    return tmp_path


@pytest.mark.fault
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_checkpoint_is_restored_with_a_warning(folder, caplog, damage, record_property):
    problem = damage(folder / "30")
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), Checkpoints(folder, num_to_keep=3) as checkpoints:
        assert checkpoints.latest_step() == 20
        restored = checkpoints.restore(20, {"params": TREE})["params"]["w"]
        np.testing.assert_array_equal(restored, TREE["w"] + 20)
        assert checkpoints.broadcast_metadata(20) == {"step": 20}
        # The number is free again.
        checkpoints.save(30, {"params": TREE}, metadata={})
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore(30, {"params": TREE})["params"]["w"], TREE["w"])
    expected = f"checkpoint 30 in {folder} is damaged ({problem}): going back to checkpoint 20"
    assert [record.message for record in caplog.records if record.name == "ray_jax_launch"] == [expected]
    assert (folder / "30.damaged").is_dir()
    assert intact_step(folder) == 30
    record_property("fault", f"newest checkpoint in a folder: {damage.__name__.replace('_', ' ')}")
    record_property("lost", "steps since the checkpoint before it")


# The reader does not need the file that `remove_a_file` deletes.
@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage is not remove_a_file])
def test_a_reader_skips_a_damaged_checkpoint(folder, damage):
    damage(folder / "30")
    with Checkpoints(folder, read_only=True) as checkpoints:
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert (found.step, found.metadata) == (20, {"step": 20})
    assert (folder / "30").is_dir()


def test_a_reader_does_not_rename_a_damaged_checkpoint(folder, caplog):
    flip_a_byte(folder / "30")
    flip_a_byte(folder / "20")
    with caplog.at_level(logging.WARNING, "ray_jax_launch"):
        assert intact_step(folder) == 10
    assert [record.message.partition(" in ")[0] for record in caplog.records] == ["checkpoint 30", "checkpoint 20"]
    assert all(record.message.endswith("going back to checkpoint 10") for record in caplog.records)
    with Checkpoints(folder, read_only=True) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(10, {"params": TREE})["params"]["w"], TREE["w"] + 10)
        found = checkpoints.restore_latest({"params": TREE})
        assert found is not None
        assert (found.step, found.metadata) == (10, {"step": 10})
        np.testing.assert_array_equal(found.items["params"]["w"], TREE["w"] + 10)
    assert {path.name for path in folder.iterdir()} == {"10", "20", "30"}


@pytest.mark.parametrize(("verify", "step"), [(True, 20), (False, 30)])
def test_only_a_verified_start_quarantines_a_damaged_checkpoint(folder, verify, step):
    flip_a_byte(folder / "30")
    with Checkpoints(folder, verify=verify) as checkpoints:
        assert checkpoints.latest_step() == step
    assert (folder / "30.damaged").exists() == verify


@pytest.mark.fault
@pytest.mark.parametrize(
    "make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["file", "pipe", "link"]
)
def test_what_is_no_folder_is_not_in_the_way_of_the_next_checkpoint(folder, make, caplog, record_property):
    record_property("fault", "a file, a pipe or a dangling link has the name of the next checkpoint")
    record_property("lost", "nothing")
    make(folder / "40")
    with Checkpoints(folder, read_only=True) as checkpoints:
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert found.step == 30
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest_step() == 30
        checkpoints.save(40, {"params": TREE}, metadata={})
    assert intact_step(folder) == 40
    assert os.path.lexists(folder / "40.damaged")
    assert f"checkpoint 40 in {folder} is damaged (" in caplog.text


def test_a_quarantine_is_on_the_disk(folder, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, (folder / "30").exists())))
    FolderStore(folder).quarantine(30)
    assert synced == [(inode(folder), False)]


@pytest.mark.fault
def test_a_quarantine_on_storage_that_fails_for_a_moment_succeeds(folder, monkeypatch, record_property):
    record_property("fault", "a rename in the run's folder fails with EIO, and its repetition with ENOENT")
    record_property("lost", "nothing")
    rename, errors = Path.rename, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def rename_at_last(path, target):
        if errors:
            rename(path, target)  # as by a server of NFS whose answer is lost
            raise errors.pop()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_at_last)
    FolderStore(folder).quarantine(30)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("30")) == ["30.damaged"]


@pytest.mark.fault
def test_a_run_does_not_start_if_all_checkpoints_are_damaged(folder, record_property):
    for step in (10, 20, 30):
        remove_a_file(folder / str(step))
    with pytest.raises(DamagedCheckpointError, match=r"are damaged \(30: .* is missing; 20: .*; 10: .*\)\. Restore"):
        Checkpoints(folder)
    record_property("fault", "a file is missing in each checkpoint")
    record_property("lost", "nothing: the start is rejected with a list of the damage")
    assert {path.name for path in folder.iterdir()} == {"10", "20", "30"}


def test_a_reader_raises_if_all_checkpoints_are_damaged(folder):
    for step in (10, 20, 30):
        cut_short(folder / str(step))
    expected = r"are damaged \(30: .* bytes, not .*; 20: .*; 10: "
    with Checkpoints(folder, read_only=True) as checkpoints, pytest.raises(DamagedCheckpointError, match=expected):
        checkpoints.restore_latest({"params": TREE})


def test_every_file_has_a_checksum_without_wait(tmp_path):
    with Checkpoints(tmp_path, num_to_keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": TREE, "opt_state": TREE}, metadata={"step": step})
    for step in (10, 20, 30):
        checkpoint = tmp_path / str(step)
        common, own = (json.loads((checkpoint / name).read_text()) for name in ("checksums.json", "_parts/0.json"))
        found = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
        # Orbax has written the last of them since version 0.12.
        unlisted = {"checksums.json", "_parts/0.json", "_CHECKPOINT_METADATA"}
        assert found - {"commit_success.txt"} - {*common["files"], *own["files"]} == unlisted
        assert not {*common["files"]} & {*own["files"]}
        assert (common["processes"], common["step"], own["step"]) == (1, step, step)
        assert {name.split("/")[1] for name in own["files"]} == {"array_metadatas", "ocdbt.process_0"}
        assert min(len(common["files"]), len(own["files"])) > 5


def test_a_checkpoint_is_on_the_disk_before_it_is_announced(tmp_path, monkeypatch):
    place, synced = tmp_path / "runs/checkpoints", {"before": set(), "after": set()}
    real, announced = os.fsync, []

    def fsync(file):
        found = os.fstat(file)
        synced["after" if (place / "10").exists() else "before"] |= {found.st_ino, (found.st_ino, found.st_size)}
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with (
        notify_of_saves(
            lambda folder, step: announced.append((step, inode(place) in synced["after"])), announced.append
        ),
        Checkpoints(place) as checkpoints,
    ):
        assert {inode(tmp_path), inode(tmp_path / "runs")} <= synced["before"]
        checkpoints.save(10, {"params": TREE, "opt_state": TREE}, metadata={})
    assert announced == [(10, True)]
    files = [
        path for path in (place / "10").rglob("*") if path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt")
    ]
    assert len(files) > 20
    assert inode(place / "10") in synced["before"]
    written = {str(path): (inode(path), path.stat().st_size) for path in files if path.is_file()}
    assert {path for path, state in written.items() if state not in synced["before"]} == set()
    assert {str(path) for path in files if inode(path) not in synced["before"]} == set()


def inode(path):
    return path.stat().st_ino


def test_a_checkpoint_of_another_command_is_not_replaced(tmp_path):
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        first.save(10, {"params": TREE}, metadata={"first": True})
        first.wait()
        with pytest.raises(UnsavedCheckpointError, match=r"another run has written .*/10\. Stop"):
            second.save(10, {"params": TREE}, metadata={"first": False})
    assert intact_step(tmp_path) == 10
    assert newest_metadata(tmp_path) == {"first": True}


def test_a_checkpoint_that_appears_after_the_check_is_not_deleted(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        first.save(10, {"params": TREE}, metadata={"first": True})
        first.wait()
        with monkeypatch.context() as stale:
            stale.setattr(FolderStore, "version", lambda self, step: None)  # as before the first save
            with pytest.raises(UnsavedCheckpointError, match="/10 already exists"):
                second.save(10, {"params": TREE}, metadata={"first": False})
    assert intact_step(tmp_path) == 10
    assert newest_metadata(tmp_path) == {"first": True}


def test_files_in_place_of_a_half_written_checkpoint_are_deleted(tmp_path):
    (tmp_path / "10.orbax-checkpoint-tmp").write_text("x")
    (tmp_path / "10.orbax-checkpoint-tmp-2").symlink_to("/nowhere")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, {"params": TREE}, metadata={})
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_files_without_a_checksum_are_not_needed(folder):
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (folder / "30" / name).unlink(missing_ok=True)
    with Checkpoints(folder) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(30, {"params": TREE})["params"]["w"], TREE["w"] + 30)
        assert checkpoints.broadcast_metadata(30) == {"step": 30}


@pytest.mark.fault
def test_a_step_can_be_quarantined_twice(folder, record_property):
    record_property("fault", "newest checkpoint in a folder: damaged, written again, and damaged again")
    record_property("lost", "steps since the checkpoint before it")
    for problem in (cut_short, spoil_the_checksums):
        problem(folder / "30")
        with Checkpoints(folder, num_to_keep=3) as checkpoints:
            assert checkpoints.latest_step() == 20
            checkpoints.save(30, {"params": TREE}, metadata={})
    assert intact_step(folder) == 30
    assert {path.name for path in folder.iterdir()} == {"10", "20", "30", "30.damaged", "30.damaged2"}
    assert (folder / "30.damaged" / "checksums.json").read_text() != "{"
    assert (folder / "30.damaged2" / "checksums.json").read_text() == "{"


def test_a_file_shorter_than_written_by_a_multiple_of_4_gib_is_damaged(folder):
    path = folder / "30" / "checksums.json"
    checksums = json.loads(path.read_text())
    name, (size, checksum) = next(iter(checksums["files"].items()))
    checksums["files"][name] = [size + (1 << 32), checksum]
    path.write_text(to_json(checksums))
    assert FolderStore(folder).find_damage(30) == f"{name} has {size} bytes, not {size + (1 << 32)}"


def test_the_first_file_that_a_host_does_not_see_is_named(folder: Path) -> None:
    store, checkpoint = FolderStore(folder), folder / "30"
    assert store.find_missing(30) is None
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    for other in (content[:-1], content + b"x", b""):
        file.write_bytes(other)
        assert store.find_missing(30) == str(file)
    file.unlink()
    assert store.find_missing(30) == str(file)
    file.write_bytes(content)
    assert store.find_missing(30) is None
    remove_the_checksums(checkpoint)
    assert store.find_missing(30) == f"{checkpoint} as it was written (checksums.json is missing)"
    assert store.find_missing(40) == str(folder / "40")


@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_the_processes_of_a_node_share_its_look_at_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    store, looked_at, stat = FolderStore(folder), list[str](), Path.stat

    def note(path: Path, **options: bool) -> os.stat_result:
        looked_at.append(str(path.relative_to(folder / "30")))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", note)
    shares = [(rank, num_ranks) for rank in range(num_ranks)]
    assert [store.find_missing(30, share) for share in shares] == [None] * num_ranks
    files = [name for name in looked_at if "checksums.json" not in name and not name.startswith("_parts")]
    assert sorted(files) == sorted(store.files(30))
    monkeypatch.undo()
    gone = "params/ocdbt.process_0/manifest.ocdbt"
    (folder / "30" / gone).unlink()
    found = [store.find_missing(30, share) for share in shares]
    assert [path for path in found if path is not None] == [str(folder / "30" / gone)]
    found = [store.find_damage(30, share) for share in shares]
    assert [problem for problem in found if problem is not None] == [f"{gone} is missing"]


def test_a_host_that_does_not_see_a_checkpoint_stops_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_jax_launch._checkpoint.writers._STALE_S", 0.0)
    with contextlib.closing(make_writer(folder, FolderStore(folder), "")) as writer:
        assert isinstance(writer, FolderWriter)
        writer._wait_until_visible(30)
        with pytest.raises(LaunchError, match=rf"does not see {folder}/40 after"):
            writer._wait_until_visible(40)


@pytest.mark.parametrize(("rank", "share"), [(1, (0, 2)), (3, (1, 2))])
def test_the_processes_of_a_node_look_for_all_files_together(
    rank: int, share: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing of a node may be old. What the processes of another node see says nothing about it."""
    shares: list[tuple[int, int]] = []

    def note(step: int, share: tuple[int, int]) -> None:
        shares.append(share)
        raise LaunchError("looked")

    monkeypatch.setattr("ray_jax_launch._checkpoint.writers._ranks_that_see", lambda folder: [1, 3])
    monkeypatch.setattr("ray_jax_launch._checkpoint.writers.from_leader", lambda look, rank: look())
    store = FolderStore(folder)
    monkeypatch.setattr(store, "find_missing", note)
    with contextlib.closing(make_writer(folder, store, "")) as writer, monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: rank)
        patch.setattr(jax, "process_count", lambda: 5)
        patch.setattr(store, "files", lambda *_, **__: pytest.skip("looked"))
        with pytest.raises(LaunchError, match="looked"):
            writer.restore(30, {})
    assert shares == [share]


def test_a_checkpoint_is_deleted_while_an_older_one_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a deleted file that is open in another process, and its folder."""
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    store = FolderStore(folder)
    for step in (10, 20):
        store.unlist(step)
        store.sweep()
    assert checkpoint_steps(folder) == [30]
    assert len([*folder.glob(".trash-*")]) == 2
    monkeypatch.setattr(shutil, "rmtree", remove)
    store.unlist(30)
    assert len([*folder.glob(".trash-30-*/params")]) == 1
    store.sweep()
    assert [*folder.iterdir()] == []


DELETES = """
import sys
from pathlib import Path
from ray_jax_launch._checkpoint.folder_store import FolderStore
store = FolderStore(Path(sys.argv[1]))
store.unlist(30)
store.sweep()
"""


@pytest.mark.fault
def test_a_process_killed_during_a_deletion_leaves_no_incomplete_checkpoint(folder, record_property):
    record_property("fault", "a process is killed while it deletes an old checkpoint from a folder")
    record_property("lost", "nothing")
    many = folder / "30" / "many"
    many.mkdir()
    for number in range(20_000):
        (many / str(number)).touch()
    process = subprocess.Popen([sys.executable, "-c", DELETES, str(folder)])
    try:
        with contextlib.suppress(FileNotFoundError):  # the folder was renamed
            while len(os.listdir(many)) == 20_000:  # noqa: PTH208  (faster)
                assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert checkpoint_steps(folder) == [10, 20]
    with Checkpoints(folder):
        pass
    assert {path.name for path in folder.iterdir()} == {"10", "20"}


def test_a_missing_folder_has_no_checkpoint(tmp_path):
    assert intact_step(tmp_path / "nowhere") is None


def test_an_array_is_restored_in_the_precision_that_is_wanted(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}}, metadata={})
        like = {"w": jnp.zeros((3, 2), jnp.bfloat16), "b": np.zeros(2)}
        restored = checkpoints.restore(1, {"params": like})["params"]
    assert (restored["w"].dtype, restored["b"].dtype) == (jnp.bfloat16, np.float64)
    np.testing.assert_array_equal(restored["w"], np.ones((3, 2)))


def test_the_version_of_a_checkpoint_is_another_after_each_replacement(tmp_path: Path) -> None:
    store, times = FolderStore(tmp_path), [(1, 1), (1, 1), (1, 3)]
    found: list[object] = [store.version(7)]
    for time_s in times:
        if (tmp_path / "7").exists():
            (tmp_path / "7").rename(tmp_path / f"old-{len(found)}")
        (tmp_path / "7").mkdir()
        os.utime(tmp_path / "7", time_s)
        assert store.version(7) == store.version(7)
        found.append(store.version(7))
    os.utime(tmp_path / "7", (1, 9))  # another folder may get the number of a deleted one
    found.append(store.version(7))
    assert found[0] is None
    assert len({*found}) == len(found)
    (tmp_path / "8").symlink_to("nowhere")
    assert store.version(8) is not None


def test_a_checkpoint_without_the_part_of_a_process_is_not_listed(tmp_path: Path) -> None:
    parts, store = tmp_path / "7.orbax-checkpoint-tmp" / "_parts", FolderStore(tmp_path)
    parts.mkdir(parents=True)
    for rank in (0, 2):
        (parts / f"{rank}.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"^process 1 has not written its shards of checkpoint 7\.$"):
        store.write_checksums(7, 3)
    assert [*parts.parent.iterdir()] == [parts]


def test_a_damaged_item_does_not_stop_the_restore_of_another_item(tmp_path: Path) -> None:
    items = {"params": TREE, "opt_state": {"mu": jnp.ones(70_000)}}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (30, 40):
            checkpoints.save(step, items, metadata={})
    problem = flip_a_byte(tmp_path / "40")
    assert problem.startswith("opt_state/")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        found = [checkpoints.restore_latest({name: items[name]}) for name in items]
        assert [one and one.step for one in found] == [40, 30]
        assert checkpoints.restore_step(40, {"params": TREE}).step == 40
        with pytest.raises(DamagedCheckpointError, match="does not have the checksum"):
            checkpoints.restore_step(40, items)
