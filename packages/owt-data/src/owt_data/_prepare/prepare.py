"""Preparation of `train.bin`, `val.bin` and `manifest.json` from text."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from owt_data._errors import DataError, RejectedDocumentsError, file_errors, show, show_name
from owt_data._options import PrepareOptions, check_arguments
from owt_data._paths import Names, is_uri, list_names, local_path, name_text
from owt_data._prepare.cpus import num_usable_cpus
from owt_data._prepare.durable import rename_durably, write_durably
from owt_data._prepare.plan import Plan, Request, find_plan, name_differences, open_documents, revisions
from owt_data._prepare.shards import (
    MIN_SHARD_BYTES,
    Encoder,
    Follower,
    ShardRecord,
    check_staging,
    local_encoder,
    shard_folder,
    shard_path,
    staging_path,
    tokenize,
)
from owt_data._prepare.write_splits import Ranges, copy_ranges, document_ends, split_at, split_documents
from owt_data._sources.documents import Documents
from owt_data._sources.source import BUILTIN, Source, SourceStates, find_splits
from owt_data._tokenizers import load_tokenizer, tokenizer_digest
from owt_data._tokens.manifest import (
    DTYPE,
    FORMAT,
    MANIFEST_NAME,
    TRAIN_NAME,
    VAL_NAME,
    FileRecord,
    Manifest,
    SplitKind,
    check_sizes,
    read_manifest,
)
from owt_data._tokens.sequence import TokenSequence, concatenate, local_sequence
from owt_data._tokens.summary import summary_of

# The share of the reference job, 0.0005, would leave a single module of the small built-in corpus.
_BUILTIN_VAL_FRACTION = 0.05
_POSITION_VAL_FRACTION = 0.1
_DOCUMENTS_VAL_FRACTION = 0.0005

# Few documents, or documents of very different lengths, cannot be split into shares near the wanted ones.
_MOST_DIFFERENCE = 0.1

_RESULT_NAME = "result"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of `prepare`."""

    stage: str
    """`reading`, `checking` (what earlier starts have tokenized), `tokenizing` or `assembling`."""

    fraction: float | None
    """Share of the stage that is done; None if its length is unknown."""

    num_documents: int = 0
    """Documents tokenized so far, including those of earlier starts."""

    num_tokens: int = 0
    """Tokens of these documents."""

    num_bytes: int = 0
    """Text of these documents, in bytes of UTF-8."""


Report = Callable[[Progress], None]


def prepare(
    sources: Names,
    out: str | os.PathLike[str],
    options: PrepareOptions,
    *,
    num_processes: int | None = None,
    use_ray: bool = False,
    progress: Report | None = None,
) -> Manifest:
    """Write `train.bin`, `val.bin` and `manifest.json` for a source into the folder `out`.

    The token files equal those of a plain loop over `train_test_split` of `datasets`, `encode_ordinary` and
    end-of-text, byte for byte. The documents are tokenized in shards in the working folder `.NAME.partial` beside
    `out`, which takes as much disk space as the token files. The complete files are renamed to `out` in one step.
    After an interruption, the same call resumes after the last finished shard and writes the same bytes. A folder
    that was prepared from the same source and options is left unchanged.

    Memory: a few shards of at most 16 MiB of text for each process, 128 MiB of tokens, and about 50 bytes for each
    document.

    Args:
        sources: see `find_source`. Names that begin with `train=` and `val=` give the split; several may give the same.
        out: the folder; made if missing.
        options: tokenizer and split.
        num_processes: number of tokenizing processes, or of concurrent tasks. Default: the usable CPUs.
        use_ray: tokenize as tasks of the connected Ray cluster, or the one at `RAY_ADDRESS`. All its machines must
            share `out`.
        progress: called after each step.

    Raises:
        DataError: the source is empty or unreadable, the folder holds other files or cannot be written, another
            process prepares into it, or an interrupted preparation had another source or other options.
    """
    report = _silent if progress is None else progress
    return prepare_for(None, sources, out, options, num_processes=num_processes, use_ray=use_ray, report=report)


