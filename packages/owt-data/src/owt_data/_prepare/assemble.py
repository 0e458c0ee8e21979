"""Token files and manifest from all shards: the last stage of a preparation."""

import dataclasses
import shutil
from collections import Counter
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from owt_data._complete_files import write_file
from owt_data._digests import share_counter
from owt_data._errors import RejectedDocumentsError, show_name
from owt_data._options import PrepareOptions
from owt_data._paths import MANIFEST_NAME, TRAIN_NAME, VAL_NAME
from owt_data._prepare.planning import Request
from owt_data._prepare.progress import Progress, Report
from owt_data._prepare.write_splits import Ranges, copy_ranges, document_ends, documents_in, split_at, split_documents
from owt_data._sources.source import BUILTIN
from owt_data._tokenizer_files import TOKENIZER_FILE, name_in_folder, tokenizer_json
from owt_data._tokenizer_names import width_for
from owt_data._tokenizers import load_tokenizer
from owt_data._tokens.document_index import index_name, write_index
from owt_data._tokens.journal import ShardRecord, shard_folder, shard_path
from owt_data._tokens.layout import Layout
from owt_data._tokens.manifest import FORMAT, Manifest, SplitKind
from owt_data._tokens.plan import Plan
from owt_data._tokens.sequence import concatenate, local_sequence
from owt_data._tokens.summary import summary_of

# The share of the reference job, 0.0005, would leave a single module of the small built-in corpus.
_BUILTIN_VAL_FRACTION = 0.05
_POSITION_VAL_FRACTION = 0.1
_DOCUMENTS_VAL_FRACTION = 0.0005

# Few documents, or documents of very different lengths, cannot be split into shares near the wanted ones.
_MOST_DIFFERENCE = 0.1


def assemble(
    request: Request, plan: Plan, shards: dict[str, list[ShardRecord]], result: Path, report: Report
) -> Manifest:
    """Write the token files and the manifest into a new folder, and wait until they are on disk.

    Args:
        request: the preparation.
        plan: its plan.
        shards: the records of all shards, by split.
        result: the folder; an earlier one is deleted.
        report: called after each step.

    Raises:
        RejectedDocumentsError: the text leaves one of the splits without tokens.
        DataError: a shard file changed after it was written.
    """
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    options = request.options
    records = list(chain.from_iterable(shards.values()))
    done = Progress(
        stage="assembling",
        fraction=0.0,
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_bytes=sum(record.num_bytes for record in records),
    )
    begins = options.documents == "wikitext-titles"
    if begins and done.num_documents == 0:
        source = f"{show_name(plan.source)} must hold rows with titles of wikitext, ' = Title = '"
        raise RejectedDocumentsError(f"{source}, got no title. Choose --documents rows.")
    tokenizer = load_tokenizer(options.tokenizer)
    end_of_text, width = tokenizer.eot_token, width_for(tokenizer.n_vocab)
    # All tokens are read twice: to find the documents, and to copy them.
    advance = share_counter(2 * done.num_tokens, lambda share: report(dataclasses.replace(done, fraction=share)))
    sequences, ends = {}, {}
    for name in request.splits:
        folder = shard_folder(request.staging, name)
        ends[name] = document_ends(folder, shards[name], end_of_text, advance, begins=begins, width=width)
        sequences[name] = local_sequence(
            [shard_path(folder, index) for index in range(len(shards[name]))], layout=Layout(width)
        )
    whole = concatenate(list(sequences.values()))
    if "all" in shards:
        num_first = records[0].num_tokens if records else 0
        split, ranges = _split(options, request.splits["all"].kind, ends["all"], len(whole), num_first)
    else:
        split, ranges = "sources", split_at(len(sequences["train"]), len(whole))
    only_ends = any(len(sequences[name]) == len(ends[name]) for name in sequences)
    if only_ends or not all((stops > starts).any() for starts, stops in ranges.values()):
        raise _shortage_error(plan, split, done)
    offsets = accumulate((len(sequences[name]) for name in sequences), initial=0)
    all_ends = np.concatenate([ends[name] + offset for name, offset in zip(ends, offsets, strict=False)])
    files = {}
    for name, file in (("train", TRAIN_NAME), ("val", VAL_NAME)):
        summary = summary_of(file, options.documents, split, end_of_text)
        files[file] = copy_ranges(whole, ranges[name], result / file, summary, advance)
        local_ends, numbers = documents_in(all_ends, ranges[name])
        write_index(
            Path(index_name(str(result / file))),
            local_ends,
            _places(request, shards, numbers, len(all_ends)),
            sha256=files[file].sha256,
            durable=True,
        )
    if (content := tokenizer_json(options.tokenizer)) is not None:
        write_file(result / TOKENIZER_FILE, memoryview(content), durable=True)
    manifest = Manifest(
        format=FORMAT,
        version=version("owt-data"),
        tokenizer=name_in_folder(options.tokenizer),
        vocab_size=tokenizer.n_vocab,
        tokenizer_sha256=plan.tokenizer_sha256,
        dtype=width,
        files=files,
        source=plan.source,
        source_sha256=plan.source_sha256,
        options=plan.options,
        split=split,
        revisions=plan.revisions,
    )
    # The token files are on disk already. This call also waits for all names in the folder.
    write_file(result / MANIFEST_NAME, manifest.to_json(), durable=True)
    return manifest


