"""The files that describe a checkpoint and its parts: their format, and damage."""

import json
import logging
import os
import re
import resource
import shutil
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch import (
    Checkpoints,
    DamagedCheckpointError,
    DeletedCheckpointError,
    LaunchError,
    checkpoint_metadata,
    checkpoint_steps,
    intact_step,
    latest_step,
    newest_metadata,
)
from ray_jax_launch._checkpoint.checksums import share_of, to_json
from ray_jax_launch._storage import open_uri

TREE = {"w": jnp.arange(1000.0)}
VERSION = version("ray-jax-launch")
DEEP = "[" * 100_000 + "]" * 100_000


def save_two(place):
    """Save checkpoints 10 and 20."""
    with Checkpoints(place) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"params": TREE}, metadata={"step": step})
    return place


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 9, 64])
def test_each_file_of_each_part_is_the_share_of_one_process(num_parts, num_ranks):
    shares = [share_of((rank, num_ranks), num_parts) for rank in range(num_ranks)]
    taken = [(part, file) for of_rank in shares for part, some in of_rank for file in range(70)[some]]
    assert sorted(taken) == [(part, file) for part in range(num_parts) for file in range(70)]


@pytest.fixture
def saved(place):
    """Checkpoints 10 and 20."""
    return save_two(place)


@pytest.fixture
def in_folder(tmp_path):
    """Checkpoints 10 and 20, in a folder."""
    return save_two(tmp_path)


@pytest.fixture
def in_storage(s3, tmp_path):
    """Checkpoints 10 and 20, in object storage."""
    return save_two(f"{s3}/{tmp_path.name}")


def description_of(place, of="checkpoint"):
    """Return the name of the file that describes checkpoint 20, or the part of its process."""
    if isinstance(place, Path):
        return {"checkpoint": "20/checksums.json", "part": "20/_parts/0.json"}[of]
    return "20.json" if of == "checkpoint" else f"20.{read_description(place)['save']}/parts/0.json"


def shown_name(place, of):
    """Return the name of such a file in messages."""
    return description_of(place, of).removeprefix("20/")


def read_description(place, of="checkpoint"):
    """Return the fields of a file that describes checkpoint 20."""
    filesystem, root = open_uri(str(place))
    with filesystem.open_input_stream(f"{root}/{description_of(place, of)}") as stream:
        return json.loads(stream.read())


def write_description(place, text, of="checkpoint"):
    filesystem, root = open_uri(str(place))
    name = description_of(place, of)
    with filesystem.open_output_stream(f"{root}/{name}") as stream:
        stream.write(text.encode())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2, "version": "9.1.0"}, "format 2, which ray-jax-launch 9.1.0 wrote. Install ray-jax-launch 9.1.0"),
        ({"format": 2, "version": "9.1.0", "files": None}, "format 2, which ray-jax-launch 9.1.0 wrote"),
        ({"new": 1, "version": "9.1.0"}, "the field 'new', which ray-jax-launch 9.1.0 wrote"),
    ],
    ids=["newer", "newer without a field", "unknown field"],
)
def test_a_checkpoint_of_a_newer_version_is_rejected_and_stays(saved, caplog, change, problem):
    fields = {key: value for key, value in (read_description(saved) | change).items() if value is not None}
    write_description(saved, json.dumps(fields))
    expected = f"must have format 1, which ray-jax-launch {VERSION} reads, got {problem}"
    for action in (
        lambda: Checkpoints(saved),
        lambda: intact_step(saved, quarantine=True),
        lambda: newest_metadata(saved),
    ):
        with pytest.raises(LaunchError, match=re.escape(expected)) as rejected:
            action()
        assert "\n" not in str(rejected.value)
    with Checkpoints(saved, read_only=True) as checkpoints:
        for read in (
            lambda: checkpoints.restore(20, {"params": TREE}),
            lambda: checkpoints.restore_latest({"params": TREE}),
        ):
            with pytest.raises(LaunchError, match=re.escape(expected)):
                read()
    assert checkpoint_steps(saved) == [10, 20]
    assert not caplog.records


