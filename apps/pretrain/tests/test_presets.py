import dataclasses

import pytest

from nnx_gpt2 import learning_rate_schedule, num_params
from pretrain import PRESETS
from pretrain._cli import parse_command
from pretrain._config import PretrainConfig, with_vocab_size
from pretrain._data_names import Splits, parse_data
from pretrain._resolve.devices import with_microbatches


def test_every_preset_knows_its_name():
    assert list(PRESETS) == [
        "quickstart",
        "baby",
        "tutorial",
        "wikitext",
        "finetune",
        "fineweb",
        "speedrun",
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
    ]
    assert all(make().preset == name for name, make in PRESETS.items())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "quickstart"),
        (["--preset", "baby"], "baby"),
        (["--seed", "1", "--preset=gpt2-xl", "--data", "baby"], "gpt2-xl"),
        (["--name", "baby"], "quickstart"),
    ],
)
def test_the_preset_is_found_among_the_arguments(arguments, name):
    config = parse_command(arguments)
    assert isinstance(config, PretrainConfig)
    assert config.model == PRESETS[name]().model
    assert config.preset == name


def test_quickstart_is_a_run_of_minutes():
    config = PRESETS["quickstart"]()
    model, train, optimizer = config.model, config.train, config.optimizer
    assert (config.data, config.prepare.tokenizer, config.prompts) == ("builtin", "bytes", ("def ", "import "))
    assert (model.num_layers, model.num_heads, model.embed_dim, model.seq_len) == (4, 4, 128, 64)
    assert (model.dropout_rate, model.dtype, model.param_dtype) == (0.0, "float32", "float32")
    assert (train.global_batch_size, train.max_steps, train.grad_accum_steps) == (16, 1500, 1)
    assert (train.log_every, train.eval_every, train.checkpoint_every) == (25, 250, 250)
    assert (train.eval_tokens, train.order) == (20_480, None)
    assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup_steps) == (2e-3, 2e-4, 50)
    assert (optimizer.schedule, optimizer.beta1, optimizer.beta2) == ("cosine", 0.9, 0.99)


def test_baby_is_nanogpts_cpu_setting():
    config = PRESETS["baby"]()
    assert (config.data, config.prepare.tokenizer, config.prompts) == ("builtin", "bytes", ("\n",))
    train = config.train
    assert (train.log_every, train.eval_every, train.checkpoint_every) == (20, 500, 250)
    assert train.eval_tokens is not None
    assert train.eval_tokens >= 111_540 - 1  # all of the validation text of tiny Shakespeare
    model, train, optimizer = config.model, config.train, config.optimizer
    assert (model.num_layers, model.num_heads, model.embed_dim, model.seq_len) == (4, 4, 128, 64)
    assert (model.dropout_rate, model.dtype, model.param_dtype) == (0.0, "float32", "float32")
    assert (train.global_batch_size, train.max_steps) == (12, 2000)
    assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup_steps) == (1e-3, 1e-4, 100)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.99)


def test_tutorial_is_the_reference_job():
    config = PRESETS["tutorial"]()
    model, train = config.model, config.train
    assert (config.data, config.prepare.tokenizer, config.seed, train.order) == ("openwebtext", "gpt2", 2357, "random")
    assert (model.num_layers, model.num_heads, model.embed_dim, model.seq_len) == (12, 12, 768, 1024)
    assert (model.dropout_rate, model.dtype, model.param_dtype) == (0.1, "bfloat16", "float32")
    assert (train.global_batch_size, train.max_steps, train.log_every) == (32, 10_000, 10)
    assert (train.eval_every, train.checkpoint_every) == (100, 100)
    assert train.eval_tokens == 655_360
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (5e-4, 0.1)
    assert (config.optimizer.final_learning_rate, config.optimizer.warmup_steps) == (0.0, 0)
    assert (config.optimizer.schedule, config.optimizer.beta2) == ("cosine", 0.999)


