"""The command `sample`: texts from a trained model."""

from collections.abc import Callable, Iterable, Iterator

import jax

from pretrain._commands.load import load_trained
from pretrain._config import MAX_COUNT, MAX_SAMPLE_TOKENS, NUM_SEEDS
from pretrain._errors import UsageError, shown
from pretrain._training.sampling import continue_prompt

_SAMPLES_AT_ONCE = 32
# The logits are divided by it in float32.
_MOST_TEMPERATURE = 1e30


def sample(  # noqa: PLR0913 - the arguments of a draw are independent
    run: str,
    *,
    prompt: str | Iterable[str],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    num_samples: int,
    write: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Yield continuations of a prompt, as they are drawn. The arguments are checked when the first is requested.

    Several texts are drawn at the same time, up to 32: `write` gets the first of them in pieces while they are drawn,
    and each other one when it is requested.

    Args:
        run: the model, as for `load_trained`.
        prompt: the beginning of each text. An empty one starts a document; an iterable gives prompts one after the
            other, each of which is read when the texts of the one before are drawn.
        max_new_tokens: number of tokens to add.
        temperature: randomness of the draw; 0 takes the most likely token each time.
        top_k: draw from the top_k most likely tokens; None draws from all tokens.
        top_p: draw from the most likely tokens whose probabilities sum to top_p; None draws from all tokens.
        seed: seed of the draw.
        num_samples: number of texts.
        write: called with the pieces of each text, before the text is yielded.

    Raises:
        ValueError: an argument or the run cannot be used; see `rejection` for the subclasses.
    """
    for name, value, holds, constraint in (
        ("max-new-tokens", max_new_tokens, 0 <= max_new_tokens <= MAX_SAMPLE_TOKENS, f"from 0 to {MAX_SAMPLE_TOKENS}"),
        ("num-samples", num_samples, 1 <= num_samples <= MAX_COUNT, f"from 1 to {MAX_COUNT}"),
        ("temperature", temperature, 0 <= temperature <= _MOST_TEMPERATURE, f"from 0 to {_MOST_TEMPERATURE:g}"),
        ("top-k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top-p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, 0 <= seed < NUM_SEEDS, f"at least 0 and at most {NUM_SEEDS - 1}"),
    ):
        if not holds:
            raise UsageError(f"--{name} must be {constraint}, got {shown(value)}.")
    trained = load_trained(run)
    tokenizer, key = trained.tokenizer, jax.random.key(seed)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    for each, first in ((each, first) for each in prompts for first in range(0, num_samples, _SAMPLES_AT_ONCE)):
        texts = continue_prompt(
            trained.model,
            tokenizer,
            each,
            num_samples=min(_SAMPLES_AT_ONCE, num_samples - first),
            max_new_tokens=max_new_tokens,
            key=jax.random.fold_in(key, first) if first else key,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            write=write,
        )
        for number, text in enumerate(texts):
            if number and write is not None:
                write(text)
            yield text
