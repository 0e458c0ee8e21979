"""Storage paths that a user writes: folders, URIs of folders, object storage."""

import re
from pathlib import Path
from urllib.parse import unquote

import jax.numpy as jnp
import pytest
from pyarrow.fs import FileType

from ray_jax_launch import (
    Checkpoints,
    LaunchError,
    as_storage_path,
    check_no_credentials,
    intact_step,
    is_uri,
    join_path,
    latest_step,
    newest_metadata,
    open_uri,
    without_credentials,
)
from ray_jax_launch._storage import check_run_name

TREE = {"w": jnp.ones(3)}


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("runs", Path("runs")),
        (Path("runs"), Path("runs")),
        ("~/runs", Path("/home/someone/runs")),
        (Path("~/runs"), Path("/home/someone/runs")),
        ("/grid/lr%3D0.1", Path("/grid/lr%3D0.1")),
        (Path("/grid/lr%3D0.1"), Path("/grid/lr%3D0.1")),
        ("file:///data/my%20runs", Path("/data/my runs")),
        ("FILE:///data", Path("/data")),
        ("file:/data", Path("/data")),
        ("file://localhost/data", Path("/data")),
        ("file:///data/a?b#c", Path("/data/a?b#c")),
        ("s3://bucket/~/a%20b?region=x", "s3://bucket/~/a%20b?region=x"),
        ("gs://bucket", "gs://bucket"),
    ],
)
def test_a_storage_path_is_parsed(written, place, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert as_storage_path(written) == place
    assert is_uri(written) == isinstance(place, str)


@pytest.mark.parametrize(
    "written",
    ["", None, 3, b"runs", "a\0b", "file://host/data", "file:////data", "file:runs", Path("s3://bucket/runs")],
)
def test_a_text_that_is_not_a_storage_path_is_rejected(written):
    message = (
        f"must be a folder, or the text of a URI, got {written!r}. Name a folder, file:///PATH, or a URI such as s3:"
    )
    with pytest.raises(LaunchError, match=re.escape(message)):
        as_storage_path(written)


def test_names_are_joined_to_any_storage_path():
    assert join_path("file:///data/my%20runs", "a%20b") == Path("/data/my runs/a%20b")
    assert join_path("gs://bucket/runs/?x=1", "a") == "gs://bucket/runs/a?x=1"
    assert join_path("gs://bucket/runs?x=1", "50% of #1", "a:b") == "gs://bucket/runs/50%25%20of%20%231/a:b?x=1"


def test_a_name_with_special_characters_is_one_folder_of_object_storage(s3, tmp_path):
    place = join_path(s3, tmp_path.name, "50% of #1")
    with Checkpoints(place) as checkpoints:
        checkpoints.save(10, {"params": TREE}, metadata={"seed": 1})
    assert open_uri(str(place))[1] == f"bucket/{tmp_path.name}/50% of #1"
    assert newest_metadata(place) == {"seed": 1}
    assert newest_metadata(join_path(s3, tmp_path.name, "50% of ")) is None


def test_checkpoints_below_the_uri_of_a_folder_are_in_that_folder(tmp_path):
    uri = f"file://{tmp_path}/my%20runs"
    with Checkpoints(uri) as checkpoints:
        checkpoints.save(10, {"params": TREE}, metadata={"seed": 1})
    assert (tmp_path / "my runs" / "10").is_dir()
    for place in (uri, tmp_path / "my runs"):
        assert latest_step(place) == intact_step(place) == 10
        assert newest_metadata(place) == {"seed": 1}


@pytest.fixture
def saved(place):
    """Checkpoints 10, 20 and 30."""
    with Checkpoints(place, num_to_keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"params": TREE}, metadata={"step": step})
    return place


def damage_metadata(place, step):
    if isinstance(place, Path):
        (place / f"{step}/metadata/metadata").write_text("[]")
        return
    filesystem, root = open_uri(place)
    with filesystem.open_output_stream(f"{root}/{step}.json") as stream:
        stream.write(b'{"metadata": {')


def test_the_newest_readable_metadata_is_found(saved):
    assert newest_metadata(saved) == {"step": 30}
    damage_metadata(saved, 30)
    assert newest_metadata(saved) == {"step": 20}
    for step in (10, 20):
        damage_metadata(saved, step)
    assert newest_metadata(saved) is None
    assert newest_metadata(join_path(saved, "nowhere")) is None


