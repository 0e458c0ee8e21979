"""Presets: complete configurations, each with its arithmetic and its expected result."""

import dataclasses
from collections.abc import Callable
from typing import Any

from nnx_gpt2 import GPT2Config, OptimizerConfig, gpt2, gpt2_large, gpt2_medium, gpt2_xl
from pretrain._config import ModelConfig, PrepareConfig, PresetName, PretrainConfig, TrainConfig

# Products in bfloat16 and a residual stream in float32, as under PyTorch's autocast in nanoGPT. On Shakespeare, a model
# of 8 layers of width 128 then had the validation loss of float32 within 0.0002 after 700 steps (2 seeds: 2.1610 and
# 2.1634). With the stream in bfloat16 it had 2.1668 and 2.1627. GPT-2 124M needs 7 % more temporary memory for it.
_MIXED: dict[str, Any] = {"dtype": "bfloat16", "residual_dtype": "float32"}


def quickstart() -> PretrainConfig:
    """Pretrain a small model on Python's own source, byte by byte, in minutes on a laptop.

    16 windows * 64 tokens = 1 024 tokens a step; 1 500 steps see 1.5 of the corpus's 11 million bytes.
    """
    return PretrainConfig(
        preset="quickstart",
        data="builtin",
        prompts=("def ", "import "),
        prepare=PrepareConfig(tokenizer="bytes"),
        model=ModelConfig(seq_len=64, num_layers=4, num_heads=4, embed_dim=128),
        train=TrainConfig(
            global_batch_size=16,
            max_steps=1500,
            log_every=25,
            eval_every=250,
            eval_tokens=20_480,
            checkpoint_every=250,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, beta2=0.99),
    )


def baby() -> PretrainConfig:
    """NanoGPT's setting for a CPU. NanoGPT reports a validation loss of 1.88 on tiny Shakespeare.

    12 windows * 64 tokens = 768 tokens a step; 2 000 steps are 1.5 epochs of a million bytes. A validation reads all
    of the validation text: 111 540 tokens.
    """
    return PretrainConfig(
        preset="baby",
        prepare=PrepareConfig(tokenizer="bytes"),
        model=ModelConfig(seq_len=64, num_layers=4, num_heads=4, embed_dim=128),
        train=TrainConfig(
            global_batch_size=12,
            max_steps=2000,
            log_every=20,
            eval_every=500,
            eval_tokens=115_200,
            checkpoint_every=250,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, beta2=0.99),
    )


def tutorial() -> PretrainConfig:
    """Pretrain GPT-2 124M on OpenWebText, as Ray's JaxTrainer tutorial does.

    32 windows * 1 024 tokens = 32 768 tokens a step; 10 000 steps see 328 million of its 9 billion.

    The tutorial adds 1e-6 in its norms and does not clip gradients: `--model.norm-epsilon 1e-6 --optimizer.clip-norm 0`
    do the same. It also decays biases and norms, and draws its kernels from Xavier's uniform distribution. There is no
    option for these two: this model has the decay and the initialization of GPT-2.

    GPUs below compute capability 8 have no bfloat16: give them `--model.dtype float32`.
    """
    return PretrainConfig(
        preset="tutorial",
        data="openwebtext",
        prepare=PrepareConfig(tokenizer="gpt2"),
        model=_fit_to_tokenizer(gpt2(dropout_rate=0.1, **_MIXED)),
        train=TrainConfig(
            global_batch_size=32,
            max_steps=10_000,
            log_every=10,
            eval_every=100,
            eval_tokens=655_360,
            checkpoint_every=100,
            order="random",
        ),
        optimizer=OptimizerConfig(learning_rate=5e-4, min_learning_rate_ratio=0.0, beta2=0.999),
    )


