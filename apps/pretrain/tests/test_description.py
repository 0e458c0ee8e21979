"""A run is continued under the settings and on the data that it was started with, and under no others."""

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from owt_data import PrepareOptions, open_tokens, prepare
from pretrain import PRESETS
from pretrain._errors import UsageError
from pretrain._run import description
from pretrain._run.description import (
    RUN,
    DataDescription,
    Origin,
    check_same_data,
    check_same_settings,
    check_same_source,
    describe,
    describe_data,
    parse_description,
    read_description,
    write_description,
)
from pretrain._run.folder import RunFolder
from ray_jax_launch import Checkpoints

# Another value for each setting, as far as the settings allow one that differs in this field alone.
CHANGED = {
    "data_mode": "stream",
    "seed": 1,
    "model.vocab_size": 300,
    "model.seq_len": 32,
    "model.num_layers": 6,
    "model.num_heads": 2,
    "model.embed_dim": 256,
    "model.mlp_dim": 100,
    "model.norm_epsilon": 1e-6,
    "model.dropout_rate": 0.5,
    "model.dtype": "bfloat16",
    "model.param_dtype": "float64",
    "model.scan_layers": True,
    "train.global_batch_size": 64,
    "train.grad_accum_steps": 4,
    "train.micro_batch_size": 2,
    "train.order": "random",
    "train.mask_documents": True,
    "optimizer.name": "muon",
    "model.residual_dtype": "float64",
    "model.grad_dtype": "bfloat16",
    "optimizer.schedule": "wsd",
    "optimizer.learning_rate": 0.01,
    "optimizer.min_learning_rate": 1e-6,
    "optimizer.min_learning_rate_ratio": 0.5,
    "optimizer.average_decay": 0.5,
    "from_checkpoint": "run@5",
    "init_from": "gpt2",
    "train.early_stop_evals": 3,
    "train.num_shards": 4,
    "optimizer.warmup_steps": 7,
    "optimizer.decay_steps": 7,
    "optimizer.weight_decay": 0.5,
    "optimizer.beta1": 0.5,
    "optimizer.beta2": 0.5,
    "optimizer.clip_norm": 0.5,
    "optimizer.muon_learning_rate": 0.02,
    "optimizer.muon_scaling": "spectral",
    "optimizer.muon_momentum": 0.9,
    "optimizer.muon_momentum_warmup_steps": 7,
    "optimizer.muon_weight_decay": 0.5,
}
FREE = {
    "preset": "baby",
    "data": "elsewhere",
    "verify_data": "off",
    "hardware": "gpu:8",
    "storage_path": "elsewhere",
    "name": "other",
    "wait_for_resources_s": 5.0,
    "prompts": ("class ",),
    "trackers": (),
    "profile": "5:7",
    "peak_tflops": 1.5,
    "train.sample_tokens": 7,
    "prepare.tokenizer": "gpt2",
    "prepare.split": "position",
    "prepare.val_fraction": 0.5,
    "prepare.split_seed": 1,
    "prepare.text_column": "content",
    "prepare.documents": "wikitext-titles",
    "prepare.row_end": " ",
    "prepare.limit_rows": 5,
    "prepare.num_processes": 2,
    "prepare.on_cluster": True,
    "prepare.cache_path": "elsewhere",
    "dashboard": True,
    "model.attention": "xla",
    "model.remat": "full",
    "model.loss_chunk_tokens": 64,
    "train.max_failures": 0,
    "train.stop_after_bad_steps": 7,
    "train.hang_timeout_s": None,
    "train.log_every": 7,
    "train.eval_every": 7,
    "train.eval_tokens": 7,
    "train.checkpoint_every": 7,
    "train.eval_tasks": ("piqa",),
    "train.eval_tasks_every": 500,
    "train.checkpoints_to_keep": 7,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "extend": True,
    "train.keep_every": 7,
    "train.keep_best": False,
}
# `check_length` compares the lengths. `anneal` is given with `from_checkpoint` alone.
APART = {"train.max_steps": 7, "train.max_epochs": 0.5, "train.max_tokens": 7, "anneal": 7}
DATA = DataDescription(tokens="a", tokenizer="bytes", fingerprint={"train.bin": "x", "tokenizer": "bytes"})


