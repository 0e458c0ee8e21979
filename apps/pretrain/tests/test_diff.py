"""The command `diff` on real runs, one of which has one element of one array changed by one ulp."""

import dataclasses
import json
import shlex
import shutil

import numpy as np
import pytest
from many_runs import PLANTED, results

from pretrain import main
from pretrain._audit.checkpoint_arrays import differing_elements
from pretrain._audit.recorded_run import read_run
from pretrain._audit.run_difference import ArrayDifference, CheckpointDifference, compare_runs, differing_settings
from pretrain._commands.diff import _arrays, _checkpoint_steps

# Restores the checkpoint of step 8, adds one ulp to one element, saves it again, and trains on.
SCRIPT = """
train(changed(BASE, name="whole"))
train(changed(BASE, name="killed"))
rewind("killed", 8)
train(changed(BASE, name="killed", train__log_every=4))
train(changed(BASE, name="short", train__max_steps=8))
train(changed(BASE, name="fork", from_checkpoint="whole@8"))
train(changed(BASE, name="seed", seed=3))
train(changed(BASE, name="rate", optimizer__learning_rate=3e-3))
train(changed(BASE, name="wide", model__embed_dim=24))
Path("next.txt").write_text("Another start. " + Path("book.txt").read_text())
train(changed(BASE, name="data", data="train=next.txt,val=end.txt"))

train(changed(BASE, name="planted", train__max_steps=8))
plant("planted", 8)
train(changed(BASE, name="planted"))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    results(SCRIPT, place)
    return place


@pytest.fixture
def diff(place, monkeypatch, capsys):
    """Runs the command in the folder of the runs. Returns its exit code, its output and its errors."""
    monkeypatch.chdir(place)

    def run(*arguments):
        code = main(["diff", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def facts(diff):
    """Runs the command with --json. Returns the exit code and the object."""

    def run(*arguments):
        code, out, _ = diff(*arguments, "--json")
        return code, json.loads(out)

    return run


def test_a_killed_and_continued_run_is_the_same(diff, place):
    code, out, _ = diff("whole", "killed")
    assert code == 0
    assert out.splitlines()[:2] == [f"A: {place}/runs/whole", f"B: {place}/runs/killed"]
    assert out.splitlines()[-3:] == [
        "The runs are the same through step 13.",
        "Equal to the bit: 13 losses, the positions of the windows of 10 records, and the",
        "checkpoints of steps 4, 8, 12, 13.",
    ]


def test_one_ulp_in_one_array_is_found_with_its_step_and_its_name(diff, facts):
    code, found = facts("whole", "planted", "--elements")
    assert code == 1
    assert found["first"] == {"kind": "arrays", "step": 8, "of_a": None, "of_b": None}
    assert found["checkpoint"]["differing"] == [PLANTED]
    elements = found["checkpoint"]["elements"][PLANTED]
    assert (elements["num_elements"], elements["size"]) == (1, 16 * 64)
    assert 0 < elements["largest"] < 1e-7
    assert found["same_checkpoints"] == [4]
    assert found.get("first_loss", {"step": 9})["step"] > 8
    _, out, _ = diff("whole", "planted")
    assert "The runs first differ at step 8: the arrays of its checkpoints differ.\n" in out
    assert "Equal to the bit: the checkpoint of step 4.\n" in out
    assert out.endswith(f" arrays:\n  {PLANTED}\n")


def test_the_arrays_of_two_checkpoints_are_compared(diff, facts):
    assert facts("whole@4", "planted@4")[0] == 0
    code, out, _ = diff("whole@8", "planted@8")
    assert code == 1
    assert out.splitlines()[2:] == ["The checkpoints differ in 1 of 50 arrays:", f"  {PLANTED}"]
    # Checkpoints of two steps have no array of the parameters in common.
    code, found = facts("whole@4", "whole@8", "--elements")
    found = found["checkpoint"]
    assert (code, found["steps"]) == (1, [4, 8])
    assert {*found["elements"]} == {*found["differing"]} > {PLANTED}
    assert len([name for name in found["differing"] if name.startswith("params.")]) == 16


def test_the_same_checkpoints_have_the_digests_of_the_result(diff, place):
    code, out, _ = diff("whole@13", "killed@13")
    assert code == 0
    digests = json.loads((place / "runs/whole/result.json").read_text())["digests"]
    assert out.endswith(f"\nparams {digests['params']}\nopt_state {digests['opt_state']}\n")


def test_the_command_in_the_result_repeats_the_run(diff, place):
    result = json.loads((place / "runs/whole/result.json").read_text())
    program, *arguments = shlex.split(result["repeat"])
    assert program == "pretrain"
    assert main(arguments) == 0
    assert diff("whole", "whole-again")[0] == 0
    again = json.loads((place / "runs/whole-again/result.json").read_text())
    assert {name: again[name] for name in ("digests", "versions", "hardware", "processor")} == {
        name: result[name] for name in ("digests", "versions", "hardware", "processor")
    }
    others = [json.loads((place / f"runs/{name}/result.json").read_text())["digests"] for name in ("data", "rate")]
    assert [other["data"] == result["digests"]["data"] for other in others] == [False, True]
    assert [other["config"] == result["digests"]["config"] for other in others] == [True, False]


def test_a_fork_is_its_parent_from_its_start_on(facts):
    code, found = facts("whole", "fork")
    assert (code, found["num_losses"], found["same_checkpoints"]) == (0, 5, [8, 12, 13])
    assert found["settings"]["from_checkpoint"] == [None, "whole@8"]


def test_a_shorter_run_is_the_same_up_to_its_end(diff):
    code, out, _ = diff("short", "whole")
    assert code == 0
    assert "train.max_steps: 8 in A, 13 in B\n" in out
    assert "The runs are the same through step 8, where A ends; B goes on to step 13.\n" in out
    assert "through step 8, where B ends; A goes on to step 13.\n" in diff("whole", "short")[1]


def test_another_seed_reads_other_windows_from_the_first_step(facts):
    code, found = facts("whole", "seed")
    assert (code, found["first"]["kind"], found["first"]["step"]) == (1, "windows", 1)
    assert found["first"]["of_a"] != found["first"]["of_b"]
    assert found["settings"]["seed"] == [2357, 3]


def test_another_learning_rate_shows_in_the_loss_after_the_first_update(diff, facts):
    code, found = facts("whole", "rate")
    assert (code, found["first"]["kind"], found["first"]["step"]) == (1, "loss", 2)
    out = diff("whole", "rate")[1]
    # What differs in the options is said first.
    assert found["settings"]["optimizer.learning_rate"] == [0.002, 0.003]
    assert out.splitlines()[2] == "optimizer.learning_rate: 2e-3 in A, 3e-3 in B"
    assert "The runs first differ at step 2: its loss is " in out
    assert "The positions of the windows of 13 records are equal." in out
    assert "The arrays of the checkpoints first differ at step 4." in out


def test_runs_of_other_data_and_of_other_models_are_answered(facts):
    code, found = facts("whole", "data")
    assert (code, found["first"]["step"], found["first_loss"]["step"]) == (1, 1, 1)
    assert {"data", "data.train.bin"} <= found["settings"].keys()
    code, found = facts("whole", "wide", "--elements")
    assert (code, found["settings"]["model.embed_dim"]) == (1, [16, 24])
    assert found["checkpoint"]["elements"].keys() == {"opt_state.0.count"} & {*found["checkpoint"]["differing"]}


def test_runs_in_object_storage_are_compared(s3, place, diff):
    results(f'train(changed(BASE, name="remote", storage_path="{s3}/runs"))', place)
    code, out, _ = diff("whole", f"{s3}/runs/remote")
    assert code == 0
    assert "the checkpoints of steps 4, 8, 12, 13." in " ".join(out.split())
    assert diff(f"{s3}/runs/remote@8", "whole@8")[0] == 0
    code, out, _ = diff(f"{s3}/runs/remote@8", "planted@8", "--elements")
    assert code == 1
    assert f"{PLANTED} 1 of 1,024 elements, by " in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("whole killed@8", "A and B must be two runs or two checkpoints, got whole and killed@8. Write RUN@STEP for "),
        ("whole nosuch", "run must be the folder or URI of a run, or its name in runs, got nosuch. "),
        ("whole@5 killed@4", "runs/whole has no checkpoint of step 5; it has 4, 8, 12, 13."),
        ("whole", "B must be given, got nothing. Write: pretrain diff A B"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(diff, arguments, error):
    code, out, err = diff(*arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert error in err


def test_a_checkpoint_that_a_training_run_deletes_meanwhile_is_not_compared(place, tmp_path):
    shutil.copytree(place / "runs" / "whole", tmp_path / "copy")
    runs = [read_run(str(place / "runs" / "whole")), read_run(str(tmp_path / "copy"))]
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "8")
    found = compare_runs(*runs)
    assert (found.same_checkpoints, found.first, found.checkpoint) == ([4, 12, 13], {}, None)


def test_the_last_step_that_both_have_is_that_of_a_loss_a_record_or_a_checkpoint(place):
    whole = read_run(str(place / "runs" / "whole"))
    losses = np.where(np.arange(13) == 6, whole.losses, np.float32(np.nan))
    parts = {
        7: {"losses": losses, "records": {}, "checkpoint_steps": [4]},
        5: {"losses": losses[:0], "records": {5: whole.records[5]}, "checkpoint_steps": [4]},
        8: {"losses": losses, "records": {5: whole.records[5]}, "checkpoint_steps": [4, 8]},
    }
    for through, changes in parts.items():
        assert compare_runs(whole, dataclasses.replace(whole, **changes)).through == through
    nothing = dataclasses.replace(whole, losses=losses[:0], records={}, checkpoint_steps=[])
    assert compare_runs(nothing, whole).through == 0


def test_what_differs_by_rounding_and_the_devices_of_the_last_start_are_among_the_settings(place):
    whole = read_run(str(place / "runs" / "whole"))
    changes = {"train.grad_accum_steps": 3, "mesh.fsdp": 2, "train.log_every": 7, "hardware": "cpu:2"}
    description = dataclasses.replace(whole.description, config=whole.description.config.with_options(changes))
    starts = [*whole.starts, {**whole.starts[-1], "devices": 8, "processor": "Z80"}]
    found = differing_settings(whole, dataclasses.replace(whole, description=description, starts=starts))
    start = whole.starts[-1]
    assert found == {
        "train.grad_accum_steps": [1, 3], "mesh.fsdp": [1, 2], "devices": [start["devices"], 8],
        "processor": [start["processor"], "Z80"],
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_elements_are_compared_bit_by_bit(dtype):
    a = np.arange(6, dtype=dtype).reshape(2, 3)
    b = a.copy()
    assert differing_elements(a, b).num_elements == 0
    b[1, 2] = 9
    assert (differing_elements(a, b).num_elements, differing_elements(a, b).largest) == (1, 4.0)


def test_signs_of_zero_and_values_that_are_not_finite_differ():
    a, b = np.array([0.0, np.nan, 1.0], np.float32), np.array([-0.0, np.nan, np.inf], np.float32)
    assert differing_elements(a, b).num_elements == 2
    assert differing_elements(a, b).largest is None


def test_the_first_arrays_that_differ_are_named_with_their_elements_and_their_side():
    found = CheckpointDifference(
        steps=(4, 4), num_arrays=20, differing=[f"d{number}" for number in range(10)], only_in_a=["a"], only_in_b=["b"],
        elements={
            "d0": ArrayDifference(num_elements=1, size=1, largest=None),
            "d1": ArrayDifference(num_elements=1234, size=5678, largest=0.000123456),
        },
    )  # fmt: skip
    lines = _arrays(found)
    assert lines[:3] == ["  d0 1 of 1 element", "  d1 1,234 of 5,678 elements, by 0.000123 at most", "  d2"]
    assert lines[10:] == ["  a (only in A)", "  b (only in B)"]
    lines = _arrays(dataclasses.replace(found, only_in_b=["b", "c", "d"]))
    assert (len(lines), lines[-2:]) == (13, ["  b (only in B)", "  and 2 more"])


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "no checkpoint, as none is left of the same step"),
        ([1000], "the checkpoint of step 1,000"),
        ([*range(1, 9)], "the checkpoints of steps 1, 2, 3, 4, 5, 6, 7, 8"),
        ([*range(1, 11)], "the checkpoints of steps ..., 3, 4, 5, 6, 7, 8, 9, 10"),
    ],
)
def test_the_last_of_many_checkpoints_are_named(steps, text):
    assert _checkpoint_steps(steps) == text
