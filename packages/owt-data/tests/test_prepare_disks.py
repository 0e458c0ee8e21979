"""Disks on which `owt-data` cannot write: full, read-only, and a mount point in place of a folder."""

import re
import shutil
import subprocess
import sys

import pytest

from owt_data import DataError, PrepareOptions, prepare

OPTIONS = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"


def in_small_filesystem(folder, megabytes, script, *arguments):
    """Run Python code with a tmpfs of that size mounted on a folder, in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount a small file system")
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder} && exec "
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'{mount} "$@"',
        "sh",
        sys.executable,
        "-c",
    ]
    if subprocess.run([*command, ""], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces, to mount a small file system")
    return subprocess.run([*command, script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.fault
def test_a_full_disk_is_reported_and_prepare_resumes_once_there_is_space(corpus, tmp_path, record_property):
    record_property("fault", "the disk full while prepare tokenizes")
    record_property("lost", "the shards in progress")
    script = """
import subprocess, sys
from pathlib import Path
from owt_data import DataError, PrepareOptions, prepare
folder, corpus, kept = map(Path, sys.argv[1:])
options = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
try:
    prepare(str(corpus), folder / "out", options)
except DataError as error:
    print(error)
shards = len(list((folder / ".out.partial/parts-all").glob("*.bin")))
print(shards, (folder / "out").exists(), list(folder.rglob("*.tmp")))
subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
prepare(str(corpus), folder / "out", options)
subprocess.run(["cp", "-r", folder / "out", kept], check=True)
"""
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir()
    # 20 MB of tokens: 8 MB end the tokenizing, 30 MB would end the assembling.
    done = in_small_filesystem(small, 8, script, str(small), str(corpus), str(kept))
    assert done.returncode == 0, done.stderr
    message, state = done.stdout.splitlines()
    # The last free page goes to a shard or to the journal.
    assert re.fullmatch(
        rf"{small}/\.out\.partial/parts-all/(0000\d\d\.bin|parts\.jsonl) must be writable, "
        r"got No space left on device\. Correct that and run the same command again\.",
        message,
    )
    shards, *rest = state.split(" ", 1)
    assert int(shards) > 5
    assert rest == ["False []"]
    prepare(str(corpus), tmp_path / "expected", OPTIONS, num_processes=1)
    names = ["manifest.json", "train.bin", "train.docs", "val.bin", "val.docs"]
    assert sorted(path.name for path in kept.iterdir()) == names
    assert [(kept / name).read_bytes() for name in names] == [
        (tmp_path / "expected" / name).read_bytes() for name in names
    ]


@pytest.mark.fault
def test_a_disk_that_is_full_while_assembling_is_reported(corpus, tmp_path, record_property):
    record_property("fault", "the disk full while prepare assembles")
    record_property("lost", "nothing")
    small = tmp_path / "small"
    small.mkdir()
    arguments = ["prepare", str(corpus), str(small / "out"), "--tokenizer", "bytes"]
    done = in_small_filesystem(small, 30, COMMAND, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {small}/out must be readable and writable, got No space left on device. ")
    assert "Traceback" not in done.stderr


@pytest.mark.fault
def test_a_disk_that_is_full_before_the_work_is_left_as_it_was(articles, tmp_path, record_property):
    record_property("fault", "the disk full before prepare and tokenizer write")
    record_property("lost", "nothing")
    script = """
import sys
from contextlib import suppress
from pathlib import Path
from owt_data._cli import main
small, articles = Path(sys.argv[1]), sys.argv[2]
with suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
    while file.write(bytes(4096)):
        pass
for command in (["tokenizer", articles, f"{small}/tokenizer", "--vocab", "300"],
                ["tokenizer", articles, f"{small}/new/deep/x.json", "--vocab", "300"],
                ["prepare", articles, f"{small}/new/out", "--tokenizer", "bytes"]):
    print(main(command), [path.name for path in small.rglob("*")])
"""
    small = tmp_path / "small"
    small.mkdir()
    done = in_small_filesystem(small, 1, script, str(small), str(articles))
    assert done.stdout == "2 ['filler']\n" * 3, done.stderr
    assert done.stderr.count("No space left on device") == done.stderr.count("\n") == 3


def test_a_mount_point_is_rejected_before_the_work(corpus, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    done = in_small_filesystem(small, 8, COMMAND, "prepare", str(corpus), str(small), "--tokenizer", "bytes")
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"error: {small} must not be a mount point, which cannot be renamed. Name a new folder in it.\n"
    )
    assert list(tmp_path.iterdir()) == [small]


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc or /sys")
def test_a_read_only_folder_is_rejected(articles, record_property):
    record_property("fault", "a read-only folder to write into")
    record_property("lost", "nothing")
    # The kernel's file system is read-only for every user, including the superuser.
    with pytest.raises(DataError, match=r"/sys/.out.partial must be readable and writable, got "):
        prepare(str(articles), "/sys/out", OPTIONS)
