"""Files that are read in several blocks: their checksums, damage in each block, and their copies."""

import io
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow.fs import FileInfo, FileSelector

from ray_jax_launch import Checkpoints, intact_step
from ray_jax_launch._checkpoint import checksums, folder_store, object_store
from ray_jax_launch._checkpoint.checksums import ChecksummedStream
from ray_jax_launch._storage import open_uri

TREE = {"w": jnp.arange(3000.0)}
BLOCK_BYTES = 1024


@pytest.fixture
def saved(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> Path | str:
    """Checkpoints 10 and 20. Files are read and written in blocks of 1 KiB."""
    for module in (checksums, folder_store, object_store):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)
    with Checkpoints(place) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"params": TREE}, metadata={"step": step})
    return place


def test_a_checksum_is_that_of_all_blocks() -> None:
    content = np.random.default_rng(0).bytes(10_007)
    expected = len(content), zlib.crc32(content)
    source = ChecksummedStream(io.BytesIO(content))
    assert source.read(7) == content[:7]
    assert source.checksum() == (7, zlib.crc32(content[:7]))
    assert source.read_to_end() == expected
    target = ChecksummedStream(file := io.BytesIO())
    for start in range(0, len(content), 999):
        target.write(content[start : start + 999])
    assert (target.checksum(), file.getvalue()) == (expected, content)


def test_damage_in_each_block_is_found(saved: Path | str) -> None:
    filesystem, root = open_uri(str(saved)) if isinstance(saved, str) else (None, "")
    if isinstance(saved, Path):
        path = max((path for path in (saved / "20").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        read, write = path.read_bytes, path.write_bytes
    else:
        assert filesystem is not None
        infos: list[FileInfo] = filesystem.get_file_info(FileSelector(root, recursive=True))
        archives = [info for info in infos if info.is_file and info.path.startswith(f"{root}/20.")]
        name = max(archives, key=lambda info: info.size).path

        def read_object() -> bytes:
            with filesystem.open_input_stream(name) as stream:
                return stream.read()

        def write_object(content: bytes) -> None:
            with filesystem.open_output_stream(name) as stream:
                stream.write(content)

        read, write = read_object, write_object
    content = read()
    assert len(content) > 7 * BLOCK_BYTES
    for position in (0, 3 * BLOCK_BYTES, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        write(bytes(damaged))
        assert intact_step(saved) == 10
    write(content)
    assert intact_step(saved) == 20


def test_a_copy_has_all_blocks(saved: Path | str) -> None:
    with Checkpoints(saved, read_only=True) as checkpoints:
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert found.step == 20
    np.testing.assert_array_equal(found.items["params"]["w"], np.arange(3000.0))
