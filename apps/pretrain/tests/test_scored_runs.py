"""Scores of checkpoints on tasks while a run trains: those of `eval`, each once, also after a kill."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from many_runs import environment, results
from own_tasks import documents, write_tasks

from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run.description import DataDescription, describe
from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._training import run_log, task_scores
from pretrain._training.run_log import RunLog
from pretrain._training.task_scores import TaskScores, is_scored

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


CHANGES: dict[str, Any] = {"max_steps": 13, "checkpoint_every": 4, "eval_tasks_every": 4, "eval_tasks": ("piqa",)}
TRAIN = dataclasses.replace(PRESETS["quickstart"]().train, **CHANGES)

# In place of the command `eval`, whose tasks need lm-eval: it tells what it was given, and fails for step 12.
ANSWERS = """
import json, os, sys
step = int(sys.argv[2].rpartition("@")[2])
with open("seen.json", "w") as file:
    json.dump([sys.argv[1:], os.nice(0), dict(os.environ)], file)
if step == 12:
    sys.exit("a warning of a library\\nerror: the data of the task is gone.")
scores = [{"metric": "acc", "value": step / 7, "stderr": 1 / 3}, {"metric": "f1", "value": 0.5, "stderr": None}]
print(json.dumps({"tasks": [{"task": "piqa", "metrics": scores}, {"task": "own", "metrics": scores[1:]}]}))
"""


def scores_of(step):
    values = {"piqa/acc": float(f"{step / 7:.6g}"), "piqa/acc_stderr": 0.333333, "piqa/f1": 0.5, "own/f1": 0.5}
    return {"tasks/step": step} | {f"tasks/{name}": value for name, value in values.items()}


def waiting_scores(folder, *, saved, start, scored):
    """The scores of a start, with checkpoints that are no more than their names."""
    for step in saved:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    return TaskScores(RunFolder(folder), TRAIN, start=start, scored=scored)


def until(holds):
    """Wait for a result that is not empty, and return it."""
    limit_s = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    return found


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


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 12, 13]), (8, [8, 13]), (None, [13])])
def test_the_last_checkpoint_is_scored_and_those_of_the_interval(every, steps):
    train = dataclasses.replace(TRAIN, eval_tasks_every=every)
    assert [step for step in range(14) if is_scored(train, step)] == steps
    assert not any(is_scored(dataclasses.replace(train, eval_tasks=()), step) for step in range(14))


def test_a_process_scores_a_checkpoint_on_the_cpus_at_the_lowest_priority(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(task_scores, "CHILD", ANSWERS)
    given = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--x", "JAX_NUM_CPU_DEVICES": "2", "RAY_ADDRESS": "a", "KEPT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(waiting_scores(tmp_path, saved=(8, 12, 13), start=13, scored=[4])) as scores:
        assert until(lambda: scores.poll(13)) == [scores_of(8)]
        arguments, niceness, variables = json.loads(Path("seen.json").read_text())
        assert arguments == ["eval", f"{tmp_path}@8", "--tasks", "piqa", "--batch-size", "4", "--json"]
        assert niceness == 19
        left = {name: variables[name] for name in variables if name in given or name.startswith("RAY_")}
        assert left == {"JAX_PLATFORMS": "cpu", "KEPT": "1"}
        # The next one, which fails, costs its scores alone, and the last one is scored.
        assert scores.held == [12, 13]
        assert until(lambda: scores.poll(13)) == [scores_of(13)]
        assert caplog.messages == [
            "the run goes on without the scores of step 12 on tasks: the data of the task is gone"
        ]
        assert (scores.poll(13), scores.held, scores.is_idle) == ([], [], True)


def test_a_process_that_runs_is_killed_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(task_scores, "CHILD", "import time; time.sleep(600)")
    scores = waiting_scores(tmp_path, saved=(8,), start=8, scored=[])
    assert scores.poll(8) == []
    assert scores._process is not None
    process = scores._process._process
    scores.close()
    assert (process.returncode, scores.is_idle) == (-9, True)
    scores.close()  # the second time, there is none


class Noted:
    """A tracker that notes the lines that it gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.steps.append((record["step"], "tasks/step" in record))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_the_log_keeps_a_checkpoint_until_it_has_its_scores_and_waits_for_the_last_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(task_scores, "CHILD", ANSWERS)
    tracker, watched = Noted(), list[bool]()
    monkeypatch.setattr(run_log, "open_trackers", lambda *_: tracker)
    monkeypatch.setattr(run_log, "stop_pending", lambda: False)  # no loop of a launch runs
    config = dataclasses.replace(with_vocab_size(PRESETS["quickstart"](), 257), train=TRAIN)
    description = describe(config, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")
    folder = RunFolder(tmp_path)

    def log_from(start):
        log = RunLog(
            folder, config, description, send=lambda line: None, watch=watched.append, keep=lambda step: step == 3
        )
        log.begin(start, 0.0)
        log.open("cpu", 1)
        return log

    with log_from(0) as log:
        log.write({"step": 4})  # the checkpoint of step 4 is not complete yet
        assert not log.keep(4)
        log.push()
        assert [step for step in range(14) if log.keep(step)] == [3, 4]
        (tmp_path / "checkpoints" / "4").mkdir(parents=True)

        def is_scored_now():
            log.write({"step": 6})
            return read_lines(folder.scores)

        assert until(is_scored_now) == [{"step": 6} | scores_of(4)]
        log.push()
        assert [step for step in range(14) if log.keep(step)] == [3]
        for step in (12, 13):
            (tmp_path / "checkpoints" / str(step)).mkdir()
            log.write({"step": step})
        watched.clear()
        log.end(13, "")  # waits, and tells that it is alive
        assert len(watched) > 1
        assert not any(watched)
        log.phase(13, "finished")
    assert read_lines(folder.scores)[1:] == [{"step": 13} | scores_of(13)]  # those of step 12 cannot be had
    assert tracker.steps[-3:] == [(12, False), (13, False), (13, True)]
    # A later start from step 6 scores nothing again. Its tracker gets the scores once more, in the order of steps.
    tracker.steps.clear()
    with log_from(6) as log:
        assert log._scores is not None
        assert log._scores.held == []
        for step in (6, 8, 13):
            log.write({"step": step})
        log.phase(13, "finished")
    assert tracker.steps == [(6, False), (6, True), (8, False), (13, False), (13, True)]
    assert len(read_lines(folder.scores)) == 2
    # After a request to stop, the scores of step 12, which are still missing, are not waited for.
    monkeypatch.setattr(task_scores, "CHILD", "import time; time.sleep(600)")
    monkeypatch.setattr(run_log, "stop_pending", lambda: True)
    with log_from(13) as log:
        assert log._scores is not None
        log.end(13, "")
        assert log._scores.held == [12]


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
