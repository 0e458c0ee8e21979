"""Reading documents: of every kind of file, in order, and from any place on."""

import gzip
import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import DataError, every_row, find_source, load_tokenizer
from owt_data._errors import UnreadableError
from owt_data._sources.documents import _CUT, START, Cursor, Documents, _read_pieces
from owt_data._sources.source import find_splits

ROWS = [f"row {number} é" for number in range(3000)]


def write_rows(path, rows, column="text"):
    if path.suffix == ".parquet":
        pq.write_table(pa.table({column: rows, "id": list(range(len(rows)))}), path, row_group_size=700)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps({column: row}) + "\n" for row in rows).encode()))
    else:
        path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return path


def read(names, **options):
    """Return the documents, joined from their pieces."""
    documents, held = [], ""
    for chunk in Documents(find_source(names), **options).read():
        for text, ends in zip(chunk.texts.to_pylist(), chunk.ends.tolist(), strict=True):
            held += text
            if ends:
                documents.append(held)
                held = ""
    assert held == ""
    return documents


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".jsonl.gz", ".json", ".json.gz"])
def test_rows_of_many_files_are_documents_in_order(suffix, tmp_path):
    paths = [
        str(write_rows(tmp_path / f"file-{number}{suffix}", ROWS[number * 300 : (number + 1) * 300], "body"))
        for number in range(10)  # a folder has them in any order
    ]
    assert read(paths, text_column="body") == ROWS
    assert read(str(tmp_path), text_column="body") == ROWS
    assert read(str(tmp_path / f"file-*{suffix}"), text_column="body") == ROWS


def test_files_may_differ_in_their_other_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "extra": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"other": [2], "text": "b"}\n')
    assert read(str(tmp_path)) == ["a", "b"]


def test_empty_files_hold_no_rows_and_empty_text_files_an_empty_document(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("")
    write_rows(tmp_path / "rows" / "b.jsonl", ["b"])
    assert read(str(tmp_path / "rows")) == ["b"]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("")
    (tmp_path / "texts" / "b.txt").write_text("b")
    assert read(str(tmp_path / "texts")) == ["", "b"]


@pytest.mark.parametrize("limit_rows", [None, 130])
@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".parquet", "texts", "lines"])
def test_reading_resumes_from_any_place(kind, limit_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 500)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 120)
    monkeypatch.setattr("owt_data._sources.documents._ROWS_PER_READ", 64)
    monkeypatch.setattr("owt_data._sources.json_lines._BLOCK_BYTES", 500)
    monkeypatch.setattr("owt_data._sources.rows._READ_BYTES", 500)
    if kind.startswith("."):
        for number in range(3):
            write_rows(tmp_path / f"{number}{kind}", ROWS[number * 100 : (number + 1) * 100])
    else:
        for number in range(3):
            (tmp_path / f"{number}.txt").write_text("\n".join(ROWS[number * 100 : (number + 1) * 100]))
    starts_document = every_row if kind == "lines" else None
    documents = Documents(find_source(str(tmp_path)), starts_document=starts_document, limit_rows=limit_rows)

    def pieces_from(cursor):
        return [
            (text, Cursor(chunk.file, offset))
            for chunk in documents.read(cursor)
            for text, offset in zip(chunk.texts.to_pylist(), chunk.offsets.tolist(), strict=True)
        ]

    pieces = pieces_from(START)
    assert len(pieces) > 10
    for number in range(0, len(pieces), 7):
        assert pieces_from(pieces[number][1]) == pieces[number + 1 :]


class CountedPattern:
    """A pattern that counts the characters of the texts that it gets."""

    num_chars = 0

    def search(self, text: str, *start: int) -> re.Match[str] | None:
        self.num_chars += len(text)
        return _CUT.search(text, *start)


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize("num_blanks", [0, 1, 50])
def test_a_text_without_blanks_is_not_joined_at_each_block(
    num_blanks: int, errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 64)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 40)
    counted = CountedPattern()
    monkeypatch.setattr("owt_data._sources.documents._CUT", counted)
    text = ("é日x" * 1000 + " ") * num_blanks + "é日x" * 1000
    (tmp_path / "long.txt").write_text(text)
    groups = list(_read_pieces(tmp_path / "long.txt", 0, errors))
    pieces = [piece for pieces, _, _ in groups for piece in pieces]
    assert "".join(pieces) == text
    assert len(pieces) == (num_blanks + 1 if errors == "strict" else 1)
    assert counted.num_chars < 4 * len(text)


