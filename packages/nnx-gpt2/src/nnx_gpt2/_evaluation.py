"""Evaluation of a model: perplexity on tokens, and accuracy on multiple choice."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Integer

from nnx_gpt2._errors import INT32_MAX, check_path, check_type, is_iterable, is_whole, kind, require, shown, value_error
from nnx_gpt2._model import GPT2, split_params
from nnx_gpt2._sharding import num_batch_shards, on_mesh
from nnx_gpt2._token_ids import check_ids
from nnx_gpt2._train_step import make_eval_step

Tokens = Integer[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvaluation:
    """A model's loss on a sequence of tokens."""

    loss: float
    """Mean cross-entropy in nats per predicted token."""

    num_tokens: int
    """Number of predicted tokens."""

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
    """Compute the loss of a token sequence. Each token except the first is predicted once.

    Args:
        model: the model.
        tokens: one long sequence. A memory map is read in batches.
        stride: distance between windows in tokens, at most `seq_len`. A window predicts its last `stride` tokens and
            uses the others as context. A smaller stride gives more context and takes more work. None is `seq_len`:
            windows do not overlap.
        batch_size: windows per step. Devices of a mesh get equally many, which rounds it up.
        end_of_text: the token that ends a document. If given, attention stays within documents, as in
            `make_train_step`.
        progress: called after each step with the number of finished windows and of all windows.

    Raises:
        ValueError: too few tokens, ids outside the vocabulary, or a stride or batch size out of range.
    """
    check_type("model", model, GPT2)
    check_type("progress", progress, Callable | None)
    require(isinstance(tokens, Sized) and is_iterable(tokens), "tokens", "be an array of token ids", kind(tokens))
    seq_len, num_predicted = model.config.seq_len, len(tokens) - 1
    stride = seq_len if stride is None else stride
    require(num_predicted >= 1, "tokens", "be at least 2", len(tokens))
    require(is_whole(stride, 1, seq_len), "stride", f"be 1 to {seq_len}, the model's context", shown(stride))
    require(is_whole(batch_size, 1), "batch_size", "be at least 1", shown(batch_size))
    stride, batch_size = int(stride), int(batch_size)  # those of numpy could overflow
    length = min(seq_len, num_predicted)
    # The first token of each window. The last window ends with the tokens.
    starts = [min(start, num_predicted - length) for start in range(0, num_predicted - length + stride, stride)]
    params, mesh = on_mesh(split_params(model))
    num_shards = num_batch_shards(mesh)
    step = make_eval_step(model.config, mesh, end_of_text=end_of_text)
    batch_size = -(-min(batch_size, len(starts)) // num_shards) * num_shards
    total, done = 0.0, 0
    for first in range(0, len(starts), batch_size):
        batch = starts[first : first + batch_size]
        windows = np.stack([tokens[start : start + length + 1] for start in batch])
        check_ids(windows, model.config.vocab_size)
        # Pad the last batch: one program then serves all batches.
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
        ValueError: a text is not a string, or the answer is not the index of a choice.
    """

    context: str
    """The beginning of the text."""

    choices: tuple[str, ...]
    """The possible continuations."""

    answer: int
    """Index of the right choice."""

    def __post_init__(self) -> None:
        """Check the fields, which may come from a file."""
        are_choices = isinstance(self.choices, tuple) and all(isinstance(choice, str) for choice in self.choices)
        are_texts = are_choices and isinstance(self.context, str)
        require(are_texts, "context and choices", "be strings", (self.context, self.choices))
        num_choices = len(self.choices)
        is_index = is_whole(self.answer, 0, num_choices - 1)
        require(is_index, "answer", f"be the index of one of {num_choices} choices", shown(self.answer))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceEvaluation:
    """Share of questions whose right choice is the likeliest for a model."""

    accuracy: float
    """Accuracy by the sum of the log-probabilities of a choice's tokens."""

    accuracy_norm: float
    """Accuracy by their mean, which does not favour short choices."""

    num_questions: int
    """Number of questions."""


def read_questions(path: str | os.PathLike[str]) -> Iterator[Question]:
    """Read questions from JSON lines, the format of HellaSwag (Zellers et al., 2019, arXiv:1905.07830).

    Each line is an object with `ctx`, a text; `endings`, a list of texts; `label`, the index of the right ending.

    Raises:
        ValueError: the path is a folder or a device, or a line has another form. The message has its number.
    """
    source = check_path("path", path)
    require(not source.is_dir(), "path", "be a file", f"the folder {shown(str(source))}")
    is_device = source.is_char_device() or source.is_block_device()
    require(not is_device, "path", "be a file or a pipe", f"the device {shown(str(source))}")
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
                question = Question(context=row["ctx"], choices=tuple(row["endings"]), answer=int(row["label"]))
            except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
                raise value_error(
                    f"line {number} of {path}",
                    "be an object with ctx, a text, endings, texts, and label, the index of an ending",
                    shown(line.decode(errors="replace").strip()),
                    "Correct the line, or delete it.",
                ) from error
            yield question


def evaluate_choices(
    model: GPT2,
    questions: Iterable[Question],
    encode: Callable[[str], Sequence[int]],
    *,
    progress: Callable[[int], None] | None = None,
) -> ChoiceEvaluation:
    """Compute the accuracy on multiple choice, by the likelihood of each choice after the context and a space.

    Args:
        model: the model. A context that is too long loses its beginning.
        questions: the questions, for example from `read_questions`.
        encode: function from text to token ids, such as `tiktoken.get_encoding("gpt2").encode_ordinary`.
        progress: called after each question with the number of finished questions.

    Raises:
        ValueError: there are no questions, a text has no tokens, a choice is longer than the model's context, or
            ids lie outside the vocabulary.
    """
    check_type("model", model, GPT2)
    require(is_iterable(questions), "questions", "be of type Iterable", kind(questions))
    check_type("encode", encode, Callable)
    check_type("progress", progress, Callable | None)
    seq_len = model.config.seq_len
    params, mesh = on_mesh(split_params(model))
    num_shards = num_batch_shards(mesh)
    step = make_eval_step(model.config, mesh)
    num_questions = num_right = num_right_norm = 0
    for question in questions:
        check_type("each question", question, Question)
        context, *choices = map(_ids, map(encode, [question.context, *(" " + choice for choice in question.choices)]))
        for choice in choices:
            require(
                bool(context) and 1 <= len(choice) <= seq_len,
                "a question",
                f"have a context of at least 1 token and choices of 1 to {seq_len} tokens",
                f"{len(context)} and {len(choice)} tokens in {shown(question.context)}",
            )
        rows = [(context + choice)[-(seq_len + 1) :] for choice in choices]
        # Round the size up to limit the number of compiled programs. Attention does not see the padding on the right.
        size = min(seq_len, 1 << (max(map(len, rows)) - 1).bit_length()) + 1
        num_rows = -(-len(rows) // num_shards) * num_shards
        windows = np.zeros((num_rows, size), np.int32)
        for window, row in zip(windows, rows, strict=False):
            window[: len(row)] = row
        check_ids(windows, model.config.vocab_size)
        losses = np.asarray(step(params, windows), np.float64)
        sums = np.array(
            [
                row_losses[len(row) - 1 - len(choice) : len(row) - 1].sum()
                for row_losses, row, choice in zip(losses, rows, choices, strict=False)
            ]
        )
        num_questions += 1
        num_right += int(sums.argmin()) == question.answer
        num_right_norm += int((sums / [len(choice) for choice in choices]).argmin()) == question.answer
        if progress is not None:
            progress(num_questions)
    require(num_questions > 0, "questions", "be at least 1", num_questions)
    return ChoiceEvaluation(
        accuracy=num_right / num_questions, accuracy_norm=num_right_norm / num_questions, num_questions=num_questions
    )


def _ids(encoded: Any) -> list[int]:
    ids = list(encoded) if is_iterable(encoded) else []
    is_list = is_iterable(encoded) and all(is_whole(one, 0, INT32_MAX) for one in ids)
    require(is_list, "encode", "return a list of token ids", shown(encoded))
    return ids
