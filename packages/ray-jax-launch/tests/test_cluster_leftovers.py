"""Temporary folders of clusters: where they are made, and what the next start deletes. Without Ray."""

import fcntl
import os
import shutil
import socket
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_jax_launch import LaunchError, _cluster
from ray_jax_launch._cluster_folder import ClusterFolder, clean_up, mark_failed

NAME = f"ray-jax-{os.getuid()}"
# The longest name below Ray's temporary folder.
SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"


@pytest.fixture
def parent(temporary, monkeypatch):
    """The folder of all clusters of this user."""
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    return temporary / NAME


def num_open_files() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208  (a listing of paths would open one more)


def test_a_start_deletes_what_a_driver_without_a_reaper_left(parent: Path) -> None:
    left = ClusterFolder()
    (left.path / "session" / "sockets").mkdir(parents=True)
    (left.path / "session_latest").symlink_to(left.path / "session")
    left.close()
    new = ClusterFolder()
    assert [*parent.iterdir()] == [new.path]
    new.close()


def test_a_failed_launch_leaves_its_logs_and_nothing_else(parent: Path) -> None:
    failed = ClusterFolder()
    for name in ("logs", "sockets"):
        (failed.path / "session" / name).mkdir(parents=True)
        (failed.path / "session" / name / "file").touch()
    (failed.path / "session" / "port").touch()
    (failed.path / "session_latest").symlink_to(failed.path / "session")
    mark_failed(failed.path)
    failed.close()
    for _ in range(2):  # by the reaper, and by the next start
        clean_up(parent)
        left = {str(path.relative_to(failed.path)) for path in failed.path.rglob("*")}
        assert left == {"failed", "lock", "session", "session/logs", "session/logs/file"}


def test_a_folder_that_cannot_be_deleted_does_not_keep_the_others(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, which containers run as, may delete everything: the error is that of another user's file."""
    before, folders = num_open_files(), [ClusterFolder() for _ in range(3)]
    for folder in folders:
        (folder.path / "session").mkdir()
        (folder.path / "port").touch()
        folder.close()
    unlink = Path.unlink

    def deny(path: Path, missing_ok: bool = False) -> None:
        if path.parent == folders[1].path:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", deny)
    clean_up(parent)
    assert [folder.path.exists() for folder in folders] == [False, True, False]
    assert num_open_files() == before


def test_a_cleanup_leaves_no_file_open(parent: Path) -> None:
    before = num_open_files()
    failed, living = ClusterFolder(), ClusterFolder()
    mark_failed(failed.path)
    failed.close()
    (parent / "file").touch()
    for _ in range(3):
        clean_up(parent)
    living.close()
    clean_up(parent)
    assert num_open_files() == before
    assert sorted(parent.iterdir()) == sorted([failed.path, parent / "file"])


def test_a_deleted_folder_cannot_be_marked(parent: Path) -> None:
    cluster = ClusterFolder()
    shutil.rmtree(parent)
    mark_failed(cluster.path)
    cluster.close()
    assert not parent.exists()


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock")], ids=["before", "after"])
def test_a_folder_that_another_process_deletes_is_not_used(parent: Path, monkeypatch, module: Any, name: str) -> None:
    """Another start may delete it before or after its lock is opened."""
    deleted: list[Path] = []

    def delete_and_call(*args: Any, **kwargs: Any) -> Any:
        if not deleted:
            deleted.extend(parent.iterdir())
            shutil.rmtree(deleted[0])
        return function(*args, **kwargs)

    before = num_open_files()
    function = getattr(module, name)
    monkeypatch.setattr(module, name, delete_and_call)
    cluster = ClusterFolder()
    assert [*parent.iterdir()] == [cluster.path] != deleted
    assert (cluster.path / "lock").exists()
    cluster.close()
    assert num_open_files() == before


def test_the_longest_folder_for_temporary_files_has_room_for_a_socket(temporary: Path, monkeypatch) -> None:
    most = (103 if sys.platform == "darwin" else 107) - len(f"/{NAME}/123456/{SOCKET}")
    longest = temporary / ("x" * (most - len(str(temporary)) - 1))
    monkeypatch.setenv("RAY_TMPDIR", str(longest))
    cluster = ClusterFolder()
    assert cluster.path.parent.parent == longest
    (cluster.path / SOCKET).parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(cluster.path / SOCKET))
    cluster.close()
    # In UTF-8, the last letter has two bytes.
    for name in (f"{longest.name}x", f"{longest.name[:-1]}\N{LATIN SMALL LETTER E WITH ACUTE}"):
        monkeypatch.setenv("RAY_TMPDIR", str(temporary / name))
        with pytest.raises(LaunchError, match=f"of at most {most} characters .*, got one of {most + 1} characters"):
            ClusterFolder()


@pytest.mark.skipif(sys.platform == "darwin", reason="TMPDIR is too long there")
def test_tmpdir_is_used_without_rays_own_variable(temporary: Path, monkeypatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(temporary))
    cluster = ClusterFolder()
    assert cluster.path.parent == temporary / NAME
    cluster.close()


def test_rays_own_variable_may_name_a_folder_that_is_missing(temporary: Path, monkeypatch) -> None:
    monkeypatch.chdir(temporary)
    monkeypatch.setenv("RAY_TMPDIR", "a/b")
    cluster = ClusterFolder()
    assert cluster.path.parent == temporary / "a" / "b" / NAME
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cluster.path.parent, cluster.path)] == [0o700] * 2
    cluster.close()


def test_a_folder_of_another_user_is_rejected(parent: Path) -> None:
    parent.mkdir()
    try:
        os.chown(parent, os.getuid() + 1, -1)
    except PermissionError:
        pytest.skip("needs the right to give a folder away")
    with pytest.raises(LaunchError, match=f"where another user has made {NAME}"):
        ClusterFolder()
    assert [*parent.iterdir()] == []


@pytest.mark.parametrize(
    ("is_head", "of_failure", "is_kept"),
    [(True, True, True), (True, False, False), (False, True, False)],
    ids=["failed", "ended well", "another cluster"],
)
def test_only_a_failed_launch_on_a_cluster_of_its_own_keeps_its_logs(
    parent: Path, monkeypatch: pytest.MonkeyPatch, is_head: bool, of_failure: bool, is_kept: bool
) -> None:
    folder = ClusterFolder()
    logs = folder.path / "session" / "logs"
    logs.mkdir(parents=True)
    node = SimpleNamespace(head=is_head, get_logs_dir_path=lambda: str(logs))
    monkeypatch.setattr(_cluster, "connected_node", lambda: node)
    monkeypatch.setattr(_cluster, "_started", (folder, None))
    assert _cluster.log_folder(of_failure=of_failure) == str(logs)
    monkeypatch.setattr(_cluster, "connected_node", lambda: None)
    assert _cluster.log_folder(of_failure=True) == ""
    folder.close()
    clean_up(parent)
    assert logs.exists() == is_kept
