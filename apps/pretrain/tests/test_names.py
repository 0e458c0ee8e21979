"""The names that runs have by default."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from pretrain import PRESETS, PretrainConfig, train
from pretrain._command_line.arguments import build_command
from pretrain._run.differences import changes_result, option_values
from pretrain._run.names import run_name, short_name, short_value

QUICKSTART = PRESETS["quickstart"]()


def named(line):
    config = build_command("train", line.split())
    assert isinstance(config, PretrainConfig)
    return run_name(config)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "quickstart-builtin"),
        ("--preset baby --data a/Shakespeare.txt", "baby-shakespeare"),
        ("--preset wikitext", "wikitext-wikitext-103-raw-v1"),
        ("--preset baby --data book.txt --seed 2 --optimizer.learning-rate 0.0003", "baby-book-lr3e-4-seed2"),
        ("--optimizer.learning-rate 3e-4 --seed 2 --data book.txt --preset baby", "baby-book-lr3e-4-seed2"),
        ("--seed 2357 --optimizer.learning-rate 2e-3", "quickstart-builtin"),
        ("--model.num-layers 2 --model.num-heads 2 --model.embed-dim 96", "quickstart-builtin-layers2-heads2-width96"),
        ("--train.global-batch-size 8 --model.dropout-rate 0.25", "quickstart-builtin-batch8-dropout0.25"),
        ("--train.mask-documents --optimizer.weight-decay 0", "quickstart-builtin-wd0-mask_documents"),
        ("--preset tutorial --train.order none", "tutorial-openwebtext-order_none"),
        ("--optimizer.beta2 0.9 --optimizer.name muon", "quickstart-builtin-optimizer_muon-beta2_0.9"),
        ("--data-mode stream --train.order sequential-first", "quickstart-builtin-mode_stream-order_sequential-first"),
        # The length of a run, and what does not change its result.
        ("--train.max-steps 40", "quickstart-builtin"),
        ("--train.max-epochs 0.5", "quickstart-builtin"),
        ("--train.max-tokens 5000 --extend", "quickstart-builtin"),
        ("--hardware cpu:2 --mesh.fsdp 2 --trackers --train.log-every 1 --prompts a b", "quickstart-builtin"),
        ("--prepare.num-processes 2 --prepare.on-cluster --prepare.cache-path x", "quickstart-builtin"),
        ("--name mine --seed 2", "mine"),
        # Names of columns: file systems may not tell upper from lower case.
        ("--text-column body", "quickstart-builtin-text_column_body"),
    ],
)  # fmt: skip
def test_a_name_says_what_differs_from_the_preset(line, expected):
    assert named(line) == expected


def test_names_of_texts_differ():
    texts = ("Body", "body", "the body", "the-body", "the_body", "body-seed2", "the  body", "\n")
    names = {run_name(QUICKSTART.with_options({"prepare.text_column": text})) for text in texts}
    assert len({name.lower() for name in names}) == len(texts)
    assert run_name(QUICKSTART.with_options({"prepare.text_column": "The body"})) == (
        "quickstart-builtin-text_column_the_body_b5551d8d"
    )


def test_a_long_name_ends_with_a_digest_of_all_options():
    options = {
        "optimizer.learning_rate": 1.2345e-3, "optimizer.weight_decay": 0.0123, "optimizer.warmup_steps": 123,
        "optimizer.clip_norm": 0.5, "train.global_batch_size": 48, "model.num_layers": 12, "model.num_heads": 2,
        "model.embed_dim": 96, "model.seq_len": 48, "model.dropout_rate": 0.125, "data": f"{'long' * 60}.txt",
    }  # fmt: skip
    names = [run_name(QUICKSTART.with_options(options | {"seed": seed})) for seed in (1, 2)]
    expected = rf"quickstart-{('long' * 60)[:100]}-lr0.0012345-wd0.0123-warmup123-clip0.5-[-a-z0-9.]*-[0-9a-f]{{8}}"
    assert all(re.fullmatch(expected, name) and len(name) <= 195 for name in names)
    assert names[0] != names[1]
    assert names[0].rpartition("-")[0] == names[1].rpartition("-")[0]


def test_each_option_that_changes_the_result_gives_another_name():
    """Two short names are never the same, and none is another one with digits behind it."""
    names = [name for name in option_values(QUICKSTART) if changes_result(name)]
    shorts = [short_name(name) for name in names]
    assert len({*shorts}) == len(shorts)
    stems = sorted(short.rstrip("0123456789") + "#" for short in shorts if not short[-1].isdigit())
    assert all(one != other for one, other in pairwise(stems))


def test_other_data_of_the_same_label_has_the_same_name():
    """`train` then rejects it."""
    assert named("--data a/x.txt") == named("--data b/x.txt") == "quickstart-x"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1e-5, "1e-5"), (0.00025, "2.5e-4"), (0.001, "1e-3"), (0.01, "0.01"), (0.1, "0.1"), (0.95, "0.95"),
        (1.0, "1"), (0.0, "0"), (1e30, "1e30"), (123456.0, "123456"), (1e-39, "1e-39"), (5, "5"), (600_000, "600000"),
        (False, "false"), (("a", "b"), "a,b"), ("bytes", "bytes"),
    ],
)  # fmt: skip
def test_values_are_short_and_exact(value, expected):
    assert short_value(value) == expected
    if isinstance(value, float):
        assert float(expected) == value


def test_another_learning_rate_is_another_run_and_the_same_one_continues(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("A short book, of some words. " * 200)
    tiny = QUICKSTART.with_options(
        {
            "data": "book.txt", "hardware": "local", "trackers": (), "train.max_steps": 2, "train.sample_tokens": 0,
            "model.seq_len": 16, "model.num_layers": 1, "model.num_heads": 1, "model.embed_dim": 8,
        }
    )  # fmt: skip
    folders = [
        train(tiny.with_options({"optimizer.learning_rate": rate, "optimizer.min_learning_rate": 0.0})).folder
        for rate in (1e-3, 3e-4, 1e-3)
    ]
    first = "quickstart-book-lr1e-3-minlr0-layers1-heads1-width8-context16"
    assert [Path(folder).name for folder in folders] == [first, first.replace("lr1e-3", "lr3e-4", 1), first]
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted({Path(folder).name for folder in folders})


def test_a_fork_has_the_name_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("A short book, of some words. " * 200)
    tiny = QUICKSTART.with_options(
        {
            "data": "book.txt", "hardware": "local", "trackers": (), "train.max_steps": 4, "train.sample_tokens": 0,
            "train.checkpoint_every": 2, "model.seq_len": 16, "model.num_layers": 1, "model.num_heads": 1,
            "model.embed_dim": 8, "name": "first",
        }
    )  # fmt: skip
    train(tiny)
    assert named("--from first@2 --seed 3") == "first-2-fork-seed3"
    assert named("--from runs/first --train.max-steps 9") == "first-fork"
    assert named("--from first@2 --data other.txt --anneal 2") == "first-2-fork-anneal2-data_other.txt"
