import dataclasses
import pydoc
import re

import pytest

from nnx_gpt2 import GPT2Config, OptimizerConfig, gpt2_xl


@pytest.mark.parametrize(("dtype", "stream"), [("float32", "bfloat16"), ("float64", "float32")])
def test_the_residual_stream_is_at_least_as_precise_as_the_layers(dtype, stream):
    for held in ("float64", None):
        assert GPT2Config(dtype=dtype, residual_dtype=held).stream_dtype == (held or dtype)
    with pytest.raises(ValueError, match=r"residual_dtype must be None, or a type of at least the precision"):
        GPT2Config(dtype=dtype, residual_dtype=stream)


def test_vocabulary_is_padded_to_a_multiple_of_128():
    assert GPT2Config().padded_vocab_size == 50304
    assert GPT2Config(vocab_size=256).padded_vocab_size == 256
    assert GPT2Config(vocab_size=257).padded_vocab_size == 384


@pytest.mark.parametrize("cls", [GPT2Config, OptimizerConfig])
def test_help_says_what_each_field_is(cls):
    lines = [line.strip(" |") for line in pydoc.plain(pydoc.render_doc(cls)).splitlines()]
    descriptors = lines[lines.index("Data descriptors defined here:") :]
    for field in dataclasses.fields(cls):
        assert descriptors[descriptors.index(field.name) + 1], field.name
    if cls is GPT2Config:
        assert descriptors[descriptors.index("seq_len") + 1] == "Context length, in tokens."


def test_the_way_of_computing_alone_does_not_change_the_result():
    free = {x.name for x in dataclasses.fields(GPT2Config) if not x.metadata.get("changes_result", True)}
    assert free == {"attention", "remat", "loss_chunk_tokens"}
    assert all(x.metadata.get("changes_result", True) for x in dataclasses.fields(OptimizerConfig))


def test_presets_take_changes():
    config = gpt2_xl(dropout_rate=0.1, dtype="bfloat16")
    assert (config.num_layers, config.num_heads, config.embed_dim, config.head_dim) == (48, 25, 1600, 64)
    assert (config.dropout_rate, config.dtype) == (0.1, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number from 1 to 10000, got 0"),
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads, got 768 and 5"),
        ({"dropout_rate": 1.0}, "dropout_rate must be in [0, 1), got 1.0"),
        ({"mlp_dim": 0}, "mlp_dim must be a whole number from 1 to 1048576, got 0"),
        ({"norm_epsilon": 1.0}, "norm_epsilon must be between 0 and 1, got 1.0"),
    ],
)
def test_bad_model_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GPT2Config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"learning_rate": float("nan")},
            "learning_rate must be above 0 and at most 3.4028234663852886e+38, got nan",
        ),
        ({"min_learning_rate": 1.0}, "must lie between 0 and learning_rate (0.0006), got 1.0"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number from 0 to 2147483647, got -1"),
        ({"decay_steps": 0}, "decay_steps must be a whole number from 1 to 2147483647, got 0"),
        (
            {"learning_rate": 1e39},
            "learning_rate must be above 0 and at most 3.4028234663852886e+38, got 1e+39",
        ),
        ({"clip_norm": float("inf")}, "clip_norm must be between 0 and 3.4028234663852886e+38, got inf"),
        ({"beta2": 1.0}, "beta2 must be in [0, 1), got 1.0"),
    ],
)
def test_bad_optimizer_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OptimizerConfig(**fields)


def test_the_defaults_are_gpt2s_shape_and_gpt3s_rates():
    """Brown et al., 2020, arXiv:2005.14165, table 2.1 and appendix B."""
    config, optimizer = GPT2Config(), OptimizerConfig()
    assert (config.norm_epsilon, config.dropout_rate, config.loss_chunk_tokens) == (1e-5, 0.0, 4096)
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (6e-4, 0)
    assert (optimizer.min_learning_rate, optimizer.final_learning_rate) == (None, pytest.approx(6e-5))
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.95, 0.1, 1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "splash", "seq_len": 100}, "splash must have a multiple of 128 positions, got 100."),
        ({"attention": "splash", "dropout_rate": 0.1}, "splash must have no dropout, got 0.1."),
        ({"attention": "cudnn"}, "cudnn must have the type bfloat16, got float32."),
        ({"attention": "cudnn", "dtype": "bfloat16", "dropout_rate": 0.1}, "cudnn must have no dropout, got 0.1."),
    ],
)
def test_a_kernel_that_the_model_rules_out_is_rejected_for_training(fields, message):
    with pytest.raises(ValueError, match=re.escape(f"attention backend {message} Choose auto.")):
        GPT2Config(**fields).check_trainable()


def test_parameters_in_bfloat16_are_rejected_for_training_before_anything_starts():
    for attention in ("auto", "splash", "cudnn"):
        GPT2Config(dtype="bfloat16", attention=attention).check_trainable()
    message = "param_dtype must be float32 or float64 for training, got 'bfloat16'. Set dtype to bfloat16"
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match=re.escape(message)):
            GPT2Config(param_dtype="bfloat16", dtype=dtype).check_trainable()
