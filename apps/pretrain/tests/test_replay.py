"""The command `replay` on real runs: undisturbed, killed, forked, and with one changed bit."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from many_runs import PLANTED, environment, results

from pretrain import main
from pretrain._audit.recompute import RecomputedSteps
from pretrain._audit.recorded_run import read_run
from pretrain._audit.replay_difference import _causes, compare_replay
from pretrain._audit.segment import find_segment
from pretrain._commands.replay import _texts

# `planted` restores the checkpoint of step 8, adds one ulp to one element, saves it again, and trains on.
SCRIPT = """
train(changed(BASE, name="whole"))
train(changed(BASE, name="killed", train__log_every=3))
rewind("killed", 8)
train(changed(BASE, name="killed", train__log_every=4, train__eval_every=5))
stop_in(5, changed(BASE, name="stopped", train__log_every=3))
train(changed(BASE, name="stopped", train__log_every=3))
train(changed(BASE, name="fork", from_checkpoint="whole@8"))
train(changed(BASE, name="weights", init_from="whole@8", train__checkpoints_to_keep=2))
train(changed(BASE, name="longer", train__max_steps=8, optimizer__schedule="cosine"))
train(changed(BASE, name="longer", optimizer__schedule="cosine", extend=True))

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
def replay(place, monkeypatch, capsys):
    """Runs the command in the folder of the runs. Returns its exit code, its output and its errors."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))

    def run(*arguments):
        code = main(["replay", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def facts(replay):
    """Runs the command with --json. Returns the exit code and the object."""

    def run(*arguments):
        code, out, _ = replay(*arguments, "--json")
        return code, json.loads(out)

    return run


@pytest.fixture
def copied(place):
    """Returns a copy of a run, to change its files."""

    def copy(name):
        target = place / "runs" / f"copy-of-{name}"
        shutil.rmtree(target, ignore_errors=True)
        return shutil.copytree(place / "runs" / name, target)

    return copy


def test_a_run_is_verified_from_its_oldest_checkpoint_to_its_newest(replay, place):
    before = _files(place / "runs" / "whole")
    code, out, _ = replay("whole")
    assert (code, out.splitlines()) == (
        0,
        [
            "steps 5 to 13: verified, bit for bit",
            "Computed again from the checkpoint of step 4. Equal to the bit: 9 losses, the",
            "windows of 9 records, and the arrays of the checkpoints 4, 8, 12, 13.",
        ],
    )
    assert _files(place / "runs" / "whole") == before


def test_a_run_is_verified_from_its_random_parameters(facts):
    code, found = facts("whole", "--from", "0", "--to", "9")
    assert (code, found["verified"], found["start"], found["from"], found["to"]) == (0, True, 0, 0, 9)
    assert (found["num_losses"], found["num_windows"], found["same_checkpoints"]) == (9, 9, [4, 8])


def test_a_run_that_was_killed_and_whose_intervals_changed_is_verified(facts, place):
    code, found = facts("killed", "--from", "0")
    assert (code, found["num_losses"], found["same_checkpoints"]) == (0, 13, [4, 8, 12, 13])
    records = (place / "runs" / "killed" / "metrics.jsonl").read_text().splitlines()
    assert found["num_windows"] == sum('"windows"' in record for record in records) == 7


def test_a_run_is_verified_from_a_checkpoint_between_two_records(facts, place):
    records = [json.loads(line) for line in (place / "runs" / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [3, 4, 6, 8, 9, 12, 13]
    code, found = facts("stopped", "--from", "5", "--to", "6")
    assert (code, found["start"], found["num_losses"], found["num_windows"]) == (0, 5, 1, 1)


def test_one_step_is_computed_from_the_checkpoint_before_it(replay, facts):
    assert replay("whole", "--step", "11")[1].splitlines() == [
        "step 11: verified, bit for bit",
        "Computed again from the checkpoint of step 8. Equal to the bit: 1 loss, and the",
        "windows of 1 record.",
    ]
    code, found = facts("whole", "--step", "11")
    assert (code, found["start"], found["from"], found["to"], found["num_losses"]) == (0, 8, 10, 11, 1)


@pytest.mark.parametrize("name", ["fork", "weights"])
def test_a_run_that_starts_from_another_one_is_verified(facts, name):
    code, found = facts(name)
    assert (code, found["start"] in (8, 12)) == (0, True)
    assert found["same_checkpoints"][0] == found["start"]


def test_one_ulp_is_found_with_its_step_and_its_name(replay, facts):
    code, out, _ = replay("planted")
    assert code == 1
    assert out.splitlines() == [
        "steps 5 to 13: step 8 is the first one that differs",
        "Computed again from the checkpoint of step 4.",
        "The checkpoint of step 8 has other arrays than those computed again:",
        f"  {PLANTED}",
        *out.splitlines()[4:],
    ]
    found = facts("planted")[1]
    assert (found["first_step"], found["checkpoint"]["differing"]) == (8, [PLANTED])
    # From the changed checkpoint on, the run is right.
    assert facts("planted", "--from", "8")[0] == 0


def test_a_changed_loss_is_named(replay, facts, copied):
    path = copied("whole") / "step_losses.f32"
    losses = np.fromfile(path, "<f4")
    losses[9] = np.nextafter(losses[9], np.float32(9))
    losses.tofile(path)
    code, out, _ = replay("copy-of-whole")
    assert (code, out.splitlines()[0]) == (1, "steps 5 to 13: step 10 is the first one that differs")
    assert f"Step 10 has recorded the loss {np.format_float_positional(losses[9])}; computed again" in out
    found = facts("copy-of-whole")[1]
    assert found["first_loss"]["step"] == 10
    assert found["first_record"] is None
    assert facts("copy-of-whole", "--to", "9")[0] == 0


@pytest.mark.parametrize(("name", "value"), [("grad_norm_max", 0.125), ("loss", 2.5), ("windows", "0" * 16)])
def test_a_changed_value_of_a_record_is_named(facts, copied, name, value):
    path = copied("whole") / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {name: value} if line["step"] == 7 else line) + "\n" for line in lines))
    code, found = facts("copy-of-whole")
    assert (code, found["first_step"]) == (1, 7)
    if name == "windows":
        assert found["first_windows"]["of_a"] == value
    else:
        assert (found["first_record"]["name"], found["first_record"]["recorded"]) == (name, value)


@pytest.mark.parametrize(
    ("num_shards", "device", "num_causes"), [(None, "cpu", 1), (4, "cpu", 0), (None, "gpu", 1), (4, "gpu", 1)]
)
def test_other_cpu_workers_of_a_run_with_shards_are_no_cause(copied, num_shards, device, num_causes):
    run = read_run(str(copied("whole")))
    config = run.description.config.with_options({"train.num_shards": num_shards, "train.global_batch_size": 8})
    here = RecomputedSteps(losses=[], records={}, digests={}, workers=2, devices=2, device=device, processor="Z80")
    run = dataclasses.replace(
        run,
        description=dataclasses.replace(run.description, config=config),
        starts=[{"step": 0, "workers": 4, "devices": 4, "device": device, "processor": "Z80"}],
    )
    assert len(_causes(run, find_segment(run, None, None), here)) == num_causes


@pytest.mark.parametrize(("first", "stop", "workers"), [(8, 12, [2]), (4, 8, [4]), (4, 12, [4, 2]), (12, 13, [3])])
def test_the_starts_that_computed_the_steps_are_the_causes(copied, first, stop, workers):
    """Two starts begin at a checkpoint: the start before has computed no later step."""
    run = read_run(str(copied("whole")))
    places = ((0, 4), (8, 2), (12, 3))
    starts = [{"step": step, "workers": number, "devices": 8, "device": "cpu"} for step, number in places]
    here = RecomputedSteps(losses=[], records={}, digests={}, workers=1, devices=1, device="cpu", processor="Z80")
    causes = _causes(dataclasses.replace(run, starts=starts), find_segment(run, first, stop), here)
    named = [cause.removeprefix("The run was computed on ")[:9] for cause in causes]
    assert named == [f"{number} workers" for number in workers]


@pytest.mark.parametrize("name", ["loss", "grad_norm_max", "num_skipped", "learning_rate"])
def test_each_number_of_a_record_that_follows_from_the_steps_is_compared(name, place):
    run = read_run(str(place / "runs" / "whole"))
    segment = dataclasses.replace(find_segment(run, 4, 8), checkpoint_steps=())
    found = RecomputedSteps(
        losses=run.losses[4:8].tolist(), records={step: run.records[step] for step in (5, 6, 7, 8)}, digests={},
        workers=1, devices=1, device="cpu", processor="Z80",
    )  # fmt: skip

    def compared(**changes):
        records = {**found.records, 7: {**found.records[7], **changes}}
        return compare_replay(run, segment, dataclasses.replace(found, records=records))

    assert compared(step_s=9.0, tokens_per_s=9.0, time_s=9.0).first_step is None
    answer = compared(**{name: 0.125})
    recorded = run.records[7].get(name)
    assert answer.record is not None
    assert dataclasses.astuple(answer.record) == (7, name, recorded, 0.125)
    (line,) = [line for line in _texts(segment, answer) if name in line]
    assert line.startswith(f"The record of step 7 has the {name} {recorded}; computed again")
    lost = dataclasses.replace(run, losses=np.where(np.arange(13) == 5, np.float32(np.nan), run.losses))
    assert "The losses of 1 steps are not recorded." in _texts(segment, compare_replay(lost, segment, found))
    assert not any("not recorded" in line for line in _texts(segment, answer))


def test_other_devices_than_those_of_the_run_are_named(facts, copied):
    path = copied("whole") / "starts.jsonl"
    start = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(start | {"workers": 2, "devices": 4, "processor": "Z80"}) + "\n")
    code, found = facts("copy-of-whole")
    assert code == 0
    cause, of_processor = found["causes"]
    assert of_processor.startswith("The processor of the run was Z80, that of this replay is ")
    assert cause.startswith("The run was computed on 2 workers with 4 devices (cpu), this replay on 1 worker with ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("weights --from 2", "must have a checkpoint before step 3, got 12, 13. Give a later step; a run with "),
        ("fork --step 3", "must have a checkpoint before step 3, got 8, 12, 13. Give a later step; a run with "),
        ("whole --to 14", "--to must be from 1 to 13, the last step of the run, got 14."),
        ("whole --from 5 --to 5", "--from must be from 0 to 4, below the last step to replay, got 5."),
        ("whole --step 0", "--step must be from 1 to 13, the last step of the run, got 0."),
        ("whole --step 14", "--step must be from 1 to 13, the last step of the run, got 14."),
        ("whole --step 3 --to 5", "--step must be given without --from and --to, got both. Leave one out."),
        ("whole --hardware cpu:4", "train.global_batch_size must be divisible by 4"),
        ("longer", "train.max_steps must be the same in all steps to replay, got 8 up to step 8 and then 13."),
    ],
)
def test_bad_input_is_rejected(replay, arguments, sentence):
    code, out, err = replay(*arguments.split())
    assert (code, out) == (2, "")
    assert sentence in err


@pytest.mark.parametrize("part", [("--to", "8"), ("--from", "8")])
def test_the_parts_of_a_run_that_was_extended_are_verified(facts, part):
    assert facts("longer", *part)[0] == 0


@pytest.mark.slow
def test_a_run_of_two_workers_is_verified_on_two_workers(place):
    def pretrain(*arguments):
        command = [sys.executable, "-m", "pretrain", *arguments]
        return subprocess.run(
            command, cwd=place, env=environment(place), capture_output=True, text=True, check=False
        )  # fmt: skip

    options = (
        "--data book.txt --hardware cpu:2 --name two --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 "
        "--model.seq-len 24 --train.global-batch-size 6 --train.max-steps 12 --train.checkpoint-every 4 "
        "--train.checkpoints-to-keep none --train.sample-tokens 0"
    )
    assert pretrain(*options.split()).returncode == 0
    again = pretrain("replay", "two")
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, "steps 5 to 12: verified, bit for bit")
    here = pretrain("replay", "two", "--hardware", "local")
    cause = "The run was computed on 2 workers with 2 devices (cpu), this replay on 1 worker "
    assert cause in here.stdout.replace("\n", " ")


def _files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if os.path.isfile(path)}  # noqa: PTH113