def names(value, prefix=""):
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from names(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def changed(value: Any, name: str, new: Any) -> Any:
    first, _, rest = name.partition(".")
    return dataclasses.replace(value, **{first: changed(getattr(value, first), rest, new) if rest else new})


@pytest.fixture
def stored():
    return describe(PRESETS["quickstart"](), DATA, "cpu:1")


def test_every_setting_is_tested():
    assert {*names(PRESETS["quickstart"]())} == CHANGED.keys() | FREE.keys() | APART.keys()


@pytest.mark.parametrize("name", CHANGED)
def test_another_setting_does_not_continue_a_run(name, stored, tmp_path):
    config = changed(PRESETS["quickstart"](), name, CHANGED[name])
    with pytest.raises(
        UsageError, match=re.escape(f"{'--from' if name == 'from_checkpoint' else name} must be ")
    ) as error:
        check_same_settings(stored, config, RunFolder(tmp_path))
    what = "--from" if name == "from_checkpoint" else "settings"
    assert f"Give the former {what} to continue the run, or another --name for a new run." in str(error.value)


@pytest.mark.parametrize(
    ("before", "now", "given"),
    [("a", "b", "a, .*, got b"), ("a", None, "a, .*, got none"), (None, "a", "absent, .*, got a")],
)
def test_another_parent_does_not_continue_a_fork(before, now, given, stored, tmp_path):
    former, config = (changed(stored.config, "from_checkpoint", name) for name in (before, now))
    with pytest.raises(UsageError, match=rf"--from must be {given}\. Give the former --from to continue the run, or"):
        check_same_settings(dataclasses.replace(stored, config=former), config, RunFolder(tmp_path))


@pytest.mark.parametrize("name", FREE)
def test_a_free_setting_continues_a_run(name, stored, tmp_path):
    check_same_settings(stored, changed(PRESETS["quickstart"](), name, FREE[name]), RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fingerprint": {"train.bin": "y", "tokenizer": "bytes"}},
            "train.bin must be x, its value at the start of the run in",
        ),
        ({"fingerprint": {"train.bin": "x"}}, "tokenizer must be bytes, its value at the start of the run in"),
        ({"fingerprint": DATA.fingerprint | {"split": 9}}, "split must be None, its value at the start of the run in"),
        ({"window_order_version": 1}, "window_order_version must be 2, its value at the start of the run in"),
    ],
)
def test_other_data_does_not_continue_a_run(changes, message, stored, tmp_path):
    with pytest.raises(UsageError, match=message):
        check_same_data(stored, dataclasses.replace(DATA, **changes), RunFolder(tmp_path))


def test_the_same_data_elsewhere_continues_a_run(stored, tmp_path):
    check_same_data(stored, dataclasses.replace(DATA, tokens="elsewhere"), RunFolder(tmp_path))


def test_a_description_comes_back_as_it_was(stored, tmp_path):
    folder = RunFolder(tmp_path)
    assert read_description(folder) is None
    write_description(folder, stored)
    assert read_description(folder) == stored
    assert set(stored.versions) >= {"python", "pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "ray"}


def rejected(stored, change):
    """The message for a description of pretrain 9.9 that was changed."""
    content = json.loads(json.dumps(stored.to_json()))
    content["versions"]["pretrain"] = "9.9"
    change(content)
    with pytest.raises(UsageError) as found:
        parse_description(json.dumps(content), "config.json")
    return str(found.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format=2), "must have format 1, which pretrain {} reads, got 2, from"),
        (lambda content: content.update(format=True), "must have format 1, which pretrain {} reads, got True, from"),
        (lambda content: content.pop("format"), "must have format 1, which pretrain {} reads, got None, from"),
        (
            lambda content: content["config"]["train"].update(new_setting=1),
            "must have the fields of this format, which pretrain {} reads, got a difference, config.train.new_setting,",
        ),
        (lambda content: content.update(new={}), "which pretrain {} reads, got a difference, new, from"),
        (lambda content: content["config"]["train"].pop("order"), "got a difference, config.train.order, from"),
    ],
)
def test_a_description_of_another_version_is_rejected_with_both_versions(change, message, stored):
    found = rejected(stored, change)
    assert message.format(version("pretrain")) in found
    assert "from pretrain 9.9. Use that version for this run, or choose another --name" in found