@pytest.mark.parametrize(
    ("written", "hidden"),
    [
        ("s3://AKIA:topsecret@bucket/runs", "s3://***@bucket/runs"),
        ("S3://AKIA:top/secret+=@bucket", "S3://***@bucket"),  # an AWS key may have a slash
        ("s3:/AKIA:topsecret@bucket/runs", "s3:/***@bucket/runs"),
        (Path("s3://AKIA:topsecret@bucket"), "s3:/***@bucket"),
        ("s3://AKIA@bucket", "s3://***@bucket"),
        ("gs://topsecret@bucket/runs", "gs://***@bucket/runs"),
        ("hf://topsecret@datasets/a/b", "hf://***@datasets/a/b"),
        ("hdfs://user:topsecret@host:9000/runs", "hdfs://***@host:9000/runs"),
        ("file://user:topsecret@host/runs", "file://***@host/runs"),
        ("s3://b/r?access_key=AKIA&secret_key=topsecret&region=x", "s3://b/r?access_key=***&secret_key=***&region=x"),
        ("s3://b/r?region=x&SESSION_TOKEN=topsecret", "s3://b/r?region=x&SESSION_TOKEN=***"),
        ("s3://b/r?secret%5Fkey=topsecret", "s3://b/r?secret%5Fkey=***"),
        ("https://host/x?X-Amz-Signature=topsecret", "https://host/x?X-Amz-Signature=***"),
        ("https://topsecret@host/x", "https://***@host/x"),
        ("http://topsecret@host/x", "http://***@host/x"),
        ("gcs://topsecret@bucket/runs", "gcs://***@bucket/runs"),
        ("abfs://container@account/x?sv=1&sig=topsecret", "abfs://container@account/x?sv=1&sig=***"),
        ("s3://b/r?aws_access_key_id=AKIA&password=topsecret", "s3://b/r?aws_access_key_id=***&password=***"),
        ("s3://b/r?x-amz-credential=AKIA&credentials=topsecret", "s3://b/r?x-amz-credential=***&credentials=***"),
    ],
)
def test_credentials_in_a_uri_are_rejected_and_not_repeated(written, hidden):
    for opens in (as_storage_path, lambda place: open_uri(str(place)), Checkpoints, latest_step):
        with pytest.raises(LaunchError, match=r"Set AWS_ACCESS_KEY_ID .*, or GOOGLE_APPLICATION_CREDENTIALS") as found:
            opens(written)
        assert f"must be without credentials, got {hidden!r}. Set" in str(found.value)
        assert "topsecret" not in str(found.value)
    assert without_credentials(f"web=0.7:{written},b=1:s3://other") == f"web=0.7:{hidden},b=1:s3://other"


@pytest.mark.parametrize(
    "written",
    [
        "gs://anonymous@bucket/runs",
        "s3://bucket/runs?region=x&allow_bucket_creation=true&retry_limit_seconds=7",
        "abfs://container@account/runs",
        "hdfs://host:9000/a@b",
        "s3://bucket/a:b@c?region=x&endpoint_override=http://127.0.0.1:9000",
        "hf://datasets/someone/corpus@main/x.bin",
        "a=1:s3://bucket,b=1:s3://other/x@2",
        "me@home:runs",
        "folder/key=value?token=3",
    ],
)
def test_a_name_without_credentials_is_accepted(written):
    check_no_credentials("data", written)
    assert without_credentials(written) == written


def test_what_is_no_text_has_no_credentials():
    with pytest.raises(LaunchError, match="text must be a text, got 5"):
        without_credentials(5)  # pyright: ignore[reportArgumentType]  # what the test is about


@pytest.mark.parametrize(
    "name", ["a" * 255, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 127, "run 7:50% of #1, a+b", "a.b"]
)
def test_a_name_of_a_run_is_a_folder_and_a_part_of_a_uri(name: str, tmp_path: Path) -> None:
    check_run_name(name)
    (tmp_path / name).mkdir()
    address = str(join_path("s3://bucket/runs", name))
    assert not {*address.removeprefix("s3:")} & {*" #?"}
    assert unquote(address) == f"s3://bucket/runs/{name}"


@pytest.mark.parametrize("name", ["a" * 256, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 128, "a?b", " a", "a/", "a\tb"])
def test_a_name_that_is_no_folder_or_no_part_of_a_uri_is_rejected(name: str) -> None:
    with pytest.raises(LaunchError, match=r"^name must "):
        check_run_name(name)


def test_an_object_in_place_of_the_folder_is_rejected(s3: str, tmp_path: Path) -> None:
    filesystem, path = open_uri(f"{s3}/{tmp_path.name}/runs")
    with filesystem.open_output_stream(path) as stream:
        stream.write(b"x")
    for create in (False, True):
        with pytest.raises(LaunchError, match=r"that can be reached, got .*: a file"):
            open_uri(f"{s3}/{tmp_path.name}/runs", create=create)


def test_only_an_opening_that_is_asked_to_makes_a_folder(s3: str, tmp_path: Path) -> None:
    uri = f"{s3}/{tmp_path.name}/a/b"
    for create in (False, True):
        filesystem, path = open_uri(uri, create=create)
        assert path == uri.removeprefix("s3://")
        assert (filesystem.get_file_info(path).type == FileType.Directory) == create
