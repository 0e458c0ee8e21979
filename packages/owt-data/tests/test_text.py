"""Text tokenized while training, through a real Ray cluster."""

from unittest import mock

import datasets
import numpy as np
import pytest
import ray.data

from owt_data import DataError, every_row, is_wikitext_title, load_tokenizer, stream_text
from owt_data._stream.text import _encode, _in_order, _pack

pytestmark = pytest.mark.usefixtures("cluster")

BLOCK = 64


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    """Made-up articles in wikitext's form: titles, headings, blank lines, paragraphs."""
    rng = np.random.default_rng(0)
    words = ["the", "naïve", "=", "@-@", "1984", "Straße", "<|endoftext|>", ",", "."]
    path = tmp_path_factory.mktemp("text") / "wiki.txt"
    with path.open("w") as file:
        for number in range(40):
            file.write(f" \n = Article {number} = \n \n")
            for section in range(rng.integers(1, 4)):
                file.write(f" = = Section {section} = = \n \n = = = Part = = = \n")
                file.write(" " + " ".join(rng.choice(words, size=rng.integers(5, 200))) + " \n")
    return path


def plain_loop(rows, tokenizer, starts_document):
    tokens = []
    for row in rows:
        if starts_document(row):
            tokens.append(tokenizer.eot_token)
        tokens += tokenizer.encode_ordinary(row)
    return tokens


def lines(path):
    """Return the rows of a text file. Lines of blanks are empty rows."""
    return [line if line.strip() else "" for line in path.read_text().splitlines(keepends=True)]


def collect(dataset, column="tokens"):
    blocks = [batch[column] for batch in dataset.iter_batches(batch_size=None)]
    return np.concatenate(blocks) if blocks else np.empty((0, BLOCK))


