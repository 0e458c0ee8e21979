"""Counts of a token file, against plain counts, in parts of any size."""

import hashlib

import numpy as np
import pytest

from owt_data._tokens.summary import Summary, summary_of

END = 9


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        # The number of documents where the token ends one, where it begins one, and where it begins one in a file that
        # may begin inside a document.
        ([], (0, 0, 0)),
        ([END], (1, 1, 1)),
        ([3, 4], (1, 1, 1)),
        ([3, END], (1, 1, 2)),
        ([END, 3], (2, 1, 1)),
        ([END, END, 5, END], (3, 3, 3)),
        ([1, END, 2, END, 8], (3, 2, 3)),
        ([7, 1, END, 2, 3, END], (2, 2, 3)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_counts_are_those_of_the_whole(tokens, counts, begins, continues, size):
    values = np.array(tokens, np.uint16)
    summary = Summary(END, begins=begins, continues=continues)
    for first in range(0, len(values) + 1, size):  # the last part may be empty
        summary.add(values[first : first + size])
    record = summary.record()
    assert record.num_tokens == len(tokens)
    assert record.num_documents == counts[(1 + continues) if begins else 0]
    assert record.sha256 == hashlib.sha256(values.tobytes()).hexdigest()
    assert summary.largest == max(tokens, default=0)


@pytest.mark.parametrize(
    ("name", "split", "num_documents"),
    [
        ("val.bin", "position", 2), ("train.bin", "position", 1), ("train.bin", "start", 2), ("val.bin", "start", 1),
        ("val.bin", "documents", 1), ("train.bin", "sources", 1),
    ],
)  # fmt: skip
def test_the_second_part_of_a_split_text_may_begin_inside_a_document(name, split, num_documents):
    summary = summary_of(name, "wikitext-titles", split, END)
    summary.add(np.array([4, END, 5], np.uint16))
    assert summary.record().num_documents == num_documents
    rows = summary_of(name, "rows", split, END)
    rows.add(np.array([4, END, 5], np.uint16))
    assert rows.record().num_documents == 2