@pytest.mark.fault
@pytest.mark.parametrize("num_bytes", [0, 999])
def test_a_full_disk_of_a_reader_is_named_and_not_taken_for_its_source(saved, caplog, num_bytes, record_property):
    record_property("fault", "a process that reads a checkpoint cannot write its copy on the local disk")
    record_property("lost", "nothing: the command ends with one sentence")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(saved, read_only=True) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            with pytest.raises(
                LaunchError, match=r"ray-jax-launch-.* could not be written: File too large\. Free some"
            ):
                checkpoints.restore_latest({"params": {"w": jnp.zeros(10)}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert caplog.messages == []


def test_the_metadata_of_any_checkpoint_are_read(saved):
    assert [checkpoint_metadata(saved, step) for step in (10, 20)] == [{"step": 10}, {"step": 20}]
    with pytest.raises(DeletedCheckpointError, match="there is no checkpoint 15 in "):
        checkpoint_metadata(saved, 15)
    write_description(saved, "{")
    with pytest.raises(DamagedCheckpointError):
        checkpoint_metadata(saved, 20)


def key_of(fields):
    """Return the field with the checksums, or, in object storage, with the name of the save."""
    return next(name for name in ("archives", "files", "save") if name in fields)


def change_checksum(fields, value):
    """Return the text in which the first file or archive has another checksum."""
    if "processes" in fields and "files" not in fields:
        return json.dumps(fields | {"processes": value})
    name = key_of(fields)
    return json.dumps(fields | {name: fields[name] | {next(iter(fields[name])): value}})


def add_file(fields, file):
    name = key_of(fields)
    return json.dumps(fields | {name: file if name == "save" else fields[name] | {file: [0, 0]}})


def without(fields, name):
    return json.dumps({key: value for key, value in fields.items() if key != name})


DAMAGED = {
    "deep": lambda fields: DEEP,
    "deep field": lambda fields: json.dumps(fields)[:-1] + f', "metadata": {DEEP}}}',
    "list": lambda fields: "[]",
    "no format": lambda fields: without(fields, "format"),
    "no version": lambda fields: without(fields, "version"),
    "no checksums": lambda fields: without(fields, key_of(fields)),
    "changed letter": lambda fields: json.dumps(fields).replace(f'"{key_of(fields)}"', '"fjles"'),
    "format 0": lambda fields: json.dumps(fields | {"format": 0}),
    "format true": lambda fields: json.dumps(fields | {"format": True}),
    "format 1e400": lambda fields: json.dumps(fields).replace('"format": 1', '"format": 1e400'),
    "version of two lines": lambda fields: json.dumps(fields | {"version": "1\n2"}),
    "size 10**400": lambda fields: change_checksum(fields, [10**400, 0]),
    "size 1e400": lambda fields: change_checksum(fields, [float("inf"), 0]),
    "size -1": lambda fields: change_checksum(fields, [-1, 0]),
    "size 1.5": lambda fields: change_checksum(fields, [1.5, 0]),
    "size true": lambda fields: change_checksum(fields, [True, 0]),
    "checksum text": lambda fields: change_checksum(fields, [1, "0"]),
    "three numbers": lambda fields: change_checksum(fields, [1, 2, 3]),
    "number of 5,000 digits": lambda fields: change_checksum(fields, [1, 2]).replace("[1, 2]", f"[1{'0' * 5000}, 2]"),
    "name above": lambda fields: add_file(fields, "../file"),
    "absolute name": lambda fields: add_file(fields, "/etc/hostname"),
    "name with a null": lambda fields: add_file(fields, "a\0b"),
    "name of half a character": lambda fields: add_file(fields, "\ud800"),
    "name of 300 letters": lambda fields: add_file(fields, "a" * 300),
    "empty name": lambda fields: add_file(fields, ""),
}
QUICK = (
    "deep field",
    "no format",
    "changed letter",
    "format true",
    "size 1e400",
    "size 1.5",
    "name above",
    "empty name",
)


@pytest.mark.fault
@pytest.mark.parametrize("of", ["checkpoint", "part"])
@pytest.mark.parametrize(
    "damage", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGED if name not in QUICK)]
)
def test_a_damaged_description_is_damage(saved, caplog, damage, of, record_property):
    name = shown_name(saved, of)
    write_description(saved, DAMAGED[damage](read_description(saved, of)), of)
    with Checkpoints(saved, read_only=True) as checkpoints:
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert found.step == 10
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), Checkpoints(saved) as checkpoints:
        assert checkpoints.latest_step() == 10
    (line,) = [record.message for record in caplog.records if record.name == "ray_jax_launch"]
    assert line == f"checkpoint 20 in {saved} is damaged ({name} cannot be read): going back to checkpoint 10"
    record_property("fault", f"the description of the newest checkpoint is damaged ({of}): {damage}")
    record_property("lost", "steps since the checkpoint before it")