def test_the_end_of_a_row_is_appended_once_to_a_text_of_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 64)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 40)
    texts = [" ".join(ROWS[:99]), "", " ".join(ROWS[:7])]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    assert read(str(tmp_path), row_end="!\n") == [f"{text}!\n" for text in texts]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_text_of_every_type_of_arrow_is_read(kind: pa.DataType, tmp_path: Path) -> None:
    texts = pa.array(["é", "", "日本", "é"] * 700).cast(kind)
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    assert read(str(tmp_path / "rows.parquet")) == ["é", "", "日本", "é"] * 700


def test_the_size_of_parquet_files_is_that_of_their_text(tmp_path: Path) -> None:
    for number in range(2):
        texts = [f"{row:03}" * 99 for row in range(number, 900 + number)]
        table = pa.table({"other": [text * 3 for text in texts], "text": texts, "id": list(range(900))})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=400, use_dictionary=False)
    source = find_source(str(tmp_path))
    num_bytes = 2 * 900 * 3 * 99
    assert num_bytes < (Documents(source).num_bytes() or 0) < 1.05 * num_bytes
    assert Documents(source, limit_rows=3).num_bytes() is None
    assert 2 * 900 * 3 < (Documents(source, text_column="id").num_bytes() or 0) < 2 * 900 * 9


def test_the_builtin_corpus_is_the_library_alone() -> None:
    files = find_source("builtin").files
    assert len(files) > 300
    assert list(files) == sorted(set(files))
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = {part for path in files for part in path.relative_to(root).parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def random_text(rng, length):
    """Text of everything that the pattern of gpt2 treats in a way of its own."""
    alphabet = [
        *"ab'st 12!\n\t",
        "  ",
        " \n",
        "\n\n",
        "\r\n",
        "'s",
        "'ll",
        "é",
        "日",
        "\u00a0",
        "\u2003",
        "🙂",
        "\x1c",
        "_",
    ]
    return "".join(rng.choice(alphabet, size=length))


@pytest.mark.parametrize("kind", ["small_bpe", pytest.param("gpt2", marks=pytest.mark.shared_data)])
def test_pieces_of_a_text_have_the_tokens_of_the_uncut_text(kind, tmp_path, monkeypatch, request):
    tokenizer = request.getfixturevalue(kind)
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 64)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 40)
    rng = np.random.default_rng(0)
    for number in range(200):
        text = random_text(rng, 400)
        path = tmp_path / f"{number}.txt"
        path.write_bytes(text.encode())
        pieces = [piece for chunk in Documents(find_source(str(path))).read() for piece in chunk.texts.to_pylist()]
        assert len(pieces) > 3
        assert "".join(pieces) == text
        assert [token for piece in pieces for token in tokenizer.encode_ordinary(piece)] == tokenizer.encode_ordinary(
            text
        )


def test_text_without_a_blank_is_read_as_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 64)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 40)
    (tmp_path / "long.txt").write_text("日" * 1000)
    assert read(str(tmp_path / "long.txt")) == ["日" * 1000]


def test_a_byte_that_is_not_utf8_is_named_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 64)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 40)
    text = ("naïve words " * 50).encode()
    (tmp_path / "bad.txt").write_bytes(text + b"\xff" + text)
    with pytest.raises(DataError, match=rf"bad.txt must hold UTF-8 text, got other bytes at byte {len(text)}\."):
        read(str(tmp_path / "bad.txt"))


