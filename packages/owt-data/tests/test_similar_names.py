"""Similar names in the error for a file that does not exist."""

import os

import pytest

from owt_data import DataError, find_source, load_tokenizer, open_tokens, tokenizer_files


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The working folder, with files."""
    monkeypatch.chdir(tmp_path)
    for name in ("shakespeare.txt", ".hidden.txt", "texts/books.jsonl", "tokens/train.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("shakespear.txt", "Did you mean shakespeare.txt?"),
        ("./Shakespeare.txt", "Did you mean shakespeare.txt?"),
        ("texts/boks.jsonl", "Did you mean texts/books.jsonl?"),
        ("txts/books.jsonl", "Did you mean texts/books.jsonl?"),
        ("txts/boks.jsonl", "Did you mean texts/books.jsonl?"),
        ("{place}/txts/books.jsonl", "Did you mean {place}/texts/books.jsonl?"),
        ("hidden.txt", ""),
        ("xyz.txt", ""),
        ("texts/shakespeare.txt", ""),
    ],
)
def test_a_name_that_does_not_exist_gets_a_similar_one(name, remedy, files):
    with pytest.raises(DataError) as caught:
        find_source(name.format(place=files))
    assert str(caught.value).endswith(f"got a name that does not exist. {remedy.format(place=files)}".rstrip())


def test_a_file_of_tokens_gets_a_similar_one(files):
    with pytest.raises(DataError) as caught:
        open_tokens("token/train.bin", tokenizer="bytes")
    assert str(caught.value).endswith(f"Did you mean {files}/tokens/train.bin?")


def test_of_files_with_equal_stems_the_one_with_the_suffix_is_named(files):
    (files / "tokens/train.docs").touch()
    (files / "tokens/train.abc").touch()
    with pytest.raises(DataError, match=r"Did you mean .*/tokens/train\.bin\?$"):
        open_tokens("tokens/traim.bin", tokenizer="bytes")


def test_other_tokens_and_files_that_are_no_tokenizers_are_not_named(files):
    (files / "tokens/train.bin").rename(files / "tokens/val.bin")
    (files / "texts/broken.json").write_text("{")
    (files / "texts/tokenizer_config.json").write_text("{}")
    (files / "texts/tokenizers").mkdir()
    for open_file in (
        lambda: open_tokens("tokens/train.bin", tokenizer="bytes"),
        lambda: load_tokenizer("texts/tokenizer.json"),
        lambda: load_tokenizer("texts/brokn.json"),
    ):
        with pytest.raises(DataError, match=r"got a name that does not exist\.$"):
            open_file()
    for name, content in tokenizer_files("bytes", max_tokens=8).items():
        (files / "texts/tokenizers" / name).write_text(content)
    with pytest.raises(DataError, match=r"Did you mean .*/texts/tokenizers/tokenizer\.json\?$"):
        load_tokenizer("texts/tokenizer/tokenizer.json")
    with pytest.raises(DataError, match=r"Did you mean .*/texts/tokenizers/tokenizer\.json\?$"):
        load_tokenizer("texts/tokenzers")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_gives_no_similar_name(files):
    (files / "texts").chmod(0o300)
    with pytest.raises(DataError, match=r"got a name that does not exist\.$"):
        find_source("texts/boks.jsonl")
    (files / "texts").chmod(0o700)
