"""Token files in object storage: a real S3 server on this machine."""

import functools
import os

import numpy as np
import pytest
from pyarrow.fs import FileSystem

from owt_data import (
    Batches,
    DataError,
    PrepareOptions,
    TokenData,
    TokenSequence,
    find_source,
    find_text,
    inspect,
    iter_steps,
    open_documents,
    open_tokens,
    prepare,
    read_manifest,
    step_windows,
    verify,
)
from owt_data._cli import main
from owt_data._paths import connect


def sequence(data: TokenData, split: str = "train") -> TokenSequence:
    """Return the tokens of a split, which must not be a mixture."""
    tokens = getattr(data, split)
    assert isinstance(tokens, TokenSequence)
    return tokens


def upload(folder, uri):
    filesystem, path = FileSystem.from_uri(uri)
    for file in folder.iterdir():
        with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
            stream.write(file.read_bytes())


@pytest.fixture
def both(s3, articles, tmp_path) -> tuple[str, str]:
    """The same prepared folder on disk and on the server."""
    prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer="bytes", val_fraction=0.1))
    upload(tmp_path / "out", f"{s3}/{tmp_path.name}/out")
    return str(tmp_path / "out"), f"{s3}/{tmp_path.name}/out"


@pytest.mark.parametrize("order", ["shuffle", pytest.param("random", marks=pytest.mark.slow), "sequential"])
def test_windows_from_the_server_are_those_from_disk(order, both):
    local, remote = (open_tokens(name, tokenizer="gpt2") for name in both)
    assert remote.fingerprint == local.fingerprint
    assert (remote.tokenizer, remote.vocab_size) == ("bytes", 257)
    for side in ("train", "val"):
        a, b = (getattr(data, side) for data in (local, remote))
        assert len(a) == len(b)
        indices = np.arange(300)
        windows = b.windows(indices, seq_len=16, order=order, seed=1)
        np.testing.assert_array_equal(windows, a.windows(indices, seq_len=16, order=order, seed=1))


def test_files_and_lists_on_the_server_are_sequences(both):
    local, remote = both
    for names in (["{}/train.bin"], ["{}/train.bin", "{}/val.bin"], ["{}", "{}"]):
        a, b = (open_tokens([name.format(folder) for name in names], tokenizer="bytes") for folder in (local, remote))
        np.testing.assert_array_equal(sequence(b).read(), sequence(a).read())
        np.testing.assert_array_equal(sequence(b, "val").read(), sequence(a, "val").read())
        assert a.fingerprint == b.fingerprint


def test_documents_on_the_server_are_those_from_disk(both):
    folders = [[folder] for folder in both]
    # A file that is named without its folder has an index too.
    files = [[f"{folder}/train.bin", f"{folder}/val.bin"] for folder in both]
    for names in (folders, files):
        a, b = (open_documents(open_tokens(name, tokenizer="bytes")) for name in names)
        assert len(a) == len(b) > 9
        positions = np.arange(len(a.tokens))
        np.testing.assert_array_equal(a.find(positions), b.find(positions))
        first, second = (one.describe(np.arange(len(a))) for one in (a, b))
        assert [(one.start, one.file, one.row) for one in first] == [(one.start, one.file, one.row) for one in second]
        assert second[3].token_file.startswith("s3://")
        assert find_text(b, "naïve", tokenizer="bytes") == find_text(a, "naïve", tokenizer="bytes") != []


def test_a_folder_on_the_server_is_verified_and_inspected(both, capsys):
    local, remote = both
    assert read_manifest(remote) == read_manifest(local)
    assert inspect(remote).samples == inspect(local).samples
    assert verify(remote) == []
    assert main(["verify", remote]) == 0
    filesystem, path = FileSystem.from_uri(remote)
    with filesystem.open_output_stream(f"{path}/val.bin") as stream:
        stream.write(b"xx")
    (difference,) = verify(remote)
    assert difference.startswith("val.bin: expected ")
    with pytest.raises(DataError, match=r"s3://.*/val.bin must have \d+ bytes as in manifest.json, got 2\."):
        open_tokens(remote, tokenizer="bytes")