def prepare_for(
    follower: Follower | None,
    sources: Names,
    out: str | os.PathLike[str],
    options: PrepareOptions,
    *,
    num_processes: int | None,
    use_ray: bool,
    report: Report,
) -> Manifest:
    """Prepare as `prepare` does, at the pace of a consumer of the training shards. No error deletes its shards."""
    num_processes = check_arguments(options, num_processes, use_ray, report)
    splits = find_splits(sources)
    if "all" not in splits and (options.split != "auto" or options.val_fraction is not None):
        found = f"{show(options.split)} and {show(options.val_fraction)}"
        raise DataError(
            f"split and val_fraction must be absent with train=... and val=..., got {found}. Leave them out."
        )
    out = local_folder(out)
    with file_errors("readable and writable", out):
        before = SourceStates(splits.values())
        digest = _digest(splits, report)
        name = " ".join(list_names(sources))
        existing = _existing(out, name, digest, options)
        if existing is not None and not staging_path(out).exists():
            return existing
        with _staging_folder(out) as staging:
            existing = _existing(out, name, digest, options)
            if existing is not None:
                shutil.rmtree(staging)  # left by a kill after the renaming
                return existing
            try:
                request = Request(staging=staging, out=out, name=name, digest=digest, splits=splits, options=options)
                plan = find_plan(request)
                with _encoder(splits, options.tokenizer, num_processes, use_ray) as encoder:
                    tokenizer_sha256 = tokenizer_digest(load_tokenizer(options.tokenizer))
                    plan, documents = open_documents(request, plan, tokenizer_sha256)
                    run = _Run(staging, splits, documents, options, plan, report, follower)
                    shards = run.tokenize(encoder)
                    before.check_unchanged()
                    manifest = run.assemble(shards)
            except RejectedDocumentsError:
                # The source must change, so its shards are useless. No other error deletes shards.
                if follower is None:
                    shutil.rmtree(staging)
                before.check_unchanged()  # a better reason for text that looks damaged
                raise
            rename_durably(staging / _RESULT_NAME, out)
            shutil.rmtree(staging)
    return manifest


