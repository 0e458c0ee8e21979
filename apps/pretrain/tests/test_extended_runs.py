"""A run that continues to another number of steps, and one whose intervals change."""

import pytest
from many_runs import results

SCRIPT = """
for name in ("constant", "once"):
    train(changed(BASE, name=name, train__max_steps=13 if name == "constant" else 23))
found["results"] = [Path("runs/constant/result.json").exists()]
stop_in(18, changed(BASE, name="constant", train__max_steps=23))
found["results"] += [Path("runs/constant/result.json").exists()]
train(changed(BASE, name="constant", train__max_steps=23))
found["of 13 steps"] = digest("constant", 13)
found["constant"] = [digest("constant", 23) == digest("once", 23), digest("constant", 23) != found["of 13 steps"]]
found["constant losses"] = [losses("constant"), losses("once")]
found["config"] = json.loads(Path("runs/constant/config.json").read_text())["config"]["train"]["max_steps"]
found["result"] = json.loads(Path("runs/constant/result.json").read_text())["steps"]

wsd = changed(BASE, optimizer__schedule="wsd", optimizer__decay_steps=5, train__max_steps=16)
for name in ("wsd", "wsd-once"):
    train(changed(wsd, name=name, train__max_steps=16 if name == "wsd" else 22))
too_late = changed(wsd, name="wsd", train__max_steps=22)
found["wsd in its decay"] = rejection(too_late)
rewind("wsd", 8)
train(too_late)
found["wsd"] = digest("wsd", 22) == digest("wsd-once", 22)
found["wsd losses"] = [losses("wsd"), losses("wsd-once")]

cosine = changed(BASE, name="cosine", optimizer__schedule="cosine")
train(cosine)
longer = changed(cosine, train__max_steps=19)
found["cosine"] = rejection(longer)
train(changed(longer, extend=True))
train(changed(longer, name="cosine-once"))
found["rates"] = [[line.get("learning_rate") for line in losses(name)] for name in ("cosine", "cosine-once")]
found["shorter"] = rejection(changed(longer, train__max_steps=7, extend=True))

intervals = changed(BASE, name="intervals")
train(intervals)
rewind("intervals", 4)
train(changed(intervals, train__log_every=2, train__eval_every=5, train__checkpoint_every=3, train__eval_tokens=48))
found["intervals"] = [digest("intervals", 13), steps("intervals")]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(SCRIPT, tmp_path_factory.mktemp("runs"))


def test_a_finished_run_of_a_constant_rate_is_extended_to_the_bit(found):
    assert found["constant"] == [True, True]
    extended, at_once = found["constant losses"]
    assert len(extended) == 24
    assert extended == at_once
    assert (found["config"], found["result"]) == (23, 23)


def test_a_run_that_is_extended_is_not_finished_until_its_new_end(found):
    """A kill would else leave the result of the former length, and the same command would not continue."""
    assert found["results"] == [True, False]


def test_a_run_of_wsd_is_extended_before_its_decay_to_the_bit(found):
    assert found["wsd"]
    extended, at_once = found["wsd losses"]
    assert extended == at_once


def test_a_run_of_wsd_is_not_extended_in_its_decay(found):
    assert found["wsd in its decay"] == (
        "train.max_steps must be 16, its value at the start of the run, got 22: the learning rate falls from step 11 "
        "on, and the run is at step 16. Give --extend to continue at the rate of the new length. A run of the schedule "
        "constant continues without a change of its rate, and so does one of wsd before its decay: fork it there by "
        "--from RUN@STEP and another --name."
    )


def test_a_run_of_cosine_is_extended_on_request_at_the_rate_of_the_new_length(found):
    assert found["cosine"].startswith(
        "train.max_steps must be 13, its value at the start of the run, got 19: the learning rate of the cosine "
        "schedule depends on this number, and the run is at step 13. Give --extend to "
    )
    extended, at_once = found["rates"]
    assert extended[:5] == at_once[:5]  # the warmup
    assert extended[13] == 0.0002
    assert extended[6] != at_once[6]
    assert extended[14:] == at_once[14:]


def test_a_run_is_not_shortened_to_less_than_it_has_done(found):
    sentence = "train.max_steps must be at least 19, the step of the newest checkpoint, got 7."
    assert found["shorter"] == f"{sentence} Give another --name for a shorter run."


def test_other_intervals_do_not_change_the_result(found):
    assert found["intervals"] == [found["of 13 steps"], [4, 6, 9, 12, 13]]
