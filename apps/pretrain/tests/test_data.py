import dataclasses

import pytest
from rich.console import Console

from owt_data import PrepareOptions
from pretrain import PRESETS
from pretrain._data import data_label, load_tokens


@pytest.mark.parametrize(
    ("name", "label"), [("/books/War and Peace.txt", "war-and-peace"), ("s3://bucket/x", "x"), ("???", "data")]
)
def test_a_label_is_fit_for_a_folder(name, label):
    assert data_label(name) == label


def test_text_is_prepared_once_for_its_content_and_its_options(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("A short book, of some words. " * 200)
    config = dataclasses.replace(PRESETS["quickstart"](), data=str(book))

    def load(**options):
        with_options = dataclasses.replace(config, prepare=PrepareOptions(tokenizer="bytes", **options))
        return load_tokens(with_options, Console(quiet=True))

    first = load()
    assert (len(first.train), len(first.val)) == (5221, 580)
    assert load().names == first.names
    half = load(val_fraction=0.5)
    assert half.names != first.names
    assert abs(len(half.train) - len(half.val)) <= 1
    book.write_text("Another book, of other words. " * 200)
    assert load().names not in (first.names, half.names)
