"""Runs that train while their text is tokenized, in this process."""

import shutil

import pytest

from pretrain import main
from pretrain._run.metrics import read_records

LINE = (
    "--data book.txt --data-mode stream --tokenizer bytes --hardware local --name run --trackers --model.seq-len 64 "
    "--model.num-layers 1 --model.num-heads 1 --model.embed-dim 8 --train.global-batch-size 64 --train.max-steps 20 "
    "--train.eval-tokens 640 --train.sample-tokens 0"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a text of 1.05 MB, and a finished stream of it."""
    place = tmp_path_factory.mktemp("place")
    (place / "book.txt").write_text("A short book, of some words. " * 36_200)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        assert main(LINE.split()) == 0
    return place


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """A copy of `finished`, to work in."""
    place = shutil.copytree(finished, tmp_path / "place")
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return place


def test_a_stream_trains_on_what_validation_leaves_of_a_text(place):
    """20 steps are 81,920 of 790,000 tokens."""
    assert [record["step"] for record in read_records(place / "runs/run/metrics.jsonl")] == [0, 20]


def test_a_finished_stream_is_known_by_its_text(place, capsys):
    assert main(LINE.split()) == 0
    assert "is finished" in capsys.readouterr().out
    with (place / "book.txt").open("a") as book:
        book.write("The end. ")
    assert main(LINE.split()) == 2
    assert "source_sha256 must be" in capsys.readouterr().err


def test_another_preparation_is_another_text(place, capsys):
    assert main([*LINE.split(), "--prepare.row-end", "x"]) == 2
    assert "options.row_end must be '', its value at the start of the run in" in capsys.readouterr().err


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_an_order_that_needs_all_tokens_is_rejected(order, place, capsys):
    assert main([*LINE.split(), "--train.order", order]) == 2
    expected = f"train.order must be sequential or sequential-first with data_mode stream, got {order}."
    assert expected in capsys.readouterr().err
