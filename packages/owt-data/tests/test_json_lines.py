"""JSON lines: only the text column matters, and every row of it is read, from any place on."""

import gzip
import json
import random
import subprocess
import sys

import pytest

from owt_data import DataError, PrepareOptions, find_source, prepare, verify
from owt_data._sources.documents import Cursor, Documents

# Parsers infer types from the first 10 MB, and fail on other types after them.
NUM_ROWS = 14_000
CHANGE = 13_000


def other_fields(kind, number):
    """The fields of a row beside its text; most kinds change after 10 MB."""
    before = number < CHANGE
    return {
        "another type": {"meta": 5 if before else "five"},
        "a late field": {} if before else {"late": [1]},
        "null, then an object": {"meta": None if before else {"a": 1}},
        "an object, then null": {"meta": {"a": 1} if before else None},
        "objects and arrays": {"meta": {"a": 1} if number % 2 else [3]},
        "dates, then words": {"date": "2020-01-01" if before else "unknown"},
        "numbers beyond 64 bits": {"meta": 1 if before else 10**400},
        "not a number": {"meta": 1.5 if before else float("nan")},
        "half a surrogate pair": {"meta": "a" if before else "\ud800"},
    }[kind]


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    words = ["the", "Straße", "日本語", "def f(x):", "\n\n", "naïve", "1234567", '"', "\\"]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 260))) for _ in range(NUM_ROWS)]


def read(path, cursor=None, column="text"):
    chunks = Documents(find_source(str(path)), text_column=column).read(*([cursor] if cursor else []))
    return [text for chunk in chunks for text in chunk.texts.to_pylist()]


def write(path, rows):
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return len(data)


@pytest.mark.parametrize(
    "kind",
    [
        "another type",
        "a late field",
        "null, then an object",
        "an object, then null",
        "objects and arrays",
        "dates, then words",
        "numbers beyond 64 bits",
        "not a number",
        "half a surrogate pair",
    ],
)
def test_the_other_fields_may_hold_anything(kind, texts, tmp_path):
    path = tmp_path / "rows.jsonl"
    size = write(
        path, ({"id": number, "text": text, **other_fields(kind, number)} for number, text in enumerate(texts))
    )
    assert size > 10_500_000
    assert read(path) == texts


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_file_whose_other_fields_change_is_prepared_and_resumed_byte_for_byte(suffix, texts, tmp_path):
    plain, changing = tmp_path / "plain.jsonl", tmp_path / f"changing{suffix}"
    write(plain, ({"text": text} for text in texts))
    write(changing, ({"text": text, **other_fields("another type", number)} for number, text in enumerate(texts)))
    options = PrepareOptions(tokenizer="bytes")
    prepare(str(plain), tmp_path / "expected", options, num_processes=1)

    def stop(progress):
        if progress.num_bytes > 3_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(changing), tmp_path / "out", options, num_processes=1, progress=stop)
    assert list((tmp_path / ".out.partial/parts-all").glob("*.bin"))
    prepare(str(changing), tmp_path / "out", options, num_processes=1)
    for file in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_reading_resumes_from_any_row_of_any_block(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._sources.json_lines._BLOCK_BYTES", 300)
    path = tmp_path / f"rows{suffix}"
    expected = [f"row {number} é\n" for number in range(200)]
    write(path, ({"text": text, "meta": 10**400 if number % 7 == 3 else 0} for number, text in enumerate(expected)))
    assert read(path) == expected
    for number in range(0, 201, 9):
        assert read(path, Cursor(0, number)) == expected[number:]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        (b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\r\n', ["a", "b"]),
        (b'{"text": "a"} {"text": "b"}\n', ["a", "b"]),
        (b'{\n  "text": "a",\n  "meta": {\n    "b": 1\n  }\n}\n{\n  "text": "b"\n}\n', ["a", "b"]),
        (b'[{"text": "a"},\n {"meta": 1, "text": "b"}]\n', ["a", "b"]),
        (b'["a",\n "b"]\n', ["a", "b"]),
        (b'{"text": "a", "meta": "te\xe9"}\n{"text": "b", "meta": 1e999}\n', ["a", "b"]),
        (b'{"text": "2020-01-01"}\n{"text": "12"}\n', ["2020-01-01", "12"]),
        (b'{"meta": {"text": 5}, "text": "a"}\n', ["a"]),
        (b'{"text": "\\u0000\\ud83d\\ude42", "meta": 123456789012345678901234567890}\n', ["\0🙂"]),
        (b"\n", []),
        (b"[]", []),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 20, 1 << 20])
