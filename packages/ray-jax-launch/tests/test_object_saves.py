"""Saves to object storage: their names, their requests, and two commands that save the same run."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from pyarrow.fs import FileSelector

from ray_jax_launch import Checkpoints, UnsavedCheckpointError, intact_step, latest_step
from ray_jax_launch._checkpoint.object_store import ObjectStore
from ray_jax_launch._storage import join_path, open_uri

TREE = {"w": jnp.arange(1000.0)}
FILES = {"parts/0.json", "process-0.tar", "process-0.params.tar"}
"""Names of the objects of a save."""


@pytest.fixture
def uri(s3, tmp_path):
    """Checkpoints 10, 20 and 30."""
    uri = join_path(s3, tmp_path.name, "checkpoints")
    with Checkpoints(uri, num_to_keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": {"w": TREE["w"] + step}}, metadata={"step": step})
    return uri


def write(uri, name, content):
    filesystem, root = open_uri(uri)
    with filesystem.open_output_stream(f"{root}/{name}") as stream:
        stream.write(content)


@pytest.fixture
def opened(monkeypatch):
    """The arguments of each opening of object storage by a store."""
    opened = []

    def open_and_note(*args, **given):
        opened.append((args, given))
        return open_uri(*args, **given)

    monkeypatch.setattr("ray_jax_launch._checkpoint.object_store.open_uri", open_and_note)
    return opened


def test_the_storage_is_opened_once_for_a_run(uri, opened):
    """Each opening asks the server."""
    with Checkpoints(uri) as checkpoints:
        assert checkpoints.latest_step() == 30
        checkpoints.save(40, {"params": TREE}, metadata={"step": 40})
        checkpoints.wait()
        assert checkpoints.broadcast_metadata(40) == {"step": 40}
        checkpoints.restore(40, {"params": TREE})
    assert len(opened) == 1


def test_the_storage_is_opened_once_for_a_reader(uri, opened):
    with Checkpoints(uri, read_only=True) as checkpoints:
        for _ in range(3):
            restored = checkpoints.restore_latest({"params": TREE})
            assert restored is not None
            assert restored.step == 30
    assert len(opened) == 1


def names(uri):
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info(FileSelector(root, recursive=True))
    return {info.path[len(root) + 1 :] for info in infos if info.is_file}


# A command that dies between the upload of its archives and the listing.
DIES = """
import os, sys
import jax.numpy as jnp
from ray_jax_launch import Checkpoints
from ray_jax_launch._checkpoint.object_store import ObjectStore

with Checkpoints(sys.argv[1]) as checkpoints:
    print("opened", checkpoints.latest_step(), flush=True)
    sys.stdin.readline()
    ObjectStore.commit = lambda *args: os._exit(0)
    checkpoints.save(10, {"params": {"w": jnp.zeros(1000)}}, metadata={})
