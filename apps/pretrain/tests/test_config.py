import dataclasses
import re
from typing import Any

import pytest

from pretrain import PRESETS, MeshConfig, TrainConfig
from pretrain._cli import parse_command
from pretrain._config import (
    MAX_COUNT,
    MAX_SAMPLE_TOKENS,
    MAX_STEPS,
    NUM_SEEDS,
    PrepareConfig,
    PretrainConfig,
    profiled_steps,
    with_vocab_size,
)
from pretrain._errors import UsageError
from pretrain._resolve.devices import check_batch, with_microbatches
from pretrain._resolve.settings import DataFacts, resolve_as_before, resolve_from_data, resolve_order
from ray_jax_launch import parse_hardware

FACTS = DataFacts(tokenizer="bytes", vocab_size=257, num_windows=1000)


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(257, 2), (65_536, 2), (65_537, 4)])
def test_an_id_has_two_bytes_up_to_65_536_of_them(vocab_size, num_bytes):
    assert FACTS._replace(vocab_size=vocab_size).bytes_per_token == num_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 0}, "train.max_steps must be at least 1 and at most 2147483647, got 0."),
        ({"eval_every": -5}, "train.eval_every must be at least 1, got -5."),
        ({"max_epochs": 0.0}, "train.max_epochs must be above 0 and at most 1e+39, got 0.0."),
        ({"max_epochs": float("nan")}, "train.max_epochs must be above 0 and at most 1e+39, got nan."),
        ({"max_tokens": 0}, "train.max_tokens must be at least 1, got 0."),
        ({"hang_timeout_s": 4.9}, "train.hang_timeout_s must be at least 5 and below 1000000000.0, got 4.9."),
        ({"max_failures": -2}, "train.max_failures must be at least -1, got -2."),
        (
            {"global_batch_size": 2**31},
            "train.global_batch_size must be at least 1 and at most 2147483647, got 2147483",
        ),
        (
            {"eval_tokens": 10**400},
            "train.eval_tokens must be an integer of at most 9007199254740991 or none, got 10",
        ),
        ({"grad_accum_steps": 5}, "train.global_batch_size must be divisible by train.grad_accum_steps, 5, got 32."),
    ],
)
def test_bad_train_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed must be at least 0 and at most 9007199254740991, got -1"),
        ({"wait_for_resources_s": float("nan")}, "wait_for_resources_s must be at least 0 and below 1000000000.0, got"),
        ({"wait_for_resources_s": 1e30}, "wait_for_resources_s must be at least 0 and below 1000000000.0, got 1e+30."),
        ({"storage_path": "s3://A:topsecret@b"}, "storage_path must be without credentials, got 's3://***@b'. Set AWS"),
        (
            {"data": "a=1:gs://b,b=1:s3://A:topsecret@b"},
            "data must be without credentials, got 'a=1:gs://b,b=1:s3://***@",
        ),
        ({"profile": f"1:{10**400}"}, "profile must be FIRST:END with 1 <= FIRST < END, such as 100:105, got 1:1000"),
        ({"hardware": "cpu:two"}, "hardware must be auto, cpu:WORKERS"),
        (
            {"name": "../x"},
            "name must be a printable text that begins with no dot or space and has no / and ? in it, got '",
        ),
        ({"name": "a@b"}, "name must have no @, got a@b. RUN@STEP names a checkpoint of a run."),
        ({"name": "parent@8"}, "name must have no @, got parent@8."),
        ({"name": ""}, "name must be a printable text"),
        ({"name": "a\nb"}, "name must be a printable text"),
        ({"name": "\udcff"}, "name must be a text in UTF-8 or none, got"),
        ({"prompts": ("a", "\ud800")}, "prompts must be a tuple of texts in UTF-8, got ('a', '\\ud800')."),
        ({"data": "\udcff"}, "data must be a text in UTF-8, got '\\udcff'."),
        ({"prompts": ("a", "")}, "prompts must be texts of at least one character"),
    ],
)
def test_bad_run_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PRESETS["quickstart"](), **fields)


