import contextlib
import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from owt_data import DataError, PrepareOptions, prepare, prepare_in_background, read_manifest
from pretrain import PRESETS, PretrainConfig, _data
from pretrain._config import PrepareConfig
from pretrain._data import find_stream, load_tokens, stream_tokens
from pretrain._errors import UsageError
from pretrain._run.description import describe_data

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


def configured(data: str, *, data_mode: Any = "prepared", **options: Any) -> PretrainConfig:
    """A configuration with windows of 64 tokens, and options of the preparation."""
    config = PRESETS["quickstart"]()
    of_prepare = PrepareConfig(tokenizer="bytes", **options)
    return dataclasses.replace(config, data=data, data_mode=data_mode, prepare=of_prepare)


def load(data, *, console=QUIET, **options):
    return load_tokens(configured(data, **options), console)


def test_text_is_prepared_once_for_its_content_and_its_options(books):
    first = load("a.txt")
    assert (len(first.train), len(first.val)) == (5221, 580)
    assert load("a.txt").names == first.names
    half = load("a.txt", val_fraction=0.5)
    assert half.names != first.names
    assert abs(len(half.train) - len(half.val)) <= 1
    (books / "a.txt").write_text("Another book, of other words. " * 200)
    assert load("a.txt").names not in (first.names, half.names)


def test_text_in_the_cache_is_not_prepared_again(books: Path) -> None:
    out = io.StringIO()
    first, second = (load("a.txt", console=Console(file=out, width=1000)) for _ in range(2))
    assert out.getvalue().count(f"preparing a.txt into {first.names}\n") == 1
    assert out.getvalue().count("preparing") == 1
    assert first.names == second.names


