import dataclasses
import re

import pytest

from owt_data import PrepareOptions
from pretrain import PRESETS, TrainConfig
from pretrain._commands.train import resolve_vocabulary
from pretrain._config import with_vocab_size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 0}, "train.max_steps must be at least 1 and below 2147483648, got 0. Change it."),
        ({"eval_every": -5}, "train.eval_every must be at least 1, got -5."),
        ({"max_failures": -1}, "train.max_failures must be at least 0, got -1."),
        ({"grad_accum_steps": 5}, "train.global_batch_size must be divisible by train.grad_accum_steps, 5, got 32."),
    ],
)
def test_bad_train_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed must be at least 0 and below 9223372036854775808, got -1"),
        ({"wait_for_resources_s": float("nan")}, "wait_for_resources_s must be at least 0, got nan."),
        (
            {"name": "../x"},
            "name must be a printable text that begins with no dot or space and has no / and ? in it, got '",
        ),
        ({"name": ""}, "name must be a printable text"),
        ({"name": "a\nb"}, "name must be a printable text"),
        ({"name": "\udcff"}, "name must be a printable text"),
        ({"prompt": ""}, "prompt must be a text of at least one character"),
    ],
)
def test_bad_run_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PRESETS["quickstart"](), **fields)


def test_the_tokenizer_is_a_preset_of_its_own():
    assert PRESETS["gpt2"]().prepare == PrepareOptions(tokenizer="gpt2")


@pytest.mark.parametrize(("given", "of_the_run", "expected"), [(None, None, 257), (None, 300, 300), (400, 300, 400)])
def test_a_continued_run_keeps_its_vocabulary_unless_another_is_given(given, of_the_run, expected):
    config = PRESETS["quickstart"]()
    if given:
        config = with_vocab_size(config, given)
    for size in (of_the_run, 257):  # that of the continued run, then that of the tokenizer
        config = resolve_vocabulary(config, size)
    assert config.model.vocab_size == expected