def test_a_file_that_is_replaced_by_a_shorter_one_is_named_with_both_sizes(both: tuple[str, str]) -> None:
    tokens = sequence(open_tokens(both[1], tokenizer="bytes"))
    filesystem, path = FileSystem.from_uri(both[1])
    with filesystem.open_output_stream(f"{path}/train.bin") as stream:
        stream.write(b"xx")
    message = rf"/train\.bin has been cut short: it had at least {2 * len(tokens)} bytes, and has 2\."
    with pytest.raises(DataError, match=message):
        tokens.read_windows(np.array([0, 9]), 16)


def test_a_missing_name_is_reported(s3):
    with pytest.raises(
        DataError, match=r"s3://bucket/nowhere must be a folder of token files or a .bin file, got a name that does"
    ):
        open_tokens(f"{s3}/nowhere", tokenizer="bytes")
    with pytest.raises(
        DataError, match=r"s3://bucket/nowhere.bin must be a token file, got a name that does not exist"
    ):
        open_tokens(f"{s3}/nowhere.bin", tokenizer="bytes")
    with pytest.raises(DataError, match=r"must be a path, s3://bucket/... or gs://bucket/..., got ftp://host/x.bin"):
        open_tokens("ftp://host/x.bin", tokenizer="bytes")


def test_a_name_with_options_leads_to_the_same_files(both, s3, monkeypatch):
    local, remote = both
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for file in ("", "/val.bin"):
        named = f"{remote}{file}?scheme=http&endpoint_override={endpoint}"
        opened, expected = (open_tokens(name, tokenizer="bytes") for name in (named, f"{local}{file}"))
        np.testing.assert_array_equal(sequence(opened).read(), sequence(expected).read())
        assert opened.fingerprint == expected.fingerprint


@pytest.mark.parametrize("options", ["", "?scheme=http&endpoint_override=127.0.0.1:9"])
def test_the_time_limit_of_googles_client_does_not_change_the_path(options: str) -> None:
    filesystem, path = connect(f"gs://anonymous@bucket/folder/train.bin{options}")
    assert (filesystem.type_name, path) == ("gcs", "bucket/folder/train.bin")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_step_stream_reads_from_the_server(both):
    local, remote = (open_tokens(name, tokenizer="bytes").train for name in both)
    batches = Batches(seq_len=16, global_batch_size=8, rank=1, world_size=2)
    steps_of = functools.partial(step_windows, batches=batches, start_step=3, stop_step=40)
    for (a, x), (b, y) in zip(iter_steps(steps_of(local)), iter_steps(steps_of(remote)), strict=True):
        assert a == b
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "name",
    [
        "s3://AKIA:topsecret@bucket/a.bin",
        "s3://AKIA:top/secret@bucket/a.bin",
        "gs://topsecret@bucket/a.bin",
        "s3://bucket/a.bin?secret_key=topsecret",
    ],
)
def test_credentials_in_a_uri_are_rejected_and_not_repeated(name):
    with pytest.raises(DataError, match=r"without credentials, got them in a URI of .* AWS_PROFILE") as found:
        open_tokens(name, tokenizer="bytes")
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    "uri", ["s3://user:topsecret@bucket/x", "s3://user:top/secret@bucket/x", "s3://bucket/x?secret_key=topsecret"]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda uri, place: prepare(uri, place / "out", PrepareOptions(tokenizer="bytes")),
        lambda uri, place: prepare("builtin", uri, PrepareOptions(tokenizer="bytes")),
        lambda uri, place: find_source(uri),
    ],
    ids=["source", "out", "find_source"],
)
def test_no_error_shows_the_credentials_of_a_uri(call, uri, tmp_path):
    with pytest.raises(DataError) as found:
        call(uri, tmp_path)
    assert "secret@" not in str(found.value)
    assert "topsecret" not in str(found.value)
