"""The documents of token files: their index, the source of each document, and searches for text."""

import gzip
import json
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from owt_data import (
    DataError,
    PrepareOptions,
    find_text,
    open_documents,
    open_tokens,
    prepare,
    prepare_in_background,
    verify,
)
from owt_data._cli import main
from owt_data._tokens.document_index import write_index

BYTES = PrepareOptions(tokenizer="bytes")
END = 256


def decode(tokens):
    return bytes(tokens[tokens != END].astype(np.uint8)).decode()


def check_ranges(documents):
    """Check that documents are consecutive, and found by all of their tokens."""
    starts, stops = documents.ranges(np.arange(len(documents)))
    assert starts.tolist() == [0, *stops[:-1].tolist()]
    assert stops[-1] == len(documents.tokens)
    ids = documents.find(np.arange(len(documents.tokens)))
    assert ids.tolist() == np.repeat(np.arange(len(documents)), stops - starts).tolist()


@pytest.fixture
def rows(tmp_path) -> list[Path]:
    """Three files of 150, 1 and 60 rows of very different lengths, some of them empty."""
    rng, files = np.random.default_rng(3), []
    for name, count in (("a.jsonl", 150), ("b.jsonl", 1), ("c.jsonl.gz", 60)):
        lines = [json.dumps({"text": f"{name}:{row} " * int(rng.integers(0, 9) ** 3)}) for row in range(count)]
        path = tmp_path / name
        content = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        files.append(path)
    return files


def texts_of(files):
    """All rows of JSON lines, by file and row."""
    contents = {str(path): path.read_bytes() for path in files}
    plain = {name: gzip.decompress(content) if name.endswith(".gz") else content for name, content in contents.items()}
    lines = [(name, row, line) for name, content in plain.items() for row, line in enumerate(content.splitlines())]
    return {(name, row): json.loads(line)["text"] for name, row, line in lines}


