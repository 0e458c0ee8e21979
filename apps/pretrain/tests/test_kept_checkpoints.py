"""The checkpoints that stay, and the early end of a run that does not improve."""

import pytest
from many_runs import results

SCRIPT = """
kept = changed(BASE, name="kept", train__checkpoints_to_keep=1, train__checkpoint_every=2, train__eval_every=2,
               train__keep_every=6, optimizer__learning_rate=1.0, optimizer__clip_norm=0.0, train__max_steps=17)
train(kept)
validated = [(line["val_loss"], line["step"]) for line in losses("kept") if "val_loss" in line and line["step"] > 0]
found["kept"] = [steps("kept"), min(one for one in validated if one[1] < 17)[1], min(validated)[1]]
traced = []
note = lambda event, seconds, **about: traced.append(about.get("fun_name"))
jax.monitoring.register_event_duration_secs_listener(note)
train(changed(kept, name="newest", seed=1, train__keep_best=False, train__keep_every=None))
found["newest"] = steps("newest")
found["traced again"] = [name for name in traced if name]
wild = changed(BASE, name="wild", optimizer__learning_rate=1e30, optimizer__clip_norm=0.0, optimizer__warmup_steps=0)
for attempt in ("first", "second"):
    result = train(wild)
    found[f"wild {attempt}"] = [str(result.error), Path("runs/wild/result.json").exists(), result.sample]
    found[f"wild phase {attempt}"] = json.loads(Path("runs/wild/phases.jsonl").read_text().splitlines()[-1])["phase"]
still = changed(BASE, name="still", optimizer__learning_rate=1e-30, optimizer__min_learning_rate=0.0,
                train__early_stop_evals=2, train__max_steps=40, train__checkpoint_every=7)
train(still)
result = json.loads(Path("runs/still/result.json").read_text())
found["still"] = [result["steps"], steps("still"), "full_val_loss" in result["metrics"], result["full_val_loss"]]
Path("runs/still/result.json").unlink()
again = train(still)
found["still again"] = [again.metrics["step"], json.loads(Path("runs/still/result.json").read_text())["steps"]]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(SCRIPT, tmp_path_factory.mktemp("runs"))


def test_the_newest_the_best_and_every_sixth_checkpoint_stay(found):
    steps, best_before_the_end, _ = found["kept"]
    assert steps == sorted({best_before_the_end, 6, 12, 17})


def test_only_the_newest_checkpoint_stays_on_request(found):
    assert found["newest"] == [17]


def test_a_process_traces_and_compiles_nothing_for_its_next_run_of_the_same_model(found):
    assert found["traced again"] == []


def test_a_run_whose_last_validation_loss_is_not_finite_has_failed(found):
    for attempt in ("first", "second"):
        error, has_result, sample = found[f"wild {attempt}"]
        assert "the training has diverged: the validation loss of the last step, 13, is not finite. Lower " in error
        assert (has_result, sample) == (False, "")
        assert found[f"wild phase {attempt}"] == "failed"


def test_a_run_ends_early_after_two_validations_without_a_lower_loss(found):
    """The loss of step 0 is the best; those of steps 4 and 8 are no lower. Step 8 has a checkpoint for that reason."""
    steps, checkpoints, is_full, _ = found["still"]
    assert (steps, checkpoints, is_full) == (8, [7, 8], True)
    assert found["still again"] == [8, 8]
