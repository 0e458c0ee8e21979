"""Files that a command writes for a user: links stay, devices and pipes get the content, and readers see no half."""

import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pretrain._errors import UsageError
from pretrain._surroundings.output_file import write_output

OLD, NEW = b"old", b"new content"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder="."):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_file_is_made_or_replaced_and_keeps_its_mode(place):
    write_output(Path("new"), NEW)
    old = place / "old"
    old.write_bytes(OLD)
    old.chmod(0o640)
    inode = old.stat().st_ino
    write_output(Path("old"), NEW)
    assert [path.read_bytes() for path in (place / "new", old)] == [NEW, NEW]
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert old.stat().st_ino != inode  # a reader keeps the old file
    assert names() == ["new", "old"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_and_its_file_is_written(exists, place):
    (place / "elsewhere").mkdir()
    target = place / "elsewhere" / "file"
    if exists:
        target.write_bytes(OLD)
    (place / "second").symlink_to("elsewhere/file")
    (place / "first").symlink_to(place / "second")
    write_output(Path("first"), NEW)
    assert (place / "first").is_symlink()
    assert (place / "second").is_symlink()
    assert target.read_bytes() == NEW
    assert names("elsewhere") == ["file"]


def test_a_pipe_gets_the_content_and_stays(place):
    os.mkfifo("pipe")
    content = os.urandom(1 << 20)  # more than a pipe holds
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE) as reader:
        with Path("pipe").open("wb", buffering=0):  # waits for the reader, which reads on until this is closed
            threading.Thread(target=write_output, args=(Path("pipe"), content), daemon=True).start()
            assert reader.stdout is not None
            assert reader.stdout.read(len(content)) == content
        reader.wait(timeout=30)
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def test_a_pipe_without_a_reader_is_an_error_and_no_wait(place):
    os.mkfifo("pipe")
    with pytest.raises(OSError, match=r"No such device or address|Device not configured"):
        write_output(Path("pipe"), NEW)


def full_device(folder):
    """Return a device that is full. Code that replaces it, run by root, must not replace the machine's own."""
    path = folder / "full"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        path.open("wb").close()
    except PermissionError:
        return Path("/dev/full")
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("link", [False, True])
def test_a_device_stays_and_its_error_is_told(link, place):
    full = full_device(place)
    (place / "link").symlink_to(full)
    before = full.stat()
    with pytest.raises(OSError, match="No space left on device"):
        write_output(place / "link" if link else full, NEW)
    assert stat.S_ISCHR(full.stat().st_mode)
    assert full.stat().st_ino == before.st_ino


def test_what_a_killed_process_of_the_same_number_has_left_is_replaced(place: Path) -> None:
    for _ in range(2):
        Path(f".{os.getpid()}.partial").write_bytes(OLD)
        write_output(Path("file"), NEW)
        assert names() == ["file"]
    assert Path("file").read_bytes() == NEW


def num_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len([*Path("/dev/fd").iterdir()])


def test_no_descriptor_stays_open(place: Path) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    before = num_descriptors()
    for name in ("new", "new", "pipe"):
        write_output(Path(name), NEW)
    assert num_descriptors() == before
    assert os.read(reader, 99) == NEW
    os.close(reader)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_gets_the_content(name, place):
    if not Path(name).exists():
        pytest.skip(f"needs {name}")
    code = f"""
from pathlib import Path
from pretrain._surroundings.output_file import write_output
print("before", flush=True)
write_output(Path("{name}"), b"new")
print("after")
"""
    with Path("out").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=file, timeout=300)
        assert os.path.samestat(Path("out").stat(), os.fstat(file.fileno()))  # no other file has the name
    assert Path("out").read_bytes() == b"before\nnewafter\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
    assert done.stdout == b"before\nnewafter\n"


@pytest.mark.parametrize("name", [".", "missing/file"])
def test_a_folder_and_a_missing_folder_are_rejected(name, place):
    with pytest.raises(UsageError, match="the output must be a file"):
        write_output(Path(name), NEW)
    assert names() == []


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("name", ["file", "new"])
def test_a_read_only_file_system_is_named(name, place):
    Path("file").write_bytes(OLD)
    code = f"""
from pathlib import Path
from pretrain._surroundings.output_file import write_output
try:
    write_output(Path("{name}").absolute(), b"new")
except OSError as error:
    print(error.strerror)
"""
    mount = f"mount --bind {place} {place} && mount -o remount,ro,bind {place} && cd {place}"
    command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code]
    if subprocess.run([*command[:2], "true"], check=False).returncode:
        pytest.skip("needs unshare of users")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "Read-only file system\n"
    assert Path("file").read_bytes() == OLD


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files ends in a signal elsewhere")
def test_a_failed_write_leaves_the_old_file(place):
    Path("file").write_bytes(OLD)
    code = """
import resource, signal, sys
from pathlib import Path
from pretrain._surroundings.output_file import write_output
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_output(Path("file"), bytes(5000))
except OSError as error:
    sys.exit(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)
    assert done.stderr == "File too large\n"
    assert names() == ["file"]
    assert Path("file").read_bytes() == OLD