@pytest.mark.parametrize("split", ["documents", "position", "start"])
@pytest.mark.parametrize("shard_bytes", [64, 1 << 18])
def test_every_document_is_a_row_of_its_source(split, shard_bytes, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", shard_bytes)  # shards that end anywhere
    # Many groups of rows, which are read one by one.
    monkeypatch.setattr("owt_data._tokens.document_index._GROUP_DOCUMENTS", 7 if shard_bytes == 64 else 1 << 16)
    if split == "start" and shard_bytes > 64:
        pytest.skip("the text is shorter than the least block of validation")
    fraction = None if split == "start" else 0.3
    prepare(
        list(map(str, rows)), tmp_path / "out", PrepareOptions(tokenizer="bytes", split=split, val_fraction=fraction)
    )
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    found = {}
    for part in ("train", "val"):
        documents = open_documents(data, part)
        check_ranges(documents)
        for document in documents.describe(np.arange(len(documents))):
            found.setdefault((document.file, document.row), []).append((part, decode(documents.read(document.id))))
    expected = texts_of(rows)
    order = ["val", "train"] if split == "start" else ["train", "val"]
    joined = {
        place: "".join(text for _, text in sorted(found[place], key=lambda one: order.index(one[0]))) for place in found
    }
    assert joined == expected
    cut = [place for place, pieces in found.items() if len(pieces) > 1]
    assert len(cut) <= (0 if split == "documents" else 1)


def test_given_splits_have_sources_of_their_own(rows, tmp_path):
    prepare([f"train={rows[0]}", f"train={rows[2]}", f"val={rows[1]}"], tmp_path / "out", BYTES)
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    train, val = open_documents(data), open_documents(data, "val")
    places = [(document.file, document.row) for document in train.describe(np.arange(len(train)))]
    assert places == [(str(rows[0]), row) for row in range(150)] + [(str(rows[2]), row) for row in range(60)]
    assert [(one.file, one.row) for one in val.describe(np.array([0]))] == [(str(rows[1]), 0)]


def test_a_text_file_is_one_document_of_its_own(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 10**number)
    prepare(
        str(tmp_path / "*.txt"),
        tmp_path / "out",
        PrepareOptions(tokenizer="bytes", split="documents", val_fraction=0.2),
    )
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    for part in ("train", "val"):
        documents = open_documents(data, part)
        for document in documents.describe(np.arange(len(documents))):
            assert document.row == 0
            assert decode(documents.read(document.id)) == Path(str(document.file)).read_text()


def test_an_article_of_wikitext_is_numbered_in_its_file(tmp_path):
    for name, count in (("a", 3), ("b", 40)):
        articles = [f" = {name} {n} = \n" + f" line of {name} {n}\n" * (n % 7) for n in range(count)]
        (tmp_path / f"{name}.txt").write_text("".join(articles))
    options = PrepareOptions(tokenizer="bytes", documents="wikitext-titles", split="documents", val_fraction=0.1)
    prepare([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "out", options)
    documents = open_documents(open_tokens(tmp_path / "out", tokenizer="bytes"))
    check_ranges(documents)
    for document in documents.describe(np.arange(len(documents))):
        assert decode(documents.read(document.id)).startswith(f" = {Path(str(document.file)).stem} {document.row} = \n")


def test_prepare_writes_an_index_beside_each_token_file(prepared):
    assert sorted(path.name for path in prepared.iterdir()) == [
        "manifest.json",
        "train.bin",
        "train.docs",
        "val.bin",
        "val.docs",
    ]
    assert verify(prepared) == []


def test_a_resumed_preparation_writes_the_same_index(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 64)
    names = list(map(str, rows))
    prepare(names, tmp_path / "whole", BYTES, num_processes=1)
    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(names, tmp_path / "out", BYTES, num_processes=1, progress=stop)
    journal = tmp_path / ".out.partial" / "parts-all" / "parts.jsonl"
    assert len(journal.read_text().splitlines()) > 4
    prepare(names, tmp_path / "out", BYTES, num_processes=1)
    for name in ("train.docs", "val.docs"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_shards_of_an_earlier_version_have_documents_of_an_unknown_source(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 64)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(rows[0]), tmp_path / "out", BYTES, num_processes=1, progress=interrupt_after(5))
    journal = tmp_path / ".out.partial" / "parts-all" / "parts.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records[1:]:
        del record["files"]
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare(str(rows[0]), tmp_path / "out", BYTES, num_processes=1)
    documents = open_documents(open_tokens(tmp_path / "out", tokenizer="bytes"))
    check_ranges(documents)
    assert documents.describe(np.array([3]))[0].file is None


def interrupt_after(count):
    calls = []

    def report(progress):
        calls.append(progress)
        if len(calls) == count:
            raise KeyboardInterrupt

    return report


def bare_file(folder, lengths, *, ends=True):
    """A token file of documents of these lengths, with the end-of-text token."""
    rng = np.random.default_rng(1)
    pieces = [np.append(rng.integers(0, 256, length - 1), END) for length in lengths]
    tokens = np.concatenate(pieces).astype("<u2")
    path = folder / "bare.bin"
    (tokens if ends else tokens[:-1]).tofile(path)
    return path


@pytest.mark.parametrize("ends", [True, False])
def test_a_bare_file_is_scanned_once(ends, tmp_path):
    lengths = [1, 5, 1, 1, 400, 90, 2, 1]
    path = bare_file(tmp_path, lengths, ends=ends)
    data = open_tokens(path, tokenizer="bytes")
    shares = []
    documents = open_documents(data, report=shares.append)
    assert shares[-1] == 1.0
    check_ranges(documents)
    assert documents.ranges(np.array([3, 4]))[1].tolist() == [8, 408]
    # The split by position cuts a document, which is the last of the one and the first of the other.
    val = open_documents(data, "val", report=shares.append)
    check_ranges(val)
    assert len(documents) + len(val) == len(lengths) + 1 - (not ends)
    assert documents.describe(np.array([len(documents) - 1]))[0].number == val.describe(np.array([0]))[0].number
    assert pq.read_table(tmp_path / "bare.docs")["end"].to_pylist()[:4] == list(accumulate(lengths[:4]))
    again = []
    open_documents(open_tokens(path, tokenizer="bytes"), report=again.append)
    assert not again


def test_the_index_of_a_replaced_file_is_not_used(tmp_path):
    first = open_documents(open_tokens(bare_file(tmp_path, [5, 95]), tokenizer="bytes"))
    second = open_documents(open_tokens(bare_file(tmp_path, [50, 50]), tokenizer="bytes"))
    assert [int(one.ranges(np.array([0]))[1][0]) for one in (first, second)] == [5, 50]


def test_no_index_is_written_for_a_file_that_has_changed_since_it_was_opened(tmp_path):
    data = open_tokens(bare_file(tmp_path, [5, 95]), tokenizer="bytes")
    bare_file(tmp_path, [50, 50])
    open_documents(data)
    bare_file(tmp_path, [5, 95])
    restored = open_documents(open_tokens(tmp_path / "bare.bin", tokenizer="bytes"))
    assert int(restored.ranges(np.array([0]))[1][0]) == 5
    assert (tmp_path / "bare.docs").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "bits", "folder"])
