"""Text by a trained model: the command `sample`, and the sample at the end of a run."""

import math
from typing import TYPE_CHECKING, Any

import jax

from nnx_gpt2 import GPT2, generate, merge
from owt_data import load_tokenizer
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError
from pretrain._trained import load_trained

if TYPE_CHECKING:
    import tiktoken

_END_TOKENS = 400
_END_TEMPERATURE = 0.8
_END_TOP_K = 40


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
    return _continue(
        trained.model,
        load_tokenizer(trained.description["data"]["tokenizer"]),
        prompt,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        key=jax.random.key(seed),
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
