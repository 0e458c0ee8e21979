"""The command `sample`: text by a trained model."""

import math

import jax

from nnx_gpt2 import generate
from owt_data import load_tokenizer
from pretrain._errors import UsageError
from pretrain._trained import load_trained


def sample(
    run: str,
    *,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    num_samples: int,
) -> list[str]:
    """Continue a prompt several times.

    Args:
        run: the run's folder or name.
        prompt: what the text begins with.
        max_new_tokens: length of each continuation.
        temperature: 0 takes the likeliest token each time.
        top_k: draw among so many; None among all.
        top_p: draw among the likeliest that have this probability together; None among all.
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
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"expected --top-p above 0 and at most 1, got {top_p}")
    trained = load_trained(run)
    tokenizer = load_tokenizer(trained.description["data"]["tokenizer"])
    prompt_tokens = tokenizer.encode_ordinary(prompt)
    # Of a prompt longer than the context the model sees the end.
    unseen, seen = prompt_tokens[: -trained.model.config.seq_len], prompt_tokens[-trained.model.config.seq_len :]
    texts = generate(
        trained.model,
        [seen] * num_samples,
        max_new_tokens,
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return [tokenizer.decode(unseen + text, errors="replace") for text in texts]
