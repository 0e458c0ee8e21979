"""Local files before an upload and after a download, and processes that are killed."""

import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from ray_jax_launch import Checkpoints, LaunchError, UnsavedCheckpointError, intact_step, latest_step
from ray_jax_launch._checkpoint.staging import Staging, node_of

SAVES = """
import sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints

with Checkpoints(sys.argv[1]) as checkpoints:
    for step in range(1, 1_000_000):
        checkpoints.save(step, {"params": {"w": jnp.ones(4_000_000)}}, metadata={})
"""

RESTORES = """
import sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints

with Checkpoints(sys.argv[1], read_only=True) as checkpoints:
    while True:
        checkpoints.restore(checkpoints.latest_step(), {"params": {"w": jnp.ones(4_000_000)}})
"""

HOLDS = """
import sys, time
from ray_jax_launch import Checkpoints

with Checkpoints(sys.argv[1]) as checkpoints:
    folder = checkpoints._writer._staging.make_folder()
    (folder / "shard").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def large_files(folder):
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and path.stat().st_size > 1_000_000:
                found.append(path)
        except FileNotFoundError:
            pass  # the process has deleted it
    return found


def begin(code, *args):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=environment, stdout=subprocess.PIPE, text=True)


def read_line(process):
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


def kill_when_files_exist(process, temporary):
    try:
        deadline = time.monotonic() + 60
        while not large_files(temporary):
            assert process.poll() is None
            assert time.monotonic() < deadline
    finally:
        kill(process)


@pytest.mark.fault
@pytest.mark.parametrize("code", [SAVES, RESTORES], ids=["save", "restore"])
def test_the_next_start_deletes_the_local_files_of_a_killed_process(s3, temporary, code, record_property):
    uri = f"{s3}/{temporary.name}"
    if code is RESTORES:
        with Checkpoints(uri) as checkpoints:
            checkpoints.save(1, {"params": {"w": jnp.ones(4_000_000)}}, metadata={})
    kill_when_files_exist(begin(code, uri), temporary)
    assert large_files(temporary)
    before = latest_step(uri) or 0
    with Checkpoints(uri) as checkpoints:
        assert not large_files(temporary)
        assert (checkpoints.latest_step() or 0) == before == (intact_step(uri) or 0)
    (parent,) = temporary.iterdir()
    assert list(parent.iterdir()) == []
    record_property(
        "fault", f"a process is killed in a {'save to' if code is SAVES else 'restore from'} object storage"
    )
    record_property("lost", "steps since the last checkpoint" if code is SAVES else "nothing")


@pytest.mark.fault
def test_a_start_does_not_delete_files_of_a_living_process(s3, temporary, record_property):
    same, other = f"{s3}/{temporary.name}/same", f"{s3}/{temporary.name}/other"
    processes = [begin(HOLDS, same), begin(HOLDS, other)]
    try:
        folders = [read_line(process) for process in processes]
        for uri in (same, other):
            with Checkpoints(uri):
                assert all(os.path.exists(f"{folder}/shard") for folder in folders)  # noqa: PTH110
        kill(processes[0])
        with Checkpoints(other):
            assert [os.path.exists(folder) for folder in folders] == [False, True]  # noqa: PTH110
    finally:
        for process in processes:
            kill(process)
    record_property("fault", "another run, and another process of the run, starts while files are uploaded")
    record_property("lost", "nothing")


def test_processes_that_start_together_keep_their_files(temporary):
    code = """
import sys
from ray_jax_launch._checkpoint.staging import Staging
for number in range(200):
    staging = Staging("s3://bucket/run")
    (staging.make_folder() / "shard").write_text("x")
    assert sum(path.is_file() for path in staging.path.rglob("*")) == 1
    staging.close()
    staging.close()