def test_a_cache_path_with_credentials_is_rejected():
    with pytest.raises(ValueError, match=re.escape("prepare.cache_path must be without credentials, got 's3://***@b'")):
        PrepareConfig(cache_path="s3://A:topsecret@b")


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 1) for name in (
            "global_batch_size", "max_steps", "log_every", "eval_every", "eval_tokens", "checkpoint_every",
            "checkpoints_to_keep", "grad_accum_steps", "micro_batch_size", "max_tokens",
            "stop_after_bad_steps",
        )),
        ("sample_tokens", 0),
        ("max_failures", -1),
    ],
)  # fmt: skip
def test_the_least_value_of_a_number_is_accepted_and_no_lower_one(name: str, least: int) -> None:
    fields: dict[str, Any] = {name: least}
    assert getattr(TrainConfig(**fields), name) == least
    fields[name] -= 1
    with pytest.raises(ValueError, match=f"train.{name} must be at least {least}"):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("name", "most"),
    [("global_batch_size", MAX_COUNT), ("max_steps", MAX_STEPS), ("sample_tokens", MAX_SAMPLE_TOKENS)],
)
def test_the_largest_value_of_a_number_is_accepted_and_no_higher_one(name: str, most: int) -> None:
    fields: dict[str, Any] = {name: most}
    assert getattr(TrainConfig(**fields), name) == most
    fields[name] += 1
    with pytest.raises(ValueError, match=f"train.{name} must be at least . and at most {most}, got {most + 1}"):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "beyond"),
    [
        ({"seed": NUM_SEEDS - 1}, {"seed": NUM_SEEDS}),
        ({"seed": 0, "wait_for_resources_s": 0.0}, {"wait_for_resources_s": -1.0}),
        ({"peak_tflops": 1e-6}, {"peak_tflops": 9e-7}),
        ({"peak_tflops": 9e8}, {"peak_tflops": 1e9}),
        ({"prompts": ("a",)}, {"prompts": ()}),
    ],
)
def test_the_bounds_of_the_settings_of_a_run_are_accepted_and_nothing_beyond(
    fields: dict[str, Any], beyond: dict[str, Any]
) -> None:
    config = dataclasses.replace(PRESETS["quickstart"](), **fields)
    assert {name: getattr(config, name) for name in fields} == fields
    with pytest.raises(ValueError, match=f"{next(iter(beyond))} must be"):
        dataclasses.replace(config, **beyond)


def test_the_axes_of_the_mesh_divide_what_they_share() -> None:
    """The model has 4 heads of 32 dimensions. A vocabulary of 257 is padded."""
    config = with_vocab_size(PRESETS["quickstart"](), 257)
    assert dataclasses.replace(config, mesh=MeshConfig(fsdp=8, tensor=4)).mesh.fsdp == 8
    with pytest.raises(ValueError, match=r"mesh axis tensor must divide num_heads"):
        dataclasses.replace(config, mesh=MeshConfig(fsdp=4, tensor=8))
    with pytest.raises(ValueError, match=r"mesh axis fsdp must divide embed_dim"):
        dataclasses.replace(config, mesh=MeshConfig(fsdp=3))


@pytest.mark.parametrize(("text", "expected"), [("1:2", range(1, 2)), ("7:9", range(7, 9)), ("007:09", range(7, 9))])
def test_the_steps_of_a_profile_are_the_first_one_to_that_before_the_end(text: str, expected: range) -> None:
    assert profiled_steps(text) == expected


@pytest.mark.parametrize("text", ["0:2", "2:2", "3:2", "1:", ":2", "3", "1:2:3", "-1:2", "1.5:3", f"1:{10**10}"])
def test_a_profile_without_steps_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="profile must be FIRST:END"):
        profiled_steps(text)


@pytest.mark.parametrize(
    ("order", "data_mode", "expected"),
    [
        (None, "prepared", "shuffle"),
        ("random", "prepared", "random"),
        ("sequential", "prepared", "sequential"),
        (None, "stream", "sequential-first"),
        ("sequential", "stream", "sequential"),
        ("sequential-first", "stream", "sequential-first"),
    ],
)
def test_the_order_follows_from_the_data_mode_unless_it_is_given(order: Any, data_mode: Any, expected: str) -> None:
    given = dataclasses.replace(with_train(order=order, max_tokens=7), data_mode=data_mode)
    assert resolve_order(given) == dataclasses.replace(with_train(order=expected, max_tokens=7), data_mode=data_mode)


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_a_stream_in_an_order_that_needs_all_tokens_is_rejected(order: str) -> None:
    given = dataclasses.replace(with_train(order=order), data_mode="stream")
    with pytest.raises(UsageError, match=f"train.order must be sequential or sequential-first.* got {order}"):
        resolve_order(given)


def test_the_tokenizer_is_a_preset_of_its_own():
    assert PRESETS["gpt2"]().prepare == PrepareConfig(tokenizer="gpt2")


