import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from owt_data import (
    DataError,
    PrepareOptions,
    TokenData,
    TokenMixture,
    TokenSequence,
    is_prepared,
    open_tokens,
    prepare,
    verify,
)


def sequence(data: TokenData, split: str = "train") -> TokenSequence:
    """Return the tokens of a split, which must not be a mixture."""
    tokens = getattr(data, split)
    assert isinstance(tokens, TokenSequence)
    return tokens


def test_a_prepared_folder_knows_its_tokenizer(prepared):
    tokens = open_tokens(str(prepared), tokenizer="gpt2")
    assert (tokens.tokenizer, tokens.vocab_size) == ("bytes", 257)
    train = np.fromfile(prepared / "train.bin", "<u2")
    np.testing.assert_array_equal(sequence(tokens).read(), train)
    windows = sequence(tokens).read_windows(np.array([5, 0]), 7)
    np.testing.assert_array_equal(windows, [train[5:13], train[:8]])
    digests = {name: hashlib.sha256((prepared / name).read_bytes()).hexdigest() for name in ("train.bin", "val.bin")}
    assert tokens.fingerprint == {"tokenizer": "bytes", "manifest": True, **digests}


def test_an_unknown_tokenizer_is_rejected_beside_a_manifest_too(prepared):
    with pytest.raises(DataError, match=r"The tokenizer must be bytes, gpt2, .* or the path of a .*, got 'nope'"):
        open_tokens(str(prepared), tokenizer="nope")


def test_a_deleted_manifest_changes_one_named_entry_of_the_fingerprint(prepared):
    with_manifest = open_tokens(str(prepared), tokenizer="bytes")
    (prepared / "manifest.json").unlink()
    without = open_tokens(str(prepared), tokenizer="bytes")
    assert without.fingerprint == {**with_manifest.fingerprint, "manifest": False}
    assert (without.train, without.val) == (with_manifest.train, with_manifest.val)