"""
    processes = [begin(code) for _ in range(4)]
    assert [process.communicate(timeout=300)[0] for process in processes] == [""] * 4
    assert [process.returncode for process in processes] == [0] * 4
    (parent,) = temporary.iterdir()
    assert list(parent.iterdir()) == []


def test_a_folder_of_another_user_is_rejected(temporary):
    folder = temporary / f"ray-jax-launch-{os.getuid()}"
    folder.mkdir()
    try:
        os.chown(folder, os.getuid() + 1, -1)
    except PermissionError:
        pytest.skip("needs the right to give a folder away")
    expected = f"must be a folder of this user, got one of user {os.getuid() + 1}. Set TMPDIR"
    with pytest.raises(LaunchError, match=expected):
        Staging("s3://bucket/run")


def test_a_link_in_place_of_the_folder_is_rejected(temporary):
    (temporary / "elsewhere").mkdir()
    (temporary / f"ray-jax-launch-{os.getuid()}").symlink_to(temporary / "elsewhere")
    with pytest.raises(LaunchError, match=r"ray-jax-launch-.* must be a folder of this user"):
        Staging("s3://bucket/run")


@pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
def test_readers_and_writers_leave_no_file_open(place, temporary):
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.ones(8)}}, metadata={})

    def open_and_close():
        with Checkpoints(place, read_only=True) as reader:
            assert reader.restore_latest({"params": {"w": jnp.ones(8)}}) is not None
        with Checkpoints(place):
            pass

    for _ in range(2):  # the first time opens what the process keeps
        open_and_close()
    before = num_open_files()
    for _ in range(3):
        open_and_close()
    end = time.monotonic() + 60
    # The server closes its end of a connection a moment later.
    while num_open_files() > before and time.monotonic() < end:
        time.sleep(0.1)
    assert num_open_files() <= before


@pytest.fixture
def parent(temporary: Path) -> Path:
    return temporary / f"ray-jax-launch-{os.getuid()}"


def num_open_files() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208  (a listing of paths would open one more)


def test_local_files_are_closed_to_other_users(parent: Path) -> None:
    before = os.umask(0)
    try:
        staging = Staging("s3://bucket/run")
        staging.make_folder()
    finally:
        os.umask(before)
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in parent.rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    staging.close()


def test_a_start_leaves_no_file_open(parent: Path) -> None:
    before = num_open_files()
    with contextlib.closing(Staging("s3://bucket/run")):
        for _ in range(3):
            Staging("s3://bucket/run").close()
    assert num_open_files() == before
    assert [*parent.iterdir()] == []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_folder_of_a_block_is_deleted_at_its_end(parent: Path, error: type[BaseException] | None) -> None:
    with contextlib.closing(Staging("s3://bucket/run")) as staging:
        with contextlib.suppress(KeyboardInterrupt), staging.folder() as folder, staging.folder() as other:
            (folder / "shard").touch()
            (other / "shard").touch()
            if error is not None:
                raise error
        assert [*staging.path.iterdir()] == []


def test_a_lock_that_another_process_deletes_is_not_used(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start may take and delete it before this process has locked it."""
    deleted: list[Path] = []

    def delete_and_lock(descriptor: int, operation: int) -> None:
        if not deleted:
            deleted.extend(parent.iterdir())
            deleted[0].unlink()
        flock(descriptor, operation)

    flock, before = fcntl.flock, num_open_files()
    monkeypatch.setattr(fcntl, "flock", delete_and_lock)
    staging = Staging("s3://bucket/run")
    assert {*parent.iterdir()} == {staging.path, staging.path.with_name(f"{staging.path.name}.lock")}
    assert deleted[0].with_suffix("") != staging.path
    staging.close()
    assert num_open_files() == before


# Ends the process by a signal when it calls a function for the first time.
KILLED = """
import importlib, os, signal, sys
from ray_jax_launch._checkpoint.staging import Staging

module, name = sys.argv[1].split(".")
setattr(importlib.import_module(module), name, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
Staging("s3://bucket/run").close()
"""


@pytest.mark.fault
@pytest.mark.parametrize("function", ["os.open", "fcntl.flock", "shutil.rmtree"])
def test_the_next_start_deletes_what_a_kill_left_at_any_time(parent: Path, function: str, record_property: Any) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, function], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    with contextlib.closing(Staging("s3://bucket/run")) as staging:
        assert {*parent.iterdir()} == {staging.path, staging.path.with_name(f"{staging.path.name}.lock")}
    record_property("fault", f"a process is killed when it calls {function} for its local files")
    record_property("lost", "nothing")


def test_processes_of_one_node_are_known_by_their_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def node(folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        return node_of(folder)

    a, b = temporary / "a", temporary / "b"
    assert node(a) == node(a) != node(b)
    here = node(a)
    for boot in (temporary / "boot", temporary / "missing"):
        (temporary / "boot").write_text("9e7c\n")
        monkeypatch.setattr("ray_jax_launch._checkpoint.staging._BOOT_ID", boot)
        assert node(a) not in (here, node(b))
        assert "\n" not in node(a)
        assert node(a).startswith("9e7c " if boot.exists() else f"{socket.gethostname()} ")
    # Folders of two file systems, as of two containers of a host, may have one number.
    places: list[Any] = [
        SimpleNamespace(stat=lambda place=place: SimpleNamespace(st_dev=place[0], st_ino=place[1]))
        for place in ((1, 7), (2, 7), (1, 72), (17, 2))
    ]
    assert len({node_of(place) for place in places}) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_local_files_are_deleted_when_their_save_has_ended(
    s3: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def fail(*args: object) -> None:
        raise OSError("broken")

    with Checkpoints(f"{s3}/{temporary.name}") as checkpoints:
        if fails:
            monkeypatch.setattr("ray_jax_launch._checkpoint.object_store.ObjectStore.upload", fail)
        for step in (1, 2):
            checkpoints.save(step, {"params": {"w": jnp.ones(8)}}, metadata={})
            with pytest.raises(UnsavedCheckpointError) if fails else contextlib.nullcontext():
                checkpoints.wait()
            assert [path.suffix for path in temporary.rglob("*") if path.is_file()] == [".lock"]
            assert checkpoints.latest_step() == (None if fails else step)
