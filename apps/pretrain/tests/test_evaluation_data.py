"""The data of the command `eval`: token files and text in every form of `train --data`, and both splits."""

import dataclasses
import io
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_gpt2 import create_optimizer, create_train_state
from owt_data import PrepareOptions, TokenMixture, load_tokenizer, open_tokens, prepare
from pretrain import PRESETS, PrepareConfig, main
from pretrain._commands import evaluation_data
from pretrain._commands.evaluate import evaluate
from pretrain._commands.evaluation_data import tokens_of, tokens_of_run
from pretrain._data import cache_folder, load_tokens
from pretrain._run.description import RUN, describe, describe_data
from pretrain._run.files import write_json
from pretrain._run.folder import RunFolder
from ray_jax_launch import Checkpoints

TEXT = "".join(f"sentence {i} of a book. " for i in range(60))
END = load_tokenizer("bytes").eot_token


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of random parameters, whose text has another column and split than the texts of the tests."""
    place = tmp_path_factory.mktemp("runs")
    config = PRESETS["quickstart"]()
    model = dataclasses.replace(config.model, vocab_size=257, seq_len=17, num_layers=1, num_heads=2, embed_dim=16)
    (place / "lines.jsonl").write_text("".join(f'{{"text": "document {i} of many"}}\n' for i in range(90)))
    prepare_config = dataclasses.replace(config.prepare, val_fraction=0.3, cache_path=str(place / "cache"))
    config = dataclasses.replace(config, data=str(place / "lines.jsonl"), model=model, prepare=prepare_config)
    tokens = load_tokens(config, Console(quiet=True))
    folder = RunFolder(place / "run")
    folder.path.mkdir()
    description = describe(config, describe_data(tokens), "cpu:1").to_json()
    write_json(folder.config, description)
    params = create_train_state(model, create_optimizer(config.optimizer, 10), jax.random.key(0)).params
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(1, {"params": params}, metadata={RUN: description})
    return folder, tokens


@pytest.fixture
def evaluated(run, capsys, monkeypatch, tmp_path):
    """Runs `eval` in a folder with some data, and returns its JSON."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    Path("end.txt").write_text(TEXT[::-1])
    Path("rows.jsonl").write_text(json.dumps({"text": TEXT[:500]}) + "\n" + json.dumps({"text": TEXT[500:]}) + "\n")
    Path("columns.jsonl").write_text('{"text": 1, "body": "twenty bytes of text"}\n')
    Path("more").mkdir()
    for name in ("a", "b"):
        Path("more", f"{name}.txt").write_text(f"{name} {TEXT}")
    prepare("book.txt", "tokens", PrepareOptions(tokenizer="bytes", val_fraction=0.25))

    def call(*words):
        assert main(["eval", str(run[0].path), "--batch-size", "5", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return call


BOOK = len(TEXT) + 1


@pytest.mark.parametrize(
    ("data", "split", "found", "num_tokens"),
    [
        ("book.txt", (), "all", BOOK),
        ("book.txt", ("--split", "val"), "val", BOOK - round(BOOK * 0.7)),  # as the run would split it
        ("rows.jsonl", (), "all", BOOK + 1),
        ("columns.jsonl", ("--text-column", "body"), "all", 21),
        ("more/*.txt", (), "all", 2 * BOOK + 4),
        ("more", (), "all", 2 * BOOK + 4),
        ("tokens", (), "val", BOOK - round(BOOK * 0.75)),
        ("tokens", ("--split", "all"), "all", BOOK),
        ("tokens/train.bin", (), "all", round(BOOK * 0.75)),
        ("tokens/t*.bin", (), "all", round(BOOK * 0.75)),
        ("train=book.txt,val=more/a.txt", (), "val", BOOK + 2),
        ("train=book.txt,val=more/a.txt", ("--split", "all"), "all", 2 * BOOK + 2),
        ("train=tokens/train.bin,val=tokens/val.bin", (), "val", BOOK - round(BOOK * 0.75)),
        ("a=0.5:book.txt,b=0.5:end.txt", (), "all", 2 * BOOK),
        ("a=0.5:book.txt,b=0.5:tokens", (), "all", 2 * BOOK),
    ],
)
def test_each_form_of_data_is_evaluated_on_the_split_that_it_has(evaluated, data, split, found, num_tokens):
    first = evaluated("--data", data, *split)
    assert (first["data"], first["split"], first["num_tokens"]) == (data, found, num_tokens - 1)
    # A model of random parameters knows nothing of any text.
    assert first["val_loss"] == pytest.approx(math.log(257), abs=0.3)
    assert evaluated("--data", data, *split) == first


def test_each_name_of_a_mixture_has_its_loss(evaluated, capsys):
    found = evaluated("--data", "a=0.5:book.txt,b-2=0.5:end.txt")
    losses = found["source_losses"]
    assert [*losses] == ["a", "b-2"]
    assert losses["a"] != losses["b-2"]
    mean = ((BOOK - 1) * losses["a"] + BOOK * losses["b-2"]) / found["num_tokens"]
    assert mean == pytest.approx(found["val_loss"], rel=1e-5)
    assert evaluated("--data", "book.txt")["source_losses"] == {}
    # The parts of a mixture of token files, in whichever order they follow each other.
    prepare("end.txt", "others", PrepareOptions(tokenizer="bytes", val_fraction=0.25))
    for split in ("val", "all"):
        both = evaluated("--data", "a=1:tokens,b=1:others", "--split", split)
        swapped = evaluated("--data", "b=1:others,a=1:tokens", "--split", split)["source_losses"]
        assert both["source_losses"] == pytest.approx(swapped, abs=0.01)
        assert both["source_losses"]["a"] != both["source_losses"]["b"]


def test_all_tokens_of_a_run_with_a_mixture_are_those_of_its_names_in_both_splits(tmp_path):
    for number, name in enumerate(("a", "b"), 1):
        (tmp_path / f"{name}.txt").write_text(TEXT * number)
        prepare(str(tmp_path / f"{name}.txt"), tmp_path / name, PrepareOptions(tokenizer="bytes", val_fraction=0.25))
    data = open_tokens({str(tmp_path / "a"): 1.0, str(tmp_path / "b"): 2.0}, tokenizer="bytes")
    assert isinstance(data.train, TokenMixture)
    train, val = [*map(len, data.train.sequences)], [*data.val_lengths]
    text = f"first=1:{tmp_path / 'a'},second=2:{tmp_path / 'b'}"
    found = tokens_of_run(describe_data(data), "all", text)
    assert found.sources == [*zip(("first", "second") * 2, train + val, strict=True)]
    assert len({*train, *val}) == 4
    assert (len(found.tokens), found.split) == (sum(train + val), "all")
    assert tokens_of_run(describe_data(data), "val", text).sources == found.sources[2:]


@pytest.mark.parametrize(
    ("split", "prepared"),
    [
        ("all", {"split": "position", "val_fraction": 0.5, "limit_rows": None}),
        ("val", {"split": "start", "limit_rows": 9}),
    ],
)
def test_text_is_prepared_as_that_of_the_run_but_here_and_all_of_it_if_asked(split, prepared, tmp_path, monkeypatch):
    given = PrepareConfig(
        tokenizer="bytes", split="start", limit_rows=9, num_processes=3, on_cluster=True, row_end="\n"
    )
    seen = []
    monkeypatch.setattr(evaluation_data, "prepared_name", lambda name, config, console: seen.append(config) or name)
    (tmp_path / "a.txt").write_text(TEXT)
    prepare(str(tmp_path / "a.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    tokens_of(str(tmp_path / "tokens"), split, given, Console(quiet=True))
    assert seen == [dataclasses.replace(given, num_processes=None, on_cluster=False, **prepared)]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_losses_of_a_mixture_are_a_table_on_a_terminal_beside_the_json(evaluated, run, is_terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, color_system=None)
    data = "web=1:book.txt,code=2:end.txt"
    found = evaluate(str(run[0].path), data=data, batch_size=8, console=console)
    rows = dict(line.split() for line in output.getvalue().splitlines()[-3:]) if is_terminal else {}
    assert rows == {
        **{name: f"{value:.4f}" for name, value in found.source_losses.items() if is_terminal},
        **({"all": f"{found.val_loss:.4f}"} if is_terminal else {}),
    }
    assert is_terminal or output.getvalue() == ""


def test_text_is_evaluated_in_its_order_as_its_token_files_are(evaluated):
    encoded = np.frombuffer(TEXT.encode(), np.uint8)
    np.append(encoded, END).astype("<u2").tofile("whole.bin")
    whole = evaluated("--data", "whole.bin")
    for data in ("book.txt", "tokens"):
        found = evaluated("--data", data, "--split", "all")
        assert (found["val_loss"], found["val_bits_per_byte"]) == (whole["val_loss"], whole["val_bits_per_byte"])
    assert evaluated("--data", "end.txt")["val_loss"] != whole["val_loss"]


def test_the_run_s_own_tokens_are_evaluated_on_either_split(run, evaluated):
    _, tokens = run
    own = evaluated()
    assert (own["data"], own["split"], own["num_tokens"]) == (tokens.names, "val", len(tokens.val) - 1)
    all_of_it = evaluated("--split", "all")
    assert all_of_it["split"] == "all"
    assert all_of_it["num_tokens"] == len(tokens.train) + len(tokens.val) - 1
    # The run's own text, with its own split, is in the cache already.
    again = evaluated("--data", str(Path(tokens.names).parent.parent / "lines.jsonl"), "--split", "val")
    assert again | {"data": own["data"]} == own
    assert not cache_folder().exists() or not any(cache_folder().iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nothing.txt"), "nothing.txt"),
        (("--data", "short.txt"), "short.txt must hold at least 18 tokens, got 4. Give other --data."),
        (("--data", "a=1:book.txt,end.txt"), "data must be one name"),
        (("--data", "empty.jsonl"), "empty.jsonl"),
        (("--data", "empty.txt"), "empty.txt must hold text"),
        (("--data", "columns.jsonl"), "Name another column with --text-column"),
        (("--split", "train"), "--split must be val or all or none, got train."),
    ],
)
def test_bad_data_is_rejected_with_one_sentence(run, evaluated, capsys, words, message):
    Path("short.txt").write_text("abc")
    Path("empty.jsonl").write_text("")
    Path("empty.txt").write_text("")
    assert main(["eval", str(run[0].path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
