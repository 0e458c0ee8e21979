import json
from pathlib import Path

import numpy as np
import tiktoken

from owt_data import PrepareOptions, prepare, verify


def test_a_changed_file_is_found_by_verify(prepared):
    path = prepared / "train.bin"
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    assert any(difference.startswith("train.bin: expected SHA-256 ") for difference in verify(prepared))


def test_verify_names_all_that_differs(prepared):
    path = prepared / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["train.bin"]["num_documents"] += 1
    manifest["tokenizer_sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    (prepared / "val.bin").unlink()
    shares = []
    tokenizer, train, val = verify(prepared, report=shares.append)
    assert tokenizer.startswith(f"manifest.json: expected the tokenizer's SHA-256 {'0' * 64}, found 0e09e")
    assert train.startswith("train.bin: expected ")
    assert val == "val.bin: expected a file, found none"
    assert shares[-1] > 0.5


def test_verify_compares_the_size_of_the_vocabulary(prepared: Path) -> None:
    path = prepared / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 258}))
    assert verify(prepared)[0] == "manifest.json: expected a vocabulary of 258, found 257"


def test_verify_says_both_sizes_of_a_file(prepared: Path) -> None:
    path = prepared / "val.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    assert verify(prepared) == [f"val.bin: expected {size} bytes, found {size - 4}"]


def test_verify_without_the_tokenizer_warns_and_compares_everything_else(
    articles, small_bpe, tmp_path, monkeypatch, caplog
):
    prepare(str(articles), tmp_path / "out", PrepareOptions(val_fraction=0.1))
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-files"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # no network
    assert verify(tmp_path / "out") == []
    assert "the tokenizer is not compared: The files of tokenizer 'gpt2' could not be downloaded" in caplog.text


def test_verify_says_what_is_in_place_of_a_file(prepared):
    (prepared / "train.bin").unlink()
    (prepared / "train.bin").symlink_to("train.bin")
    (prepared / "val.bin").unlink()
    (prepared / "val.bin").mkdir()
    assert verify(prepared) == [
        "train.bin: expected a file, found none",
        "val.bin: expected a file, found a folder",
    ]


def test_verify_finds_ids_above_the_vocabulary(prepared):
    path = prepared / "train.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[5] = 257
    tokens.tofile(path)
    assert any("expected ids below 257, found 257" in difference for difference in verify(prepared))
