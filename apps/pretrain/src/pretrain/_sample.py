"""The command `sample`: text by a trained model."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from nnx_gpt2 import generate
from owt_data import load_tokenizer
from pretrain._errors import UsageError
from pretrain._trained import load_trained


def sample(
    run: str, *, prompt: str, max_new_tokens: int, temperature: float, top_k: int | None, seed: int, num_samples: int
) -> list[str]:
    """Continue a prompt several times.

    Args:
        run: the run's folder or name.
        prompt: what the text begins with.
        max_new_tokens: length of each continuation.
        temperature: 0 takes the likeliest token each time.
        top_k: draw among so many; None among all.
        seed: makes it reproducible.
        num_samples: how many texts.

    Raises:
        ValueError: a subclass says what is wrong.
    """
    if not prompt:
        raise UsageError("prompt must not be empty: the model continues something")
    if max_new_tokens < 0 or num_samples < 1:
        raise UsageError(
            f"expected --max-new-tokens of at least 0 and --num-samples of at least 1, got {max_new_tokens} and "
            f"{num_samples}"
        )
    if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise UsageError(
            f"expected --temperature of at least 0 and --top-k of at least 1, got {temperature} and {top_k}"
        )
    trained = load_trained(run)
    tokenizer = load_tokenizer(trained.description["data"]["tokenizer"])
    tokens = generate(
        trained.model,
        jnp.tile(jnp.array([tokenizer.encode_ordinary(prompt)], jnp.int32), (num_samples, 1)),
        max_new_tokens,
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
    )
    return [tokenizer.decode(row, errors="replace") for row in np.asarray(tokens).tolist()]
