"""nnx-gpt2 alone: a small GPT-2 on the bytes of a text, in one process, without Ray and without a data package.

    python examples/model_alone.py --text book.txt

It trains, samples, writes the model in Hugging Face's format, and evaluates the files.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from nnx_gpt2 import (
    GPT2,
    GPT2Config,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    evaluate_tokens,
    generate,
    make_train_step,
    merge,
    num_params,
)


def main() -> None:
    """Train, sample, save and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--out", type=Path, default=Path("model-alone"), help="folder for the trained model")
    arguments = parser.parse_args()

    # The tokens are bytes. Keep the last tenth for the evaluation.
    tokens = np.frombuffer(arguments.text.read_bytes(), np.uint8)
    train, val = np.split(tokens, [len(tokens) * 9 // 10])
    config = GPT2Config(vocab_size=256, seq_len=64, num_layers=2, num_heads=4, embed_dim=128)
    print(f"{num_params(config):,} parameters, {len(train):,} tokens")

    optimizer = create_optimizer(OptimizerConfig(learning_rate=2e-3, warmup_steps=20), max_steps=arguments.steps)
    state = create_train_state(config, optimizer, jax.random.key(0))
    train_step = make_train_step(config, optimizer)
    dropout_key, sample_key = jax.random.split(jax.random.key(1))

    rng = np.random.default_rng(0)
    for step in range(1, arguments.steps + 1):
        # A window is seq_len inputs and, shifted by one, seq_len targets.
        starts = rng.integers(0, len(train) - config.seq_len, size=16)
        windows = train[starts[:, None] + np.arange(config.seq_len + 1)]
        state, metrics = train_step(state, windows, dropout_key)
        if step % 50 == 0 or step == arguments.steps:
            print(f"step {step}  loss {float(metrics['loss']):.3f}")

    model = merge(config, state.params)
    (sample,) = generate(model, [list(arguments.prompt.encode())], 100, key=sample_key, temperature=0.8, top_k=40)
    print(bytes(sample).decode(errors="replace"))

    model.save_pretrained(arguments.out)
    loaded = GPT2.from_pretrained(arguments.out)
    print(f"validation loss {evaluate_tokens(loaded, val).loss:.3f}, model in {arguments.out}")


if __name__ == "__main__":
    main()