def assert_blocks(blocks, expected):
    assert blocks.dtype == np.uint16
    assert blocks.shape == (len(expected) // BLOCK, BLOCK)
    np.testing.assert_array_equal(blocks.ravel(), expected[: len(expected) // BLOCK * BLOCK])


def test_titles_are_distinguished_from_headings():
    titles = [" = Robert Boulter = \n", " = X = ", " = C = D = \n", " = Homarus gammarus = \n"]
    others = [" = = Career = = \n", " = = = 2000 to 2005 = = = \n", " \n", "", " a = b \n", " = = \n", "= X =\n"]
    assert [is_wikitext_title(row) for row in titles + others] == [True] * 4 + [False] * 7


@pytest.mark.parametrize("num_cpus", [1, 3])
def test_blocks_are_the_tokens_of_a_plain_loop(num_cpus, wikitext):
    tokenizer = load_tokenizer("bytes")
    expected = plain_loop(lines(wikitext), tokenizer, lambda row: row.startswith(" = Article"))
    assert expected.count(256) == 40
    stream = stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes", batch_size=7, num_cpus=num_cpus)
    assert_blocks(collect(stream), expected)


def test_wikitext_itself(corpora, gpt2):
    path = corpora / "wikitext-2-valid.txt"
    rows = lines(path)
    titles = [row for row in rows if row.startswith(" = ") and not row.startswith(" = =") and row.endswith(" = \n")]
    expected = plain_loop(rows, gpt2, lambda row: row in titles)
    assert expected.count(gpt2.eot_token) == len(titles) > 50
    for num_cpus in (1, 2):
        assert_blocks(collect(stream_text(str(path), block_size=BLOCK, num_cpus=num_cpus)), expected)


@pytest.mark.parametrize("rows_per_batch", [1, 2, 7])
def test_the_remainder_of_a_batch_of_rows_begins_the_next_block(rows_per_batch):
    tokens = np.arange(5000, dtype=np.uint16)
    pieces = np.split(tokens, [3, 200, 201, 201, 700, 1900, 1950, 4444])
    assert_blocks(np.concatenate(list(_pack(pieces, BLOCK, rows_per_batch))), tokens)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_no_more_results_are_pending_than_allowed(most):
    begun, seen = [], []

    def results():
        for number in range(10):
            begun.append(number)
            yield lambda number=number: np.array([number])

    for result in _in_order(results(), most):
        assert len(begun) - len(seen) <= most
        assert len(begun) >= min(10, len(seen) + most)  # else fewer threads than there are would work
        seen += result.tolist()
    assert seen == [*range(10)]


@pytest.mark.parametrize(("given", "work", "workers"), [
    ({"num_cpus": 3}, "_in_threads", 3),
    ({"num_cpus": 2, "num_tasks": 5}, "_in_tasks", 5),
])  # fmt: skip
def test_a_stream_tokenizes_groups_of_rows_with_the_workers_it_is_given(given, work, workers, wikitext):
    """The task runs in this process here: Ray runs it in another one."""
    run = ray.data.Dataset.map_batches
    with mock.patch.object(ray.data.Dataset, "map_batches", autospec=True, side_effect=run) as made:
        stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes", batch_size=7, **given)
    assert made.call_args.kwargs["num_cpus"] == given["num_cpus"]
    (_, produce), seen = made.call_args.args, []

    def encode(groups, tokenizer, num_workers):
        seen.append((tokenizer, num_workers))
        for rows in groups:
            seen.append(len(rows))
            yield _encode(rows, tokenizer)

    with mock.patch(f"owt_data._stream.text.{work}", side_effect=encode):
        blocks = np.concatenate([batch["tokens"] for batch in produce({})])
    expected = plain_loop(lines(wikitext), load_tokenizer("bytes"), is_wikitext_title)
    assert_blocks(blocks, expected)
    assert seen[0] == ("bytes", workers)
    assert {*seen[1:-1]} == {7}


def test_blocks_of_a_long_text_are_the_tokens_of_a_plain_loop(tmp_path, monkeypatch):
    monkeypatch.setattr("owt_data._stream.text._BLOCK_BYTES", 10 * 2 * BLOCK)
    (tmp_path / "long.txt").write_text("".join(f"line {number}\n" for number in range(3000)))
    expected = plain_loop(lines(tmp_path / "long.txt"), load_tokenizer("bytes"), lambda row: False)
    assert_blocks(collect(stream_text(str(tmp_path / "long.txt"), block_size=BLOCK, tokenizer="bytes")), expected)


@pytest.mark.parametrize("start_block", [1, 37, 10_000])
def test_a_stream_starts_at_a_block(start_block, wikitext, monkeypatch):
    monkeypatch.setattr("owt_data._stream.text._BLOCK_BYTES", 10 * 2 * BLOCK)
    whole = collect(stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes"))
    rest = collect(stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes", start_block=start_block))
    np.testing.assert_array_equal(rest, whole[start_block:])


@pytest.mark.parametrize(
    ("world_size", "start_block", "num_tasks"),
    [pytest.param(2, 0, 1, marks=pytest.mark.slow), (3, 7, 2), pytest.param(4, 50, 3, marks=pytest.mark.slow)],
)
def test_ranks_make_up_the_blocks_of_one_rank_in_turn(world_size, start_block, num_tasks, wikitext, monkeypatch):
    monkeypatch.setattr("owt_data._stream.text._BLOCK_BYTES", 10 * 2 * BLOCK)
    whole = collect(stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes"))[start_block:]
    for rank in range(world_size):
        share = stream_text(
            str(wikitext),
            block_size=BLOCK,
            tokenizer="bytes",
            start_block=start_block,
            rank=rank,
            world_size=world_size,
            batch_size=5,
            num_tasks=num_tasks,
        )
        np.testing.assert_array_equal(collect(share), whole[rank::world_size])


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_the_column_and_the_type_of_the_tokens_can_be_chosen(dtype, wikitext):
    expected = collect(stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes"))
    stream = stream_text(str(wikitext), block_size=BLOCK, tokenizer="bytes", column="input_ids", dtype=dtype)
    blocks = collect(stream, "input_ids")
    assert blocks.dtype == dtype
    np.testing.assert_array_equal(blocks, expected)


@pytest.mark.parametrize("form", ["file", "dataset"])
def test_rows_can_be_documents_and_have_an_end(form, wikitext):
    tokenizer, rows = load_tokenizer("bytes"), lines(wikitext)
    expected = plain_loop([f"{row}\n" for row in rows], tokenizer, lambda row: True)
    source = str(wikitext) if form == "file" else datasets.Dataset.from_dict({"text": rows})
    assert_blocks(
        collect(stream_text(source, block_size=BLOCK, tokenizer="bytes", documents="rows", row_end="\n")), expected
    )


@pytest.mark.parametrize("form", ["file", "dataset"])
def test_the_beginning_of_a_document_is_found_in_the_row_without_its_end(form, wikitext):
    tokenizer, rows = load_tokenizer("bytes"), lines(wikitext)
    starts = {f"{row}|" for row in rows if row == ""}
    expected = plain_loop([f"{row}|" for row in rows], tokenizer, starts.__contains__)
    source = str(wikitext) if form == "file" else datasets.Dataset.from_dict({"text": rows})
    stream = stream_text(
        source, block_size=BLOCK, tokenizer="bytes", starts_document=lambda row: row == "", row_end="|"
    )
    assert_blocks(collect(stream), expected)


def test_segments_count_the_documents_of_a_block(wikitext):
    batches = stream_text(
        str(wikitext), block_size=4096, tokenizer="bytes", segment_ids=True, starts_document=lambda row: row == ""
    ).take_all()
    for row in batches:
        expected, document = [], 0
        for position, token in enumerate(row["tokens"].tolist()):
            document += token == 256 and position > 0
            expected.append(document)
        assert row["segment_ids"].dtype == np.int32
        assert row["segment_ids"].tolist() == expected
    assert max(row["segment_ids"].max() for row in batches) > 2


def test_rows_of_datasets_are_documents_if_one_says_so(articles):
    tokenizer = load_tokenizer("bytes")
    loaded = datasets.Dataset.from_json(str(articles))
    expected = plain_loop(loaded["text"], tokenizer, lambda row: True)
    renamed = loaded.rename_column("text", "body")
    renamed.to_parquet(articles.with_suffix(".parquet"))
    for source, column in (
        (str(articles), "text"),
        (loaded, "text"),
        (renamed.to_iterable_dataset(), "body"),
        (str(articles.with_suffix(".parquet")), "body"),
    ):
        stream = stream_text(source, block_size=BLOCK, tokenizer="bytes", starts_document=every_row, text_column=column)
        assert_blocks(collect(stream), expected)


def test_a_text_shorter_than_a_block_gives_no_block(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    assert len(collect(stream_text(str(tmp_path / "short.txt"), block_size=BLOCK, tokenizer="bytes"))) == 0


def test_bad_arguments_are_rejected_at_once(tmp_path):
    with pytest.raises(DataError, match="block_size must be an integer of at least 1, got 0"):
        stream_text("builtin", block_size=0, tokenizer="bytes")
    with pytest.raises(DataError, match="rank must be an integer from 0 to 1, got 2"):
        stream_text("builtin", block_size=8, tokenizer="bytes", rank=2, world_size=2)
    with pytest.raises(
        DataError, match=r"nowhere.txt must be a file or a folder of files, got a name that does not exist"
    ):
        stream_text(str(tmp_path / "nowhere.txt"), block_size=8, tokenizer="bytes")


def test_bad_text_is_named_by_the_task(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"tea\ntea\xe9\n")
    with pytest.raises(Exception, match=r"bad.txt must hold UTF-8 text, got other bytes at byte 7"):
        collect(stream_text(str(tmp_path / "bad.txt"), block_size=2, tokenizer="bytes"))