def test_the_processes_and_the_cluster_of_the_options_prepare_the_text(
    books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {}

    def prepare_here(*args: Any, **kwargs: Any) -> None:
        passed.update(kwargs)
        prepare(*args, **kwargs | {"use_ray": False, "num_processes": 1})

    monkeypatch.setattr("pretrain._data.prepare", prepare_here)
    load("a.txt", num_processes=3, on_cluster=True)
    assert (passed["num_processes"], passed["use_ray"]) == (3, True)


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


@pytest.mark.parametrize("data", ["x.bin", "train=x.bin,val=y.bin", "a=1:x.bin,b=2:y.bin"])
def test_token_files_without_a_manifest_are_of_the_tokenizer_of_the_options(data: str, books: Path) -> None:
    for name in ("x", "y"):
        np.full(1000, 65, "<u2").tofile(books / f"{name}.bin")
    found = load(data)
    assert (found.tokenizer, found.vocab_size) == ("bytes", 257)


@pytest.mark.parametrize(
    ("data", "split"), [("train=a.txt,val=SHORT", "validation"), ("train=SHORT,val=a.txt", "training")]
)
def test_one_window_of_each_split_is_enough_and_no_less(data: str, split: str, books: Path) -> None:
    (books / "window.txt").write_text("a" * 64)  # and end-of-text
    found = load(data.replace("SHORT", "window.txt"))
    assert min(len(found.train), len(found.val)) == 65
    (books / "less.txt").write_text("a" * 63)
    with pytest.raises(DataError, match=rf"at least 65 {split} tokens, .* got 64"):
        load(data.replace("SHORT", "less.txt"))


@pytest.mark.parametrize(
    ("data", "split", "sources", "expected"),
    [
        ("a.txt", "auto", ["a.txt"], "start"),
        ("a.txt", "position", ["a.txt"], "position"),
        ("train=a.txt,val=b.txt", "auto", ["train=a.txt", "val=b.txt"], "auto"),
    ],
)
def test_a_stream_has_its_sources_and_a_split_that_is_known_at_its_start(
    data: str, split: str, sources: list[str], expected: str, books: Path
) -> None:
    found = find_stream(configured(data, data_mode="stream", split=split, row_end="|"))
    assert (found.sources, found.options.split, found.options.row_end) == (sources, expected, "|")


@pytest.mark.parametrize("cache", [None, "shared"])
def test_a_stream_is_tokenized_into_the_folder_of_the_prepared_text(cache: str | None, books: Path) -> None:
    def folder(data: str, split: str = "auto") -> Path:
        return find_stream(configured(data, data_mode="stream", split=split, cache_path=cache)).folder

    splits = "train=a.txt,val=b.txt"
    assert load(splits, cache_path=cache).names == str(folder(splits).absolute())
    assert folder("a.txt") == folder("a.txt", "start") != folder("a.txt", "position")
    assert folder("a.txt").parent == folder(splits).parent


@pytest.mark.parametrize(("num_tasks", "expected"), [(None, (3, False)), (5, (5, True))])
def test_a_stream_is_tokenized_by_tasks_or_by_processes_and_known_by_its_source(
    num_tasks: int | None, expected: tuple[int, bool], books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {}

    def prepare_here(*args: Any, **kwargs: Any) -> Any:
        passed.update(kwargs)
        return prepare_in_background(*args, **kwargs | {"use_ray": False, "num_processes": 1})

    monkeypatch.setattr("pretrain._data.prepare_in_background", prepare_here)
    config, reported = configured("train=a.txt,val=b.txt", data_mode="stream", num_processes=3), list[Any]()
    stream = find_stream(config)
    with stream_tokens(stream, config, QUIET, num_tasks=num_tasks, report=reported.append) as tokens:
        limit_s = time.monotonic() + 60
        while not reported and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert tokens.names == str(stream.folder)
        described = describe_data(tokens, "stream")
    assert (passed["num_processes"], passed["use_ray"]) == expected
    assert reported
    finished = load("train=a.txt,val=b.txt")
    assert described.fingerprint == describe_data(finished, "stream").fingerprint == finished.source_fingerprint
    assert describe_data(finished).fingerprint == finished.fingerprint != finished.source_fingerprint


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


@pytest.mark.parametrize(("num_processes", "on_cluster"), [(3, True), (None, False)])
def test_text_is_prepared_where_the_options_say(num_processes, on_cluster, books, monkeypatch):
    noted = {}

    def note(*args, **kwargs):
        noted.update(kwargs)
        raise DataError("noted. Ignore this.")

    monkeypatch.setattr(_data, "prepare", note)
    with pytest.raises(DataError, match="noted"):
        load("a.txt", num_processes=num_processes, on_cluster=on_cluster)
    assert (noted["num_processes"], noted["use_ray"]) == (num_processes, on_cluster)


@pytest.mark.parametrize(
    ("num_tasks", "num_processes", "expected"), [(None, 3, (3, False)), (None, None, (None, False)), (5, 3, (5, True))]
)
def test_a_stream_is_tokenized_by_processes_or_by_tasks_of_the_cluster(
    num_tasks, num_processes, expected, books, monkeypatch
):
    noted, tokens = {}, load("a.txt")

    @contextlib.contextmanager
    def note(*args, **kwargs):
        noted.update(kwargs, args=args)
        yield tokens

    monkeypatch.setattr(_data, "prepare_in_background", note)
    prepare = PrepareConfig(tokenizer="bytes", num_processes=num_processes, cache_path=str(books / "cache"))
    config = dataclasses.replace(PRESETS["quickstart"](), data="b.txt", data_mode="stream", prepare=prepare)
    stream = find_stream(config)
    with stream_tokens(stream, config, QUIET, num_tasks=num_tasks, report=print) as found:
        assert found is tokens
    assert (noted["num_processes"], noted["use_ray"]) == expected
    assert noted["progress"] is print
    assert noted["args"] == (["b.txt"], stream.folder, PrepareOptions(tokenizer="bytes", split="start"))
    assert stream.folder.parent == books / "cache"


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
    for options in (PrepareConfig(tokenizer="gpt2"), PrepareConfig(tokenizer="bytes")):
        load_tokens(dataclasses.replace(config, prepare=options), Console(file=out, width=1000))
    assert out.getvalue() == f"{prepared} has tokens of bytes; prepare.tokenizer, gpt2, is not used\n"


def test_the_remedy_for_too_little_text_is_one_of_the_split(books):
    (books / "tiny.txt").write_text("tiny")
    with pytest.raises(
        DataError, match=r"at least 65 validation tokens, .* got 5\. Give more text or a shorter --model"
    ):
        load("train=a.txt,val=tiny.txt")
