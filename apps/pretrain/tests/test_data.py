import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from owt_data import DataError, PrepareOptions, read_manifest
from pretrain import PRESETS
from pretrain._config import PrepareConfig
from pretrain._data import load_tokens
from pretrain._errors import UsageError

BOOK = "A short book, of some words. "
END_OF_TEXT = 256  # of the tokenizer `bytes`
QUIET = Console(quiet=True)


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Three texts of different length in the working folder."""
    for name, count in (("a", 200), ("b", 100), ("c", 50)):
        (tmp_path / f"{name}.txt").write_text(BOOK * count)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(data, *, model_seq_len=64, **options):
    config = PRESETS["quickstart"]()
    return load_tokens(
        dataclasses.replace(
            config,
            data=data,
            prepare=PrepareConfig(tokenizer="bytes", **options),
            model=dataclasses.replace(config.model, seq_len=model_seq_len),
        ),
        QUIET,
    )


def test_text_is_prepared_once_for_its_content_and_its_options(books):
    first = load("a.txt")
    assert (len(first.train), len(first.val)) == (5221, 580)
    assert load("a.txt").names == first.names
    half = load("a.txt", val_fraction=0.5)
    assert half.names != first.names
    assert abs(len(half.train) - len(half.val)) <= 1
    (books / "a.txt").write_text("Another book, of other words. " * 200)
    assert load("a.txt").names not in (first.names, half.names)


def test_where_text_is_prepared_changes_neither_its_key_nor_its_manifest(books):
    here, there = load("a.txt"), load("a.txt", num_processes=2, cache_path=str(books / "shared"))
    assert there.names == str(books / "shared" / str(here.names).rpartition("/")[2])
    manifest = read_manifest(str(here.names))
    assert manifest is not None
    assert manifest == read_manifest(str(there.names))
    assert manifest.options.keys() == {field.name for field in dataclasses.fields(PrepareOptions)}


def test_each_split_has_text_of_its_own(books):
    data = load("train=a.txt,val=b.txt")
    assert (len(data.train), len(data.val)) == (200 * len(BOOK) + 1, 100 * len(BOOK) + 1)  # and end-of-text
    assert load("train=a.txt,val=b.txt").names == data.names
    assert load("train=a.txt,val=c.txt").names != data.names
    swapped = load("train=b.txt,val=a.txt")
    assert (len(swapped.train), len(swapped.val)) == (len(data.val), len(data.train))


def test_a_mixture_prepares_text_and_takes_token_files_as_they_are(books):
    np.full(1000, 65, "<u2").tofile(books / "x.bin")
    data = load("web=0.75:a.txt,code=0.25:x.bin")
    assert isinstance(data.names, dict)
    assert list(data.names.values()) == [0.75, 0.25]
    assert list(data.names)[1] == str(books / "x.bin")
    assert len(data.train) == 5221 + 900
    assert data.fingerprint["weights"] == [0.75, 0.25]


def test_an_existing_file_is_a_plain_name_whatever_its_characters(books):
    (books / "a.txt").rename(books / "train=a,val=b.txt")
    assert len(load("train=a,val=b.txt").train) == 5221


def test_text_for_one_split_and_tokens_for_the_other_are_rejected(books):
    np.full(1000, 65, "<u2").tofile(books / "x.bin")
    with pytest.raises(UsageError, match=r"data must be text or token files for both splits, got train=a.txt,val=x"):
        load("train=a.txt,val=x.bin")


def test_each_split_has_a_token_file_of_its_own(books):
    for name, count in (("x", 1000), ("y", 500)):
        np.full(count, 65, "<u2").tofile(books / f"{name}.bin")
    data = load("train=x.bin,val=y.bin")
    assert (len(data.train), len(data.val)) == (1000, 500)


def test_options_of_the_split_are_rejected_if_the_splits_are_given(books):
    with pytest.raises(DataError, match="split and val_fraction must be absent with train"):
        load("train=a.txt,val=b.txt", val_fraction=0.5)


def test_the_options_of_prepare_are_those_of_owt_data():
    config = PrepareConfig(tokenizer="bytes", split="position", text_column="body", num_processes=3, on_cluster=True)
    assert config.options() == PrepareOptions(tokenizer="bytes", split="position", text_column="body")
    defaults = PrepareOptions()
    assert {name: getattr(PrepareConfig(), name) for name in dataclasses.asdict(defaults)} == dataclasses.asdict(
        defaults
    )


def test_the_preset_wikitext_has_an_end_of_text_for_each_article(books):
    for name, num_articles in (("train", 9), ("val", 4)):
        article = " \n = A title = \n \n Some text , of some words . \n = = A section = = \n More text . \n"
        (books / f"{name}.txt").write_text(article * num_articles)
    preset = PRESETS["wikitext"]()
    data = load_tokens(
        dataclasses.replace(
            preset,
            data="train=train.txt,val=val.txt",
            prepare=dataclasses.replace(preset.prepare, tokenizer="bytes"),
            model=dataclasses.replace(preset.model, seq_len=16),
        ),
        QUIET,
    )
    for name, num_articles in (("train", 9), ("val", 4)):
        tokens = np.fromfile(f"{data.names}/{name}.bin", "<u2")
        assert (tokens == END_OF_TEXT).sum() == num_articles
        # The empty row with its row end, and the title with its row end after the end-of-text.
        title = b" = A title = \n\n"
        assert tokens[: 2 + len(title)].tolist() == [*b"\n", END_OF_TEXT, *title]


def test_a_tokenizer_that_token_files_do_not_have_is_named(books):
    prepared, out = load("a.txt").names, io.StringIO()
    config = dataclasses.replace(PRESETS["quickstart"](), data=prepared, prepare=PrepareConfig(tokenizer="gpt2"))
    for prepare in (PrepareConfig(tokenizer="gpt2"), PrepareConfig(tokenizer="bytes")):
        load_tokens(dataclasses.replace(config, prepare=prepare), Console(file=out, width=1000))
    assert out.getvalue() == f"{prepared} has tokens of bytes; prepare.tokenizer, gpt2, is not used\n"


def test_the_remedy_for_too_little_text_is_one_of_the_split(books):
    (books / "tiny.txt").write_text("tiny")
    with pytest.raises(
        DataError, match=r"at least 65 validation tokens, .* got 5\. Give more text or a shorter --model"
    ):
        load("train=a.txt,val=tiny.txt")
