"""The tokens of an evaluation: a run's own, other token files, or text."""

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

from rich.console import Console

from owt_data import TokenData, TokenMixture, Tokens, TokenSequence, is_prepared, open_tokens, same_tokenizer
from pretrain._config import PrepareConfig
from pretrain._data import prepared_name, validation_sources
from pretrain._data_names import Splits, labels_of, names_of, parse_data
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription

Split = Literal["val", "all"]


class EvaluationData(NamedTuple):
    """The tokens to evaluate on."""

    tokens: Tokens
    """The tokens."""

    split: Split
    """The part of the data: its validation tokens, or all."""

    sources: list[tuple[str, int]]
    """Label and number of tokens of each part, in order, if the data is a mixture."""


def tokens_of_run(stored: DataDescription, split: Split, text: str) -> EvaluationData:
    """Open the tokens of a run.

    Args:
        stored: the run's tokens.
        split: the part to evaluate on.
        text: the option `data` of the run, whose labels name the parts of a mixture.

    Raises:
        UsageError: the files hold other tokens.
        DataError: the tokens cannot be read.
    """
    data = open_tokens(stored.tokens, tokenizer=stored.tokenizer)
    if stored.fingerprint not in (data.fingerprint, data.source_fingerprint):
        raise UsageError(
            f"{stored.tokens} must hold the tokens of the run, got others. Restore the files, or give --data."
        )
    sources = validation_sources(text, data)
    if split == "all" and isinstance(data.train, TokenMixture):
        lengths = map(len, data.train.sequences)
        sources = [*zip(labels_of(text), lengths, strict=True), *sources]
    return EvaluationData(_part(data, split), split, sources)


def tokens_of(text: str, split: Split | None, config: PrepareConfig, console: Console) -> EvaluationData:
    """Open the tokens that `--data` names. Text is prepared into the cache first.

    Args:
        text: token files or text, in a form of `parse_data`.
        split: the part to evaluate on; None takes the validation tokens if all names have some of their own, as a
            folder of token files and `train=NAME,val=NAME` do, and else all tokens.
        config: how the run's text was prepared.
        console: shows the preparation.

    Raises:
        UsageError: the text has no valid form, or the tokens are of another tokenizer.
        DataError: the tokens or the text cannot be read.
    """
    data = parse_data(text)
    names = names_of(data)
    have_val = isinstance(data, Splits) or all(is_prepared(name) and not name.endswith(".bin") for name in names)
    chosen: Split = split or ("val" if have_val else "all")
    part = chosen
    if isinstance(data, Splits) and chosen == "val":
        names, part = [data.val], "all"
    # The split of the training only if its validation is wanted. By position, all tokens are in the order of the text.
    if part == "all":
        config = dataclasses.replace(config, split="position", val_fraction=0.5, limit_rows=None)
    config = dataclasses.replace(config, num_processes=None, on_cluster=False)
    parts: list[Tokens] = []
    for name in names:
        found = open_tokens(prepared_name(name, config, console), tokenizer=config.tokenizer)
        if not same_tokenizer(found.tokenizer, config.tokenizer):
            raise UsageError(
                f"--data must be tokens of the run's tokenizer, {config.tokenizer}, got tokens of {found.tokenizer}. "
                "Give other data."
            )
        parts.append(_part(found, part))
    labels = labels_of(text)
    sources = [*zip(labels, map(len, parts), strict=bool(labels))]
    return EvaluationData(_joined(parts) if len(parts) > 1 else parts[0], chosen, sources)


def _part(data: TokenData, split: Split) -> Tokens:
    return data.val if split == "val" else _joined((data.train, data.val))


def _joined(parts: Iterable[Tokens]) -> TokenSequence:
    sequences: list[TokenSequence] = []
    for part in parts:
        if isinstance(part, TokenMixture):
            sequences += part.sequences
        elif isinstance(part, TokenSequence):
            sequences.append(part)
        else:
            raise UsageError("--split must be val while the text is being prepared, got all. Wait for the end.")
    spans = tuple(span for sequence in sequences for span in sequence.spans)
    return TokenSequence(spans, min(sequence.vocab_size or 1 << 31 for sequence in sequences))
