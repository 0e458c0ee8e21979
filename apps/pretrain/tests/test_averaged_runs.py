"""Runs that keep an average of their parameters: it is validated, sampled, loaded and exported."""

import pytest
from many_runs import results

SCRIPT = """
averaged = changed(BASE, name="averaged", optimizer__average_decay=0.9, optimizer__learning_rate=2e-2)
plain = changed(averaged, name="plain", optimizer__average_decay=0.0)
for config in (averaged, plain):
    train(config)
names = ("averaged", "plain")
found["losses"] = [[line.get("loss") for line in losses(name)] for name in names]
found["val losses"] = [[line["val_loss"] for line in losses(name) if "val_loss" in line] for name in names]
found["params"] = [params_digest(arrays(name, 13)["params"]) for name in names]
models = [params_digest(split_params(load_trained(f"{name}@13").model)) for name in names]
found["models"] = models
begun = changed(plain, name="begun", init_from="averaged@13")
train(begun)
found["begun"] = params_digest(arrays("begun", 0)["params"])
train(changed(averaged, name="fork", from_checkpoint="averaged@8"))
found["fork"] = [digest("fork", 13), digest("averaged", 13)]
found["dropped"] = rejection(changed(plain, name="none", from_checkpoint="averaged@8"))
found["added"] = rejection(changed(averaged, name="none", from_checkpoint="plain@8"))
rewind("averaged", 4)
train(averaged)
found["continued"] = digest("averaged", 13)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    # The update with an average is another program. Fully optimized, its updates have the same bits.
    return results(SCRIPT, tmp_path_factory.mktemp("runs"), is_optimized=True)


def test_an_average_changes_no_step(found):
    averaged, plain = found["losses"]
    assert averaged == plain
    assert found["params"][0] == found["params"][1]


def test_the_average_is_what_a_run_validates_and_loads(found):
    averaged, plain = found["val losses"]
    assert averaged[0] == plain[0]  # before the first update
    assert all(one != other for one, other in zip(averaged[1:], plain[1:], strict=True))
    assert found["models"][0] != found["params"][0]
    assert found["models"][1] == found["params"][1]


def test_a_run_starts_from_the_average_of_another(found):
    assert found["begun"] == found["models"][0]


def test_a_fork_and_a_continued_run_keep_the_average(found):
    fork, averaged = found["fork"]
    assert fork == averaged == found["continued"]


def test_a_fork_neither_drops_nor_adds_an_average(found):
    assert found["dropped"] == "optimizer.average_decay must be above 0, as in averaged@8, got 0.0."
    assert found["added"] == "optimizer.average_decay must be 0, as in plain@8, got 0.9."