def test_a_damaged_index_is_made_again_or_named(damage, tmp_path):
    path = bare_file(tmp_path, [1 + number**2 % 97 for number in range(5000)])
    first = open_documents(open_tokens(path, tokenizer="bytes"))
    index = tmp_path / "bare.docs"
    content = bytearray(index.read_bytes())
    index.unlink()
    if damage == "folder":
        index.mkdir()
    else:
        changed = {
            "cut": content[:-20],
            "empty": b"",
            "text": b"notes",
            "bits": content[:300] + b"\0" * 40 + content[340:],
        }
        index.write_bytes(changed[damage])
    if damage == "bits":
        with pytest.raises(DataError, match=r"bare\.docs is damaged: .* Delete it"):
            open_documents(open_tokens(path, tokenizer="bytes"))
        return
    documents = open_documents(open_tokens(path, tokenizer="bytes"))
    check_ranges(documents)
    assert len(documents) == len(first)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_the_index_of_a_folder_that_cannot_be_written_is_kept_in_memory(tmp_path):
    path = bare_file(tmp_path, [3] * 50)
    tmp_path.chmod(0o500)
    documents = open_documents(open_tokens(path, tokenizer="bytes"))
    tmp_path.chmod(0o700)
    check_ranges(documents)
    assert not (tmp_path / "bare.docs").exists()


def test_an_index_that_cannot_be_written_is_kept_in_memory(tmp_path):
    path = bare_file(tmp_path, [3] * 50)
    (tmp_path / "bare.docs").mkdir()  # also for root
    check_ranges(open_documents(open_tokens(path, tokenizer="bytes")))


@pytest.mark.parametrize("documents", ["rows", "wikitext-titles"])
@pytest.mark.parametrize("split", ["documents", "position", "start"])
def test_an_older_folder_gets_the_index_of_prepare(documents, split, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 64)
    rng = np.random.default_rng(5)
    lines = [f" = Title {n} = \n" + " a line of text\n" * int(rng.integers(0, 9)) for n in range(200)]
    (tmp_path / "wiki.txt").write_text("".join(lines))
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    source = tmp_path / ("wiki.jsonl" if documents == "rows" else "wiki.txt")
    options = PrepareOptions(
        tokenizer="bytes", documents=documents, split=split, val_fraction=None if split == "start" else 0.1
    )
    prepare(str(source), tmp_path / "out", options)
    before = {name: pq.read_table(tmp_path / "out" / name)["end"].to_pylist() for name in ("train.docs", "val.docs")}
    for name in before:
        (tmp_path / "out" / name).unlink()
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    for documents_of_part, name in ((open_documents(data), "train.docs"), (open_documents(data, "val"), "val.docs")):
        check_ranges(documents_of_part)
        assert pq.read_table(tmp_path / "out" / name)["end"].to_pylist() == before[name]
    assert verify(tmp_path / "out") == []


