"""Storage that fails: temporary read errors, full disks, read-only folders."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from ray_jax_launch import Checkpoints, LaunchError, StorageFullError, UnsavedCheckpointError, latest_step
from ray_jax_launch._checkpoint.catalog import unsaved

# Fails the first FAULT_READS reads of files whose path contains FAULT_PATH, with the error FAULT_ERRNO.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int faulty(int descriptor) {
  static int left = -1;
  if (left < 0) left = atoi(getenv("FAULT_READS"));
  if (left == 0) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  if (!strstr(path, getenv("FAULT_PATH"))) return 0;
  left--;
  errno = atoi(getenv("FAULT_ERRNO"));
  return 1;
}

ssize_t read(int descriptor, void *buffer, size_t size) {
  static ssize_t (*real)(int, void *, size_t);
  if (!real) real = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
  return faulty(descriptor) ? -1 : real(descriptor, buffer, size);
}

/* By tensorstore. */
ssize_t pread(int descriptor, void *buffer, size_t size, off_t offset) {
  static ssize_t (*real)(int, void *, size_t, off_t);
  if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
  return faulty(descriptor) ? -1 : real(descriptor, buffer, size, offset);
}
"""

# First step of every start: find the newest undamaged checkpoint, and quarantine damaged ones.
START = """
import sys
from ray_jax_launch import LaunchError, intact_step
from ray_jax_launch._checkpoint import retry
retry.DELAYS_S = (0.05,) * 5
try:
    print(intact_step(sys.argv[1], quarantine=True))
except LaunchError as error:
    print("LaunchError:", error)
"""

# Restores a checkpoint that another process has verified.
RESTORE = """
import sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints, LaunchError
from ray_jax_launch._checkpoint import retry
retry.DELAYS_S = (0.05,) * 5
with Checkpoints(sys.argv[1], verify=False) as checkpoints:
    try:
        print(checkpoints.restore(20, {"params": {"w": jnp.zeros(10)}})["params"]["w"][0])
    except LaunchError as error:
        print("LaunchError:", error)
"""

FULL = """
import gc, sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints, UnsavedCheckpointError, latest_step

with Checkpoints(sys.argv[1], num_to_keep=1) as checkpoints:
    checkpoints.save(1, {"params": {"w": jnp.ones(10)}}, metadata={})
    checkpoints.save(2, {"params": {f"w{n}": jnp.ones(200_000) for n in range(40)}}, metadata={})
    try:
        checkpoints.save(3, {"params": {"w": jnp.ones(10)}}, metadata={})
    except UnsavedCheckpointError as error:
        print(error)
        print("cause:", error.__cause__)
    gc.collect()  # logs what tasks have raised
    assert checkpoints.latest_step() == checkpoints.durable_step() == latest_step(sys.argv[1]) == 1
    checkpoints.save(4, {"params": {"w": jnp.full(10, 4.0)}}, metadata={})
    checkpoints.wait()
    assert checkpoints.latest_step() == checkpoints.durable_step() == 4
    assert (checkpoints.restore(4, {"params": {"w": jnp.ones(10)}})["params"]["w"] == 4).all()
"""

NO_INODES = """
import sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints, UnsavedCheckpointError

with Checkpoints(sys.argv[1]) as checkpoints:
    try:
        for step in range(50):
            checkpoints.save(step, {"params": {"w": jnp.ones(10)}}, metadata={})
            checkpoints.wait()
    except UnsavedCheckpointError as error:
        print(error)
"""

FULL_LAUNCH = """
import sys
from ray_jax_launch import LaunchError, StorageFullError, launch

def loop():
    import jax.numpy as jnp
    from ray_jax_launch import Checkpoints
    with Checkpoints() as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.ones(10)}}, metadata={})
        checkpoints.save(2, {"params": {f"w{n}": jnp.ones(200_000) for n in range(40)}}, metadata={})

try:
    launch(loop, hardware="HARDWARE", storage_path=sys.argv[1], name="run")
except StorageFullError as error:
    assert not isinstance(error, LaunchError)
    print("StorageFullError", error)
"""

