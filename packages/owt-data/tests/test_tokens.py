import hashlib

import numpy as np
import pytest

from owt_data import DataError, PrepareOptions, is_prepared, open_tokens, prepare, verify


@pytest.fixture
def prepared(articles, tmp_path):
    prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer="bytes", val_fraction=0.1))
    return tmp_path / "out"


def test_a_prepared_folder_knows_its_tokenizer(prepared):
    tokens = open_tokens(str(prepared), tokenizer="gpt2")
    assert (tokens.tokenizer, tokens.vocab_size) == ("bytes", 257)
    train = np.fromfile(prepared / "train.bin", "<u2")
    np.testing.assert_array_equal(tokens.train.read(), train)
    windows = tokens.train.read_windows(np.array([5, 0]), 7)
    np.testing.assert_array_equal(windows, [train[5:13], train[:8]])
    assert tokens.fingerprint["train.bin"] == hashlib.sha256(train.tobytes()).hexdigest()


def test_a_folder_without_manifest_is_read_through_once(prepared):
    with_manifest = open_tokens(str(prepared), tokenizer="bytes")
    (prepared / "manifest.json").unlink()
    assert open_tokens(str(prepared), tokenizer="bytes") == with_manifest


def test_one_file_is_split_by_position(prepared):
    path = prepared / "train.bin"
    tokens = open_tokens(str(path), tokenizer="bytes")
    whole = np.fromfile(path, "<u2")
    np.testing.assert_array_equal(np.concatenate([tokens.train.read(), tokens.val.read()]), whole)
    assert len(tokens.val) == pytest.approx(0.1 * len(whole), abs=1)


def test_what_counts_as_prepared(prepared, tmp_path):
    assert is_prepared(str(prepared))
    assert is_prepared("x.bin")
    assert not is_prepared(str(tmp_path))
    assert not is_prepared("x.txt")
    assert not is_prepared("builtin")


def test_an_odd_length_is_refused(prepared):
    with (prepared / "val.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"expected an even number of bytes in .*val.bin, two per token, got"):
        open_tokens(str(prepared), tokenizer="bytes")


def test_a_truncated_file_is_refused(prepared):
    with (prepared / "train.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"expected \d+ tokens in .*train.bin, as its manifest says, found 50"):
        open_tokens(str(prepared), tokenizer="bytes")
    assert len(verify(prepared)) == 1


def test_a_changed_file_is_found_by_verify(prepared):
    path = prepared / "train.bin"
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    (difference,) = verify(prepared)
    assert difference.startswith("train.bin: expected SHA-256 ")


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    np.array([1, 2, 257, 3], "<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"expected ids below 257 in .*x.bin, .*bytes, found 257"):
        open_tokens(str(tmp_path / "x.bin"), tokenizer="bytes")


def test_missing_files_are_refused(prepared):
    with pytest.raises(DataError, match=r"expected the token file .*nowhere.bin, which does not exist"):
        open_tokens("nowhere.bin", tokenizer="bytes")
    (prepared / "val.bin").unlink()
    with pytest.raises(DataError, match=r"expected the token file .*val.bin"):
        open_tokens(str(prepared), tokenizer="bytes")


def test_a_manifest_that_is_none_is_refused(prepared):
    (prepared / "manifest.json").write_text('{"files": 3}')
    with pytest.raises(DataError, match="expected a manifest of owt-data"):
        open_tokens(str(prepared), tokenizer="bytes")