def test_an_index_of_many_groups_is_read_by_groups(tmp_path):
    lengths = [1 + number % 3 for number in range(150_001)]
    path = bare_file(tmp_path, lengths)
    open_documents(open_tokens(path, tokenizer="bytes"))
    assert pq.ParquetFile(tmp_path / "bare.docs").metadata.num_row_groups == 3
    documents = open_documents(open_tokens(path, tokenizer="bytes"))
    check_ranges(documents)
    assert (tmp_path / "bare.docs").stat().st_size < 150_001


def test_files_of_a_list_and_of_a_mixture_have_ids_one_after_the_other(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(50)))
        prepare(str(tmp_path / f"{name}.jsonl"), tmp_path / name, PrepareOptions(tokenizer="bytes", val_fraction=0.1))
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    for names in (folders, {folders[0]: 3.0, folders[1]: 1.0}):
        documents = open_documents(open_tokens(names, tokenizer="bytes"))
        check_ranges(documents)
        assert len(documents) == 90
        described = documents.describe(np.array([0, 44, 45, 89]))
        mixed = np.array([89, 0, 45, 44, 0])  # ids and positions need no order
        assert documents.describe(mixed) == [described[place] for place in (3, 0, 2, 1, 0)]
        assert documents.find(documents.ranges(mixed)[0]).tolist() == mixed.tolist()
        assert [Path(one.token_file).parent.name for one in described] == ["a", "a", "b", "b"]
        assert all(decode(documents.read(one.id)) == f"{Path(str(one.file)).stem}{one.row}" for one in described)


@pytest.mark.parametrize("documents", ["rows", "wikitext-titles"])
def test_unfinished_tokens_have_the_documents_of_the_finished_ones(documents, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 64)
    lines = [f" = Title {n} = \n" + " a line of text\n" * (n % 9) for n in range(300)]
    source = tmp_path / ("text.jsonl" if documents == "rows" else "text.txt")
    content = "".join(json.dumps({"text": line}) + "\n" for line in lines) if documents == "rows" else "".join(lines)
    source.write_text(content)
    options = PrepareOptions(tokenizer="bytes", documents=documents, split="start")
    with prepare_in_background(str(source), tmp_path / "out", options, num_processes=1):
        pass
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    growing = open_documents(data)
    num_tokens = len(growing.tokens)
    check_ranges(growing)
    places = growing.describe(np.arange(len(growing)))
    early_val = open_documents(data, "val")
    check_ranges(early_val)
    val_places = [(one.file, one.row) for one in early_val.describe(np.arange(len(early_val)))]
    prepare(str(source), tmp_path / "out", options)
    # Tokens that were opened before have the documents of the complete folder, too.
    for split in ("train", "val"):
        found, expected = (
            open_documents(one, split) for one in (data, open_tokens(tmp_path / "out", tokenizer="bytes"))
        )
        ids = np.arange(len(expected))
        assert found.describe(ids) == expected.describe(ids)
    assert val_places == [(one.file, one.row) for one in expected.describe(ids)]
    finished = open_documents(open_tokens(tmp_path / "out", tokenizer="bytes"))
    assert 0 < num_tokens < len(finished.tokens)
    positions = np.arange(num_tokens)
    assert growing.find(positions).tolist() == finished.find(positions).tolist()
    assert [one.row for one in places] == [one.row for one in finished.describe(np.arange(len(growing)))]
    assert {one.file for one in places} == {str(source)}


