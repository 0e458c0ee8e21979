import json

import numpy as np

from owt_data import verify


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
    assert tokenizer.startswith(f"manifest.json: expected the tokenizer's SHA-256 {'0' * 64}, found 2114b")
    assert train.startswith("train.bin: expected ")
    assert val == "val.bin: expected a file, found none"
    assert shares[-1] > 0.5


def test_verify_without_the_tokenizer_warns_and_compares_everything_else(prepared, caplog):
    path = prepared / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": "words"}))
    assert verify(prepared) == []
    assert "the tokenizer is not compared: The tokenizer must be bytes or gpt2, got 'words'" in caplog.text


def test_verify_finds_ids_above_the_vocabulary(prepared):
    path = prepared / "train.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[5] = 257
    tokens.tofile(path)
    assert any("expected ids below 257, found 257" in difference for difference in verify(prepared))
