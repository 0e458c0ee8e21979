"""The digests of checkpoints: they are those of the arrays, and equal for equal runs."""

import dataclasses

import pytest
from many_runs import results

from pretrain import PRESETS
from pretrain._run.checkpoint_digests import description_digests
from pretrain._run.description import DataDescription, describe

SCRIPT = """
from nnx_gpt2 import root_digest, tensor_digests
from pretrain._run.result import read_result
from ray_jax_launch import newest_metadata

def recorded(name, step):
    with Checkpoints(RunFolder(Path("runs", name).absolute()).checkpoints, read_only=True) as checkpoints:
        return checkpoints.broadcast_metadata(step)["digests"]

def windows(name):
    return {line["step"]: line.get("windows") for line in read_records(Path("runs", name, "metrics.jsonl"))}

train(changed(BASE, name="whole"))
train(changed(BASE, name="killed", train__max_steps=6))
train(changed(BASE, name="killed", train__checkpoint_every=5))
train(changed(BASE, name="other", seed=3))
found["recorded"] = {name: {step: recorded(name, step) for step in steps(name)} for name in ("whole", "killed")}
found["restored"] = {step: {k: tensor_digests(v) for k, v in arrays("whole", step).items()} for step in steps("whole")}
found["result"] = read_result(RunFolder(Path("runs/whole").absolute())).digests
found["windows"] = {name: windows(name) for name in ("whole", "killed", "other")}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(SCRIPT, tmp_path_factory.mktemp("runs"))


def test_the_metadata_of_a_checkpoint_have_the_digests_of_its_arrays(found):
    assert found["restored"].keys() == {"4", "8", "12", "13"}
    for step, tensors in found["restored"].items():
        assert found["recorded"]["whole"][step]["tensors"] == tensors
    roots = [of_step["params"] for of_step in found["recorded"]["whole"].values()]
    assert len({*roots}) == len(roots)


def test_a_continued_run_has_the_digests_of_an_undisturbed_one(found):
    whole, killed = found["recorded"]["whole"], found["recorded"]["killed"]
    assert killed.keys() == {"4", "6", "10", "13"}
    assert [killed[step] for step in ("4", "13")] == [whole[step] for step in ("4", "13")]


def test_the_result_has_the_roots_of_the_last_checkpoint(found):
    last = found["recorded"]["whole"]["13"]
    assert found["result"].keys() == {"data", "config", "params", "opt_state"}
    assert [found["result"][name] for name in ("params", "opt_state")] == [last["params"], last["opt_state"]]
    assert {len(root) for root in found["result"].values()} == {64}


def test_records_tell_which_windows_a_step_read(found):
    whole, killed, other = (found["windows"][name] for name in ("whole", "killed", "other"))
    assert whole == killed
    assert whole["0"] is None
    assert len({*whole.values()}) == 14
    assert not {*whole.values()} & {*other.values()} - {None}


DATA = DataDescription(tokens="a", tokenizer="gpt2", fingerprint={"train.bin": "1"})


@pytest.mark.parametrize(
    ("data", "options", "changed"),
    [
        ({"fingerprint": {"train.bin": "2"}}, {}, {"data"}),
        ({"tokenizer": "bytes"}, {}, {"data"}),
        ({"window_order_version": 99}, {}, {"data"}),
        ({"tokens": "another/place"}, {"data": "b.txt", "prepare.val_fraction": 0.3}, set()),
        ({}, {"seed": 5}, {"config"}),
        ({}, {"model.vocab_size": 300}, {"config"}),
        ({}, {"train.log_every": 3, "name": "other", "mesh.fsdp": 2}, set()),
    ],
    ids=str,
)
def test_the_digests_of_a_run_are_those_of_what_decides_its_result(data, options, changed):
    config = PRESETS["quickstart"]()
    before = description_digests(describe(config, DATA, "local"))
    other = describe(config.with_options(options), dataclasses.replace(DATA, **data), "cpu:1")
    assert {name for name, digest in description_digests(other).items() if digest != before[name]} == changed