def _places(
    request: Request, shards: dict[str, list[ShardRecord]], numbers: np.ndarray, num_documents: int
) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Return the names of the source's files, and the file and the row in it of documents of all splits.

    None if shards of an earlier version do not tell.
    """
    names: list[str] = []
    counts: list[int] = []
    for split, source in request.splits.items():
        found: Counter[int] = Counter()
        for record in shards[split]:
            found.update(dict(record.files))
        if source.files:
            names += map(str, source.files)
            counts += (found[file] for file in range(len(source.files)))
        else:  # the rows of a dataset are numbered over all its files
            names.append(source.name)
            counts.append(found.total())
    firsts = np.concatenate([[0], np.cumsum(counts)])
    if firsts[-1] != num_documents:
        return None
    files = np.searchsorted(firsts, numbers, side="right") - 1
    return names, files, numbers - firsts[files]


def _split(
    options: PrepareOptions, kind: str, ends: np.ndarray, num_tokens: int, num_first: int
) -> tuple[SplitKind, dict[str, Ranges]]:
    """Split the tokens of one source.

    Args:
        options: the split, its share and its seed.
        kind: the kind of the source.
        ends: exclusive end of each document.
        num_tokens: number of all tokens.
        num_first: number of tokens of the first shard.

    Returns:
        The kind of the split, and the token ranges of `train` and `val`.
    """
    if options.split == "start":
        ranges = split_at(num_first, num_tokens)
        return "start", {"train": ranges["val"], "val": ranges["train"]}
    if options.split != "position":
        wanted = options.val_fraction or (_BUILTIN_VAL_FRACTION if kind == BUILTIN else _DOCUMENTS_VAL_FRACTION)
        ranges = split_documents(ends, wanted, options.split_seed)
        starts, stops = ranges["val"]
        share = int((stops - starts).sum()) / max(1, num_tokens)
        if options.split == "documents" or abs(share - wanted) <= _MOST_DIFFERENCE:
            return "documents", ranges
    boundary = round(num_tokens * (1 - (options.val_fraction or _POSITION_VAL_FRACTION)))
    return "position", split_at(boundary, num_tokens)


def _shortage_error(plan: Plan, split: SplitKind, done: Progress) -> RejectedDocumentsError:
    """Return the error for a text that leaves one of the splits without tokens."""
    constraint, got = "text for both splits", f"{done.num_tokens} tokens in {done.num_documents} documents"
    remedy = "Give more text, or another --split or --val-fraction."
    if split == "sources":
        remedy = "Give text for both, train=... and val=...."
    elif split == "start":
        taken = f"its first {plan.part_bytes} bytes up to the end of a row or a word"
        constraint, got = f"more text than validation takes, {taken}", f"{done.num_bytes} bytes"
        remedy = "Give more text, or name both splits, train=... and val=...."
    return RejectedDocumentsError(f"{show_name(plan.source)} must hold {constraint}, got {got}. {remedy}")