def test_wikitext_is_the_job_of_the_pytorch_tutorial():
    config = with_vocab_size(PRESETS["wikitext"](), 50257)
    model, train, optimizer = config.model, config.train, config.optimizer
    assert parse_data(config.data) == Splits(
        "Salesforce/wikitext:wikitext-103-raw-v1:train", "Salesforce/wikitext:wikitext-103-raw-v1:validation"
    )
    assert (config.prepare.tokenizer, config.prepare.documents, config.prepare.row_end) == (
        "gpt2", "wikitext-titles", "\n",
    )  # fmt: skip
    assert num_params(model) == 123_849_984  # the tutorial prints 123.8M
    assert (model.dropout_rate, model.norm_epsilon, model.dtype) == (0.1, 1e-5, "float32")
    assert train.global_batch_size * model.seq_len == 4 * 16 * 256
    assert (train.max_epochs, train.order, train.checkpoints_to_keep, train.max_failures) == (5, None, 2, 3)
    assert (optimizer.name, optimizer.schedule, optimizer.learning_rate) == ("adamw", "constant", 3e-4)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.beta1, optimizer.beta2) == (0.1, 1.0, 0.9, 0.999)
    assert optimizer.warmup_steps == 0
    assert (train.log_every, train.eval_every, train.checkpoint_every) == (10, 1000, 1000)
    assert train.eval_tokens == 327_680


def test_fineweb_is_the_run_of_llm_c():
    config = with_vocab_size(PRESETS["fineweb"](), 50257)
    model, train, optimizer = config.model, config.train, config.optimizer
    assert num_params(model) == 124_439_808
    assert (config.data, config.prepare.tokenizer, config.prepare.split) == ("fineweb", "gpt2", "start")
    assert (model.seq_len, model.dropout_rate, model.dtype, model.param_dtype) == (1024, 0.0, "bfloat16", "float32")
    assert train.global_batch_size * model.seq_len == 524_288
    assert train.global_batch_size * model.seq_len * train.max_steps == 10_255_073_280
    assert with_microbatches(config, [8]).train.grad_accum_steps == 4
    assert (optimizer.name, optimizer.schedule, optimizer.warmup_steps) == ("adamw", "cosine", 700)
    assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.weight_decay) == (6e-4, 0.0, 0.1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (0.9, 0.95, 1.0)
    assert (train.eval_every, train.eval_tokens) == (250, 20 * 524_288)


def test_speedrun_is_fineweb_with_muon_in_fewer_steps():
    before, config = PRESETS["fineweb"](), PRESETS["speedrun"]()
    optimizer = config.optimizer
    assert config.train.max_steps == pytest.approx(0.65 * before.train.max_steps, rel=2e-3)
    same = dataclasses.replace(
        config,
        preset=before.preset,
        train=dataclasses.replace(config.train, max_steps=before.train.max_steps),
        optimizer=before.optimizer,
    )
    assert same == before
    assert (optimizer.name, optimizer.muon_scaling, optimizer.muon_momentum) == ("muon", "rms", 0.95)
    # Updates of root mean square 0.2 with the first rate have the length of those of root mean square 1 with 3.6e-4.
    assert 0.2 * optimizer.of_matrices.learning_rate == pytest.approx(3.6e-4)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.muon_weight_decay) == (3.6e-3, 0.0, None)
    rates = learning_rate_schedule(optimizer.of_matrices, config.train.max_steps)
    assert [float(rates(step)) for step in (250, 8_999, 12_699)] == pytest.approx([1.8e-3, 1.8e-3, 0.0], abs=1e-9)
    assert optimizer.wsd_decay_steps(12_700) / 12_700 == pytest.approx(1_800 / 6_200, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "published", "learning_rate", "windows_at_once"),
    [
        ("gpt2", 124_439_808, 6e-4, 12),
        ("gpt2-medium", 354_823_168, 3e-4, 6),
        ("gpt2-large", 774_030_080, 2.5e-4, 4),
        ("gpt2-xl", 1_557_611_200, 2e-4, 2),
    ],
)
def test_openwebtext_presets_are_half_a_million_tokens_a_step_on_eight_devices(
    name, published, learning_rate, windows_at_once
):
    config = with_vocab_size(PRESETS[name](), 50257)
    model, train, optimizer = config.model, config.train, config.optimizer
    assert num_params(model) == published
    assert (optimizer.learning_rate, optimizer.final_learning_rate) == pytest.approx(
        (learning_rate, learning_rate / 10)
    )
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.weight_decay) == ("cosine", 2000, 0.1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.clip_norm) == (0.9, 0.95, 1.0)
    assert (model.dropout_rate, model.dtype, model.param_dtype) == (0.0, "bfloat16", "float32")
    assert (config.data, config.prepare.tokenizer, train.order) == ("openwebtext", "gpt2", None)
    assert (train.max_steps, train.eval_every, train.checkpoint_every) == (600_000, 1000, 1000)
    assert config.train.global_batch_size * config.model.seq_len == 491_520
    assert train.micro_batch_size == windows_at_once
    assert with_microbatches(config, [8]).train.grad_accum_steps == 60 // windows_at_once
    assert (train.log_every, train.eval_tokens) == (10, 1_966_080)