def test_a_description_without_versions_is_rejected_too(stored):
    assert "got 2, of an unknown version" in rejected(stored, lambda content: content.update(format=2, versions="x"))


def test_a_description_may_hold_a_mixture_and_any_fingerprint(stored):
    data = dataclasses.replace(DATA, tokens={"a": 0.5, "b": 1.0}, fingerprint={"train": {"bytes": 3, "sha256": "ab"}})
    stored = dataclasses.replace(stored, data=data)
    assert parse_description(json.dumps(stored.to_json()), "config.json") == stored


def test_a_description_that_is_nested_deeply_is_damaged():
    with pytest.raises(UsageError, match="must be JSON as a run writes it, got an error in it"):
        parse_description('{"format":' * 100_000, "config.json")


def test_the_tokens_of_a_stream_are_known_by_their_source(tmp_path):
    (tmp_path / "book.txt").write_text("A short book. " * 100)
    prepare(str(tmp_path / "book.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    data = open_tokens(tmp_path / "tokens", tokenizer="gpt2")
    assert data.source_fingerprint not in (None, data.fingerprint)
    expected = DataDescription(tokens=str(tmp_path / "tokens"), tokenizer="bytes", fingerprint=data.fingerprint)
    assert describe_data(data) == expected
    assert describe_data(data, "stream") == dataclasses.replace(expected, fingerprint=data.source_fingerprint)


@pytest.mark.parametrize(
    ("sha256", "options", "message"),
    [
        ("aa", PrepareOptions(tokenizer="bytes"), None),
        ("ab", PrepareOptions(tokenizer="bytes"), "source_sha256 must be aa, its value at the start of the run in"),
        (
            "aa",
            PrepareOptions(tokenizer="gpt2"),
            r"options\.tokenizer must be bytes, its value at the start of the run",
        ),
    ],
)
def test_another_text_does_not_continue_a_finished_stream(sha256, options, message, tmp_path):
    former = {"source_sha256": "aa", "options": PrepareOptions(tokenizer="bytes").record()}
    stored = describe(PRESETS["quickstart"](), dataclasses.replace(DATA, fingerprint=former), "cpu:1")
    expected = contextlib.nullcontext() if message is None else pytest.raises(UsageError, match=message)
    with expected as error:
        check_same_source(stored, sha256, options, RunFolder(tmp_path))
    assert error is None or "Give the former --data to continue" in str(error.value)


@pytest.mark.parametrize(
    ("step", "weights_only", "text"),
    [(8, False, "everything of a@8"), (8, True, "the weights of a@8"), (None, True, "the weights of a")],
)
def test_the_origin_of_a_run_says_what_it_takes(step, weights_only, text):
    assert str(Origin(place="a", step=step, tokenizer=None, weights_only=weights_only)) == text


def test_the_newest_checkpoint_has_the_description_that_counts(stored, tmp_path):
    folder, other = RunFolder(tmp_path), dataclasses.replace(stored, hardware="cpu:2")
    assert read_description(folder) is None
    write_description(folder, other)
    assert read_description(folder) == other
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(1, {"params": {"w": np.ones(2)}}, metadata={RUN: stored.to_json()})
    assert read_description(folder) == stored


def test_a_new_run_knows_the_commit_of_a_checkout(stored, capfd):
    """The packages of this repository are installed from its checkout, except from a wheel or an archive."""
    assert describe(PRESETS["quickstart"](), DATA, "cpu:1") == stored
    assert capfd.readouterr() == ("", "")
    if stored.commit is None:
        pytest.skip("the source is no git checkout")
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", stored.commit)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_says_whether_files_differ_from_it(tmp_path, monkeypatch):
    def git(*args):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit():
        return describe(PRESETS["quickstart"](), DATA, "cpu:1").commit

    source = tmp_path / "description.py"
    source.write_text("x = 1")
    monkeypatch.setattr(description, "__file__", str(source))
    git("init", "-q")
    assert commit() is None  # another project's checkout does not have the file
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD").strip()
    assert commit() == head
    source.write_text("x = 2")
    assert commit() == f"{head}-dirty"
