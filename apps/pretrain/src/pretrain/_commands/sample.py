"""Text by a trained model: the command `sample`, and the sample at the end of a run."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from nnx_gpt2 import GPT2, generate, merge
from owt_data import load_tokenizer
from pretrain._commands.load import load_trained
from pretrain._config import NUM_SEEDS, PretrainConfig
from pretrain._errors import UsageError

if TYPE_CHECKING:
    import tiktoken

_END_TOKENS = 400
_END_TEMPERATURE = 0.8
_END_TOP_K = 40
_SAMPLES_AT_ONCE = 32


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
) -> Iterator[str]:
    """Continue a prompt several times. Nothing is computed, or rejected, before the first text is asked for.

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
    for name, value, holds, constraint in (
        ("prompt", prompt, prompt != "", "not empty, as the model continues it"),
        ("max-new-tokens", max_new_tokens, max_new_tokens >= 0, "at least 0"),
        ("num-samples", num_samples, num_samples >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature < math.inf, "finite and at least 0"),
        ("top-k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top-p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, 0 <= seed < NUM_SEEDS, f"at least 0 and below {NUM_SEEDS}"),
    ):
        if not holds:
            raise UsageError(f"--{name} must be {constraint}, got {value!r}. Give another.")
    trained = load_trained(run)
    tokenizer, key = load_tokenizer(trained.description.data.tokenizer), jax.random.key(seed)
    for first in range(0, num_samples, _SAMPLES_AT_ONCE):
        yield from _continue(
            trained.model,
            tokenizer,
            prompt,
            num_samples=min(_SAMPLES_AT_ONCE, num_samples - first),
            max_new_tokens=max_new_tokens,
            key=jax.random.fold_in(key, first) if first else key,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )


def sample_text(config: PretrainConfig, tokenizer: "tiktoken.Encoding", params: Any) -> str:
    """The sample at the end of a run, computed on one device of this process.

    Args:
        config: the run's; its `prompt` is continued.
        tokenizer: the run's.
        params: the trained parameters, complete on every device.
    """
    model = merge(config.model, jax.tree.map(lambda x: x.addressable_data(0), params))
    (text,) = _continue(
        model,
        tokenizer,
        config.prompt,
        num_samples=1,
        max_new_tokens=_END_TOKENS,
        key=jax.random.key(config.seed),
        temperature=_END_TEMPERATURE,
        top_k=_END_TOP_K,
    )
    return text


def _continue(
    model: GPT2, tokenizer: "tiktoken.Encoding", prompt: str, *, num_samples: int, max_new_tokens: int, **options: Any
) -> list[str]:
    prompt_tokens = tokenizer.encode_ordinary(prompt)
    # The model sees the end of a prompt that is longer than its context.
    unseen, seen = prompt_tokens[: -model.config.seq_len], prompt_tokens[-model.config.seq_len :]
    # A model may have more ids than the tokenizer, which cannot decode them.
    vocab_size = min(tokenizer.n_vocab, model.config.vocab_size)
    texts = generate(model, [seen] * num_samples, max_new_tokens, vocab_size=vocab_size, **options)
    return [tokenizer.decode(unseen + text, errors="replace") for text in texts]