def forget(place, is_forgotten, of, write=json.dumps):
    """Delete entries from the checksums of checkpoint 20."""
    fields = read_description(place, of)
    name = key_of(fields)
    fields[name] = {file: checksum for file, checksum in fields[name].items() if not is_forgotten(file)}
    write_description(place, write(fields), of)


@pytest.mark.fault
@pytest.mark.parametrize("write", [json.dumps, to_json], ids=["changed", "written"])
@pytest.mark.parametrize(
    ("of", "forgotten"),
    [
        ("checkpoint", "params/d/"),
        ("checkpoint", "params/_METADATA"),
        ("checkpoint", ""),
        ("part", "params/ocdbt.process_0/manifest.ocdbt"),
        ("part", "params/array_metadatas/"),
        ("part", ""),
    ],
)
def test_a_file_that_the_checksums_do_not_list_is_damage(in_folder, caplog, of, forgotten, write, record_property):
    forget(in_folder, lambda file: file.startswith(forgotten), of, write)
    problem = "does not list " if write is to_json else "does not have the checksum it was written with"
    check_that_20_is_damaged(in_folder, caplog, f"{shown_name(in_folder, of)} {problem}")
    record_property("fault", f"the checksums of the newest checkpoint ({of}) lack the names {forgotten}*")
    record_property("lost", "steps since the checkpoint before it")


@pytest.mark.fault
@pytest.mark.parametrize("of", ["checkpoint", "part"])
def test_a_part_that_no_process_wrote_is_damage(in_folder, caplog, of, record_property):
    """A checkpoint of two processes has a second part; one of a single process has no files of a second."""
    if of == "checkpoint":
        write_description(in_folder, to_json(read_description(in_folder) | {"processes": 2}))
        problem = "_parts/1.json is missing"
    else:
        (in_folder / "20/params/ocdbt.process_1").mkdir()
        (in_folder / "20/params/ocdbt.process_1/manifest.ocdbt").touch()
        problem = "checksums.json does not list params/ocdbt.process_1/manifest.ocdbt"
    check_that_20_is_damaged(in_folder, caplog, problem)
    record_property("fault", f"the number of the parts of the newest checkpoint is wrong ({of})")
    record_property("lost", "steps since the checkpoint before it")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("of", "change"),
    [
        ("checkpoint", {"metadata": {"step": 21}}),
        ("checkpoint", {"processes": 2}),
        ("checkpoint", {"save": "0a-1"}),
        ("part", {"files": {"process-0.params.tar": []}}),
        ("part", {"archives": {}}),
    ],
)
def test_a_changed_listing_in_object_storage_is_damage(in_storage, caplog, of, change, record_property):
    name = shown_name(in_storage, of)
    write_description(in_storage, json.dumps(read_description(in_storage, of) | change), of)
    check_that_20_is_damaged(in_storage, caplog, f"{name} does not have the checksum it was written with")
    record_property("fault", f"the listing of the newest checkpoint in object storage has other {next(iter(change))}")
    record_property("lost", "steps since the checkpoint before it")


@pytest.mark.fault
@pytest.mark.parametrize("how", ["copied", "linked", "renamed"])
def test_a_checkpoint_in_the_folder_of_another_number_is_damage(in_folder, caplog, how, record_property):
    record_property("fault", f"the folder of a checkpoint is {how} to a larger number")
    record_property("lost", "nothing if it is a copy, else steps since the checkpoint before it")
    if how == "copied":
        shutil.copytree(in_folder / "20", in_folder / "35")
    elif how == "linked":
        (in_folder / "35").symlink_to(in_folder / "20")
    else:
        (in_folder / "20").rename(in_folder / "35")
    with pytest.raises(DamagedCheckpointError, match=r"checksums\.json is that of checkpoint 20"):
        Checkpoints(in_folder, verify=False, read_only=True).restore(35, {"params": TREE})
    newest = 10 if how == "renamed" else 20
    assert newest_metadata(in_folder) == {"step": newest}
    assert intact_step(in_folder, quarantine=True) == newest
    assert (
        f"checkpoint 35 in {in_folder} is damaged (checksums.json is that of checkpoint 20): going back to checkpoint "
        f"{newest}" in caplog.messages
    )
    assert latest_step(in_folder) == newest