def wikitext() -> PretrainConfig:
    """Pretrain GPT-2 124M on wikitext-103, as Ray's PyTorch tutorial does.

    4 workers * 16 windows * 256 tokens = 16 384 tokens a step. An epoch is about 118 million tokens, 7 200 steps; a run
    is 5 epochs. The validation text has about 1 000 windows. The model has 123 849 984 parameters.

    The tutorial trains in float32, which its GPUs are made for. `--model.dtype bfloat16` is faster on newer GPUs.
    The norms, the dropout and the initialization are those of transformers, as in the tutorial. Three things differ.
    The tutorial also decays biases and norms. Its blocks have 255 targets, a window has 256. It drops the end of each
    batch of rows that it tokenizes, where this preset drops less than one window in all.
    """
    source = "Salesforce/wikitext:wikitext-103-raw-v1"
    return PretrainConfig(
        preset="wikitext",
        data=f"train={source}:train,val={source}:validation",
        prepare=PrepareConfig(tokenizer="gpt2", documents="wikitext-titles", row_end="\n"),
        model=_fit_to_tokenizer(gpt2(seq_len=256, dropout_rate=0.1)),
        train=TrainConfig(
            global_batch_size=64,
            max_epochs=5,
            log_every=10,
            eval_every=1000,
            eval_tokens=327_680,
            checkpoint_every=1000,
        ),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=3e-4, beta2=0.999),
    )


def finetune() -> PretrainConfig:
    """Fine-tune GPT-2 124M on one text at a small constant rate, as nanoGPT does on Shakespeare.

    32 windows * 1 024 tokens = 32 768 tokens a step; 20 steps are 2 epochs of Shakespeare's 300 000 tokens. NanoGPT
    takes `--init-from gpt2-xl`.
    """
    return PretrainConfig(
        preset="finetune",
        init_from="gpt2",
        prepare=PrepareConfig(tokenizer="gpt2"),
        model=dataclasses.replace(_fit_to_tokenizer(gpt2(**_MIXED)), vocab_size=gpt2().vocab_size),
        train=TrainConfig(
            global_batch_size=32,
            max_steps=20,
            log_every=1,
            eval_every=5,
            eval_tokens=40_960,
            checkpoint_every=5,
            micro_batch_size=1,
        ),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=3e-5, beta2=0.95),
    )


def _fit_to_tokenizer(model: GPT2Config) -> ModelConfig:
    fields = dataclasses.asdict(model)
    del fields["vocab_size"]
    return ModelConfig(**fields)


def fineweb() -> PretrainConfig:
    """GPT-2 124M on 10 billion tokens of FineWeb, with llm.c's settings. Its validation loss was 3.2722.

    512 windows * 1 024 tokens = 524 288 tokens a step; 19 560 steps see 10.26 billion, an epoch of the sample of 10B
    tokens. On 8 devices, each has 64 windows a step, in microbatches of 16.

    The settings are those of llm.c's scripts/run_gpt2_124M.sh: a rate of 6e-4 after 700 steps of warmup, with a cosine
    to 0, decay 0.1 of matrices, betas 0.9 and 0.95, clipping at 1. The loss and the number of steps are those of its
    run in KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc; 3.28 is the target of that repository's
    speedruns. Karpathy's first run, of 18 865 steps and 9.9 billion tokens, ended at about 3.29
    (karpathy/llm.c, discussion 481).

    llm.c validates on the first 10.5 million tokens of the text, of which it does not train on the first 100 million.
    Here, validation is the first 16 MiB, the first 3.6 million tokens of the same text. Windows are shuffled over all
    tokens; llm.c reads them in the order of the text.
    """
    rates = OptimizerConfig(learning_rate=6e-4, min_learning_rate_ratio=0.0, warmup_steps=700, beta2=0.95)
    return _fineweb("fineweb", rates, max_steps=19_560)


