"""Text from a model."""

from typing import TYPE_CHECKING, Any

import jax

from nnx_gpt2 import GPT2, generate, merge
from pretrain._config import PretrainConfig

if TYPE_CHECKING:
    import tiktoken

_END_TOKENS = 400
_END_TEMPERATURE = 0.8
_END_TOP_K = 40


def sample_text(config: PretrainConfig, tokenizer: "tiktoken.Encoding", params: Any) -> str:
    """Generate the sample at the end of a run, on one device of this process.

    Args:
        config: the run's configuration, with the prompt.
        tokenizer: the run's tokenizer.
        params: the trained parameters, replicated on every device.
    """
    model = merge(config.model, jax.tree.map(lambda x: x.addressable_data(0), params))
    (text,) = continue_prompt(
        model,
        tokenizer,
        config.prompts[0],
        num_samples=1,
        max_new_tokens=_END_TOKENS,
        key=jax.random.key(config.seed),
        temperature=_END_TEMPERATURE,
        top_k=_END_TOP_K,
    )
    return text


def continue_prompt(
    model: GPT2, tokenizer: "tiktoken.Encoding", prompt: str, *, num_samples: int, max_new_tokens: int, **options: Any
) -> list[str]:
    """Generate continuations of a prompt.

    Args:
        model: the model.
        tokenizer: the tokenizer of the model's training text.
        prompt: the beginning of each text.
        num_samples: number of texts.
        max_new_tokens: number of tokens to add.
        options: other arguments of `nnx_gpt2.generate`.

    Returns:
        The texts, each with the prompt.
    """
    prompt_tokens = tokenizer.encode_ordinary(prompt)
    # Of a prompt that is longer than the context, the model reads the last tokens.
    unseen, seen = prompt_tokens[: -model.config.seq_len], prompt_tokens[-model.config.seq_len :]
    # The model may have more ids than the tokenizer can decode.
    vocab_size = min(tokenizer.n_vocab, model.config.vocab_size)
    texts = generate(model, [seen] * num_samples, max_new_tokens, vocab_size=vocab_size, **options)
    return [tokenizer.decode(unseen + text, errors="replace") for text in texts]