@pytest.mark.fault
def test_a_checkpoint_below_another_number_in_object_storage_is_damage(in_storage, caplog, record_property):
    record_property("fault", "the objects of a checkpoint are copied to a larger number")
    record_property("lost", "nothing")
    filesystem, root = open_uri(in_storage)
    for file in filesystem.get_file_info(FileSelector(root, recursive=True)):
        if file.is_file:
            filesystem.copy_file(file.path, file.path.replace(f"{root}/20.", f"{root}/35."))
    assert intact_step(in_storage) == 20
    assert "(35.json is that of checkpoint 20): going back to checkpoint 20" in caplog.text


@pytest.mark.fault
def test_checksums_that_are_changed_with_their_files_are_damage(in_folder, caplog, record_property):
    fields = read_description(in_folder)
    for name in [name for name in fields["files"] if name.startswith("params/d/")]:
        (in_folder / "20" / name).unlink()
        del fields["files"][name]
    write_description(in_folder, json.dumps(fields))
    check_that_20_is_damaged(in_folder, caplog, "checksums.json does not have the checksum it was written with")
    record_property("fault", "files of the newest checkpoint are deleted, and their names from checksums.json")
    record_property("lost", "steps since the checkpoint before it")


def check_that_20_is_damaged(place, caplog, problem):
    with Checkpoints(place, read_only=True) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match=problem):
            checkpoints.restore(20, {"params": TREE})
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert found.step == 10
    assert f"checkpoint 20 in {place} is damaged ({problem}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ray_jax_launch"):
        assert intact_step(place) == 10
    assert f"checkpoint 20 in {place} is damaged ({problem}" in caplog.text


def test_a_hidden_file_in_a_checkpoint_is_no_damage(in_folder):
    for name in ("20/.DS_Store", "20/params/.nfs000000000001"):
        (in_folder / name).touch()
    assert intact_step(in_folder) == 20


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


@pytest.mark.fault
@pytest.mark.parametrize("name", ["checksums.json", "metadata/metadata", "params/_METADATA"])
@pytest.mark.parametrize("make", [pipe, device, folder])
def test_a_file_that_is_no_regular_file_is_damage(in_folder, name, make, record_property):
    (in_folder / "20" / name).unlink()
    make(in_folder / "20" / name)
    if name in ("checksums.json", "metadata/metadata"):
        assert newest_metadata(in_folder) == {"step": 10}
    with Checkpoints(in_folder, read_only=True) as checkpoints:
        assert checkpoints.latest_step() == 20
    with Checkpoints(in_folder) as checkpoints:
        assert checkpoints.latest_step() == 10
    assert (in_folder / "20.damaged").is_dir()
    record_property("fault", f"a {make.__name__} in place of {name} of the newest checkpoint")
    record_property("lost", "steps since the checkpoint before it")


@pytest.mark.fault
def test_metadata_that_was_replaced_is_damage(in_folder, record_property):
    (in_folder / "20/metadata/metadata").write_text("{}")
    assert newest_metadata(in_folder) == {"step": 10}
    record_property("fault", "the metadata of the newest checkpoint is replaced by other JSON")
    record_property("lost", "steps since the checkpoint before it")


@pytest.mark.fault
def test_metadata_that_is_nested_too_deeply_is_damage(in_folder, record_property):
    (in_folder / "20/metadata/metadata").write_text(DEEP)
    assert newest_metadata(in_folder) == {"step": 10}
    assert intact_step(in_folder) == 10
    record_property("fault", "the metadata of the newest checkpoint is JSON of 100,000 levels")
    record_property("lost", "steps since the checkpoint before it")


@pytest.mark.parametrize(
    "name", ["9" * 23, "9" * 255, "007", "1e3", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}"]
)
def test_a_folder_whose_name_is_no_step_is_no_checkpoint(place, name):
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, {"params": TREE}, metadata={})
    if isinstance(place, Path):
        (place / name).mkdir()
    else:
        filesystem, root = open_uri(place)
        with filesystem.open_output_stream(f"{root}/{name}.json") as stream:
            stream.write(b"{}")
    assert latest_step(place) == 1
    with Checkpoints(place) as checkpoints:
        assert checkpoints.latest_step() == 1


def test_a_step_that_no_folder_can_have_is_rejected(place):
    with Checkpoints(place) as checkpoints:
        with pytest.raises(LaunchError, match=r"^step must be less than 10\*\*18, got 10{39}\. "):
            checkpoints.save(10**400, {"params": TREE}, metadata={})
        checkpoints.save(10**18 - 1, {"params": TREE}, metadata={})
        checkpoints.wait()
        restored = checkpoints.restore(10**18 - 1, {"params": TREE})["params"]["w"]
        np.testing.assert_array_equal(restored, TREE["w"])