@pytest.mark.parametrize("wanted", ["x", "needle", "eedle n", "nn", "ß\n"])  # places of `nn` overlap
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_a_text_is_found_wherever_chunks_and_documents_end(wanted, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._tokens.text_search._CHUNK_TOKENS", chunk)
    rng = np.random.default_rng(2)
    pieces = ["needle", " ", "x", "é", "ß", "\n", "nee", "dle", "n"]
    texts = ["".join(rng.choice(pieces, int(rng.integers(0, 40)))) for _ in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(str(tmp_path / "rows.jsonl"), tmp_path / "out", PrepareOptions(tokenizer="bytes", val_fraction=0.2))
    documents = open_documents(open_tokens(tmp_path / "out", tokenizer="bytes"))
    expected = {}
    for document in documents.describe(np.arange(len(documents))):
        content = texts[document.row or 0].encode()
        places = [place for place in range(len(content)) if content[place:].startswith(wanted.encode())]
        if places:
            expected[document.id] = (len(places), document.start + places[0])
    shares = []
    found = find_text(documents, wanted, tokenizer="bytes", report=shares.append)
    assert {one.document: (one.num_matches, one.position) for one in found} == expected
    assert shares[-1] == 1.0


def test_text_is_found_across_tokens_of_several_bytes(small_bpe, tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._tokens.text_search._CHUNK_TOKENS", 5)
    text = "the import of the module returns the number of the tokens"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(9)))
    prepare(
        str(tmp_path / "rows.jsonl"),
        tmp_path / "out",
        PrepareOptions(tokenizer="gpt2", val_fraction=0.2),
        num_processes=1,
    )
    documents = open_documents(open_tokens(tmp_path / "out", tokenizer="gpt2"))
    for start in range(0, len(text) - 6, 3):
        wanted = text[start : start + 6]
        found = find_text(documents, wanted, tokenizer="gpt2")
        assert [one.num_matches for one in found] == [text.count(wanted)] * len(documents), wanted
        # The token that has the first byte, of tokens of several bytes.
        lengths = [len(small_bpe.decode_single_token_bytes(token)) for token in small_bpe.encode_ordinary(text)]
        place = int(np.searchsorted(np.cumsum(lengths), text.index(wanted), side="right"))
        starts, _ = documents.ranges(np.arange(len(documents)))
        assert [one.position for one in found] == (starts + place).tolist(), wanted


@pytest.mark.parametrize("text", ["", "a\0b", "\ud800"])
def test_a_text_that_no_document_can_have_is_rejected(text, tmp_path):
    documents = open_documents(open_tokens(bare_file(tmp_path, [3] * 50), tokenizer="bytes"))
    with pytest.raises(DataError, match="text must be"):
        find_text(documents, text, tokenizer="bytes")


@pytest.mark.parametrize(("call", "message"), [
    (lambda documents: documents.find(np.array([10_000])), "The largest position must be .* to 134"),
    (lambda documents: documents.ranges(np.array([45])), "The largest document must be .* to 44"),
    (lambda documents: documents.describe(np.array([-1])), "The smallest document must be"),
    (lambda documents: documents.read(99), "The largest document must be"),
])  # fmt: skip
def test_positions_and_ids_out_of_range_are_rejected(call, message, tmp_path):
    documents = open_documents(open_tokens(bare_file(tmp_path, [3] * 50), tokenizer="bytes"))
    with pytest.raises(DataError, match=message):
        call(documents)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda ends: ends[:-1], "expected a last end {last}, found {before}"),
        (lambda ends: np.append(ends[:-2], [ends[-1], ends[-1]]), "expected ascending ends"),
        (lambda ends: np.append(ends[0], ends), "expected ascending ends"),
        (lambda ends: np.append(0, ends), "expected ascending ends"),
        (lambda ends: np.concatenate([ends[:6], ends[8:9], ends[7:]]), "expected ascending ends"),  # in the next group
    ],
    ids=["missing", "last twice", "first twice", "empty document", "between groups"],
)
def test_verify_names_an_index_whose_ends_are_wrong(change, found, prepared, monkeypatch):
    monkeypatch.setattr("owt_data._tokens.document_index._GROUP_DOCUMENTS", 7)
    ends = pq.read_table(prepared / "train.docs")["end"].to_numpy().astype(np.int64)
    sha256 = open_tokens(prepared, tokenizer="bytes").file_digests[f"{prepared}/train.bin"]
    write_index(prepared / "train.docs", change(ends), None, sha256=sha256)
    assert verify(prepared) == [f"train.docs: {found.format(last=ends[-1], before=ends[-2])}"]