def test_the_fingerprint_of_files_has_the_digest_of_each_and_the_boundary(prepared: Path) -> None:
    digests = [hashlib.sha256((prepared / f"{split}.bin").read_bytes()).hexdigest() for split in ("train", "val")]
    sizes = [(prepared / f"{split}.bin").stat().st_size // 2 for split in ("train", "val")]
    train, val = (str((prepared / f"{split}.bin").rename(prepared / f"{split}-0.bin")) for split in ("train", "val"))
    given = {"tokenizer": "bytes", "manifest": False}
    one = open_tokens(train, tokenizer="bytes")
    assert one.fingerprint == {**given, "split": round(0.9 * sizes[0]), "whole": digests[0]}
    both = open_tokens([val, train], tokenizer="bytes")
    assert both.fingerprint == {**given, "split": round(0.9 * sum(sizes)), "whole": digests[::-1]}
    splits = open_tokens([f"train={val}", f"train={train}", f"val={train}"], tokenizer="bytes")
    assert splits.fingerprint == {**given, "train.bin": digests[::-1], "val.bin": digests[0]}
    assert [data.source_fingerprint for data in (one, both, splits)] == [None] * 3
    assert [data.digests for data in (one, both, splits)] == [{}] * 3


@pytest.mark.parametrize(
    "names",
    [
        "out",
        "out/train.bin",
        "out/t*.bin",
        ["out", "out"],
        ["train=out/train.bin", "val=out/val.bin"],
        {"out/val.bin": 2, "out/train.bin": 1},
    ],
    ids=str,
)
def test_the_names_of_opened_tokens_open_them_in_another_working_folder(
    names: str | list[str] | dict[str, float], prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared.parent)
    data = open_tokens(names, tokenizer="bytes")
    monkeypatch.chdir("/")
    assert open_tokens(data.names, tokenizer="bytes") == data


def test_files_are_checked_block_by_block(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(prepared / "train.bin")
    whole = open_tokens(path, tokenizer="bytes")
    monkeypatch.setattr("owt_data._paths._STREAM_BYTES", 14)
    assert open_tokens(path, tokenizer="bytes") == whole
    shares: list[float] = []
    assert verify(prepared, report=shares.append) == []
    total = sum((prepared / f"{split}.bin").stat().st_size for split in ("train", "val"))
    assert (shares[0], shares[-1]) == (14 / total, 1.0)
    assert shares == sorted(shares)
    tokens = np.fromfile(path, "<u2")
    tokens[[38, 95]] = 300, 400
    tokens.tofile(path)
    with pytest.raises(DataError, match=r"got 300 at token 38\."):
        open_tokens(path, tokenizer="bytes")


def test_one_file_is_split_by_position(prepared):
    path = prepared / "train.bin"
    tokens = open_tokens(str(path), tokenizer="bytes")
    whole = np.fromfile(path, "<u2")
    np.testing.assert_array_equal(np.concatenate([sequence(tokens).read(), sequence(tokens, "val").read()]), whole)
    assert len(tokens.val) == pytest.approx(0.1 * len(whole), abs=1)


def test_is_prepared_recognizes_token_files(prepared, tmp_path):
    assert is_prepared(str(prepared))
    assert is_prepared("x.bin")
    assert not is_prepared(str(tmp_path))
    assert not is_prepared("x.txt")
    assert not is_prepared("builtin")
    assert is_prepared("s3://bucket/folder")
    (prepared / "train.bin").unlink()  # what is left is damaged, and no text
    assert is_prepared(prepared)


def test_an_odd_length_is_rejected(prepared):
    with (prepared / "val.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"val.bin must have \d+ bytes as in manifest.json, got \d+\. Restore it"):
        open_tokens(str(prepared), tokenizer="bytes")


def test_a_truncated_file_is_rejected(prepared):
    with (prepared / "train.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"train.bin must have \d+ bytes as in manifest.json, got 100\."):
        open_tokens(str(prepared), tokenizer="bytes")
    assert len(verify(prepared)) == 1


def test_ids_outside_the_vocabulary_are_rejected(tmp_path):
    np.array([1, 2, 257, 3], "<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"ids in .*x.bin must be below 257, .*, got 257 at token 2\.") as caught:
        open_tokens(str(tmp_path / "x.bin"), tokenizer="bytes")
    # Not every command that opens token files has an option for it.
    assert str(caught.value).endswith(
        "Name the right tokenizer or a folder with a manifest.json, or restore a damaged file."
    )


def test_formats_that_look_like_token_files_are_rejected(tmp_path):
    path = tmp_path / "x.bin"
    np.arange(1000, dtype="<u8").tofile(path)
    with pytest.raises(DataError, match=r"x.bin must hold tokens of 16 or 32 bits, got values of 64 bits"):
        open_tokens(str(path), tokenizer="bytes")
    with path.open("wb") as file:
        np.save(file, np.arange(1000, dtype="<u2"))
    with pytest.raises(DataError, match=r"x.bin must hold raw tokens, got a .npy file"):
        open_tokens(str(path), tokenizer="bytes")


def test_a_manifest_of_another_dtype_or_without_a_file_is_rejected(prepared):
    path = prepared / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "dtype": "<u8"}))
    with pytest.raises(DataError, match=r"a manifest of owt-data, got .*: dtype: Input should be '<u2' or '<u4'\."):
        open_tokens(str(prepared), tokenizer="bytes")
    path.write_text(json.dumps({**manifest, "files": {"train.bin": manifest["files"]["train.bin"]}}))
    with pytest.raises(DataError, match=r"must be a manifest of owt-data, got .*: files are \['train.bin'\]"):
        open_tokens(str(prepared), tokenizer="bytes")


def test_files_that_match_a_pattern_are_one_sequence(prepared, tmp_path):
    whole = np.fromfile(prepared / "train.bin", "<u2")
    for number, piece in reversed([*enumerate(np.array_split(whole, 9))]):  # a folder has its files in any order
        piece.tofile(tmp_path / f"shard-{number}.bin")
    data = open_tokens(str(tmp_path / "shard-*.bin"), tokenizer="bytes")
    one = open_tokens(str(prepared / "train.bin"), tokenizer="bytes")
    np.testing.assert_array_equal(sequence(data).read(), sequence(one).read())
    np.testing.assert_array_equal(sequence(data, "val").read(), sequence(one, "val").read())
    assert open_tokens(data.names, tokenizer="bytes") == data
    with pytest.raises(DataError, match=r"other-\*.bin must be a token file, got a name that does not exist"):
        open_tokens(str(tmp_path / "other-*.bin"), tokenizer="bytes")
    (tmp_path / "shard-0.bin").rename(tmp_path / "shard-[12].bin")  # a name that exists is no pattern
    exact = open_tokens(str(tmp_path / "shard-[12].bin"), tokenizer="bytes")
    assert len(exact.train) + len(exact.val) == -(-len(whole) // 9)


def test_folders_are_read_one_after_the_other(prepared, tmp_path):
    (tmp_path / "book.txt").write_text("abc" * 100)
    prepare(str(tmp_path / "book.txt"), tmp_path / "book", PrepareOptions(tokenizer="bytes"))
    names = [str(prepared), str(tmp_path / "book")]
    data = open_tokens(names, tokenizer="bytes")
    opened = [open_tokens(name, tokenizer="bytes") for name in names]
    for side in ("train", "val"):
        expected = np.concatenate([getattr(each, side).read() for each in opened])
        np.testing.assert_array_equal(getattr(data, side).read(), expected)
    assert data.fingerprint == {"sequence": [each.fingerprint for each in opened]}
    mixed = open_tokens({names[0]: 3, names[1]: 1}, tokenizer="bytes")
    assert isinstance(mixed.train, TokenMixture)
    assert (mixed.train.sequences, mixed.train.weights) == (tuple(each.train for each in opened), (3, 1))
    np.testing.assert_array_equal(sequence(mixed, "val").read(), sequence(data, "val").read())
    assert mixed.fingerprint == {"weights": [3, 1], "mixture": [each.fingerprint for each in opened]}
    assert open_tokens(mixed.names, tokenizer="bytes") == mixed


def test_tokens_of_different_tokenizers_are_not_joined(prepared, tmp_path, small_bpe):
    (tmp_path / "book.txt").write_text("abc" * 100)
    prepare(str(tmp_path / "book.txt"), tmp_path / "book", PrepareOptions(tokenizer="gpt2"))
    with pytest.raises(DataError, match=r"All tokens must be of one tokenizer, got \['bytes', 'gpt2'\]"):
        open_tokens([str(prepared), str(tmp_path / "book")], tokenizer="bytes")


@pytest.mark.parametrize("num_files", [1, 2])
def test_files_are_opened_by_split(num_files, prepared, tmp_path):
    for number in range(num_files):
        for split in ("train", "val"):
            tokens = np.fromfile(prepared / f"{split}.bin", "<u2")
            np.array_split(tokens, num_files)[number].tofile(tmp_path / f"{split}-{number}.bin")
    data = open_tokens([f"train={tmp_path}/train-*.bin", f"val={tmp_path}/val-*.bin"], tokenizer="bytes")
    whole = open_tokens(str(prepared), tokenizer="bytes")
    np.testing.assert_array_equal(sequence(data).read(), sequence(whole).read())
    assert isinstance(data.val, TokenSequence)
    np.testing.assert_array_equal(data.val.read(), np.fromfile(prepared / "val.bin", "<u2"))
    assert (data.fingerprint == {**whole.fingerprint, "manifest": False}) == (num_files == 1)
    assert open_tokens(data.names, tokenizer="bytes") == data


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train={}/train.bin"], r"The names must give both splits, train=... and val=..., or no split, got"),
        (["train={}/train.bin", "{}/val.bin"], r"The names must give both splits"),
        (["train={}", "val={}/val.bin"], r"train=... and val=... must name .bin files, got .*/out\. Name"),
        (["train={}/train.bin", "val={}/no.bin"], r"no.bin must be a token file, got a name that does not exist"),
    ],
)
def test_incomplete_splits_are_rejected(names, message, prepared):
    with pytest.raises(DataError, match=message):
        open_tokens([name.format(prepared) for name in names], tokenizer="bytes")


def test_missing_files_are_rejected(prepared):
    with pytest.raises(DataError, match=r"nowhere.bin must be a token file, got a name that does not exist"):
        open_tokens("nowhere.bin", tokenizer="bytes")
    (prepared / "val.bin").unlink()
    missing = "/val.bin must be a token file, got a name that does not exist. "
    with pytest.raises(DataError, match=f"{missing}Restore it from a copy, or delete the folder"):
        open_tokens(str(prepared), tokenizer="bytes")
    (prepared / "manifest.json").unlink()
    with pytest.raises(DataError, match=f"{missing}Write both files, or name a .bin file"):
        open_tokens(str(prepared), tokenizer="bytes")


def test_an_invalid_manifest_is_rejected(prepared):
    (prepared / "manifest.json").write_text('{"format": 1, "files": 3}')
    with pytest.raises(DataError, match="must be a manifest of owt-data"):
        open_tokens(str(prepared), tokenizer="bytes")


@pytest.mark.parametrize("other", ["{}/./train.bin", "{}/../out/train.bin", "{}/link.bin"])
def test_a_mixture_names_each_file_once(other, prepared):
    (prepared / "link.bin").symlink_to("train.bin")
    names = {f"{prepared}/train.bin": 1, other.format(prepared): 2}
    with pytest.raises(
        DataError, match=r"The names of a mixture must be different files or folders, got .*, which are the"
    ):
        open_tokens(names, tokenizer="bytes")


@pytest.mark.parametrize(
    "names",
    [
        ["{}", "{}"],
        ["{}/train.bin", "{}/train.bin"],
        ["train={}/train.bin", "val={}/val.bin"],
        {"{}/train.bin": 1, "{}/val.bin": 1},
    ],
    ids=str,
)
def test_windows_of_several_files_are_checked_against_the_vocabulary(
    names: list[str] | dict[str, float], prepared: Path
) -> None:
    named = [name.format(prepared) for name in names]
    data = open_tokens(dict.fromkeys(named, 1.0) if isinstance(names, dict) else named, tokenizer="bytes")
    for split in ("train", "val"):
        np.full((prepared / f"{split}.bin").stat().st_size // 2, 257, "<u2").tofile(prepared / f"{split}.bin")
    for tokens in (data.train, data.val):
        with pytest.raises(DataError, match=r"\.bin must be below 257, .*, got 257 at token"):
            tokens.windows(np.arange(3), seq_len=7, order="shuffle", seed=1)


def test_windows_of_opened_tokens_are_checked_against_the_vocabulary(prepared):
    data = open_tokens(str(prepared), tokenizer="bytes")
    for split in ("train", "val"):
        values = np.fromfile(prepared / f"{split}.bin", "<u2")
        values[-2] = 65_535
        values.tofile(prepared / f"{split}.bin")
    place = len(sequence(data)) - 2
    with pytest.raises(DataError, match=f"train.bin must be below 257, .*, got 65535 at token {place}\\."):
        sequence(data).windows(np.arange(len(sequence(data)) // 4), seq_len=4, order="shuffle", seed=1)
    with pytest.raises(DataError, match=r"val.bin must be below 257, .*, got 65535 at token"):
        sequence(data, "val").read()
