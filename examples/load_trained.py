"""Load a trained model in Python: sample from it, evaluate a text, and write it for other libraries.

python examples/load_trained.py runs/own-text --prompt "The "
"""

import argparse

import jax
import numpy as np

from nnx_gpt2 import evaluate_tokens, generate
from pretrain import load_trained


def main() -> None:
    """Load, sample, evaluate and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder or URI of a run")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--export", help="folder for config.json and model.safetensors, for transformers")
    arguments = parser.parse_args()

    trained = load_trained(arguments.run)
    model, tokenizer = trained.model, trained.tokenizer
    print(f"step {trained.step} of {trained.config.train.max_steps}, {model.config.num_layers} layers")

    prompt = tokenizer.encode_ordinary(arguments.prompt)
    key = jax.random.key(0)
    (tokens,) = generate(model, [prompt], arguments.max_new_tokens, key=key, temperature=0.8, top_k=40)
    print(tokenizer.decode(tokens))
    print(f"loss of this text {evaluate_tokens(model, np.array(tokens)).loss:.3f}")
    if arguments.export:
        model.save_pretrained(arguments.export)


if __name__ == "__main__":
    main()
