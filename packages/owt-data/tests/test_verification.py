"""Verification of token files by their SHA-256, in this process and in the background."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

from owt_data import (
    DataError,
    PrepareOptions,
    check_digests,
    find_source,
    open_tokens,
    prepare,
    source_digest,
    verify_in_background,
)
from owt_data._digests import file_sha256, known_sha256
from owt_data._paths import open_regular, read_blocks

TIMEOUT_S = 60


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Token files of 2.2 MB, for which this process need not wait until a change must have another time."""
    monkeypatch.setattr("owt_data._digests._SETTLED_S", 0)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 32_000)
    prepare(str(tmp_path / "book.txt"), tmp_path / "out", PrepareOptions(tokenizer="bytes"), num_processes=1)
    return tmp_path / "out"


def flip(path, offset):
    """Flip one bit of a token, so that its size and the range of its ids stay."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def verified(folder):
    data = open_tokens(str(folder), tokenizer="bytes")
    with verify_in_background(data) as verification:
        return verification.wait(TIMEOUT_S)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_flipped_bit_is_found_in_the_background_and_at_first(name, folder):
    assert verified(folder) is None
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    flip(folder / name, (folder / name).stat().st_size // 2 & ~1)
    damage = verified(folder)
    assert damage is not None
    assert damage.startswith(f"{folder / name} is damaged: its SHA-256 is ")
    assert damage.endswith("in its manifest. Restore it from a copy, or prepare the text again.")
    with pytest.raises(DataError) as caught:
        check_digests(open_tokens(str(folder), tokenizer="bytes"))
    assert str(caught.value) == damage


def test_the_process_imports_no_files_of_the_working_folder(folder, monkeypatch):
    for name in ("json.py", "pyarrow.py", "platformdirs.py"):
        (folder.parent / name).write_text("raise RuntimeError('not a module of owt-data')")
    monkeypatch.chdir(folder.parent)
    flip(folder / "train.bin", 1000)
    assert "train.bin is damaged: its SHA-256" in (verified(folder) or "")


def test_a_damaged_file_stays_damaged_at_the_next_verification(folder):
    """Its digest is in the cache after the first, as that of a good file is."""
    flip(folder / "train.bin", 1000)
    time.sleep(2.1)  # the process in the background must wait until a change must have another time
    first, second = verified(folder), verified(folder)
    assert [path for path in entries() if f"{folder}/train.bin" in path.read_text()]
    assert "train.bin is damaged: its SHA-256" in (first or "")
    assert second == first


def test_a_second_verification_reads_no_large_file(folder):
    sizes = [(folder / name).stat().st_size for name in ("train.bin", "val.bin")]
    for _ in range(2):
        shares = []
        check_digests(open_tokens(str(folder), tokenizer="bytes"), report=shares.append)
        assert shares == [sizes[0] / sum(sizes), 1.0]
    # The file cannot be read any more, and root can read every file: a directory in its place would differ. Its state
    # in the cache is enough.
    (entry,) = [path for path in entries() if str(folder) in path.read_text()]
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({**known, "sha256": "0" * 64}))
    with pytest.raises(DataError, match=r"train.bin is damaged: its SHA-256 is .*, and .* in its manifest"):
        check_digests(open_tokens(str(folder), tokenizer="bytes"))


def entries():
    return sorted((platformdirs.user_cache_path("owt-data") / "digests").glob("*"))


@pytest.mark.parametrize("damage", ["", "null", "[" * 5000, '{"format": 2, "version": "9.0"}'])
def test_a_damaged_or_newer_cache_is_written_again(damage, folder):
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    (entry,) = [path for path in entries() if str(folder) in path.read_text()]
    whole = entry.read_text()
    entry.write_text(damage)
    entry.with_name(f"{entry.name}.0123.tmp").touch()  # of a process that was killed
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    assert entry.read_text() == whole
    assert not entry.with_name(f"{entry.name}.0123.tmp").exists()


@pytest.mark.parametrize("field", ["size", "inode", "mtime_ns", "ctime_ns"])
def test_a_file_of_another_state_than_in_the_cache_is_read_again(field, folder):
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    (entry,) = [path for path in entries() if str(folder) in path.read_text()]
    known = json.loads(entry.read_text())
    state = {**known["state"], field: known["state"][field] + 1}
    entry.write_text(json.dumps({**known, "state": state, "sha256": "0" * 64}))
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    assert json.loads(entry.read_text()) == known


def test_a_file_that_has_just_been_written_is_not_kept_in_the_cache(folder, monkeypatch):
    """Another change within the step of the file system's clock would leave the same state."""
    monkeypatch.setattr("owt_data._digests._SETTLED_S", 2)
    os.utime(folder / "train.bin", (0, 0))  # as a copy has the time of change of the original
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    assert not [path for path in entries() if str(folder) in path.read_text()]
    time.sleep(2.1)
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    assert len([path for path in entries() if str(folder) in path.read_text()]) == 1