@pytest.mark.parametrize(("given", "of_the_run", "expected"), [(None, None, 257), (None, 300, 300), (400, 300, 400)])
def test_a_continued_run_keeps_its_vocabulary_unless_another_is_given(given, of_the_run, expected):
    config = PRESETS["quickstart"]()
    stored = config if of_the_run is None else with_vocab_size(config, of_the_run)
    if given:
        config = with_vocab_size(config, given)
    found = resolve_from_data(resolve_as_before(config, stored), FACTS)
    assert found == with_vocab_size(config, expected)


def test_a_vocabulary_without_an_embedding_for_each_id_is_rejected():
    assert resolve_from_data(with_vocab_size(PRESETS["quickstart"](), 257), FACTS).model.vocab_size == 257
    with pytest.raises(UsageError, match="vocab-size must be at least 257, the vocabulary of the tokenizer bytes, got"):
        resolve_from_data(with_vocab_size(PRESETS["quickstart"](), 256), FACTS)


def with_train(**fields):
    config = PRESETS["quickstart"]()
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1500),
        ({"max_epochs": 2.0}, 125),  # 2 * 1000 / 16
        ({"max_epochs": 1.5}, 93),
        ({"max_epochs": 1e-9}, 1),
        ({"max_epochs": 2.01, "global_batch_size": 3}, 670),  # in floating point, 2.01 * 1000 is below 2010
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 2 * 16 * 64 + 1}, 3),
        ({"max_epochs": 2.0, "max_tokens": 10**9}, 125),
        ({"max_epochs": 1e30, "max_tokens": 2048}, 2),
    ],
)
def test_epochs_and_tokens_give_the_steps(fields, expected):
    """16 windows of 64 tokens a step, 1000 windows an epoch."""
    found = resolve_from_data(with_train(**fields), FACTS).train
    assert found == dataclasses.replace(with_train(**fields).train, max_steps=expected)


@pytest.mark.parametrize(
    ("hardware", "batch_size", "num_microbatches", "mesh"),
    [
        ("gpu:3x2", 9, 3, {"tensor": 2}),  # three shares of the batch, each of three microbatches
        ("gpu:3x2", 6, 1, {"fsdp": 3}),
        ("gpu:3x2", 3, 1, {"fsdp": 3, "tensor": 2}),
        ("cpu:2-3x2", 12, 1, {"tensor": 2}),
        ("tpu:v4:2x2x2:3", 24, 1, {"fsdp": 8}),  # as many as a slice has
        ("tpu:v7x:2x2x1", 8, 1, {"fsdp": 8}),  # two devices of jax a chip
        ("tpu:v2:2x2", 8, 1, {"fsdp": 8}),
        ("tpu:v3:2x2", 8, 1, {"fsdp": 8}),
    ],
)
def test_a_batch_that_the_devices_can_share_is_accepted(hardware, batch_size, num_microbatches, mesh):
    config = with_train(global_batch_size=batch_size, grad_accum_steps=num_microbatches)
    check_batch(dataclasses.replace(config, mesh=MeshConfig(**mesh)), parse_hardware(hardware))


@pytest.mark.parametrize(
    ("batch_size", "size", "num_devices", "expected"),
    [
        (480, 12, [8], 5),
        (480, 12, [1], 40),
        (480, 12, [32], 3),  # 15 windows on each device are no two equal microbatches
        (480, 100, [8], 1),
        (480, 7, [8], 10),  # 60 windows in microbatches of at most 7: 6
        (12, 4, [1, 2], 3),
        (12, 6, [1, 2, 3], 2),  # one device has 6 windows at once: the least that 2 and 3 devices can share
        (36, 5, [2, 3], 6),  # two devices have 18 windows each, three have 12
        (7, 2, [1], 7),
    ],
)
def test_the_size_of_a_microbatch_gives_the_fewest_accumulation_steps(batch_size, size, num_devices, expected):
    config = with_train(global_batch_size=batch_size, micro_batch_size=size)
    found = with_microbatches(config, num_devices).train.grad_accum_steps
    assert found == expected
    assert all(batch_size % (found * number) == 0 for number in num_devices)
    assert batch_size <= found * min(num_devices) * size


@pytest.mark.parametrize(("size", "message"), [(0, "must be at least 1, got 0"), (True, "must be an integer, auto or")])
def test_the_size_of_a_microbatch_is_a_positive_number_or_auto(size, message):
    assert with_train(micro_batch_size="auto").train.micro_batch_size == "auto"
    with pytest.raises(ValueError, match=f"train.micro_batch_size {message}"):
        with_train(micro_batch_size=size)


