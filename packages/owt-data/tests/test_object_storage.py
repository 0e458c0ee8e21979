"""Token files in object storage: a real S3 server on this machine."""

import functools
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pyarrow.fs import FileSystem, LocalFileSystem

from owt_data import (
    Batches,
    DataError,
    PrepareOptions,
    TokenData,
    TokenMixture,
    TokenSequence,
    TokenSpan,
    check_digests,
    find_source,
    find_text,
    inspect,
    iter_steps,
    open_documents,
    open_tokens,
    prepare,
    read_manifest,
    read_steps,
    step_windows,
    verify,
    verify_in_background,
)
from owt_data._cli import main
from owt_data._paths import connect
from owt_data._tokens.layout import Layout


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
    for names in (["{}/train.bin"], ["{}/train.bin", "{}/train.bin"], ["{}", "{}"]):
        a, b = (open_tokens([name.format(folder) for name in names], tokenizer="bytes") for folder in (local, remote))
        np.testing.assert_array_equal(sequence(b).read(), sequence(a).read())
        np.testing.assert_array_equal(sequence(b, "val").read(), sequence(a, "val").read())
        assert a.fingerprint == b.fingerprint


def test_a_folder_may_be_named_with_a_slash_at_its_end(both):
    for local_or_remote in both:
        plain, slash = (open_tokens(f"{local_or_remote}{end}", tokenizer="bytes") for end in ("", "/"))
        assert slash.fingerprint == plain.fingerprint
        assert sequence(slash).read(0, 9).tolist() == sequence(plain).read(0, 9).tolist()
        assert open_documents(slash).describe(np.array([3]))[0].row is not None


def test_documents_on_the_server_are_those_from_disk(both):
    folders = [[folder] for folder in both]
    # A file that is named without its folder has an index too.
    files = [[f"{folder}/train.bin"] * 2 for folder in both]
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
    data = open_tokens(remote, tokenizer="bytes")
    assert (data.digests, data.source_fingerprint) == ({}, open_tokens(local, tokenizer="bytes").source_fingerprint)
    check_digests(data)  # reads files on disk alone
    with verify_in_background(data) as verification:
        assert verification.is_done
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


@pytest.fixture
def put(s3: str, tmp_path: Path) -> Callable[..., str]:
    """Writes a file of tokens to the server, and returns its URI."""

    def write(tokens: np.ndarray, name: str = "tokens.bin") -> str:
        uri = f"{s3}/{tmp_path.name}/{name}"
        filesystem, path = FileSystem.from_uri(uri)
        with filesystem.open_output_stream(path) as stream:
            stream.write(tokens.tobytes())
        return uri

    return write


@pytest.fixture
def joined(put: Callable[..., str]) -> TokenSequence:
    """Tokens that equal their positions: 2000 in each of three files, with empty spans between them."""
    spans: list[TokenSpan] = []
    for number in range(3):
        uri = put(np.arange(2000 * number, 2000 * (number + 1), dtype="<u2"), f"{number}.bin")
        spans += [TokenSpan(path=uri, start=0, stop=2000), TokenSpan(path=uri, start=5, stop=5)]
    return TokenSequence(tuple(spans))


def sent(requests: list[tuple[str, str]], read: Callable[[], object]) -> Counter[str]:
    """Return the number of requests of each method during a call."""
    before = len(requests)
    read()
    return Counter(method for method, _ in requests[before:])


def test_a_file_is_opened_once_by_each_thread_that_reads(
    joined: TokenSequence, s3_requests: list[tuple[str, str]]
) -> None:
    def read() -> None:
        for start in (0, 100, 1990, 3990, 5000):
            joined.read_windows(np.array([start]), 16)

    assert sent(s3_requests, read) == {"HEAD": 3, "GET": 7}  # two of the windows cross files
    assert sent(s3_requests, read) == {"GET": 7}
    # Another process opens them again.
    assert sent(s3_requests, lambda: pickle.loads(pickle.dumps(joined)).read_windows(np.array([0]), 16)) == {
        "HEAD": 1,
        "GET": 1,
    }


