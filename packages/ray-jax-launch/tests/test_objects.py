"""Checkpoints in object storage: what is damaged, half written, or out of reach."""

import http.client
import http.server
import io
import json
import logging
import os
import tarfile
import threading
import time
import zlib
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch import Checkpoints, DamagedCheckpointError, LaunchError, intact_step, latest_step
from ray_jax_launch._checkpoint.catalog import list_steps
from ray_jax_launch._checkpoint.object_store import Listing, ObjectStore, _Summing
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


@pytest.mark.fault
@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, remove_a_part, spoil_the_listing])
def test_the_one_before_a_damaged_checkpoint_is_restored_with_a_warning_that_names_both(
    uri, caplog, damage, record_property
):
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
    record_property("fault", f"newest checkpoint in object storage: {damage.__name__.replace('_', ' ')}")
    record_property("lost", "steps since the checkpoint before it")


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


@pytest.mark.fault
def test_parts_without_a_listing_are_no_checkpoint_and_are_deleted(uri, record_property):
    record_property("fault", "a process is killed between the upload of its part and the listing")
    record_property("lost", "steps since the last checkpoint")
    write(uri, "40/process-1.tar", b"half")
    assert latest_step(uri) == 30
    with Checkpoints(uri, read_only=True):
        assert "40/process-1.tar" in names(uri)
    with Checkpoints(uri):
        assert "40/process-1.tar" not in names(uri)


@pytest.mark.fault
def test_the_same_step_is_quarantined_twice_and_its_number_is_free_again(uri, record_property):
    record_property("fault", "newest checkpoint in object storage: damaged, written again, and damaged again")
    record_property("lost", "steps since the checkpoint before it")
    for _ in range(2):
        flip_a_byte(uri)
        with Checkpoints(uri, num_to_keep=3) as checkpoints:
            assert checkpoints.latest_step() == 20
            checkpoints.save(30, {"params": TREE}, metadata={})
        assert intact_step(uri) == 30
        assert {name for name in names(uri) if name.startswith("30/")} == {"30/checkpoint.json", "30/process-0.tar"}
    # Somebody lists a quarantined one again.
    flip_a_byte(uri)
    listing = read(uri, "30/checkpoint.json")
    for _ in range(2):
        write(uri, "30/checkpoint.json", listing)
        with Checkpoints(uri, num_to_keep=3) as checkpoints:
            assert checkpoints.latest_step() == 20
        assert sorted(list_steps(uri)) == [10, 20]


def test_clean_up_keeps_the_parts_of_a_quarantined_checkpoint(uri):
    flip_a_byte(uri)
    part = read(uri, "30/process-0.tar")
    for _ in range(2):
        with Checkpoints(uri, num_to_keep=3) as checkpoints:
            assert checkpoints.latest_step() == 20
        assert {name for name in names(uri) if name.startswith("30/")} == {
            "30/checkpoint.json.damaged", "30/process-0.tar"
        }  # fmt: skip
    assert read(uri, "30/process-0.tar") == part


def test_sizes_of_parts_beyond_4_gib_are_kept(uri):
    size, kept = (1 << 32) + 5, ObjectStore(uri)
    kept.write_note(30, 1, "a save", (size, 7))
    assert kept.read_note(30, 1, "a save") == (size, 7)
    kept.commit(40, Listing({"process-0.tar": (size, 7)}, {}, None))
    assert kept.listing(40).parts == {"process-0.tar": (size, 7)}
    # A part that lost 4 GiB is not the part that was written.
    listing = kept.listing(30)
    (size, checksum), short = listing.parts["process-0.tar"], listing.parts["process-0.tar"][0]
    kept.commit(30, Listing({"process-0.tar": (size + (1 << 32), checksum)}, {}, None))
    assert kept.find_damage(30) == f"process-0.tar has {short} bytes, not {size + (1 << 32)}"
    # What is uploaded and read is counted block by block.
    stream = _Summing(io.BytesIO(b"abcdef"))
    stream.size = (1 << 32) - 1
    stream.write(b"ab")
    stream.read_rest()
    assert stream.size == (1 << 32) + 5


