"""Opening of token files by name, with checks and a fingerprint."""

import dataclasses
import glob
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow.fs import FileType

from owt_data._digests import computed_once, lasting_state
from owt_data._errors import DataError, file_errors, show, show_name
from owt_data._paths import (
    TOKEN_NAMES,
    TRAIN_NAME,
    VAL_NAME,
    Names,
    base_name,
    group_by_split,
    holds_tokens,
    is_uri,
    join,
    list_folder,
    look_up_as,
    normalize,
    read_blocks,
    remote_state,
    shards_by_split,
    split_of,
)
from owt_data._tokenizer_files import end_of_text_id, name_from_folder, tokenizer_label, tokenizer_name, vocab_size
from owt_data._tokens.growing_tokens import GrowingTokens
from owt_data._tokens.journal import staging_path
from owt_data._tokens.layout import Layout, find_layout, missing_header_error
from owt_data._tokens.manifest import check_sizes, read_manifest
from owt_data._tokens.mixture_stages import MixtureWeight, split_weights
from owt_data._tokens.plan import Plan, read_plan, source_fingerprint
from owt_data._tokens.sequence import TokenMixture, Tokens, TokenSequence, TokenSpan, check_ids, concatenate

# Share of validation at the end of `.bin` files, which have no split.
_VAL_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenData:
    """Training and validation tokens, and their fingerprint."""

    names: str | list[str] | dict[str, MixtureWeight]
    """Names that `open_tokens` opens again from any working folder."""

    train: Tokens
    """Training tokens: a `TokenSequence`, a `TokenMixture`, or tokens that are being prepared."""

    val: Tokens
    """Validation tokens; those of all sequences of a mixture, one after the other."""

    tokenizer: str
    """Name of the tokenizer of the tokens; for one of a file, the path of the file and its end-of-text token."""

    vocab_size: int
    """Number of token ids. Every token is smaller."""

    end_of_text: int
    """Id of the token that ends a document."""

    fingerprint: dict[str, Any]
    """Fingerprint for checkpoints, equal for equal tokens of the same tokenizer. Its entry `manifest` tells whether a
    manifest vouches for the tokens: it is True for prepared folders, and False for files that were read instead."""

    source_fingerprint: dict[str, Any] | None = dataclasses.field(default=None, compare=False)
    """Fingerprint of the text and the options, the same while a folder is prepared and after it. None for tokens that
    `prepare` has not made from one list of sources. The `fingerprint` of unfinished tokens is this one."""

    digests: dict[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """SHA-256 of each file on disk that has a manifest, by path, for `check_digests` and `verify_in_background`."""

    val_lengths: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    """Number of validation tokens of each name of a mixture, in the order of `val`. Empty for other tokens."""

    file_digests: dict[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """SHA-256 of each token file, by path or URI, from its manifest or from the file itself. Empty while a folder is
    being prepared."""


@file_errors("readable")
def is_prepared(name: str | os.PathLike[str]) -> bool:
    """Return whether a name is that of token files, and not of text to prepare."""
    text = normalize(name)
    path = Path(text)
    return is_uri(text) or path.suffix == ".bin" or holds_tokens(path)


@file_errors("readable")
def open_tokens(names: Names | Mapping[str, MixtureWeight], *, tokenizer: str) -> TokenData:
    """Open token files, on disk or in object storage.

    With a manifest, the sizes are checked and its checksums are the fingerprint. Files without a manifest are read
    once, for their fingerprint and to check that every id is in the vocabulary. Ids are checked again, in all files,
    when windows are read.

    Args:
        names: a folder with `train.bin` and `val.bin`, or with shards such as `fineweb_train_000001.bin` and
            `fineweb_val_000000.bin`; a `.bin` file or a glob of them, split 90/10 by position; a list of such names,
            read one after the other; `.bin` files by split, as `train=...` and `val=...`; or folders and files with
            weights, mixed. The files of a glob or a list must not have the names of both splits. A weight that changes
            is a list of pairs: the index of a window, and the weight from there on. `s3://` and `gs://` names are read
            in ranges. Files of llm.c and modded-nanogpt, which begin with a header, are read as they are; see
            `find_layout` for the width of tokens without one.
        tokenizer: tokenizer of files without a manifest.

    Raises:
        DataError: the tokenizer is unknown; a file is missing or truncated, or holds ids outside the vocabulary; or
            the names do not fit together.
    """
    tokenizer = tokenizer_name(tokenizer)  # an unknown name is an error beside a manifest too
    if isinstance(names, Mapping):
        return _open_mixture(names, tokenizer)
    by_split = group_by_split(names)
    expanded = {split: [name for given in group for name in _expand(given)] for split, group in by_split.items()}
    for group in expanded.values():
        _check_one_split(group)
    return _open_splits(expanded, tokenizer) if "train" in expanded else _open_sequence(expanded["all"], tokenizer)


def _open_sequence(expanded: list[str], tokenizer: str) -> TokenData:
    if all(base_name(name).endswith(".bin") for name in expanded):
        return _open_files(expanded, tokenizer)
    if len(expanded) == 1:
        return _open_folder(expanded[0], tokenizer)
    opened = [open_tokens(name, tokenizer=tokenizer) for name in expanded]
    return _combine(
        opened,
        names=expanded,
        train=concatenate([_sequence(data.train) for data in opened]),
        fingerprint={"sequence": [data.fingerprint for data in opened]},
    )


def _open_splits(paths: dict[str, list[str]], tokenizer: str) -> TokenData:
    """Open `.bin` files whose split is given."""
    others = [path for group in paths.values() for path in group if not base_name(path).endswith(".bin")]
    if others:
        raise DataError(
            f"train=... and val=... must name .bin files, got {show_name(others[0])}. Name its token files."
        )
    names = [f"{split}={path}" for split, group in paths.items() for path in group]
    return _open_split_files(names, paths, tokenizer)


def _open_split_files(
    names: str | list[str], paths: dict[str, list[str]], tokenizer: str, *, one_layout: bool = False
) -> TokenData:
    """Open token files by split. `names` opens them again."""
    num_ids = vocab_size(tokenizer)
    spans = {split: [_look_up_span(path, num_ids) for path in group] for split, group in paths.items()}
    if one_layout:
        _check_one_layout([span for group in spans.values() for span in group])
    digests = {split: [_read_sha256(span, num_ids) for span in group] for split, group in spans.items()}
    tokens = {split: concatenate([_sequence_of(span, num_ids) for span in group]) for split, group in spans.items()}
    return TokenData(
        names=names,
        train=tokens["train"],
        val=tokens["val"],
        tokenizer=tokenizer,
        vocab_size=num_ids,
        end_of_text=end_of_text_id(tokenizer),
        # Equal to the fingerprint of a folder with these two files and no manifest.
        fingerprint={"tokenizer": tokenizer_label(tokenizer), "manifest": False}
        | {f"{split}.bin": group[0] if len(group) == 1 else group for split, group in digests.items()},
        file_digests={
            path: sha256 for split in paths for path, sha256 in zip(paths[split], digests[split], strict=True)
        },
    )


def _open_mixture(given: Mapping[str, MixtureWeight], tokenizer: str) -> TokenData:
    weights: dict[str, MixtureWeight] = {}
    named: dict[str, str] = {}
    for name, weight in given.items():
        path = normalize(name)
        same = named.setdefault(path if is_uri(path) else os.path.realpath(path), name)
        if same != name:
            raise DataError(
                f"The names of a mixture must be different files or folders, got {show_name(same)} and "
                f"{show_name(name)}, which are the same. Give it once, with the sum of both weights."
            )
        weights[path] = weight
    first, later = split_weights([*weights.values()])
    opened = [open_tokens(name, tokenizer=tokenizer) for name in weights]
    return _combine(
        opened,
        names=weights,
        train=TokenMixture(tuple(_sequence(data.train) for data in opened), first, later),
        fingerprint={
            # As JSON has them: a run compares those of its checkpoint.
            "weights": [
                [*map(list, weight)] if isinstance(weight, list | tuple) else weight for weight in weights.values()
            ],
            "mixture": [data.fingerprint for data in opened],
        },
        val_lengths=tuple(len(data.val) for data in opened),
    )


def _expand(name: str) -> list[str]:
    path = normalize(name)
    if is_uri(path) or not glob.has_magic(path) or Path(path).exists():
        return [path]
    # A pattern without matches is rejected as a name that does not exist.
    return sorted(glob.glob(path)) or [path]  # noqa: PTH207 - takes a pattern with an absolute path


def _check_one_split(paths: list[str]) -> None:
    """Check that files that are read one after the other do not have the names of both splits."""
    named = {split: path for path in reversed(paths) if (split := split_of(path))}
    if len(named) > 1:
        raise DataError(
            f"The files of a pattern or a list must be of one split, got {show_name(named['train'])} and "
            f"{show_name(named['val'])}. Name their folder, or the files as train=... and val=...."
        )


def _sequence(tokens: Tokens) -> TokenSequence:
    if isinstance(tokens, GrowingTokens):
        raise DataError(
            "Tokens to join or to mix must be complete, got those of a folder that is being prepared. Finish it with "
            "owt-data prepare."
        )
    assert isinstance(tokens, TokenSequence), "one name gives a sequence"
    return tokens


def _combine(
    opened: list[TokenData],
    *,
    names: list[str] | dict[str, MixtureWeight],
    train: TokenSequence | TokenMixture,
    fingerprint: dict[str, Any],
    val_lengths: tuple[int, ...] = (),
) -> TokenData:
    labels = {tokenizer_label(data.tokenizer) for data in opened}
    if len(labels) != 1:
        raise DataError(f"All tokens must be of one tokenizer, got {show(sorted(labels))}. Prepare them with one.")
    return TokenData(
        names=names,
        train=train,
        val=concatenate([_sequence(data.val) for data in opened]),
        tokenizer=opened[0].tokenizer,
        vocab_size=opened[0].vocab_size,
        end_of_text=opened[0].end_of_text,
        fingerprint=fingerprint,
        val_lengths=val_lengths,
        digests={path: sha256 for data in opened for path, sha256 in data.digests.items()},
        file_digests={path: sha256 for data in opened for path, sha256 in data.file_digests.items()},
    )


def _open_folder(folder: str, tokenizer: str) -> TokenData:
    plan = None if is_uri(folder) else read_plan(staging_path(Path(folder)))
    if plan is not None and read_manifest(folder) is None:
        return _open_growing(Path(folder), plan, tokenizer)
    remedy = "Prepare text with owt-data prepare first, or correct the name."
    look_up_as(folder, FileType.Directory, "a folder of token files or a .bin file", remedy)
    manifest = read_manifest(folder)
    if manifest is None and (shards := _shards_in(folder)):
        return _open_split_files(folder, shards, tokenizer, one_layout=True)
    if manifest is not None:
        check_sizes(folder, manifest)
        tokenizer, num_ids = name_from_folder(folder, manifest.tokenizer), manifest.vocab_size
    else:
        num_ids = vocab_size(tokenizer)
    layout, remedy = None if manifest is None else Layout(manifest.dtype), "Write both files, or name a .bin file."
    spans = {name: _look_up_span(join(folder, name), num_ids, remedy, layout=layout) for name in TOKEN_NAMES}
    if manifest is None:
        digests = {name: _read_sha256(span, num_ids) for name, span in spans.items()}
    else:
        digests = {name: record.sha256 for name, record in manifest.files.items()}
    return TokenData(
        names=folder,
        train=_sequence_of(spans[TRAIN_NAME], num_ids),
        val=_sequence_of(spans[VAL_NAME], num_ids),
        tokenizer=tokenizer,
        vocab_size=num_ids,
        end_of_text=end_of_text_id(tokenizer),
        fingerprint={"tokenizer": tokenizer_label(tokenizer), "manifest": manifest is not None, **digests},
        source_fingerprint=None if manifest is None else source_fingerprint(manifest),
        digests={} if manifest is None or is_uri(folder) else {join(folder, name): digests[name] for name in digests},
        file_digests={join(folder, name): digests[name] for name in digests},
    )


def _shards_in(folder: str) -> dict[str, list[str]]:
    """Return the paths of the shards in a folder without a manifest, by split; empty for `train.bin` and `val.bin`.

    Raises:
        DataError: the folder has shards, and lacks those of a split, or has other token files too.
    """
    found = list_folder(folder)
    shards = shards_by_split(found)
    if not shards:
        return {}
    for split in ("train", "val"):
        if split not in shards:
            raise DataError(
                f"{show_name(folder)} must have shards of both splits, got none named ..._{split}_....bin. Copy them "
                f"too, or name files as train=... and val=...."
            )
    datasets = {name.rpartition(f"_{split}")[0] for split, group in shards.items() for name in group}
    mixed = sorted(datasets) if len(datasets) > 1 else [name for name in TOKEN_NAMES if name in found]
    if mixed:
        raise DataError(
            f"{show_name(folder)} must have the shards of one dataset, got those of {', '.join(sorted(datasets))}"
            f"{'' if len(datasets) > 1 else f' and {mixed[0]}'}. Name the files as train=... and val=...."
        )
    return {split: [join(folder, name) for name in group] for split, group in shards.items()}


def _check_one_layout(spans: list[TokenSpan]) -> None:
    """Check that shards hold tokens and have one layout. Else one of them is damaged, or of another program."""
    for span in spans:
        if not len(span):
            raise DataError(f"{show_name(span.path)} must hold tokens, got an empty file. Copy it again.")
    with_header = next((span for span in spans if span.layout.offset), None)
    for span in spans:
        if with_header is not None and not span.layout.offset:
            raise missing_header_error(span.path, with_header.path, with_header.layout)
        if span.layout != spans[0].layout:
            raise DataError(
                f"{show_name(span.path)} must be {spans[0].layout} as {show_name(spans[0].path)}, got {span.layout}. "
                "Copy it again, or name the files as train=... and val=...."
            )


def _open_growing(folder: Path, plan: Plan, tokenizer: str) -> TokenData:
    """Open a folder that is being prepared.

    Args:
        folder: the folder.
        plan: the plan of its preparation.
        tokenizer: the tokenizer that the caller names. That of the plan has a copy in the working folder.
    """
    label = plan.options["tokenizer"]
    if label != tokenizer_label(tokenizer):
        tokenizer = label if plan.tokenizer is None else name_from_folder(str(staging_path(folder)), plan.tokenizer)
    train, val = (
        GrowingTokens(folder, split, is_one_source="all" in plan.layouts, vocab_size=vocab_size(tokenizer))
        for split in ("train", "val")
    )
    return TokenData(
        names=str(folder),
        train=train,
        val=val,
        tokenizer=tokenizer,
        vocab_size=vocab_size(tokenizer),
        end_of_text=end_of_text_id(tokenizer),
        fingerprint=source_fingerprint(plan),
        source_fingerprint=source_fingerprint(plan),
    )


def _open_files(paths: list[str], tokenizer: str) -> TokenData:
    """Open `.bin` files as one sequence. The first 90 % of its tokens are for training."""
    num_ids = vocab_size(tokenizer)
    spans = [_look_up_span(path, num_ids) for path in paths]
    whole = concatenate([_sequence_of(span, num_ids) for span in spans])
    boundary = round(len(whole) * (1 - _VAL_FRACTION))
    digests = [_read_sha256(span, num_ids) for span in spans]
    return TokenData(
        names=paths[0] if len(paths) == 1 else paths,
        train=whole.between(0, boundary),
        val=whole.between(boundary, len(whole)),
        tokenizer=tokenizer,
        vocab_size=vocab_size(tokenizer),
        end_of_text=end_of_text_id(tokenizer),
        fingerprint={
            "tokenizer": tokenizer_label(tokenizer),
            "manifest": False,
            "split": boundary,
            "whole": digests[0] if len(digests) == 1 else digests,
        },
        file_digests=dict(zip(paths, digests, strict=True)),
    )


def _sequence_of(span: TokenSpan, num_ids: int) -> TokenSequence:
    return TokenSequence((span,) if len(span) else (), num_ids)


def _look_up_span(path: str, num_ids: int, remedy: str = "", *, layout: Layout | None = None) -> TokenSpan:
    """Return all tokens of a file as a span.

    Args:
        path: the file.
        num_ids: number of ids of the tokenizer.
        remedy: a sentence, for a file that the user has not named.
        layout: the layout, if a manifest gives it.
    """
    size = look_up_as(path, FileType.File, "a token file", remedy, suggest=not remedy).size or 0
    layout = layout or find_layout(path, size, num_ids)
    return TokenSpan(path=path, start=0, stop=layout.num_tokens(size), layout=layout)


def _read_sha256(span: TokenSpan, num_ids: int) -> str:
    """Return the SHA-256 of the tokens of a file without a manifest, and check their ids. The file is read once."""

    def read() -> str:
        start = 0
        digest = hashlib.sha256()
        for block in read_blocks(span.path, span.layout.offset):
            tokens = np.frombuffer(block, dtype=span.layout.dtype)
            check_ids(tokens, num_ids, span.path, start)
            digest.update(block)
            start += len(tokens)
        return digest.hexdigest()

    state_of = remote_state if is_uri(span.path) else lasting_state
    name = f"{span.path} as {span.layout.width} from {span.layout.offset} below {num_ids}"
    return computed_once(name, span.layout.place(span.stop), lambda: state_of(span.path), read)
