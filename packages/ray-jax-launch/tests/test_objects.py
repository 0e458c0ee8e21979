"""Checkpoints in object storage: what is damaged, half written, or out of reach."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch import Checkpoints, DamagedCheckpointError, LaunchError, intact_step, latest_step
from ray_jax_launch._storage import join_path, open_uri

TREE = {"w": jnp.arange(1000.0)}


@pytest.fixture
def uri(s3, tmp_path):
    """Checkpoints 10, 20 and 30, of other values each."""
    uri = join_path(s3, tmp_path.name, "checkpoints")
    with Checkpoints(uri, num_to_keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": {"w": TREE["w"] + step}}, metadata={"step": step})
            checkpoints.wait()
    return uri


def read(uri, name):
    filesystem, root = open_uri(uri)
    with filesystem.open_input_stream(f"{root}/{name}") as stream:
        return stream.read()


def write(uri, name, content):
    filesystem, root = open_uri(uri)
    with filesystem.open_output_stream(f"{root}/{name}") as stream:
        stream.write(content)


def names(uri):
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info(FileSelector(root, recursive=True))
    return {info.path[len(root) + 1 :] for info in infos if info.is_file}


def flip_a_byte(uri):
    content = bytearray(read(uri, "30/process-0.tar"))
    content[len(content) // 2] ^= 1
    write(uri, "30/process-0.tar", bytes(content))
    return "process-0.tar does not have the checksum it was written with"


def cut_short(uri):
    content = read(uri, "30/process-0.tar")
    write(uri, "30/process-0.tar", content[:-1])
    return f"process-0.tar has {len(content) - 1} bytes, not {len(content)}"


def remove_a_part(uri):
    filesystem, root = open_uri(uri)
    filesystem.delete_file(f"{root}/30/process-0.tar")
    return "process-0.tar is missing"


def spoil_the_listing(uri):
    write(uri, "30/checkpoint.json", b"{")
    return "checkpoint.json cannot be read"


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, remove_a_part, spoil_the_listing])
def test_the_one_before_a_damaged_checkpoint_is_restored_with_a_warning_that_names_both(uri, caplog, damage):
    problem = damage(uri)
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), Checkpoints(uri, num_to_keep=3) as checkpoints:
        assert checkpoints.latest_step() == 20
        restored = checkpoints.restore(20, {"params": TREE})["params"]["w"]
        np.testing.assert_array_equal(restored, TREE["w"] + 20)
        assert checkpoints.metadata(20) == {"step": 20}
        # The number is free again.
        checkpoints.save(30, {"params": TREE}, metadata={})
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore(30, {"params": TREE})["params"]["w"], TREE["w"])
    expected = f"checkpoint 30 in {uri} is damaged ({problem}): going back to checkpoint 20"
    assert [record.message for record in caplog.records if record.name == "ray_jax_launch"] == [expected]
    assert intact_step(uri) == 30


def test_what_was_damaged_since_it_was_looked_at_is_not_restored(uri):
    with Checkpoints(uri, read_only=True) as checkpoints:
        flip_a_byte(uri)
        with pytest.raises(DamagedCheckpointError):
            checkpoints.restore(30, {"params": TREE})


def test_items_are_restored_one_by_one(uri):
    with Checkpoints(uri, num_to_keep=3) as checkpoints:
        checkpoints.save(40, {"params": TREE, "extra": {"x": jnp.ones(2)}}, metadata={})
        checkpoints.wait()
        assert set(checkpoints.restore(40, {"extra": {"x": jnp.zeros(2)}})) == {"extra"}


def test_a_checkpoint_is_its_parts_and_the_object_that_lists_them(uri):
    assert {name for name in names(uri) if name.startswith("30/")} == {"30/checkpoint.json", "30/process-0.tar"}
    listing = json.loads(read(uri, "30/checkpoint.json"))
    assert listing["parts"]["process-0.tar"][0] == len(read(uri, "30/process-0.tar"))
    assert listing["metadata"] == {"step": 30}


def test_parts_without_a_listing_are_no_checkpoint_and_are_swept_out(uri):
    write(uri, "40/process-1.tar", b"half")
    assert latest_step(uri) == 30
    with Checkpoints(uri, read_only=True):
        assert "40/process-1.tar" in names(uri)
    with Checkpoints(uri):
        assert "40/process-1.tar" not in names(uri)


@pytest.mark.parametrize("uri", ["s3://no-such-bucket/x", "nowhere://x"])
def test_storage_out_of_reach_is_said(s3, uri):
    with pytest.raises(LaunchError, match=r"expected .*bucket/path.* that can be reached, got"):
        Checkpoints(uri)


def test_names_are_joined_before_the_options_of_a_uri():
    assert join_path("s3://bucket/runs/?scheme=http", "a", "b") == "s3://bucket/runs/a/b?scheme=http"
