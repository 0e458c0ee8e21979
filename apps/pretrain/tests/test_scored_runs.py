"""Scores of checkpoints on tasks while a run trains: those of `eval`, each once, also after a kill."""

import json
import subprocess
import sys

import pytest
from many_runs import environment, results
from own_tasks import documents, write_tasks

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