def test_a_file_cut_off_in_a_character_is_rejected(tmp_path):
    (tmp_path / "cut.txt").write_bytes("naïve 日".encode()[:-1])
    with pytest.raises(DataError, match="must hold UTF-8 text, got other bytes at byte 7"):
        read(str(tmp_path / "cut.txt"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_that_are_not_utf8_are_rejected(suffix, tmp_path):
    path = tmp_path / f"bad{suffix}"
    if suffix == ".jsonl":
        path.write_bytes(b'{"text": "te\xe9"}\n')
    else:
        column = pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xe9\xff")]
        )
        pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(DataError, match=r"bad.* must hold UTF-8 text, got other bytes .*(column 'text'|line 1)"):
        read(str(path))


def test_a_parquet_row_without_text_is_named_by_its_number_in_the_file(tmp_path):
    path = write_rows(tmp_path / "rows.parquet", [*ROWS[:2500], None, *ROWS[2500:]])
    with pytest.raises(DataError, match=r"must hold text in every row, got none in row 2500\."):
        read(str(path))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_file_that_is_gone_is_not_a_damaged_one(suffix: str, tmp_path: Path) -> None:
    """The shards of a damaged file are deleted. Those of a file that comes back are not."""
    path = write_rows(tmp_path / f"rows{suffix}", ROWS)
    documents = Documents(find_source(str(path)))
    path.unlink()
    with pytest.raises(UnreadableError, match=rf"^{path} must be readable, got "):
        list(documents.read())


def test_several_sources_must_be_of_one_kind(tmp_path):
    names = [str(write_rows(tmp_path / "a.jsonl", ["a"])), str(write_rows(tmp_path / "b.parquet", ["b"]))]
    with pytest.raises(DataError, match=r"must be files of one kind .*, got json and parquet"):
        find_source(names)
    with pytest.raises(DataError, match=r"must be files of one kind .*, got builtin and json"):
        find_source([names[0], "builtin"])


def test_a_pattern_that_matches_nothing_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"\*.jsonl must name .txt, .jsonl or .parquet files, got no file\."):
        find_source(str(tmp_path / "*.jsonl"))


def test_splits_are_named_together_or_not_at_all(tmp_path):
    name = str(write_rows(tmp_path / "a.jsonl", ["a"]))
    assert find_splits(name).keys() == {"all"}
    assert find_splits([f"train={name}", f"val={name}"]).keys() == {"train", "val"}
    for names in ([f"train={name}"], [f"train={name}", name]):
        with pytest.raises(DataError, match="The names must give both splits"):
            find_splits(names)


def test_hub_names_have_a_configuration_and_a_split():
    assert find_source("openwebtext").hub_address == ("Skylion007/openwebtext", None, "train")
    assert find_source("fineweb").hub_address == ("HuggingFaceFW/fineweb", "sample-10BT", "train")
    assert find_source("fineweb:sample-100BT").hub_address == ("HuggingFaceFW/fineweb", "sample-100BT", "train")
    assert find_source("fineweb-edu::train").hub_address == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")
    assert find_source("Salesforce/wikitext:wikitext-103-raw-v1:validation").hub_address == (
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        "validation",
    )


def test_the_digest_is_of_contents_and_kind(tmp_path):
    a, b = write_rows(tmp_path / "a.jsonl", ["a"]), write_rows(tmp_path / "b.jsonl", ["a"])
    assert find_source(str(a)).digest() == find_source(str(b)).digest()
    as_text = b.with_suffix(".txt")
    as_text.write_bytes(a.read_bytes())
    assert find_source(str(a)).digest() != find_source(str(as_text)).digest()
    write_rows(b, ["c"])
    assert find_source(str(a)).digest() != find_source(str(b)).digest()
    both = find_source([str(a), str(b)]).digest()
    assert both != find_source([str(b), str(a)]).digest()
    assert both != find_source([str(b), str(b)]).digest()
    write_rows(b, ["b" * 9])
    shares = []
    find_source([str(a), str(b)]).digest(shares.append)
    first, second = a.stat().st_size, b.stat().st_size
    assert shares == [first / (first + second), 1.0]


def test_the_bytes_tokenizer_may_be_cut_anywhere():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_ordinary("a b") == tokenizer.encode_ordinary("a") + tokenizer.encode_ordinary(" b")