def speedrun() -> PretrainConfig:
    """Train `fineweb` by Muon, in 0.65 of its steps. No run of it has been measured.

    12 700 steps of 524 288 tokens see 6.66 billion. Two records of KellerJordan/modded-nanogpt, in
    records/track_1_short, have tuned rates, and rotary positions, which GPT-2 lacks: AdamW reached a loss of 3.276
    after 9 536 steps of this size (2024-06-06_AdamW), Muon 3.279 after 6 200 (2024-10-10_Muon), 0.65 as many;
    0.65 * 19 560 = 12 714. `benchmarks/optimizers.py` compares the two on small models.

    The settings are those of the second record: a rate of 3.6e-4 for updates of root mean square 1, which is 1.8e-3 for
    those of 0.2 here; AdamW for the embeddings with 3.6e-3, no weight decay, and a linear decay to 0 over the last
    1 800 / 6 200 of the steps. The warmups of the rate and of the momentum are added.
    """
    rates = OptimizerConfig(
        name="muon",
        muon_learning_rate=1.8e-3,
        muon_momentum_warmup_steps=300,
        learning_rate=3.6e-3,
        weight_decay=0.0,
        beta2=0.95,
        schedule="wsd",
        warmup_steps=250,
        decay_steps=3_700,
        min_learning_rate_ratio=0.0,
    )
    return _fineweb("speedrun", rates, max_steps=12_700)


def _fineweb(preset: PresetName, optimizer: OptimizerConfig, *, max_steps: int) -> PretrainConfig:
    return PretrainConfig(
        preset=preset,
        data="fineweb",
        prepare=PrepareConfig(tokenizer="gpt2", split="start"),
        model=_fit_to_tokenizer(gpt2(**_MIXED)),
        train=TrainConfig(
            global_batch_size=512,
            max_steps=max_steps,
            log_every=10,
            eval_every=250,
            eval_tokens=10_485_760,
            checkpoint_every=1000,
            micro_batch_size=16,
        ),
        optimizer=optimizer,
    )


def _openwebtext(preset: PresetName, model: GPT2Config, learning_rate: float, micro_batch_size: int) -> PretrainConfig:
    """NanoGPT's long run: 480 windows * 1 024 tokens = 491 520 tokens a step, 600 000 steps.

    On nanoGPT's 8 devices, each has 60 windows a step, in microbatches of `micro_batch_size`.
    """
    return PretrainConfig(
        preset=preset,
        data="openwebtext",
        prepare=PrepareConfig(tokenizer="gpt2"),
        model=_fit_to_tokenizer(model),
        train=TrainConfig(
            global_batch_size=480,
            max_steps=600_000,
            log_every=10,
            eval_every=1000,
            eval_tokens=1_966_080,
            checkpoint_every=1000,
            micro_batch_size=micro_batch_size,
        ),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2000, beta2=0.95),
    )


def gpt2_small() -> PretrainConfig:
    """GPT-2 124M on OpenWebText; nanoGPT reports a validation loss of about 2.85."""
    return _openwebtext("gpt2", gpt2(**_MIXED), 6e-4, micro_batch_size=12)


# The larger models take the learning rates of GPT-3's models of about their size:
# Brown et al., 2020 (arXiv:2005.14165), table 2.1.


def medium() -> PretrainConfig:
    """GPT-2 355M on OpenWebText."""
    return _openwebtext("gpt2-medium", gpt2_medium(**_MIXED), 3e-4, micro_batch_size=6)


def large() -> PretrainConfig:
    """GPT-2 774M on OpenWebText."""
    return _openwebtext("gpt2-large", gpt2_large(**_MIXED), 2.5e-4, micro_batch_size=4)


def xl() -> PretrainConfig:
    """GPT-2 1.6B on OpenWebText."""
    return _openwebtext("gpt2-xl", gpt2_xl(**_MIXED), 2e-4, micro_batch_size=2)


PRESETS: dict[str, Callable[[], PretrainConfig]] = {
    "quickstart": quickstart,
    "baby": baby,
    "tutorial": tutorial,
    "wikitext": wikitext,
    "finetune": finetune,
    "fineweb": fineweb,
    "speedrun": speedrun,
    "gpt2": gpt2_small,
    "gpt2-medium": medium,
    "gpt2-large": large,
    "gpt2-xl": xl,
}
