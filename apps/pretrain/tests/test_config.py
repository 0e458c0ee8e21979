import dataclasses
import re

import pytest

from owt_data import PrepareOptions
from pretrain import PRESETS, TrainConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 0}, "train.max_steps must be at least 1, got 0"),
        ({"eval_every": -5}, "train.eval_every must be at least 1, got -5"),
        ({"max_failures": -1}, "train.max_failures must not be negative, got -1"),
        ({"grad_accum_steps": 5}, "train.grad_accum_steps must divide train.global_batch_size, got 5 and 32"),
    ],
)
def test_bad_train_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed must be at least 0 and below 9223372036854775808, got -1"),
        ({"wait_for_resources_s": float("nan")}, "wait_for_resources_s must be at least 0 and below inf, got nan"),
        (
            {"name": "../x"},
            "name must be a printable text that begins with no dot or space and has no / and ? in it, got '",
        ),
        ({"name": ""}, "name must be a printable text"),
        ({"name": "a\nb"}, "name must be a printable text"),
        ({"name": "\udcff"}, "name must be a printable text"),
        ({"prompt": ""}, "prompt must not be empty"),
    ],
)
def test_bad_run_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PRESETS["quickstart"](), **fields)


def test_the_tokenizer_is_a_preset_of_its_own():
    assert PRESETS["gpt2"]().prepare == PrepareOptions(tokenizer="gpt2")