READ_ONLY = """
import sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints, LaunchError

try:
    Checkpoints(sys.argv[1])
except LaunchError as error:
    print(error)
with Checkpoints(sys.argv[1], read_only=True) as checkpoints:
    assert (checkpoints.restore_latest({"params": {"w": jnp.zeros(10)}}).items["params"]["w"] == 1).all()
print("read")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A library that makes reads fail, and the environment variables that load it."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True)

    def environment(path, error, num_reads):
        return os.environ | {
            "LD_PRELOAD": str(folder / "shim.so"),
            "FAULT_PATH": path,
            "FAULT_ERRNO": str(error),
            "FAULT_READS": str(num_reads),
        }

    return environment


@pytest.fixture
def folder(tmp_path):
    """Checkpoints 10 and 20."""
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"params": {"w": jnp.full(10, float(step))}}, metadata={})
    return tmp_path / "checkpoints"


@pytest.fixture
def in_mount_namespace():
    """Run a shell command and then Python code, in a mount namespace of their own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("needs unshare, and the permission to mount")

    def run(mount, code, folder):
        command = ["unshare", "-m", "sh", "-ec", f'{mount}; exec "$0" -c "$1" "$2"', sys.executable, code, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    return run


def start(folder, environment, code=START):
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.fault
@pytest.mark.parametrize("num_inodes", [20, 23, 27])
def test_a_process_ends_after_a_save_without_room_for_a_folder(
    in_mount_namespace, tmp_path, num_inodes, record_property
):
    record_property("fault", f"storage with room for {num_inodes} files and folders")
    record_property("lost", "steps since the last checkpoint")
    done = in_mount_namespace(f"mount -t tmpfs -o nr_inodes={num_inodes} none {tmp_path}", NO_INODES, tmp_path)
    assert "No space left on device" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.fault
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_checkpoint_with_a_temporary_read_error_is_not_damaged(folder, shim, error, record_property):
    began = time.monotonic()
    answer, log = start(folder, shim("/20/params/", error, 3))
    assert answer == "20"
    assert log.count("cannot be accessed") == 3
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20"]
    record_property("fault", f"three reads of the newest checkpoint fail with {errno.errorcode[error]}")
    record_property("lost", "nothing")
    record_property("recovery_s", round(time.monotonic() - began, 1))


@pytest.mark.fault
def test_a_permanent_read_error_ends_the_start_and_changes_nothing(folder, shim, record_property):
    answer, _ = start(folder, shim("/20/", errno.EIO, 1_000_000))
    assert answer.startswith("LaunchError: ")
    assert "cannot be accessed: [Errno 5]" in answer
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20"]
    assert start(folder, os.environ)[0] == "20"
    record_property("fault", "every read of the newest checkpoint fails with EIO")
    record_property("lost", "nothing: the start is rejected, and succeeds when the storage works")


@pytest.mark.fault
def test_a_checkpoint_with_a_temporary_read_error_of_its_checksums_is_not_damaged(folder, shim, record_property):
    answer, log = start(folder, shim("/20/checksums.json", errno.ESTALE, 2))
    assert answer == "20"
    assert log.count("checksums.json cannot be accessed") == 2
    record_property("fault", "two reads of a checkpoint's checksums fail with ESTALE")
    record_property("lost", "nothing")


@pytest.mark.fault
@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_a_restore_succeeds_despite_a_temporary_read_error(folder, shim, name, record_property):
    began = time.monotonic()
    answer, log = start(folder, shim(f"/20/params/{name}", errno.EIO, 2), RESTORE)
    assert answer == "20.0"
    assert log.count("20 cannot be accessed") == 2
    record_property("fault", f"two reads of {name} fail with EIO in a restore")
    record_property("lost", "nothing")
    record_property("recovery_s", round(time.monotonic() - began, 1))


@pytest.mark.fault
def test_a_permanent_read_error_ends_a_restore_with_one_message(folder, shim, record_property):
    answer, _ = start(folder, shim("/20/params/d/", errno.EIO, 1_000_000), RESTORE)
    assert answer.startswith(f"LaunchError: {folder}/20 cannot be accessed: [Errno 5]")
    record_property("fault", "every read of the arrays fails with EIO in a restore")
    record_property("lost", "nothing: the restore is rejected, and succeeds when the storage works")


@pytest.mark.fault
def test_a_full_disk_fails_the_save_and_keeps_the_checkpoints_before_it(tmp_path, in_mount_namespace, record_property):
    done = in_mount_namespace(f"mount -t tmpfs -o size=8m tmpfs {tmp_path}", FULL, tmp_path / "checkpoints")
    assert done.returncode == 0, done.stderr
    message, cause = done.stdout.splitlines()
    assert message == (
        f"checkpoint 2 in {tmp_path}/checkpoints could not be written: No space left on device. The checkpoints before "
        "it are unchanged. Free some space, then start again."
    )
    assert cause.startswith("cause: ")
    assert done.stderr == ""  # no tracebacks of Orbax
    record_property("fault", "the disk is full while a checkpoint is saved")
    record_property("lost", "steps since the last checkpoint")


@pytest.mark.fault
@pytest.mark.parametrize("hardware", ["local", pytest.param("cpu:1", marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_launch_with_one_sentence(tmp_path, in_mount_namespace, hardware, record_property):
    code = FULL_LAUNCH.replace("HARDWARE", hardware)
    (tmp_path / "small").mkdir()
    done = in_mount_namespace(f"mount -t tmpfs -o size=8m tmpfs {tmp_path}/small", code, tmp_path / "small")
    assert done.returncode == 0, done.stderr
    assert "StorageFullError checkpoint 2 in" in done.stdout
    assert "written: No space left on device. The" in done.stdout
    assert "Traceback" not in done.stderr
    assert "start again (failure" not in done.stderr
    record_property("fault", f"the disk is full while a run on {hardware} saves")
    record_property("lost", "steps since the last checkpoint")


@pytest.mark.fault
def test_a_read_only_folder_can_be_read_and_is_rejected_for_writing(tmp_path, in_mount_namespace, record_property):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.ones(10)}}, metadata={})
    mount = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    done = in_mount_namespace(mount, READ_ONLY, folder)
    assert done.returncode == 0, done.stderr
    assert "the folder of the checkpoints cannot be written: [Errno 30] Read-only file system" in done.stdout
    assert done.stdout.endswith("read\n")
    record_property("fault", "the storage of the checkpoints is mounted read-only")
    record_property("lost", "nothing: the start is rejected")


def test_a_file_in_place_of_the_folder_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/checkpoints"):
        with pytest.raises(LaunchError, match=r"is no folder: \[Errno \d+\] .* Move the file away, or"):
            Checkpoints(place)
        assert latest_step(place) is None


def test_a_file_that_takes_the_place_of_the_folder_fails_the_save_with_its_cause_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        folder.rmdir()
        folder.touch()
        with pytest.raises(UnsavedCheckpointError) as raised:
            checkpoints.save(1, {"params": {"w": jnp.ones(10)}}, metadata={})
    assert str(raised.value) == (
        f"checkpoint 1 in {folder} could not be written: [Errno 17] File exists: {str(folder)!r}. The checkpoints "
        "before it are unchanged. Check the storage, then start again."
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("folder", [Path("runs"), "s3://bucket/runs"], ids=["folder", "s3"])
def test_a_full_disk_and_a_full_quota_end_a_run(number: int, folder: Path | str) -> None:
    error = unsaved(folder, 7, ValueError(f"FAILED_PRECONDITION: {os.strerror(number)} [os_error_code='{number}']"))
    assert isinstance(error, StorageFullError)
    place = "" if isinstance(folder, Path) else f" in {tempfile.gettempdir()}, where it is written before the upload"
    assert f"checkpoint 7 in {folder} could not be written: {os.strerror(number)}{place}. " in str(error)
    assert "Free some space" in str(error)
    other = unsaved(folder, 7, OSError(errno.EIO, os.strerror(errno.EIO)))
    assert type(other) is UnsavedCheckpointError
    assert "Check the storage" in str(other)