def test_forms_of_json_are_read(block_bytes, data, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._sources.json_lines._BLOCK_BYTES", block_bytes)
    (tmp_path / "rows.json").write_bytes(data)
    assert read(tmp_path / "rows.json") == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": 5}\n', "'text' of .* must hold text in every row, got a number in line 2"),
        (b'{"text": "a"}\n{"text": ["b"]}\n', "must hold text in every row, got an array in line 2"),
        (b'{"text": "a"}\n{"text": null}\n', "must hold text in every row, got none in line 2"),
        (b'{"text": "a"}\n{"body": "b"}\n', "must hold text in every row, got none in line 2"),
        (
            b'{"body": "a", "id": 1}\n',
            r"The text column must be exactly one of the columns \['body', 'id'\] of .*, got 'text'",
        ),
        (
            b'{"text": "a"}\nnull\n',
            "must hold JSON lines, one object in each, got another or a damaged file: null in line 2",
        ),
        (b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', "Expecting ',' delimiter in line 2. "),
        (b'{"text": "a"\n', "Expecting ',' delimiter in line 1. "),
        (b'{"text": "a"}\n\n{"text": "b",\n{"text": "c"}\n', "Expecting property name .* in line 3. "),
        (b'{"text": "a"}\n{"text":\n{"text": "c"}\n{"text": "d"}\n', "in line 3 of the row that begins in line 2. "),
        (b'{\n  "text": "a"\n  "meta": 1\n}\n', "Expecting ',' delimiter in line 2 of the row that begins in line 1. "),
        (b'[{"text": "a"},\n {"text": "b"\n {"text": "c"}]\n', "Expecting ',' delimiter in line 2. "),
        (
            b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n',
            "got another or a damaged file: Invalid control character in line 2. ",
        ),
        (b'{"text": "a"}\n{"text": "\\x"}\n', r"got another or a damaged file: Invalid \\escape in line 2. "),
        (b'{"text": "a"}\n{"text": "b', "got another or a damaged file: Unterminated string starting in line 2. "),
        (b'{"text": "a"}\n\0\0\0\0', "Expecting value in line 2"),
        (b'{"text": "te\xe9"}\n', "must hold UTF-8 text, got other bytes or half a surrogate pair in line 1"),
        (b'{"text": "\\ud800"}\n', r"characters, got half a surrogate pair, \\ud800, in line 1. Correct the row, or"),
        (b'{"text": "a", "meta": ' + b"[" * 100_000 + b"\n", "must hold JSON lines"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_rows_without_text_are_rejected_by_number(block_bytes, data, message, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._sources.json_lines._BLOCK_BYTES", block_bytes)
    (tmp_path / "rows.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "rows.jsonl")


def test_a_line_that_is_cut_is_named_among_thousands(tmp_path):
    lines = ['{"text": "good"}\n'] * 6000
    lines[3000] = '{"text": "broken"\n'
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    with pytest.raises(DataError, match=r"Expecting ',' delimiter in line 3001\. "):
        read(tmp_path / "rows.jsonl")


def test_a_file_that_begins_with_null_is_rejected_without_a_crash(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('null\n{"text": "a"}\n')
    code = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["prepare", str(path), str(tmp_path / "out"), "--tokenizer", "bytes"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "null in line 1" in done.stderr
    assert "Traceback" not in done.stderr