class BusyServer(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the S3 server, after it has answered some of them with 503."""

    num_failures = 0
    failing = ""
    changed: ClassVar[list[tuple[str, str]]] = []
    """Method and path of each request that wrote or deleted, in the order of the answers."""

    def do_GET(self):
        if f"/30/{BusyServer.failing}" in self.path and BusyServer.num_failures > 0:
            BusyServer.num_failures -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"), timeout=60)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while (line := self.rfile.readline()) != b"\r\n":
                size = int(line, 16)
                body += line + self.rfile.read(size + 2 if size else 0)
            body += line
        upstream.request(self.command, self.path, body, dict(self.headers))
        response = upstream.getresponse()
        content = response.read()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if response.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command in ("PUT", "POST", "DELETE"):
            BusyServer.changed.append((self.command, self.path.partition("?")[0]))
        if self.command != "HEAD":
            self.wfile.write(content)
        upstream.close()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, format, *args):
        pass


@pytest.fixture
def busy(uri):
    """The checkpoints behind a server that is busy from time to time."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), BusyServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"{uri}?scheme=http&endpoint_override=127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.fault
def test_a_busy_server_does_not_condemn_a_checkpoint(uri, busy, caplog, record_property):
    BusyServer.failing = "process-0.tar"
    BusyServer.num_failures = 40  # more than pyarrow's client tries again, in 6 s
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), Checkpoints(busy, num_to_keep=3) as checkpoints:
        assert BusyServer.num_failures == 0
        assert checkpoints.latest_step() == 30
        assert "process-0.tar of checkpoint 30" in caplog.text
        assert "503" in caplog.text
        assert "damaged" not in caplog.text
    record_property("fault", "the object storage answers 503 forty times")
    record_property("lost", "nothing")
    record_property("recovery_s", round(time.monotonic() - began, 1))


@pytest.mark.fault
@pytest.mark.parametrize("name", ["process-0.tar", "checkpoint.json"])
def test_a_server_that_stays_busy_ends_the_start_and_changes_nothing(uri, busy, name, monkeypatch, record_property):
    monkeypatch.setattr("ray_jax_launch._checkpoint.retry.DELAYS_S", ())  # pyarrow's client takes 6 s for each attempt
    before = names(uri)
    BusyServer.failing, BusyServer.num_failures = name, 1_000_000
    with pytest.raises(LaunchError, match=rf"{name} .* must be accessible, got .*503"):
        Checkpoints(busy)
    BusyServer.num_failures = 0
    assert names(uri) == before
    assert intact_step(uri) == 30
    record_property("fault", f"the object storage answers 503 to every request for {name} of the newest checkpoint")
    record_property("lost", "nothing: the start is refused, and works once the storage does")


def test_a_checkpoint_is_listed_after_its_parts_are_there_and_no_longer_before_they_go(uri, busy):
    BusyServer.changed.clear()
    with Checkpoints(busy, num_to_keep=3) as checkpoints:
        checkpoints.save(40, {"params": TREE}, metadata={})
    written = [
        path.rpartition("/40/")[2] for method, path in BusyServer.changed if "/40/" in path and method != "DELETE"
    ]
    assert "process-0.tar" in written[: written.index("checkpoint.json")]
    assert "process-0.tar" not in written[written.index("checkpoint.json") :]
    deleted = [
        path.rpartition("/10/")[2] for method, path in BusyServer.changed if "/10/" in path and method == "DELETE"
    ]
    assert deleted == ["checkpoint.json", "process-0.tar"]


def link(name):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    return member


@pytest.mark.fault
@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("items/../../outside"),
        tarfile.TarInfo("/outside"),
        link("items/link"),
    ],
    ids=["parent", "hidden parent", "absolute", "link"],
)
def test_a_part_that_names_files_elsewhere_is_refused(uri, member, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if member.name == "/outside":
        member.name = str(tmp_path / "outside")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member.size = 0 if member.linkname else 4
        tar.addfile(member, io.BytesIO(b"evil"))
        tar.addfile(tarfile.TarInfo("items/link/file"))
    part = content.getvalue()
    listing = json.loads(read(uri, "30/checkpoint.json"))
    listing["parts"]["process-0.tar"] = [len(part), zlib.crc32(part)]
    write(uri, "30/process-0.tar", part)
    write(uri, "30/checkpoint.json", json.dumps(listing).encode())
    with Checkpoints(uri, read_only=True) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match="must hold files and folders with relative names, got"):
            checkpoints.restore(30, {"params": TREE})
        found = checkpoints.restore_latest({"params": TREE})
    assert found is not None
    assert found.step == 20
    assert not [path for path in tmp_path.rglob("*") if path.name in ("outside", "link", "file")]
    record_property("fault", f"an object of a checkpoint names the file {member.name.replace(str(tmp_path), '')}")
    record_property("lost", "nothing: nothing is written elsewhere")


@pytest.mark.parametrize("uri", ["s3://no-such-bucket/x", "nowhere://x"])
def test_storage_out_of_reach_is_said(s3, uri):
    with pytest.raises(LaunchError, match=r"expected .*bucket/path.* that can be reached, got"):
        Checkpoints(uri)


def test_names_are_joined_before_the_options_of_a_uri():
    assert join_path("s3://bucket/runs/?scheme=http", "a", "b") == "s3://bucket/runs/a/b?scheme=http"
