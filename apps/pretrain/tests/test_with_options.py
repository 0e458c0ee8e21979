"""Options of a configuration, set by their names from Python."""

import re

import pytest

from pretrain import PRESETS


def test_options_are_set_by_their_names():
    quickstart = PRESETS["quickstart"]()
    options = {"train.max_steps": 40, "optimizer.learning-rate": 5e-3, "prompts": ["a", "b"], "mesh.fsdp": 2, "seed": 1}
    found = quickstart.with_options(options)
    assert (found.train.max_steps, found.optimizer.learning_rate) == (40, 5e-3)
    assert (found.prompts, found.mesh.fsdp, found.seed) == (("a", "b"), 2, 1)
    assert quickstart == PRESETS["quickstart"]()
    assert found.with_options({}) == found


def test_a_new_length_and_new_microbatches_replace_the_former_ones():
    epochs = PRESETS["wikitext"]().with_options({"train.max_steps": 3})
    assert (epochs.train.max_steps, epochs.train.max_epochs) == (3, None)
    accumulated = PRESETS["gpt2"]().with_options({"train.grad_accum_steps": 2})
    assert (accumulated.train.grad_accum_steps, accumulated.train.micro_batch_size) == (2, None)
    assert epochs.with_options({"train.max_tokens": 9}).train.max_tokens == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train.max_step": 3}, "no option 'train.max_step' of a configuration; did you mean train.max_steps?"),
        ({"learning-rate": 3}, "no option 'learning-rate' of a configuration; did you mean optimizer.learning_rate?"),
        ({"preset": "baby"}, "no option 'preset' of a configuration"),
        ({"train": None}, "no option 'train' of a configuration"),
        ({"train.max_steps": 0}, "train.max_steps must be at least 1"),
        ({"optimizer.learning_rate": -1.0}, "optimizer.learning_rate must be above 0"),
        ({"optimizer.name": "adam"}, "optimizer.name must be adamw or muon"),
        ({"seed": True}, "seed must be an integer, got True."),
    ],
)
def test_a_wrong_option_is_rejected(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PRESETS["quickstart"]().with_options(options)