def damage(column):
    def change(path):
        metadata = pq.read_metadata(path).row_group(0).column(column)
        start = metadata.dictionary_page_offset or metadata.data_page_offset
        content = bytearray(path.read_bytes())
        content[start + metadata.total_compressed_size - 2] ^= 1
        path.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda path: path.write_bytes(b""), "train.docs: expected an index of the token file, found another or a dam"),
        (
            lambda path: path.write_bytes(path.with_name("val.docs").read_bytes()),
            "train.docs: expected an index of the",
        ),
        *((damage(column), "train.docs is damaged: ") for column in range(3)),
    ],
    ids=["empty", "of another file", "bit of an end", "bit of a file", "bit of a row"],
)
def test_verify_names_a_damaged_index(change, found, prepared, capsys):
    change(prepared / "train.docs")
    (difference,) = verify(prepared)
    assert found in difference
    assert main(["verify", str(prepared)]) == 1
    (prepared / "train.docs").unlink()
    assert verify(prepared) == []


def test_unfinished_tokens_of_two_sources_have_documents_of_each(tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 64)
    names = [f"{split}={tmp_path}/{split}.jsonl" for split in ("train", "val")]
    for split in ("train", "val"):
        lines = [json.dumps({"text": f"{split} row {number} " * (number % 9)}) for number in range(300)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    with prepare_in_background(names, tmp_path / "out", BYTES, num_processes=1):
        pass
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    for split in ("train", "val"):
        documents = open_documents(data, split)
        check_ranges(documents)
        assert len(documents) == 300 if split == "val" else 9 < len(documents) < 300
        for document in documents.describe(np.arange(len(documents))):
            assert document.row == document.id
            assert decode(documents.read(document.id)) == f"{split} row {document.row} " * (document.id % 9)


def test_no_document_and_no_match_goes_beyond_the_end_of_a_file(tmp_path):
    """The last document of a file may have no end of text."""
    for name, text in (("a", "one|a nee"), ("b", "dle two|needle"), ("c", "|needle")):
        tokens = [END if byte == ord("|") else byte for byte in text.encode()]
        np.array(tokens, "<u2").tofile(tmp_path / f"{name}.bin")
    names = [f"train={tmp_path}/a.bin", f"train={tmp_path}/b.bin", f"val={tmp_path}/c.bin"]
    data = open_tokens(names, tokenizer="bytes")
    documents = open_documents(data)
    check_ranges(documents)
    assert [decode(documents.read(number)) for number in range(len(documents))] == ["one", "a nee", "dle two", "needle"]
    places = [(Path(one.token_file).name, one.number) for one in documents.describe(np.arange(4))]
    assert places == [("a.bin", 0), ("a.bin", 1), ("b.bin", 0), ("b.bin", 1)]
    assert [(one.document, one.position) for one in find_text(documents, "needle", tokenizer="bytes")] == [(3, 17)]
    val = find_text(open_documents(data, "val"), "needle", tokenizer="bytes")
    assert [(one.document, one.num_matches, one.position) for one in val] == [(1, 1, 1)]


def test_a_split_without_tokens_has_no_documents(tmp_path):
    (tmp_path / "empty.bin").touch()
    data = open_tokens([f"train={bare_file(tmp_path, [3] * 5)}", f"val={tmp_path}/empty.bin"], tokenizer="bytes")
    documents = open_documents(data, "val")
    assert (len(documents), documents.parts(), find_text(documents, "a", tokenizer="bytes")) == (0, [], [])
    none = np.empty(0, np.int64)
    assert (documents.find(none).tolist(), documents.describe(none)) == ([], [])
    for call in (documents.find, documents.ranges, documents.describe):
        with pytest.raises(DataError, match="The tokens must have at least one document, got none for"):
            call(np.array([0]))