def test_the_digest_of_a_file_that_changes_meanwhile_is_not_kept(folder):
    path = folder / "train.bin"
    file_sha256(path, lambda num_bytes: os.utime(path))
    assert not [entry for entry in entries() if str(folder) in entry.read_text()]
    file_sha256(path)
    assert len([entry for entry in entries() if str(folder) in entry.read_text()]) == 1


def test_a_damaged_file_with_its_old_time_of_change_is_read_again(folder):
    path = folder / "train.bin"
    before = path.stat()
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    flip(path, 1000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "train.bin is damaged: its SHA-256" in (verified(folder) or "")


def test_a_cache_that_cannot_be_written_does_not_matter(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert verified(folder) is None
    check_digests(open_tokens(str(folder), tokenizer="bytes"))


def test_the_cache_is_readable_by_its_owner_only(folder):
    check_digests(open_tokens(str(folder), tokenizer="bytes"))
    assert (platformdirs.user_cache_path("owt-data") / "digests").stat().st_mode & 0o077 == 0
    assert not [path for path in entries() if path.suffix != ".json"]


def test_a_file_that_is_missing_is_named(folder):
    data = open_tokens(str(folder), tokenizer="bytes")
    (folder / "val.bin").unlink()
    with verify_in_background(data) as verification:
        damage = verification.wait(TIMEOUT_S)
        assert "val.bin must be readable, got No such file" in (damage or "")
        assert (verification.wait(0), verification.poll(), verification.is_done) == (damage, damage, True)
    assert (verification.wait(), verification.poll()) == (damage, damage)  # also after the end of the block


def test_files_without_a_manifest_need_no_process(folder):
    data = open_tokens(str(folder / "train.bin"), tokenizer="bytes")
    with verify_in_background(data) as verification:
        assert (verification.is_done, verification.poll()) == (True, None)


def test_files_that_are_verified_already_need_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("owt_data._digests._REMEMBERED_BYTES", 1 << 16)
    data = open_tokens(str(folder), tokenizer="bytes")
    check_digests(data)
    with verify_in_background(data) as verification:
        assert (verification._process, verification.is_done, verification.wait(0)) == (None, True, None)


def test_a_file_is_known_by_any_of_its_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = file_sha256(folder / "train.bin")
    monkeypatch.chdir(folder)
    assert (known_sha256("train.bin"), known_sha256("val.bin")) == (digest, None)
    monkeypatch.chdir(folder.parent)
    assert (known_sha256("out/train.bin"), known_sha256("train.bin")) == (digest, None)


def test_all_folders_of_a_mixture_are_verified(folder, tmp_path):
    options = PrepareOptions(tokenizer="bytes", val_fraction=0.2)
    prepare(str(tmp_path / "book.txt"), tmp_path / "other", options, num_processes=1)
    flip(tmp_path / "other/val.bin", 100)
    data = open_tokens({str(folder): 1, str(tmp_path / "other"): 2}, tokenizer="bytes")
    with verify_in_background(data) as verification:
        assert f"{tmp_path / 'other/val.bin'} is damaged:" in (verification.wait(TIMEOUT_S) or "")


@pytest.fixture
def endless(folder) -> Path:
    """Token files that take minutes to read, because they have no contents on disk, only a size."""
    num_bytes = 1 << 39
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["train.bin"]["num_tokens"] = num_bytes // 2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(folder / "train.bin", num_bytes)
    return folder


STARTED = """
import os, sys, time
from owt_data import open_tokens, verify_in_background
verification = verify_in_background(open_tokens(sys.argv[1], tokenizer="bytes"))
print(verification._process.pid, flush=True)
if sys.argv[2] == "returns":
    sys.exit()
if sys.argv[2] == "forks" and os.fork() == 0:  # a child that keeps the pipe open
    time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["is killed", "returns", "forks"])
def test_no_process_is_left_behind(end, endless, wait_until):
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(endless), end], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if sys.platform == "linux" and end != "returns":  # it reads
        wait_until(lambda: has_open(pid, endless / "train.bin"))
    if end == "is killed":
        parent.kill()
        parent.wait(TIMEOUT_S)
    elif end == "forks":
        os.kill(parent.pid, signal.SIGKILL)
    else:
        parent.wait(TIMEOUT_S)
    wait_until(lambda: "digest_worker" not in command(pid))
    if end == "forks":
        os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()


def test_a_verification_that_nobody_holds_ends(endless):
    """As that of a notebook's cell that is run again."""
    verification = verify_in_background(open_tokens(str(endless), tokenizer="bytes"))
    assert verification._process is not None
    pid = verification._process.pid
    del verification
    gc.collect()
    with pytest.raises(ProcessLookupError):  # it is no zombie either
        os.kill(pid, 0)


def has_open(pid, path):
    with contextlib.suppress(FileNotFoundError):  # the process has closed a file
        return path in [handle.readlink() for handle in Path(f"/proc/{pid}/fd").iterdir()]
    return False


def command(pid):
    """The command of a process; empty if it has ended."""
    found = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=False)
    return "" if "defunct" in found.stdout else found.stdout


def test_the_process_has_the_lowest_priority_and_stop_ends_it(endless, wait_until):
    with verify_in_background(open_tokens(str(endless), tokenizer="bytes")) as verification:
        assert verification._process is not None
        process = verification._process
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == 19)
        assert os.getpgid(process.pid) == process.pid  # else Ctrl-C reaches it, too
        assert verification.poll() is None
        assert verification.wait(0.01) is None
        assert not verification.is_done
    assert process.returncode == -signal.SIGKILL
    assert verification.is_done