"""


@pytest.fixture
def other(s3, tmp_path):
    """A second command on a run without checkpoints. It saves step 10 on a line of input, and dies before it lists."""
    place = join_path(s3, tmp_path.name, "two")
    process = subprocess.Popen(
        [sys.executable, "-c", DIES, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "opened None\n"
    yield place, process
    process.kill()
    process.communicate()


@pytest.mark.fault
def test_a_second_command_that_dies_before_it_lists_leaves_the_durable_checkpoint_intact(other, record_property):
    place, process = other
    with Checkpoints(place) as checkpoints:
        checkpoints.save(10, {"params": TREE}, metadata={})
    process.communicate("now\n", timeout=300)
    saves = {name.split("/")[0] for name in names(place) if "/process-" in name}
    assert len(saves) == 2
    assert intact_step(place) == 10
    with Checkpoints(place) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(10, {"params": TREE})["params"]["w"], TREE["w"])
    record_property("fault", "two commands save the same step of a run, and the second one dies before it lists it")
    record_property("lost", "nothing")


def test_a_start_deletes_no_archives_that_another_command_may_be_writing(other):
    place, process = other
    process.communicate("now\n", timeout=300)
    uploaded = names(place)
    assert {name.split("/", 1)[1] for name in uploaded} == FILES
    with Checkpoints(place, num_to_keep=1) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"params": TREE}, metadata={})
    assert {name for name in names(place) if name.startswith("10.")} == uploaded


def test_a_step_that_another_command_has_listed_is_not_replaced(uri):
    with Checkpoints(uri) as first, Checkpoints(uri) as second:
        first.save(40, {"params": TREE}, metadata={"first": True})
        first.wait()
        second.save(40, {"params": TREE}, metadata={"first": False})
        with pytest.raises(UnsavedCheckpointError, match=r"another run has listed checkpoint 40 in"):
            second.wait()
    with Checkpoints(uri) as checkpoints:
        assert checkpoints.broadcast_metadata(40) == {"first": True}
        np.testing.assert_array_equal(checkpoints.restore(40, {"params": TREE})["params"]["w"], TREE["w"])


@pytest.mark.fault
def test_archives_without_a_listing_are_no_checkpoint_and_are_deleted_after_a_day(uri, monkeypatch, record_property):
    record_property("fault", "a process is killed between the upload of its archives and the listing")
    record_property("lost", "steps since the last checkpoint")
    saved = names(uri)
    left = {"40.0a-1/process-1.tar", "30.0a-2/process-1.tar"}
    for name in left:
        write(uri, name, b"half")
    assert latest_step(uri) == 30
    with Checkpoints(uri):
        pass
    assert names(uri) == saved | left
    monkeypatch.setattr("ray_jax_launch._checkpoint.object_store._ABANDONED_AFTER_S", -60.0)
    with Checkpoints(uri, read_only=True):
        pass
    assert names(uri) == saved | left
    with Checkpoints(uri):
        pass
    assert names(uri) == saved
    assert intact_step(uri) == 30


def set_age(uri: str, name: str, hours: float) -> None:
    """Let an object of the server be older than it is."""
    bucket, _, root = uri.removeprefix("s3://").partition("/")
    written = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=hours)
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[bucket].keys[f"{root}/{name}"].last_modified = written


@pytest.mark.parametrize(("hours", "is_left"), [(23, False), (25, True)])
def test_archives_count_as_left_a_day_after_the_last_of_them(uri: str, hours: float, is_left: bool) -> None:
    saved = names(uri)
    ages = {"40.0a-1/process-0.tar": 49, "40.0a-1/process-1.tar": hours, "40.0a-1/process-2.tar": 49, "7.0b-3/x.tar": 1}
    for name, age in ages.items():
        write(uri, name, b"half")
        set_age(uri, name, age)
    for name in saved:
        set_age(uri, name, 10_000)
    with Checkpoints(uri):
        pass
    assert names(uri) == saved | {name for name in ages if not is_left or name.startswith("7.")}
    assert intact_step(uri) == 30


def test_archives_that_a_damaged_listing_may_name_stay(uri: str) -> None:
    write(uri, "30.0a-2/process-1.tar", b"half")
    write(uri, "30.json", b"{")
    saved = names(uri)
    for name in saved:
        set_age(uri, name, 49)
    with Checkpoints(uri, num_to_keep=1) as checkpoints:
        assert checkpoints.latest_step() == 20
    assert names(uri) == saved - {"30.json"} | {"30.json.damaged"}


def test_a_checkpoint_whose_listing_is_damaged_can_be_unlisted_and_its_archives_go_a_day_later(uri: str) -> None:
    write(uri, "10.json", b"{")
    store, saved = ObjectStore(uri), names(uri)
    store.unlist(10)
    store.sweep()
    assert names(uri) == saved - {"10.json"}
    assert store.steps() == [20, 30]
    for name in names(uri):
        set_age(uri, name, 25)
    store.clean_up()
    assert names(uri) == {name for name in saved if not name.startswith("10.")}


def test_archives_without_a_time_count_as_those_of_a_process_that_writes(uri: str) -> None:
    write(uri, "40.0a-1/process-0.tar", b"half")
    store, saved = ObjectStore(uri), names(uri)
    contents = store._contents

    def without_times(folder: str, *, recursive: bool) -> list[Any]:
        return [
            SimpleNamespace(base_name=info.base_name, is_file=info.is_file, mtime=None)
            for info in contents(folder, recursive=recursive)
        ]

    set_age(uri, "40.0a-1/process-0.tar", 49)
    store._contents = without_times
    store.clean_up()
    assert names(uri) == saved
    store._contents = contents
    store.clean_up()
    assert names(uri) == saved - {"40.0a-1/process-0.tar"}


def test_a_checkpoint_of_three_processes_has_the_archives_of_each(s3: str, tmp_path: Path) -> None:
    store = ObjectStore(f"{s3}/{tmp_path.name}/")
    store.prepare()
    for rank in (2, 0, 1):
        for item in ("params", "params2"):
            leaf = tmp_path / f"rank{rank}" / "items" / f"{item}.w"
            leaf.mkdir(parents=True)
            for name in (".zarray", f"{rank}.0"):
                (leaf / name).write_text(f"{item} {name} of {rank}")
        if rank == 1:
            with pytest.raises(FileNotFoundError, match="process 1 has not uploaded its shards of checkpoint 7"):
                store.commit(7, 3, "0a-1", {})
            assert store.steps() == []
        store.upload(7, rank, "0a-1", tmp_path / f"rank{rank}")
    store.commit(7, 3, "0a-1", {"seed": 9})
    assert ObjectStore(f"{s3}/{tmp_path.name}").steps() == store.steps() == [7]
    assert (store.metadata(7), store.find_damage(7)) == ({"seed": 9}, None)
    listing = store.listing(7)
    parts = [store._part(listing, rank) for rank in range(3)]
    of_items = {
        f"process-{rank}.{item}.tar": [f"items/{item}.w/{rank}.0"]
        for rank in range(3)
        for item in ("params", "params2")
    }
    assert {name: files for part in parts for name, files in part.files.items()} == of_items
    assert {name for part in parts for name in part.archives} == {"process-0.tar", *of_items}
    store.download(7, ["params"], tmp_path / "all")
    store.download(7, ["params"], tmp_path / "one", lambda: {"items/params.w/2.0"})
    found = {
        str(path.relative_to(tmp_path))
        for name in ("all", "one")
        for path in (tmp_path / name).rglob("*.*")
        if path.is_file()
    }
    common = [f"items/{item}.w/.zarray" for item in ("params", "params2")]
    assert found == {
        *(f"all/{name}" for name in (*common, *(f"items/params.w/{rank}.0" for rank in range(3)))),
        *(f"one/{name}" for name in (*common, "items/params.w/2.0")),
    }
    assert (tmp_path / "all/items/params.w/.zarray").read_text() == "params .zarray of 0"
    assert (tmp_path / "one/items/params.w/2.0").read_text() == "params 2.0 of 2"


def test_a_checkpoint_is_listed_after_its_upload_and_unlisted_before_its_deletion(uri, proxy):
    archives = {name for name in names(uri) if name.startswith("10.") and name != "10.json"}
    proxy.changes.clear()
    with Checkpoints(proxy.uri(uri), num_to_keep=3) as checkpoints:
        checkpoints.save(40, {"params": TREE}, metadata={})
    changes = [(method, path.removeprefix(f"{uri.removeprefix('s3:/')}/")) for method, path in proxy.changes]
    written = [path.rpartition("/")[2] for method, path in changes if path.startswith("40.") and method != "DELETE"]
    assert "process-0.params.tar" in written[: written.index("0.json")]
    assert not {"process-0.params.tar", "0.json"} & {*written[written.index("40.json") :]}
    # The archives are deleted by one request to the bucket, between the marker's first and last.
    (save,) = {name.split("/")[0] for name in archives}
    deletions = [(method, path) for method, path in changes if path.startswith("10.") or path == "/bucket"]
    marked = [number for number, (_, path) in enumerate(deletions) if path == f"{save}.deleted"]
    ordered = [deletions.index(one) for one in (("DELETE", "10.json"), ("POST", "/bucket"))]
    assert [marked[0], *ordered, marked[-1]] == sorted([marked[0], *ordered, marked[-1]])
    assert deletions[marked[-1]] == ("DELETE", f"{save}.deleted")
    assert not {name for name in names(uri) if name.startswith("10.")}


@pytest.mark.parametrize("num_items", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_save_needs_few_requests(uri, proxy, num_items):
    items = {f"item{number}": TREE for number in range(num_items)}
    with Checkpoints(proxy.uri(uri), num_to_keep=2) as checkpoints:
        for step in (40, 50):
            checkpoints._cleaner.submit(lambda: None).result()  # what the save before has left to do
            proxy.requests.clear()
            checkpoints.save(step, items, metadata={})
            checkpoints.wait()
    # Three for an upload: of the items, what Orbax keeps, the part, the listing, and the mark of the deletion. The rest
    # is for the deletion of the checkpoint before, and does not grow with the number of items.
    assert len(proxy.requests) <= 3 * (num_items + 4) + 14


def upload(place, num_ranks, step, tmp_path):
    """Upload the shards of ranks that are simulated, and return the store."""
    store = ObjectStore(place)
    for rank in range(num_ranks):
        leaf = tmp_path / f"{step}-{rank}" / "items" / "params.w"
        leaf.mkdir(parents=True)
        (leaf / ".zarray").write_text("{}")
        (leaf / f"{rank}.0").write_text(f"{step} {rank}")
        store.upload(step, rank, "0a-1", tmp_path / f"{step}-{rank}")
    return store


def test_the_requests_of_the_first_process_do_not_grow_with_the_number_of_processes(s3, proxy, tmp_path):
    found = []
    for num_ranks in (1, 4, 9):
        place = f"{s3}/{tmp_path.name}-{num_ranks}"
        upload(place, num_ranks, 1, tmp_path / str(num_ranks))
        store = ObjectStore(proxy.uri(place))
        costs = []
        for change in (
            partial(store.commit, 1, num_ranks, "0a-1", {}),
            store.steps,
            partial(store.unlist, 1),
            store.sweep,
        ):
            proxy.requests.clear()
            change()
            costs.append(len(proxy.requests))
        found.append(costs)
        assert names(place) == set()
    # pyarrow looks for a folder once more at times.
    assert max(map(max, found)) <= 9
    assert all(max(costs) - min(costs) <= 1 for costs in zip(*found, strict=True))


def test_the_list_of_the_checkpoints_reads_nothing_of_them(s3, proxy, tmp_path):
    place = f"{s3}/{tmp_path.name}"
    store = ObjectStore(proxy.uri(place))
    for step in (1, 2, 3):
        upload(place, 2, step, tmp_path)
        store.commit(step, 2, "0a-1", {"of": step})
    upload(place, 2, 4, tmp_path)  # without a listing
    proxy.requests.clear()
    assert sorted(store.steps()) == [1, 2, 3]
    assert len(proxy.requests) == 1


def test_a_node_reads_the_descriptions_of_the_processes_at_its_place_first(s3, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr("ray_jax_launch._checkpoint.object_store._NUM_READERS", 3)
    upload(f"{s3}/{tmp_path.name}", 10, 1, tmp_path).commit(1, 10, "0a-1", {})
    store = ObjectStore(proxy.uri(f"{s3}/{tmp_path.name}"))
    layouts = [(10, (4, 5), {0, 4, 5}), (5, (2,), {0, 4, 3}), (20, (8, 9), {0, 4, 5})]
    for num_ranks, ranks, expected in layouts:
        proxy.downloads.clear()
        target = tmp_path / f"of-{num_ranks}"
        share = [(rank, num_ranks) for rank in ranks]
        store.download(1, ["params"], target, lambda: {"items/params.w/4.0"}, share)
        read = {int(path.rpartition("/")[2].partition(".")[0]) for path, _ in proxy.downloads if "/parts/" in path}
        assert read == expected
        assert (target / "items/params.w/4.0").read_text() == "1 4"
        assert proxy.downloaded_bytes(".params.tar") == proxy.downloaded_bytes("process-4.params.tar") > 0
    # Elsewhere than expected, it is found in the end; and what is nowhere is no reason to read archives.
    store.download(1, ["params"], tmp_path / "far", lambda: {"items/params.w/9.0"}, [(0, 10)])
    assert (tmp_path / "far/items/params.w/9.0").read_text() == "1 9"
    store.download(1, ["params"], tmp_path / "none", lambda: {"items/params.w/10.0"}, [(0, 10)])
    assert [path.name for path in (tmp_path / "none/items/params.w").iterdir()] == [".zarray"]


@pytest.mark.fault
@pytest.mark.parametrize("killed_at", ["before it is unlisted", "before its archives are deleted", "in between"])
def test_a_deletion_that_a_kill_broke_off_is_completed_by_the_next_start(uri, monkeypatch, killed_at, record_property):
    record_property("fault", f"a process is killed while it deletes an old checkpoint: {killed_at}")
    record_property("lost", "nothing")
    store, saved = ObjectStore(uri), names(uri)
    save = store.listing(10).save

    class KilledError(Exception):
        pass

    def die(*args):
        raise KilledError

    if killed_at == "before it is unlisted":
        monkeypatch.setattr(ObjectStore, "_delete", die)
        with pytest.raises(KilledError):
            store.unlist(10)
        monkeypatch.undo()
        assert names(uri) == saved | {f"10.{save}.deleted"}
        store.sweep()
        with Checkpoints(uri, num_to_keep=3):
            pass
        assert names(uri) == saved | {f"10.{save}.deleted"}  # it is listed, and complete
        assert ObjectStore(uri).find_damage(10) is None
        with Checkpoints(uri, num_to_keep=3) as checkpoints:
            checkpoints.save(40, {"params": TREE}, metadata={})
    else:
        store.unlist(10)
        assert intact_step(uri) == 30
        if killed_at == "in between":
            filesystem, root = open_uri(str(uri))
            filesystem.delete_file(f"{root}/10.{save}/process-0.tar")
        with Checkpoints(uri, num_to_keep=3) as checkpoints:
            assert checkpoints.latest_step() == 30
    assert not {name for name in names(uri) if name.startswith("10.")}
    assert {name for name in names(uri) if name.startswith(("20.", "30."))} == {
        name for name in saved if name.startswith(("20.", "30."))
    }


# A save of two processes.
TWO = """
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints

jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
split = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
with Checkpoints(sys.argv[1], verify=False) as checkpoints:
    w = jax.jit(lambda: jnp.zeros(6), out_shardings=split)()
    checkpoints.save(1, {"params": {"w": w}}, metadata={})
    checkpoints.wait()
    print("found", checkpoints.latest_step())
"""


def test_the_processes_learn_from_each_other_that_a_checkpoint_is_listed(run_ranks, s3, proxy, tmp_path):
    place = f"{s3}/{tmp_path.name}"
    assert run_ranks(TWO, [proxy.uri(place)] * 2) == ["1", "1"]
    assert {name.partition("/")[2] or name for name in names(place)} == {
        "1.json", "parts/0.json", "parts/1.json", "process-0.tar", "process-0.params.tar", "process-1.params.tar",
    }  # fmt: skip
    assert proxy.downloaded_bytes(".json") == 0
    assert len([one for one in proxy.requests if one[0] == "HEAD" and one[1].endswith("/1.json")]) == 1
