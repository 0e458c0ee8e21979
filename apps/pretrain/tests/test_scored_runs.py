"""Scores of checkpoints on tasks while a run trains: those of `eval`, each once, also after a kill."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from many_runs import environment, results
from own_tasks import documents, write_tasks

from pretrain import PRESETS
from pretrain._run.folder import RunFolder
from pretrain._training.task_scores import TaskScores

SCRIPT = """
scored = changed(
    BASE, name="scored", data="train=book.txt,val=end.txt", train__checkpoints_to_keep=1,
    train__eval_tasks=("own/own_choice.yaml:5",), train__eval_tasks_every=4,
)
lines = lambda: [json.loads(line) for line in open("runs/scored/scores.jsonl")]
train(scored)
found["first"] = lines()
found["result"] = json.loads(Path("runs/scored/result.json").read_text())["metrics"]
kept = lines()[:-1]  # the last scores had not come when the run was killed
Path("runs/scored/scores.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in kept))
Path("runs/scored/result.json").unlink()
train(scored)
found["again"] = lines()
Path("own/documents.jsonl").unlink()
lost = changed(scored, name="lost", train__eval_tasks_every=None)
train(lost)
result = json.loads(Path("runs/lost/result.json").read_text())
found["lost"] = [Path("runs/lost/scores.jsonl").exists(), result["steps"]]
"""


def waiting_scores(folder, *, saved, start, scored):
    """The scores of a start, with checkpoints that are no more than their names."""
    for step in saved:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    changes: dict[str, Any] = {"max_steps": 13, "checkpoint_every": 4, "eval_tasks_every": 4, "eval_tasks": ("piqa",)}
    train = dataclasses.replace(PRESETS["quickstart"]().train, **changes)
    return TaskScores(RunFolder(folder), train, start=start, scored=scored)


@pytest.mark.parametrize(("start", "held"), [(8, [8]), (13, [8, 12, 13]), (7, [])])
def test_a_start_scores_the_checkpoints_up_to_its_step_that_have_no_scores(tmp_path, start, held):
    scores = waiting_scores(tmp_path, saved=(4, 6, 8, 12, 13), start=start, scored=[4])
    assert (scores.held, scores.is_idle) == (held, True)


def test_a_checkpoint_stays_while_its_process_runs(tmp_path):
    with contextlib.closing(waiting_scores(tmp_path, saved=(8, 12), start=12, scored=[4])) as scores:
        assert scores.poll(12) == []
        assert (scores.held, scores.is_idle) == ([8, 12], False)


def test_a_later_checkpoint_takes_the_place_of_one_that_waits_and_the_log_names_that_one(tmp_path, caplog):
    scores = waiting_scores(tmp_path, saved=(), start=0, scored=[])
    for step, held in ((4, [4]), (5, [4]), (8, [8]), (8, [8]), (9, [8])):
        assert scores.poll(step) == []
        assert scores.held == held
    (record,) = caplog.records
    assert record.getMessage().startswith("the checkpoint of step 4 is not scored on tasks: ")
    assert scores.poll(9, is_last=True) == []  # such as a run that has stalled
    assert scores.held == [9]


@pytest.mark.slow
@pytest.mark.fault
def test_checkpoints_are_scored_once_and_a_failure_costs_the_scores_alone(tmp_path, record_property):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    record_property("fault", "a kill before the scores of a checkpoint on tasks have come; a task that cannot be read")
    record_property("lost", "nothing; the scores")
    write_tasks(tmp_path / "own", documents(5))
    found = results(SCRIPT, tmp_path)
    steps = [line["tasks/step"] for line in found["first"]]
    assert steps == sorted({*steps})
    assert steps[-1] == 13
    assert {*steps} <= {4, 8, 12, 13}
    last = found["first"][-1]
    assert (last["step"], found["result"]["tasks/step"]) == (13, 13)
    assert found["result"]["tasks/own_choice/acc"] == last["tasks/own_choice/acc"]
    again = {line["tasks/step"]: line for line in found["again"]}
    assert len(again) == len(found["again"])
    assert all(again[line["tasks/step"]] == line for line in found["first"])
    assert found["lost"] == [False, 13]

    write_tasks(tmp_path / "own", documents(5))
    words = ["eval", "scored@13", "--tasks", "own/own_choice.yaml:5", "--json"]
    for devices in ("1", "2"):  # two devices share the rows
        variables = environment(tmp_path) | {"JAX_NUM_CPU_DEVICES": devices}
        done = subprocess.run(
            [sys.executable, "-m", "pretrain", *words], cwd=tmp_path, env=variables, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        (task,) = json.loads(done.stdout)["tasks"]
        scores = {one["metric"]: one["value"] for one in task["metrics"]}
        assert scores == {name: last[f"tasks/own_choice/{name}"] for name in ("acc", "acc_norm")}