def test_windows_that_are_close_are_one_request(
    joined: TokenSequence, s3_requests: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = np.array([1990, 30, 10, 1500, 10])
    windows = starts[:, None] + np.arange(9)
    read = functools.partial(joined.read_windows, starts, 8)
    assert sent(s3_requests, read)["GET"] == 1
    monkeypatch.setattr("owt_data._tokens.sequence._GAP_TOKENS", 11)
    assert sent(s3_requests, read)["GET"] == 3
    monkeypatch.setattr("owt_data._tokens.sequence._GAP_TOKENS", 10)
    assert sent(s3_requests, read)["GET"] == 4
    np.testing.assert_array_equal(read(), windows)
    monkeypatch.setattr("owt_data._tokens.sequence._GAP_TOKENS", 1 << 15)
    monkeypatch.setattr("owt_data._tokens.sequence._RANGE_TOKENS", 1500)
    assert sent(s3_requests, read)["GET"] == 2
    np.testing.assert_array_equal(read(), windows)


@pytest.mark.parametrize("gap_tokens", [0, 3, 40, 1 << 15])
@pytest.mark.parametrize("range_tokens", [1, 77, 1 << 20])
def test_ranges_of_any_size_give_the_same_windows(
    gap_tokens: int, range_tokens: int, joined: TokenSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._tokens.sequence._GAP_TOKENS", gap_tokens)
    monkeypatch.setattr("owt_data._tokens.sequence._RANGE_TOKENS", range_tokens)
    starts = np.random.default_rng(0).integers(0, 6000 - 13, 60)
    np.testing.assert_array_equal(joined.read_windows(starts, 12), starts[:, None] + np.arange(13))
    assert joined.read_windows(starts[:0], 12).shape == (0, 13)


@pytest.mark.parametrize("kind", ["sequence", "mixture"])
def test_the_steps_that_are_read_ahead_share_requests(
    kind: str, joined: TokenSequence, s3_requests: list[tuple[str, str]]
) -> None:
    batches = Batches(seq_len=8, global_batch_size=4, order="sequential-first")
    tokens = joined if kind == "sequence" else TokenMixture((joined,), (1.0,))
    found: list[np.ndarray] = []

    def read() -> None:
        for step, windows in read_steps(tokens, batches, start_step=2, stop_step=11, prefetch_steps=4):
            assert step == 2 + len(found)
            found.append(windows)

    num_requests = sent(s3_requests, read)["GET"]
    if kind == "sequence":
        assert num_requests == 3  # one step, four, and four
    else:
        assert num_requests <= 3 * 3  # its windows are in all three files
    expected = tokens.windows(np.arange(8, 44), seq_len=8, order="sequential-first", seed=2357)
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_the_steps_before_a_damaged_one_are_read(put: Callable[..., str]) -> None:
    tokens = np.arange(1000, dtype="<u2")
    tokens[320] = 60_000  # in step 4 alone
    limited = TokenSequence((TokenSpan(path=put(tokens), start=0, stop=1000),), vocab_size=1000)
    batches = Batches(seq_len=9, global_batch_size=8, order="sequential")
    steps = read_steps(limited, batches, start_step=0, stop_step=13, prefetch_steps=8)
    assert [next(steps)[0] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="got 60000 at token 320"):
        next(steps)


@pytest.mark.fault
@pytest.mark.parametrize("num_bytes", [0, 1, 20, 1999, 1998, 1001, 2000])
def test_an_open_file_that_is_replaced_by_a_shorter_one_is_named(
    num_bytes: int, put: Callable[..., str], record_property: Callable[[str, object], None]
) -> None:
    record_property("fault", f"an open token file replaced by one of {num_bytes} bytes in object storage")
    record_property("lost", "nothing: the read fails with a sentence")
    uri = put(np.arange(1000, dtype="<u2"))
    tokens = TokenSequence((TokenSpan(path=uri, start=0, stop=1000),))
    tokens.read_windows(np.array([0, 991]), 8)
    put(np.arange(1000, dtype="<u2").view(np.uint8)[:num_bytes])
    for start in (0, 493, 991):
        if 2 * (start + 9) <= num_bytes:
            assert tokens.read_windows(np.array([start]), 8)[0].tolist() == [*range(start, start + 9)]
        else:
            message = rf"tokens\.bin has been cut short: it had at least 2000 bytes, and has {num_bytes}\."
            with pytest.raises(DataError, match=message):
                tokens.read_windows(np.array([start]), 8)


@pytest.mark.parametrize("last", [7, 0xFF00, 0xFF_FFFF, 0x7FFF_FFFF])
def test_an_open_file_of_32_bits_that_is_replaced_by_a_shorter_one_is_named(last: int, put: Callable[..., str]) -> None:
    tokens = np.full(100, last, dtype="<u4")
    uri = put(tokens)
    sequence = TokenSequence((TokenSpan(path=uri, start=0, stop=100, layout=Layout("<u4")),))
    np.testing.assert_array_equal(sequence.read_windows(np.array([0, 91]), 8), np.full((2, 9), last))
    for num_bytes in (399, 398, 397, 396, 300):
        put(tokens.view(np.uint8)[:num_bytes])
        with pytest.raises(DataError, match=rf"it had at least 400 bytes, and has {num_bytes}\."):
            sequence.read_windows(np.array([91]), 8)


def test_an_open_file_that_is_deleted_is_named(put: Callable[..., str]) -> None:
    uri = put(np.arange(1000, dtype="<u2"))
    tokens = TokenSequence((TokenSpan(path=uri, start=0, stop=1000),))
    tokens.read_windows(np.array([0]), 8)
    filesystem, path = FileSystem.from_uri(uri)
    filesystem.delete_file(path)
    with pytest.raises(DataError, match=r"tokens\.bin must be a token file, got a name that does not exist"):
        tokens.read_windows(np.array([0]), 8)


@pytest.mark.parametrize("last", [0xFEFF, 0xFF00, 0xFFFF])
def test_every_id_can_be_the_last_of_a_range(last: int, put: Callable[..., str]) -> None:
    tokens = np.full(100, last, dtype="<u2")
    sequence = TokenSequence((TokenSpan(path=put(tokens), start=0, stop=100),))
    np.testing.assert_array_equal(sequence.read_windows(np.array([0, 91]), 8), np.full((2, 9), last))


def test_a_file_without_a_manifest_is_read_once_until_it_is_replaced(
    put: Callable[..., str], s3_requests: list[tuple[str, str]]
) -> None:
    tokens = np.arange(600_000, dtype="<u4").astype("<u2") % 257
    uri = put(tokens)
    opened = functools.partial(open_tokens, uri, tokenizer="bytes")
    assert sent(s3_requests, opened)["GET"] > 0
    first = opened().fingerprint
    assert sent(s3_requests, opened)["GET"] == 1  # of its first bytes, which may be a header
    assert sent(s3_requests, lambda: open_tokens(uri, tokenizer="gpt2"))["GET"] > 1  # has not been checked for it
    tokens[300_000] ^= 1
    put(tokens)  # within the same second, with the same size
    assert opened().fingerprint != first
    tokens[300_000] = 257
    put(tokens)
    with pytest.raises(DataError, match="must be below 257"):
        opened()


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
        assert open_documents(opened).describe(np.array([3]))[0].row is not None  # by the index of these options


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


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
@pytest.mark.parametrize(("options", "asked"), [("", "?retry_limit_seconds=5"), ("?a=b", "?a=b&retry_limit_seconds=5")])
def test_googles_storage_is_not_asked_for_long(scheme, options, asked, monkeypatch):
    """By default pyarrow repeats a failed request for 15 minutes."""
    asked_uris = []
    storage = SimpleNamespace(from_uri=lambda uri: asked_uris.append(uri) or (LocalFileSystem(), "x"))
    monkeypatch.setattr("owt_data._paths.FileSystem", storage)
    connect(f"{scheme}://bucket/x{options}", retry_s=5)
    assert asked_uris == [f"{scheme}://bucket/x{asked}"]


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
    "uri",
    [
        "s3://user:topsecret@bucket/x", "s3://user:top/secret@bucket/x", "s3://bucket/x?secret_key=topsecret",
        "s3://bucket/x?X-Amz-Signature=topsecret&X-Amz-Credential=topsecret&AWSAccessKeyId=topsecret",
        f"s3://user:topsecret{'x' * 40}@bucket/{'y' * 60}",  # a message has a part of it
    ],
)  # fmt: skip
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