def test_devices_without_equal_microbatches_are_rejected():
    config = with_train(global_batch_size=12, micro_batch_size=3)
    with pytest.raises(UsageError, match="must be at least 6 for equal microbatches on 1, 2 or 3 data-parallel"):
        with_microbatches(config, [1, 2, 3])
    with pytest.raises(UsageError, match="must be divisible by 5 for 5 data-parallel devices, got 12"):
        with_microbatches(config, [5])


def test_the_number_of_microbatches_is_kept_without_their_size():
    config = with_train(global_batch_size=12, grad_accum_steps=3)
    assert with_microbatches(config, [4]) == config
    assert resolve_as_before(config, with_train(grad_accum_steps=2)) == config


def test_a_continued_run_keeps_its_microbatches_if_their_size_is_given():
    stored = with_microbatches(with_train(global_batch_size=12, micro_batch_size=3), [2])
    assert stored.train.grad_accum_steps == 2
    assert resolve_as_before(with_train(global_batch_size=12, micro_batch_size=3), stored) == stored


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (1, 12)),
        (["--train.micro-batch-size", "4"], (1, 4)),
        (["--train.grad-accum-steps", "5"], (5, None)),
        (["--train.micro-batch-size", "none"], (1, None)),
    ],
)
def test_given_microbatches_replace_those_of_a_preset(arguments, expected):
    config = parse_command(["--preset", "gpt2", *arguments])
    assert isinstance(config, PretrainConfig)
    assert (config.train.grad_accum_steps, config.train.micro_batch_size) == expected


@pytest.mark.parametrize("fields", [{"max_epochs": 1e38}, {"max_tokens": 10**15}])
def test_a_run_that_is_too_long_is_rejected(fields):
    with pytest.raises(UsageError, match=f"train.max_epochs and train.max_tokens must give at most {MAX_STEPS} steps"):
        resolve_from_data(with_train(**fields), FACTS._replace(num_windows=10**12))


def test_a_continued_run_keeps_its_steps_if_its_length_is_given_in_epochs():
    stored = with_train(max_steps=125, max_epochs=2.0)
    assert resolve_as_before(with_train(max_epochs=2.0), stored) == stored
    assert resolve_as_before(with_train(max_steps=7), stored).train.max_steps == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (1000, 5.0, None)),
        (["--train.max-steps=7"], (7, None, None)),
        (["--train.max_steps", "1000"], (1000, None, None)),
        (["--train.max-tokens", "99"], (1000, None, 99)),
        (["--train.max-steps", "7", "--train.max-epochs", "none"], (7, None, None)),
        (["--train.max-tokens", "99", "--train.max-epochs", "2"], (1000, 2.0, 99)),
    ],
)
def test_a_given_length_replaces_the_epochs_of_a_preset(arguments, expected):
    config = parse_command(["--preset", "wikitext", *arguments])
    assert isinstance(config, PretrainConfig)
    assert (config.train.max_steps, config.train.max_epochs, config.train.max_tokens) == expected


@pytest.mark.parametrize(
    ("replaced", "other"),
    [
        ("--train.max-steps", "--train.max-epochs"),
        ("--train.max-steps", "--train.max-tokens"),
        ("--train.grad-accum-steps", "--train.micro-batch-size"),
    ],
)
def test_two_options_of_which_one_replaces_the_other_are_rejected(replaced, other):
    message = f"^{replaced} cannot be given with {other}, which replaces it. Leave one of them out.$"
    with pytest.raises(UsageError, match=message):
        parse_command([replaced, "4", other, "2"])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tokenizer", "gpt2", "gpt2"),
        ("split", "position", "position"),
        ("val-fraction", "0.25", 0.25),
        ("split-seed", "3", 3),
        ("text-column", "body", "body"),
    ],
)
@pytest.mark.parametrize("prefix", ["--", "--prepare."])
def test_an_option_of_prepare_has_a_long_and_a_short_name(prefix, name, value, expected):
    config = parse_command([f"{prefix}{name}", value])
    assert isinstance(config, PretrainConfig)
    assert getattr(config.prepare, name.replace("-", "_")) == expected


def test_parameters_in_bfloat16_are_rejected_before_anything_starts():
    with pytest.raises(ValueError, match=r"model\.param_dtype must be float32 or float64 for training, got 'bfloat16'"):
        parse_command(["--model.param-dtype", "bfloat16"])
