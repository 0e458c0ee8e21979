"""Runs that start from all that a checkpoint of another run holds."""

import pytest
from many_runs import results

SCRIPT = """
from rich.console import Console

from pretrain import main
from pretrain._commands.plan_run import plan
from pretrain._commands.report import report
from ray_jax_launch import checkpoint_metadata

wsd = changed(BASE, optimizer__schedule="wsd", optimizer__decay_steps=5, train__max_steps=18)
train(changed(wsd, name="parent"))
same = changed(wsd, name="same", from_checkpoint="parent@8")
train(same)
found["same"] = [digest("same", step) == digest("parent", step) for step in (8, 12, 18)]
found["same steps"] = steps("same")
found["same losses"] = [losses("same"), losses("parent")[8:]]
other = changed(wsd, name="other", from_checkpoint="runs/parent@8", optimizer__learning_rate=1e-3)
train(other)
found["other losses"] = losses("other")
found["other"] = digest("other", 18) == digest("parent", 18)
end = digest("other", 18)

annealed = changed(wsd, name="annealed", from_checkpoint="parent@8", anneal=3)
train(annealed)
train(changed(wsd, name="annealed-once", optimizer__decay_steps=3, train__max_steps=11))
found["annealed"] = digest("annealed", 11) == digest("annealed-once", 11)
found["annealed again"] = train(annealed).metrics["step"]
found["too late"] = rejection(changed(annealed, name="late", from_checkpoint="parent@16"))
found["too short"] = rejection(changed(wsd, name="short", from_checkpoint="parent@8", train__max_steps=8))
found["no such step"] = rejection(changed(wsd, name="none", from_checkpoint="parent@9"))
found["other batch"] = rejection(changed(wsd, name="none", from_checkpoint="parent@8", train__global_batch_size=12))
found["other optimizer"] = rejection(changed(wsd, name="none", from_checkpoint="parent@8", optimizer__name="muon"))
found["no clipping"] = rejection(changed(wsd, name="none", from_checkpoint="parent@8", optimizer__clip_norm=0.0))
found["another parent"] = rejection(changed(other, from_checkpoint="parent@12"))
planned = changed(wsd, from_checkpoint="parent@8", train__max_steps=31)
options = {"price_per_hour": None, "measure": False, "console": None}
found["planned"] = [plan(planned, **options).num_steps, plan(changed(planned, anneal=3), **options).num_tokens]
best = min((line["val_loss"], line["step"]) for line in losses("parent") if "val_loss" in line)[1]
found["best"] = [load_trained("parent@best").step, best, load_trained("parent@4").step, load_trained("parent").step]

of_step_8 = [checkpoint_metadata(f"runs/{name}/checkpoints", 8)["best"] for name in ("parent", "other")]
parts = [checkpoint_metadata(f"runs/{name}/checkpoints", 12)["unrecorded"] for name in ("parent", "same")]
found["unrecorded"] = [parts[0] == parts[1], len(parts[0]["trailing_losses"])]
records = [read_records(Path("runs", name, "metrics.jsonl")) for name in ("parent", "same")]
found["times"] = [records[0][-1]["time_s"], records[1][0]["time_s"]]
found["best at step 8"] = [[one[f"best_{kind}"] for kind in ("loss", "saved_loss", "saved_step")] for one in of_step_8]

for state in ("with its parent", "alone"):
    report(["same"], out=f"{state}.html", console=Console(quiet=True))
    page = Path(f"{state}.html").read_text()
    found[f"report {state}"] = ["everything of" in page, "grey s0" in page]
    if state == "with its parent":
        shutil.rmtree("runs/parent")
rewind("other", 8)
train(other)
found["without its parent"] = digest("other", 18) == end
rewind("other", 12)
line = ["--from", "runs/parent@8", "--name", "other", "--optimizer.learning-rate", "1e-3"]
found["command without its parent"] = [main(line), digest("other", 18) == end]
found["new without its parent"] = main([*line[:3], "new"])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(SCRIPT, tmp_path_factory.mktemp("runs"))


def test_a_fork_without_changes_is_its_parent_to_the_bit(found):
    assert found["same"] == [True, True, True]
    assert found["same steps"] == [8, 12, 16, 18]
    forked, parent = found["same losses"]
    assert len(forked) == 11
    assert forked == parent


def test_a_fork_knows_the_losses_before_it_and_has_its_own_times(found):
    """The score of a spike depends on the losses before it."""
    assert found["unrecorded"] == [True, 12]
    of_parent, of_fork = found["times"]
    assert of_fork > of_parent


def test_a_fork_reads_the_batches_of_its_parent_at_another_rate(found):
    forked, parent = found["other losses"], found["same losses"][1]
    assert forked[0] == parent[0]
    assert forked[1]["learning_rate"] == 0.001
    assert forked[1]["loss"] == parent[1]["loss"]  # before the update
    assert forked[2]["loss"] != parent[2]["loss"]
    assert not found["other"]


def test_a_plan_of_a_fork_has_the_steps_that_are_left(found):
    assert found["planned"] == [31 - 8, 3 * 6 * 24]


def test_the_report_of_a_fork_has_the_part_of_its_parent_in_grey(found):
    assert found["report with its parent"] == [True, True]
    assert found["report alone"] == [True, False]


def test_a_fork_continues_after_its_parent_is_deleted(found):
    assert found["without its parent"]
    assert found["command without its parent"] == [0, True]
    assert found["new without its parent"] == 2


def test_an_annealed_run_is_a_shorter_run_of_wsd_to_the_bit(found):
    assert found["annealed"]
    assert found["annealed again"] == 11


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("too late", "must be a checkpoint before the learning rate of its run falls, at most step 13, got 16"),
        ("too short", "train.max_steps must be above 8, the step that the run starts at, got 8"),
        ("no such step", "has no checkpoint of step 9; it has 4, 8, 12, 16, 18."),
        ("other batch", "train.global_batch_size must be 6, as in parent@8, got 12"),
        ("other optimizer", "optimizer.name must be adamw, as in parent@8, got muon"),
        ("no clipping", "optimizer.clip_norm must be above 0, as in parent@8, got 0.0"),
        ("another parent", "--from must be runs/parent@8, as at the start of the run in"),
    ],
)
def test_what_a_fork_cannot_take_is_rejected(found, name, sentence):
    assert sentence in found[name]


def test_a_checkpoint_is_named_by_its_step_or_as_the_best(found):
    best, expected, fourth, newest = found["best"]
    assert (best, fourth, newest) == (expected, 4, 18)


def test_the_best_checkpoint_of_a_parent_is_none_of_its_fork(found):
    """The fork would else keep none of its own until one is better."""
    parent, fork = found["best at step 8"]
    assert parent[1:] == [parent[0], 4]  # a checkpoint is saved before its validation
    assert fork == [parent[0], None, None]
