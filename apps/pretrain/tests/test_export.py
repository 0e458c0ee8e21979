"""The command `export`: what readers of its folder get, without Ray."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers
from loopback_hub import OWNER, TOKEN, LoopbackHub
from rich.console import Console
from safetensors.numpy import load_file

from nnx_gpt2 import GPT2, create_optimizer, create_train_state, num_params, root_digest, split_params, tensor_digests
from owt_data import load_tokenizer
from pretrain import PRESETS, main
from pretrain._cli import parse_command
from pretrain._commands.export import export
from pretrain._data import load_tokens
from pretrain._errors import UsageError
from pretrain._export.model_card import render_card
from pretrain._export.new_folder import check_new, new_folder
from pretrain._run.checkpoint_digests import DIGESTS, description_digests
from pretrain._run.description import RUN, describe, describe_data
from pretrain._run.files import write_json
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history
from pretrain._training.load_state import digests_of
from ray_jax_launch import Checkpoints

FILES = {
    "README.md", "config.json", "generation_config.json", "run.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two checkpoints that keeps an average of its parameters: its folder, configuration and states."""
    place = tmp_path_factory.mktemp("run")
    (place / "book.txt").write_text("A short `book`, of some words. " * 200)
    config = PRESETS["quickstart"]()
    model = dataclasses.replace(config.model, vocab_size=257, seq_len=33, num_layers=1, num_heads=2, embed_dim=16)
    config = dataclasses.replace(
        config,
        data=str(place / "book.txt"),
        model=model,
        optimizer=dataclasses.replace(config.optimizer, average_decay=0.9),
        train=dataclasses.replace(config.train, max_steps=9),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        description = describe(config, describe_data(load_tokens(config, Console(quiet=True))), "cpu:1")
    folder = RunFolder(place / "a|run")
    folder.path.mkdir()
    write_json(folder.config, description.to_json())
    lines = [
        {"step": 4, "tokens": 1056, "epoch": 0.5, "loss": 5.25, "val_loss": 5.0},
        {"step": 9, "tokens": 2376, "epoch": 1.125, "loss": 4.5, "val_loss": 5.5, "full_val_loss": 5.5625},
    ]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    state = create_train_state(model, create_optimizer(config.optimizer, 9), jax.random.key(0))
    states = {}
    with Checkpoints(folder.checkpoints) as checkpoints:
        for step in (4, 9):
            # The last parameters differ from the average, and between the steps.
            last = jax.tree.map(lambda array, step=step: np.asarray(array) * step, state.params)
            items = {"params": last, "opt_state": state.opt_state}
            digests = digests_of(items)
            checkpoints.save(step, items, metadata={RUN: description.to_json(), DIGESTS: digests})
            states[step] = SimpleNamespace(average=state.params, last=last, digests=digests)
    return SimpleNamespace(folder=folder, name=str(folder), config=config, description=description, states=states)


def test_a_folder_gets_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, sync, out = [], os.fsync, tmp_path / "out"

    def note(file):
        synced.append((os.fstat(file).st_ino, out.exists()))
        sync(file)

    monkeypatch.setattr(os, "fsync", note)
    with new_folder(out) as folder:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(name)
    inodes = [path.stat().st_ino for path in (*sorted(out.iterdir()), out)]
    assert sorted(synced[:-1]) == sorted((inode, False) for inode in inodes)
    assert synced[-1] == (tmp_path.stat().st_ino, True)


def digest(params):
    return root_digest(tensor_digests(params))


def test_an_export_opens_with_its_tokenizer(run, tmp_path, capsys):
    assert main(["export", run.name, str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"wrote the model of step 9 to {tmp_path / 'out'}\n"
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "model.safetensors", *FILES}
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "Words, é\n\n  日"
    assert tokenizer.encode(text).ids == load_tokenizer("bytes").encode_ordinary(text)
    read = {name: json.loads((tmp_path / "out" / name).read_text()) for name in FILES if name.endswith(".json")}
    assert read["config.json"]["eos_token_id"] == read["generation_config.json"]["eos_token_id"] == 256
    end_of_text = read["tokenizer_config.json"]["eos_token"]
    assert tokenizer.token_to_id(end_of_text) == 256
    assert read["tokenizer_config.json"]["model_max_length"] == read["generation_config.json"]["max_length"] == 33


@pytest.mark.parametrize(("weights", "of"), [(None, "average"), ("average", "average"), ("last", "last")])
def test_the_weights_are_those_of_the_step_or_their_average(run, tmp_path, weights, of):
    assert export(f"{run.name}@4", str(tmp_path / "out"), weights=weights).step == 4
    found = digest(split_params(GPT2.from_pretrained(tmp_path / "out")))
    assert found == digest(getattr(run.states[4], of))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| weights | {'moving average up to' if of == 'average' else 'of'} step 4, float32 |" in card


def test_the_best_checkpoint_is_exported_in_another_type_and_in_shards(run, tmp_path):
    out = tmp_path / "out"
    assert export(f"{run.name}@best", str(out), dtype="float16", max_shard_bytes=5000).step == 4
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert {array.dtype for name in files for array in load_file(out / name).values()} == {np.dtype("float16")}
    rounded = jax.tree.map(lambda array: array.astype("float16").astype("float32"), run.states[4].average)
    assert digest(split_params(GPT2.from_pretrained(out))) == digest(rounded)


def test_the_card_tells_the_run_up_to_the_step(run, tmp_path):
    digests = description_digests(run.description)
    export(f"{run.name}@4", str(tmp_path / "early"))
    export(run.name, str(tmp_path / "late"))
    early, late = ((tmp_path / name / "README.md").read_text() for name in ("early", "late"))
    assert early.startswith("---\nlibrary_name: transformers\n")
    for line in (
        "# a|run", f"| data | `{run.config.data}` |", "| steps | 4 of 9 |", "| tokens seen | 1,056 |",
        "| epochs | 0.5 |", "| training loss | 5.25 |", "| validation loss | 5.0 at step 4 |", "| hardware | `cpu:1` |",
        f"A GPT-2 of {num_params(run.config.model):,} parameters, trained from random weights on `{run.config.data}`.",
        "optimizer.average_decay = 0.9", "model.seq_len = 33",
        f"| data | `{digests['data']}` |", f"| config | `{digests['config']}` |",
        f"| params | `{run.states[4].digests['params']}` |", f"| opt_state | `{run.states[4].digests['opt_state']}` |",
        f"| python | {run.description.versions['python']} |",
    ):  # fmt: skip
        assert f"\n{line}\n" in early
    for line in (
        "| steps | 9 of 9 |", "| tokens seen | 2,376 |", "| validation loss | 5.5 at step 9 |",
        "| lowest validation loss | 5.0 at step 4 |", "| validation loss, all tokens | 5.5625 |",
        f"| params | `{run.states[9].digests['params']}` |",
    ):  # fmt: skip
        assert f"\n{line}\n" in late
    assert "all tokens" not in early
    assert "train.eval_every" not in early  # as in the preset


def test_the_card_of_a_trained_step_has_no_loss_of_the_untrained_model(run):
    records = [{"step": 0, "val_loss": 5.5}, {"step": 5, "loss": 4.5}, {"step": 9, "loss": 4.0, "val_loss": 4.25}]
    history = dataclasses.replace(read_history(run.folder), records=records)
    for step, loss in ((0, "5.5 at step 0"), (5, None), (9, "4.25 at step 9")):
        card = render_card(history, step=step, is_average=False, dtype="float32", metadata={})
        found = [line for line in card.splitlines() if "validation loss" in line]
        expected = [f"| validation loss | {loss} |", f"| lowest validation loss | {loss} |"]
        assert found == ([] if loss is None else expected)


def test_the_command_of_the_card_gives_the_configuration(run, tmp_path, monkeypatch):
    export(run.name, str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path / "out")
    (command,) = re.findall("^pretrain .*", (tmp_path / "out" / "README.md").read_text(), re.MULTILINE)
    assert command == "pretrain --config run.json --name 'a|run-again'"
    given = parse_command(shlex.split(command)[1:])
    assert given == dataclasses.replace(run.config, name="a|run-again")
    text = (tmp_path / "out" / "run.json").read_text()
    assert "storage_path" not in text
    assert str(run.folder) not in text


@pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")  # the client passes bytes in an old way
def test_an_export_is_repeated_only_to_upload_it(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with LoopbackHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        export(run.name, str(out))
        with pytest.raises(UsageError, match="out must be a new or empty folder, got"):
            export(run.name, str(out))
        card = f"{(out / 'README.md').read_text()}\nA word of my own.\n"
        (out / "README.md").write_text(card)
        done = export(run.name, str(out), push_to=f"{OWNER}/run")
        repository = hub.repositories[f"{OWNER}/run"]
        assert done.commit_url == f"{hub.endpoint}/{OWNER}/run/commit/{repository.sha}"
        assert repository.files == {path.name: path.read_bytes() for path in out.iterdir()}
        assert repository.files["README.md"] == card.encode()
        with pytest.raises(UsageError, match="out must be a new or empty folder, or have this export, got"):
            export(run.name, str(out), weights="last", push_to=f"{OWNER}/run")
        assert len(repository.commits) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("is_new", [True, False])
def test_an_export_that_fails_leaves_the_folder_as_it_was(tmp_path, is_new):
    out = tmp_path / "out"
    if not is_new:
        out.mkdir()

    def write_until_the_disk_is_full():
        with new_folder(out) as partial:
            (partial / "config.json").write_text("the first bytes")
            assert not out.exists() if is_new else list(out.iterdir()) == []
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_until_the_disk_is_full()
    assert list(tmp_path.iterdir()) == ([] if is_new else [out])
    with new_folder(out) as partial:
        (partial / "config.json").write_text("all bytes")
    assert [path.read_text() for path in out.iterdir()] == ["all bytes"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.fault
def test_an_export_that_was_killed_is_begun_again(tmp_path, record_property):
    record_property("fault", "SIGKILL in the middle of an export")
    record_property(
        "lost", "nothing: the folder does not exist until it is complete, and the same command begins again"
    )
    out = tmp_path / "out"
    code = f"""
import os, signal
from pathlib import Path
from pretrain._export.new_folder import new_folder
with new_folder(Path({str(out)!r})) as partial:
    (partial / "model-00001-of-00002.safetensors").write_text("a part")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not out.exists()
    with new_folder(out) as partial:
        (partial / "model.safetensors").write_text("complete")
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [out]


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="out must be neither a mount point nor the working folder, got "):
        check_new(tmp_path / "here")
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "there").mkdir()
    with new_folder(tmp_path / "link") as partial:
        (partial / "config.json").write_text("{}")
    assert (tmp_path / "there" / "config.json").read_text() == "{}"
