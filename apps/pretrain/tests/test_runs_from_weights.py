"""Runs that start from the weights of a run, of an exported folder, or of a published model."""

import pytest
from many_runs import results

SCRIPT = """
from ray_jax_launch import checkpoint_metadata

train(changed(BASE, name="parent", model__seq_len=32))
begun = changed(BASE, name="begun", init_from="parent@8", model__vocab_size=257, optimizer__learning_rate=1e-3)
train(begun)
weights = arrays("parent", 8)["params"]
weights["wpe"]["embedding"] = weights["wpe"]["embedding"][:24]
found["begun"] = [params_digest(arrays("begun", 0)["params"]) == params_digest(weights), steps("begun")]
found["begun losses"] = losses("begun")
found["origin"] = json.loads(Path("runs/begun/config.json").read_text())["origin"] | {"place": None}
found["best"] = checkpoint_metadata("runs/begun/checkpoints", 4)["best"]
end = digest("begun", 13)
found["longer windows"] = rejection(changed(begun, name="none", model__seq_len=33))
found["other width"] = rejection(changed(begun, name="none", model__embed_dim=32))

load_trained("parent@8").model.save_pretrained("exported", end_of_text=256)
exported = changed(begun, name="exported", init_from="exported")
train(exported)
found["exported"] = digest("exported", 13) == end
shutil.rmtree("exported")
shutil.rmtree("runs/parent")
rewind("begun", 0)
train(begun)
found["without its weights"] = digest("begun", 13) == end
found["missing"] = rejection(changed(begun, name="none", init_from="parent@8"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(SCRIPT, tmp_path_factory.mktemp("runs"))


def test_a_run_starts_from_the_weights_of_a_checkpoint_with_shorter_windows(found):
    assert found["begun"] == [True, [0, 4, 8, 12, 13]]
    assert found["origin"] == {"place": None, "step": 8, "tokenizer": "bytes", "weights_only": True}
    records = found["begun losses"]
    assert (records[0]["step"], records[1]["learning_rate"]) == (0, 0.00025)
    assert records[0]["val_loss"] < 5.4  # that of random weights is 5.53


def test_the_weights_at_its_start_are_the_best_checkpoint_of_a_run_until_another_one_is_better(found):
    """Step 4 is saved before its validation."""
    loss = found["begun losses"][0]["val_loss"]
    assert (found["best"]["best_saved_loss"], found["best"]["best_saved_step"]) == (loss, 0)


def test_an_exported_folder_gives_the_same_run(found):
    assert found["exported"]


def test_a_run_continues_after_its_weights_are_deleted(found):
    assert found["without its weights"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("longer windows", "model.seq_len must be at most 32, that of parent@8, got 33"),
        ("other width", "model.embed_dim must be 16, as in parent@8, got 32"),
        ("missing", "got parent"),
    ],
)
def test_weights_that_do_not_fit_are_rejected(found, name, sentence):
    assert sentence in found[name]
