"""How good a model is: its perplexity on tokens, and its answers to multiple choice."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from nnx_gpt2._model import GPT2, check_ids, split_params
from nnx_gpt2._train_step import make_eval_step

Tokens = Integer[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvaluation:
    """A model's loss on a sequence of tokens."""

    loss: float
    """Mean cross-entropy in nats per predicted token."""

    num_tokens: int
    """Tokens predicted."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)


def evaluate_tokens(
    model: GPT2,
    tokens: Tokens,
    *,
    stride: int | None = None,
    batch_size: int = 8,
    end_of_text: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenEvaluation:
    """The loss over every token but the first, each predicted once.

    Args:
        model: the model.
        tokens: one long sequence; a memory map is read as it is needed.
        stride: tokens that a window moves on, at most `seq_len`. A window predicts its last `stride` tokens, and
            the others are context: fewer means more context for each, and more work. None is `seq_len`, windows
            that do not overlap.
        batch_size: windows per step.
        end_of_text: the token that ends a document; where given, attention does not look across it, as in
            `make_train_step`.
        progress: called with the number of windows done and of all windows, after each step.

    Raises:
        ValueError: too few tokens, ids outside the vocabulary, or a stride or batch size out of range.
    """
    seq_len, num_predicted = model.config.seq_len, len(tokens) - 1
    stride = seq_len if stride is None else stride
    if num_predicted < 1:
        raise ValueError(f"expected at least 2 tokens to evaluate on, got {len(tokens)}")
    if not 1 <= stride <= seq_len or batch_size < 1 or stride % 1 or batch_size % 1:
        raise ValueError(
            f"stride must be a whole number of 1 to {seq_len}, the model's context, and batch_size one of at least 1, "
            f"got {stride} and {batch_size}."
        )
    length = min(seq_len, num_predicted)
    # Where windows begin; the last is moved back so as to end with the tokens.
    starts = [min(start, num_predicted - length) for start in range(0, num_predicted - length + stride, stride)]
    step, params = make_eval_step(model.config, end_of_text=end_of_text), split_params(model)
    total, done = 0.0, 0
    for first in range(0, len(starts), batch_size):
        batch = starts[first : first + batch_size]
        windows = np.stack([tokens[start : start + length + 1] for start in batch])
        check_ids(windows, model.config)
        # The last batch is filled up so that one program serves all.
        filled = np.pad(windows, ((0, batch_size - len(batch)), (0, 0)))
        losses = np.asarray(step(params, filled), np.float64)
        for start, row in zip(batch, losses, strict=False):
            total += row[done - start :].sum()
            done = start + length
        if progress is not None:
            progress(first + len(batch), len(starts))
    return TokenEvaluation(loss=total / num_predicted, num_tokens=num_predicted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A text and its possible continuations.

    Raises:
        ValueError: a field is no text, or the answer is none of the choices.
    """

    context: str
    """How it begins."""

    choices: tuple[str, ...]
    """How it may go on."""

    answer: int
    """Index of the right one."""

    def __post_init__(self) -> None:
        """Check every field once."""
        if not all(isinstance(text, str) for text in (self.context, *self.choices)):
            raise ValueError(
                f"a question's context and choices must be texts, got {self.context!r} and {self.choices!r}."
            )
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer must be the index of one of the {len(self.choices)} choices, got {self.answer}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceEvaluation:
    """How often a model finds the right choice likeliest."""

    accuracy: float
    """By the sum of the log-probabilities of a choice's tokens."""

    accuracy_norm: float
    """By their mean, which does not favour short choices."""

    num_questions: int
    """Questions asked."""


def read_questions(path: str | os.PathLike[str]) -> Iterator[Question]:
    """Questions from JSON lines as HellaSwag (Zellers et al., 2019, arXiv:1905.07830) is published.

    Each line is an object with `ctx`, a text; `endings`, a list of texts; `label`, the index of the right one.

    Raises:
        ValueError: a line is something else; the message has its number.
    """
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                question = Question(context=row["ctx"], choices=tuple(row["endings"]), answer=int(row["label"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} must be an object with ctx, a text, endings, texts, and label, the index "
                    f"of one of them, got {line.strip()[:80]!r}. Correct the line, or delete it."
                ) from error
            yield question


def evaluate_choices(
    model: GPT2,
    questions: Iterable[Question],
    encode: Callable[[str], Sequence[int]],
    *,
    progress: Callable[[int], None] | None = None,
) -> ChoiceEvaluation:
    """Let the model choose: each choice follows the context after a space, and its likelihood is compared.

    Args:
        model: the model. Contexts too long for it lose their beginning.
        questions: what to ask, such as `read_questions` gives.
        encode: text to token ids, such as `tiktoken.get_encoding("gpt2").encode_ordinary`.
        progress: called with the number of questions done.

    Raises:
        ValueError: there are no questions, a text has no tokens, a choice is longer than the model's context, or
            ids lie outside the vocabulary.
    """
    seq_len = model.config.seq_len
    step, params = make_eval_step(model.config), split_params(model)
    num_questions = num_right = num_right_norm = 0
    for question in questions:
        context = list(encode(question.context))
        choices = [list(encode(" " + choice)) for choice in question.choices]
        for choice in choices:
            if not context or not 1 <= len(choice) <= seq_len:
                raise ValueError(
                    f"expected a context of at least 1 token and choices of 1 to {seq_len}, the model's context, got "
                    f"{len(context)} and {len(choice)}: {question.context[:60]!r}"
                )
        rows = [(context + choice)[-(seq_len + 1) :] for choice in choices]
        # A few sizes, so that few programs are compiled; padding is to the right, unseen.
        size = min(seq_len, 1 << (max(map(len, rows)) - 1).bit_length()) + 1
        windows = np.zeros((len(rows), size), np.int32)
        for window, row in zip(windows, rows, strict=True):
            window[: len(row)] = row
        check_ids(windows, model.config)
        losses = np.asarray(step(params, windows), np.float64)
        sums = np.array(
            [
                row_losses[len(row) - 1 - len(choice) : len(row) - 1].sum()
                for row_losses, row, choice in zip(losses, rows, choices, strict=True)
            ]
        )
        num_questions += 1
        num_right += int(sums.argmin()) == question.answer
        num_right_norm += int((sums / [len(choice) for choice in choices]).argmin()) == question.answer
        if progress is not None:
            progress(num_questions)
    if not num_questions:
        raise ValueError("expected at least one question, got none")
    return ChoiceEvaluation(
        accuracy=num_right / num_questions, accuracy_norm=num_right_norm / num_questions, num_questions=num_questions
    )
