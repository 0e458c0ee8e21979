"""Figures of OpenAI's GPT-2 on tasks of lm-eval, without examples in the prompt (zero-shot), each with its source.

They were measured with versions of lm-eval of several years. OpenAI's own figures for LAMBADA are not among them: its
procedure leaves out stop words, and they are 13 points higher.
"""

from typing import NamedTuple


class Figure(NamedTuple):
    """A published score."""

    model: str
    """The model."""

    value: float
    """The score, as lm-eval gives it: an accuracy is a share of 1."""

    source: str
    """The place of its publication."""


MODELS = ("GPT-2 124M", "GPT-2 1.5B")
"""The models, in the order of their sizes. No figures of the other two sizes with a source are known to us."""

_SMALL, _XL = MODELS
_BUILD_NANOGPT = "github.com/karpathy/build-nanogpt, hellaswag.py"
_ISSUE_2159 = "github.com/EleutherAI/lm-evaluation-harness, issue 2159"
_GPT_NEO = "github.com/EleutherAI/gpt-neo, README.md"
_GPT2023 = "huggingface.co/crumb/gpt2023, README.md"
_ISSUE_13761 = "github.com/huggingface/transformers, issue 13761"

_FIGURES: dict[tuple[str, str], tuple[Figure, ...]] = {
    ("hellaswag", "acc"): (Figure(_SMALL, 0.2892, _BUILD_NANOGPT), Figure(_XL, 0.4004, _BUILD_NANOGPT)),
    ("hellaswag", "acc_norm"): (Figure(_SMALL, 0.3114, _BUILD_NANOGPT), Figure(_XL, 0.5089, _BUILD_NANOGPT)),
    ("lambada_openai", "acc"): (Figure(_SMALL, 0.3256, _ISSUE_2159), Figure(_XL, 0.5121, _GPT_NEO)),
    ("lambada_openai", "perplexity"): (Figure(_SMALL, 40.0554, _ISSUE_2159), Figure(_XL, 10.634, _GPT_NEO)),
    ("piqa", "acc"): (Figure(_SMALL, 0.6289, _GPT2023), Figure(_XL, 0.7078, _GPT_NEO)),
    ("winogrande", "acc"): (Figure(_SMALL, 0.5161, _GPT2023), Figure(_XL, 0.5940, _GPT_NEO)),
    ("sciq", "acc"): (Figure(_SMALL, 0.75, _GPT2023),),
    ("wikitext", "word_perplexity"): (Figure(_SMALL, 37.37, _ISSUE_13761), Figure(_XL, 17.48, _GPT_NEO)),
    ("mathqa", "acc"): (Figure(_XL, 0.2364, _GPT_NEO),),
    ("pubmedqa", "acc"): (Figure(_XL, 0.5833, _GPT_NEO),),
}


def published_figures(task: str, metric: str) -> tuple[Figure, ...]:
    """Return the figures for a metric of a task, in the order of the sizes of the models; none for most tasks.

    >>> [(figure.model, figure.value) for figure in published_figures("hellaswag", "acc_norm")]
    [('GPT-2 124M', 0.3114), ('GPT-2 1.5B', 0.5089)]
    """
    return _FIGURES.get((task, metric), ())