def test_a_verification_that_is_killed_is_a_warning_and_no_damage(endless, caplog):
    with verify_in_background(open_tokens(str(endless), tokenizer="bytes")) as verification:
        assert verification._process is not None
        os.kill(verification._process.pid, signal.SIGKILL)
        assert verification.wait(TIMEOUT_S) is None
    assert "the token files are not verified: the process ended with exit code -9" in caplog.text


@pytest.fixture
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 1.3 MB in files of 10 KB, for which this process need not wait as above."""
    monkeypatch.setattr("owt_data._digests._SETTLED_S", 0)
    (tmp_path / "many").mkdir()
    for number in range(130):
        (tmp_path / "many" / f"{number:03d}.txt").write_text(f"{number:04d} words " * 1000)
    return tmp_path / "many"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read for digests, other than those of the cache."""
    names: list[str] = []

    def open_and_note(path: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        if not str(path).startswith(str(platformdirs.user_cache_path("owt-data"))):
            names.append(str(path))
        return open_regular(path, *args, **options)

    def read_and_note(name: str, offset: int) -> Iterator[bytes]:
        names.append(name)
        return read_blocks(name, offset)

    monkeypatch.setattr("owt_data._digests.open_regular", open_and_note)
    monkeypatch.setattr("owt_data._tokens.open.read_blocks", read_and_note)
    return names


def test_many_small_files_are_read_once_until_one_changes(small_files: Path, opened: list[str]) -> None:
    first = source_digest(str(small_files))
    assert len(opened) == 130
    shares: list[float] = []
    assert find_source(str(small_files)).digest(shares.append) == first
    assert (len(opened), shares) == (130, [1.0])
    path = small_files / "077.txt"
    before = path.stat()
    flip(path, 5000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source_digest(str(small_files)) != first
    assert len(opened) == 260
    flip(path, 5000)
    assert source_digest(str(small_files)) == first
    (small_files / "000.txt").rename(small_files / "200.txt")
    assert source_digest(str(small_files)) != first  # in another order


def test_small_files_that_have_just_been_written_are_read_again(
    small_files: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._digests._SETTLED_S", 60)
    assert source_digest(str(small_files)) == source_digest(str(small_files))
    assert len(opened) == 260


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    small_files: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(path: str | os.PathLike[str], *args: Any) -> str:
        if Path(path).name == "129.txt":
            flip(small_files / "003.txt", 10)
        return file_sha256(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr("owt_data._sources.source.file_sha256", change)
        first = source_digest(str(small_files))
    num_opened = len(opened)
    assert source_digest(str(small_files)) != first
    assert len(opened) == num_opened + 130


def test_a_file_without_a_manifest_is_read_once_until_it_changes(folder: Path, opened: list[str]) -> None:
    path = folder / "train.bin"
    first = open_tokens(str(path), tokenizer="bytes").fingerprint
    assert opened == [str(path)]
    assert open_tokens(str(path), tokenizer="bytes").fingerprint == first
    assert opened == [str(path)]
    assert open_tokens(str(path), tokenizer="gpt2").fingerprint["whole"] == first["whole"]
    assert opened == [str(path)] * 2  # its ids were checked for the other tokenizer
    before = path.stat()
    flip(path, 5000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_tokens(str(path), tokenizer="bytes").fingerprint["whole"] != first["whole"]
    np.full(before.st_size // 2, 257, "<u2").tofile(path)
    with pytest.raises(DataError, match="must be below 257"):
        open_tokens(str(path), tokenizer="bytes")
    # The digest that a verification has kept tells nothing about ids.
    assert file_sha256(path) == known_sha256(path)
    with pytest.raises(DataError, match="must be below 257"):
        open_tokens(str(path), tokenizer="bytes")