@file_errors("readable and writable")
def local_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder to write into as an absolute path without links.

    Raises:
        DataError: the name is that of a file or of object storage.
    """
    name = name_text(out)
    path = Path(os.path.realpath(local_path(name)))
    if os.path.lexists(path) and not path.is_dir():
        raise DataError(f"The output must be a folder, got {show(name)}, which is something else. Name another.")
    if not name or is_uri(name):
        raise DataError(
            f"The output must be a local or mounted folder, got {show(name)}. Prepare into one and copy it."
        )
    return path


def _silent(progress: Progress) -> None:
    """Ignore the progress."""


def _digest(splits: dict[str, Source], report: Report) -> str:
    """Return the digest of one source, or of both splits together."""
    digests = {
        split: source.digest(lambda share: report(Progress(stage="reading", fraction=share)))
        for split, source in splits.items()
    }
    return digests["all"] if "all" in digests else hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _existing(out: Path, name: str, digest: str, options: PrepareOptions) -> Manifest | None:
    """Return the manifest of `out` if it was prepared from this source and these options; None if `out` is empty."""
    manifest = read_manifest(out)
    if manifest is None and not (out.exists() and any(out.iterdir())):
        return None
    if manifest is None:
        found = "other files"
    elif (manifest.source_sha256, manifest.options) == (digest, options.record()):
        check_sizes(os.fspath(out), manifest)
        return manifest
    else:
        different = name_differences(manifest.options, options, manifest.source_sha256 == digest)
        found = f"token files of {show_name(manifest.source)}: {different} differ"
    raise DataError(
        f"{show_name(out)} must be empty or made from {show_name(name)} with these options, got {found}. Choose "
        "another folder."
    )


@contextlib.contextmanager
def _staging_folder(out: Path) -> Iterator[Path]:
    """Make and lock the working folder beside `out`. Its contents stay for the next start.

    The lock is on the folder itself. The system releases it when the process ends, even after a kill.
    """
    staging = staging_path(out)
    if out.is_mount():
        raise DataError(
            f"{show_name(out)} must not be a mount point, which cannot be renamed. Name a new folder in it."
        )
    staging.mkdir(parents=True, exist_ok=True)
    folder = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{show_name(out)} must be prepared by one process at a time, got two. Wait for the other."
            ) from error
        check_staging(staging)
        yield staging
    finally:
        os.close(folder)
        with contextlib.suppress(OSError):
            staging.rmdir()  # works only if the folder is empty


def _encoder(
    splits: dict[str, Source], tokenizer: str, num_processes: int | None, use_ray: bool
) -> AbstractContextManager[Encoder]:
    """Return the encoder. Its processes start at once, while the caller opens the documents."""
    if use_ray:
        # The import takes seconds, which a run without Ray must not wait for.
        from owt_data._prepare.ray_encoder import ray_encoder

        return ray_encoder(tokenizer, num_processes)
    sizes = [source.num_bytes for source in splits.values()]
    most_shards = max(1, -(-sum(1 << 62 if size is None else size for size in sizes) // MIN_SHARD_BYTES))
    return local_encoder(tokenizer, min(num_processes or num_usable_cpus(), most_shards))


class _Run:
    """Work of one start in the working folder."""

    def __init__(
        self,
        staging: Path,
        splits: dict[str, Source],
        documents: dict[str, Documents],
        options: PrepareOptions,
        plan: Plan,
        report: Report,
        follower: Follower | None,
    ) -> None:
        self._staging, self._splits, self._documents = staging, splits, documents
        self._options, self._plan, self._report = options, plan, report
        self._follower = follower
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._done = Progress(stage="tokenizing", fraction=None)

    def tokenize(self, encoder: Encoder) -> dict[str, list[ShardRecord]]:
        """Tokenize the missing shards. Return the records of all shards, by split."""
        # Validation comes first: training needs all of it when it begins.
        shards = {split: self._tokenize(split, encoder) for split in sorted(self._splits, reverse=True)}
        return {split: shards[split] for split in self._splits}

    def assemble(self, shards: dict[str, list[ShardRecord]]) -> Manifest:
        """Write the token files and the manifest into the folder `result`."""
        split, files = self._assemble(shards)
        manifest = Manifest(
            format=FORMAT,
            version=version("owt-data"),
            tokenizer=self._options.tokenizer,
            vocab_size=self._tokenizer.n_vocab,
            tokenizer_sha256=self._plan.tokenizer_sha256,
            dtype=DTYPE,
            files=files,
            source=self._plan.source,
            source_sha256=self._plan.source_sha256,
            options=self._plan.options,
            split=split,
            revisions=revisions(self._plan),
        )
        # The token files are on disk already. This call also waits for all names in the folder.
        write_durably(self._result / MANIFEST_NAME, manifest.to_json())
        return manifest

    @property
    def _result(self) -> Path:
        return self._staging / _RESULT_NAME

    def _tokenize(self, split: str, encoder: Encoder) -> list[ShardRecord]:
        return tokenize(
            self._documents[split],
            shard_folder(self._staging, split),
            shard_bytes=self._plan.part_bytes,
            encoder=encoder,
            report=self._count,
            follower=None if split == "val" else self._follower,
        )

    def _count(self, record: ShardRecord, is_kept: bool) -> None:
        before, total = self._done, self._plan.num_bytes
        num_bytes = before.num_bytes + record.num_bytes
        self._done = Progress(
            stage="checking" if is_kept else "tokenizing",
            fraction=min(1.0, num_bytes / total) if total else None,
            num_documents=before.num_documents + record.num_documents,
            num_tokens=before.num_tokens + record.num_tokens,
            num_bytes=num_bytes,
        )
        self._report(self._done)

    def _assemble(self, shards: dict[str, list[ShardRecord]]) -> tuple[SplitKind, dict[str, FileRecord]]:
        shutil.rmtree(self._result, ignore_errors=True)
        self._result.mkdir()
        if self._options.documents == "wikitext-titles" and self._done.num_documents == 0:
            source = f"{show_name(self._plan.source)} must hold rows with titles of wikitext, ' = Title = '"
            raise RejectedDocumentsError(f"{source}, got no title. Choose --documents rows.")
        end_of_text, begins = self._tokenizer.eot_token, self._options.documents == "wikitext-titles"
        total, moved = max(1, self._done.num_tokens), 0

        def advance(num_tokens: int) -> None:
            nonlocal moved
            moved += num_tokens
            self._report(dataclasses.replace(self._done, stage="assembling", fraction=moved / (2 * total)))

        sequences, ends = {}, {}
        for name, records in shards.items():
            folder = shard_folder(self._staging, name)
            ends[name] = document_ends(folder, records, end_of_text, advance, begins=begins)
            sequences[name] = local_sequence([shard_path(folder, index) for index in range(len(records))])
        whole = concatenate(list(sequences.values()))
        first = next(iter(shards.values()))
        split, ranges = self._ranges(sequences, ends, num_first_tokens=first[0].num_tokens if first else 0)
        only_ends = any(len(sequences[name]) == len(ends[name]) for name in sequences)
        if only_ends or not all((stops > starts).any() for starts, stops in ranges.values()):
            raise RejectedDocumentsError(self._too_little(split, len(whole), sum(map(len, ends.values()))))
        files = {}
        for name, file in (("train", TRAIN_NAME), ("val", VAL_NAME)):
            summary = summary_of(file, self._options.documents, split, end_of_text)
            files[file] = copy_ranges(whole, ranges[name], self._result / file, summary, advance)
        return split, files

    def _too_little(self, split: SplitKind, num_tokens: int, num_documents: int) -> str:
        """Return the sentence about a text that leaves one of the splits without tokens."""
        constraint, got = "text for both splits", f"{num_tokens} tokens in {num_documents} documents"
        remedy = "Give more text, or another --split or --val-fraction."
        if split == "sources":
            remedy = "Give text for both, train=... and val=...."
        elif split == "start":
            taken = f"its first {self._plan.part_bytes} bytes up to the end of a row or a word"
            constraint, got = f"more text than validation takes, {taken}", f"{self._done.num_bytes} bytes"
            remedy = "Give more text, or name both splits, train=... and val=...."
        return f"{show_name(self._plan.source)} must hold {constraint}, got {got}. {remedy}"

    def _ranges(
        self, sequences: dict[str, TokenSequence], ends: dict[str, np.ndarray], *, num_first_tokens: int
    ) -> tuple[SplitKind, dict[str, Ranges]]:
        """Return the kind of the split and the token ranges of each part. The first shard has `num_first_tokens`."""
        num_tokens = sum(map(len, sequences.values()))
        if "all" not in sequences:
            return "sources", split_at(len(sequences["train"]), num_tokens)
        options, source = self._options, self._splits["all"]
        if options.split == "start":
            ranges = split_at(num_first_tokens, num_tokens)
            return "start", {"train": ranges["val"], "val": ranges["train"]}
        if options.split != "position":
            default = _BUILTIN_VAL_FRACTION if source.kind == BUILTIN else _DOCUMENTS_VAL_FRACTION
            wanted = options.val_fraction or default
            ranges = split_documents(ends["all"], wanted, options.split_seed)
            starts, stops = ranges["val"]
            share = int((stops - starts).sum()) / max(1, num_tokens)
            if options.split == "documents" or abs(share - wanted) <= _MOST_DIFFERENCE:
                return "documents", ranges
        boundary = round(num_tokens * (1 - (options.val_fraction or _POSITION_VAL_FRACTION)))
        return "position", split_at(boundary, num_tokens)
