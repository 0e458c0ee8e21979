"""Text to token files: `train.bin`, `val.bin` and the manifest that vouches for them."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from owt_data._errors import DataError, RejectedDocumentsError, check_integer, file_errors
from owt_data._options import PrepareOptions
from owt_data._paths import is_uri, local_path
from owt_data._prepare.cpus import num_usable_cpus
from owt_data._prepare.durable import rename_durably, write_durably
from owt_data._prepare.plan import Plan, Request, find_plan, name_differences, open_documents, revisions
from owt_data._prepare.shards import MIN_SHARD_BYTES, Encoder, ShardRecord, local_encoder, shard_path, tokenize
from owt_data._prepare.write_splits import Ranges, copy_ranges, document_ends, split_at, split_documents
from owt_data._sources.documents import Documents
from owt_data._sources.names import BUILTIN, Source, find_splits
from owt_data._tokenizers import load_tokenizer, tokenizer_digest
from owt_data._tokens.manifest import (
    DTYPE,
    MANIFEST_NAME,
    TRAIN_NAME,
    VAL_NAME,
    FileRecord,
    Manifest,
    check_sizes,
    read_manifest,
)
from owt_data._tokens.sequence import TokenSequence, concatenate, local_sequence

# The built-in corpus is small: the reference's 0.0005 would leave a single module to validate on.
_BUILTIN_VAL_FRACTION = 0.05
_POSITION_VAL_FRACTION = 0.1
_DOCUMENTS_VAL_FRACTION = 0.0005

_RESULT_NAME = "result"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far `prepare` has come."""

    stage: str
    """`reading`, `tokenizing` or `assembling`."""

    fraction: float | None
    """Share of the stage that is done, where its length is known."""

    num_documents: int = 0
    """Documents tokenized so far, those of an earlier start included."""

    num_tokens: int = 0
    """Their tokens."""

    num_bytes: int = 0
    """Their text, in bytes of UTF-8."""


Report = Callable[[Progress], None]


def prepare(
    sources: str | Sequence[str],
    out: str | os.PathLike[str],
    options: PrepareOptions,
    *,
    num_processes: int | None = None,
    use_ray: bool = False,
    progress: Report | None = None,
) -> Manifest:
    """Write `train.bin`, `val.bin` and `manifest.json` for a source into the folder `out`.

    The token files are those of a plain loop over `datasets`' `train_test_split`, `encode_ordinary` and
    end-of-text, byte for byte. They are made in shards beside `out`, in `.NAME.partial`, which takes as much
    disk again as they do, and appear in `out` all at once when they are whole. Whatever interrupts it, the
    same call again goes on from the last finished shard and writes the same bytes. A folder that already
    holds this very source and these options is left as it is.

    Memory: some shards of at most 16 MiB of text for each process, one stretch of 128 MiB of tokens, and
    about 50 bytes for each document.

    Args:
        sources: see `find_source`. With `train=` and `val=` before the names, the split is given.
        out: the folder; made if missing.
        options: tokenizer and split.
        num_processes: how many tokenize at once. Default: as many as this process may use cores.
        use_ray: tokenize as tasks of the Ray cluster that `RAY_ADDRESS` names, or of one started here,
            whose machines all must see `out`.
        progress: called now and then.

    Raises:
        DataError: the source is empty or unreadable, the folder holds something else or cannot be
            written, another process is preparing into it, or it was interrupted with another source or
            other options.
    """
    if num_processes is not None:
        check_integer("num_processes", num_processes, least=1)
    report = progress or _silent
    splits = find_splits(sources)
    if "all" not in splits and (options.split != "auto" or options.val_fraction is not None):
        raise DataError("--split and --val-fraction must be left out where train=... and val=... give the split.")
    out = local_folder(out)
    with file_errors("readable and writable", out):
        digest = _digest(splits, report)
        name = " ".join([sources] if isinstance(sources, str) else sources)
        existing = _existing(out, name, digest, options)
        if existing is not None and not _staging_path(out).exists():
            return existing
        with _staging_folder(out) as staging:
            existing = _existing(out, name, digest, options)
            if existing is not None:
                shutil.rmtree(staging)  # a kill came between the renaming and this
                return existing
            try:
                request = Request(staging=staging, out=out, name=name, digest=digest, splits=splits, options=options)
                plan = find_plan(request)
                with _encoder(splits, options.tokenizer, num_processes, use_ray) as encoder:
                    tokenizer_sha256 = tokenizer_digest(load_tokenizer(options.tokenizer))
                    plan, documents = open_documents(request, plan, tokenizer_sha256)
                    manifest = _Run(staging, splits, documents, options, plan, report).write(encoder)
            except RejectedDocumentsError:
                # The source must change, and with it all that was made of it. Nothing else discards work.
                shutil.rmtree(staging)
                raise
            rename_durably(staging / _RESULT_NAME, out)
            shutil.rmtree(staging)
    return manifest


@file_errors("readable and writable")
def local_folder(out: str | os.PathLike[str]) -> Path:
    """The folder to write into, as an absolute path without links.

    Raises:
        DataError: it is a file, or no local folder.
    """
    name = os.fspath(out)
    path = Path(os.path.realpath(local_path(name)))
    if is_uri(name):
        raise DataError(
            f"The folder to write into must be a local or mounted one, got {name}. Prepare into a local folder and "
            "copy it to the storage, where it can be read."
        )
    if not name or (os.path.lexists(path) and not path.is_dir()):
        raise DataError(f"The last name must be a folder to write into, got {name or 'an empty one'}. Name a folder.")
    return path


def _silent(progress: Progress) -> None:
    """Report to nobody."""


def _digest(splits: dict[str, Source], report: Report) -> str:
    """What identifies the sources: that of the one, or those of both splits together."""
    digests = {
        split: source.digest(lambda share: report(Progress(stage="reading", fraction=share)))
        for split, source in splits.items()
    }
    return digests["all"] if "all" in digests else hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _existing(out: Path, name: str, digest: str, options: PrepareOptions) -> Manifest | None:
    """The manifest of what `out` holds, if that is what is asked for; None if it holds nothing."""
    manifest = read_manifest(out)
    if manifest is None:
        if out.exists() and any(out.iterdir()):
            raise DataError(f"{out} must be empty or missing, got a folder of other files. Choose another folder.")
        return None
    if (manifest.source_sha256, manifest.options) != (digest, dataclasses.asdict(options)):
        different = name_differences(manifest.options, options, manifest.source_sha256 == digest)
        raise DataError(
            f"{out} must be empty or prepared from {name} as it is now and with these options, got it prepared from "
            f"{manifest.source}: {different} differ. Choose another folder."
        )
    check_sizes(os.fspath(out), manifest)
    return manifest


def _staging_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@contextlib.contextmanager
def _staging_folder(out: Path) -> Iterator[Path]:
    """The folder beside `out` where the work is done, held against a second prepare.

    The lock is on the folder itself and goes with the process, however that ends. What is in it stays for
    the next start, unless it was the source that was found unfit.
    """
    staging = _staging_path(out)
    if out.is_mount():
        raise DataError(f"{out} must not be a mount point, which cannot be renamed. Name a new folder in it.")
    staging.mkdir(parents=True, exist_ok=True)
    folder = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{out} must be prepared by one process at a time, got two. Wait for the other.") from error
        yield staging
    finally:
        os.close(folder)
        with contextlib.suppress(OSError):
            staging.rmdir()  # if nothing came to be in it


def _encoder(
    splits: dict[str, Source], tokenizer: str, num_processes: int | None, use_ray: bool
) -> AbstractContextManager[Encoder]:
    """Processes begin to start here, while the rest is made ready."""
    if use_ray:
        # Imported here because it takes seconds, which a run without it need not wait for.
        from owt_data._prepare.ray_encoder import ray_encoder

        return ray_encoder(tokenizer)
    sizes = [source.num_bytes for source in splits.values()]
    most_shards = max(1, -(-sum(1 << 62 if size is None else size for size in sizes) // MIN_SHARD_BYTES))
    return local_encoder(tokenizer, min(num_processes or num_usable_cpus(), most_shards))


class _Run:
    """One start of the work in a staging folder."""

    def __init__(
        self,
        staging: Path,
        splits: dict[str, Source],
        documents: dict[str, Documents],
        options: PrepareOptions,
        plan: Plan,
        report: Report,
    ) -> None:
        self._staging, self._splits, self._documents = staging, splits, documents
        self._options, self._plan, self._report = options, plan, report
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._done = Progress(stage="tokenizing", fraction=None)

    def write(self, encoder: Encoder) -> Manifest:
        """Tokenize what is not yet tokenized, and assemble it into the folder `result`."""
        shards = {split: self._tokenize(split, encoder) for split in self._splits}
        files = self._assemble(shards)
        manifest = Manifest(
            tokenizer=self._options.tokenizer,
            vocab_size=self._tokenizer.n_vocab,
            tokenizer_sha256=self._plan.tokenizer_sha256,
            dtype=DTYPE,
            files=files,
            source=self._plan.source,
            source_sha256=self._plan.source_sha256,
            options=self._plan.options,
            version=version("owt-data"),
            revisions=revisions(self._plan),
        )
        # The token files are on disk by now, and this waits for all the names in the folder.
        write_durably(self._result / MANIFEST_NAME, manifest.to_json())
        return manifest

    @property
    def _result(self) -> Path:
        return self._staging / _RESULT_NAME

    def _folder(self, split: str) -> Path:
        return self._staging / f"parts-{split}"

    def _tokenize(self, split: str, encoder: Encoder) -> list[ShardRecord]:
        shard_bytes, folder = self._plan.part_bytes, self._folder(split)
        return tokenize(self._documents[split], folder, shard_bytes=shard_bytes, encoder=encoder, report=self._count)

    def _count(self, record: ShardRecord) -> None:
        before, total = self._done, self._plan.num_bytes
        num_bytes = before.num_bytes + record.num_bytes
        self._done = Progress(
            stage="tokenizing",
            fraction=min(1.0, num_bytes / total) if total else None,
            num_documents=before.num_documents + record.num_documents,
            num_tokens=before.num_tokens + record.num_tokens,
            num_bytes=num_bytes,
        )
        self._report(self._done)

    def _assemble(self, shards: dict[str, list[ShardRecord]]) -> dict[str, FileRecord]:
        shutil.rmtree(self._result, ignore_errors=True)
        self._result.mkdir()
        end_of_text = self._tokenizer.eot_token
        total, moved = self._done.num_tokens, 0

        def advance(num_tokens: int) -> None:
            nonlocal moved
            moved += num_tokens
            self._report(dataclasses.replace(self._done, stage="assembling", fraction=moved / (2 * total)))

        sequences, ends = {}, {}
        for split, records in shards.items():
            folder = self._folder(split)
            ends[split] = document_ends(folder, records, end_of_text, advance)
            if sum(record.num_tokens for record in records) == len(ends[split]):
                found = "empty ones" if len(ends[split]) else "none"
                raise RejectedDocumentsError(
                    f"{self._splits[split].name} must hold documents with text, got {found}. Give another source."
                )
            sequences[split] = local_sequence([shard_path(folder, index) for index in range(len(records))])
        whole = concatenate(list(sequences.values()))
        ranges = self._ranges(sequences, ends)
        for split, (starts, stops) in ranges.items():
            if not (stops > starts).any():
                raise RejectedDocumentsError(
                    f"The text must suffice for training and validation, got {sum(map(len, ends.values()))} documents "
                    f"of {len(whole)} tokens, which leave none for {split}. Give more text, or another --split or "
                    "--val-fraction."
                )
        return {
            name: copy_ranges(whole, ranges[split], self._result / name, end_of_text, advance)
            for split, name in (("train", TRAIN_NAME), ("val", VAL_NAME))
        }

    def _ranges(self, sequences: dict[str, TokenSequence], ends: dict[str, np.ndarray]) -> dict[str, Ranges]:
        """Which tokens of all shards go where."""
        num_tokens = sum(map(len, sequences.values()))
        if "all" not in sequences:
            return split_at(len(sequences["train"]), num_tokens)
        options, source, num_documents = self._options, self._splits["all"], len(ends["all"])
        by_position = options.split == "position" or (options.split == "auto" and num_documents == 1)
        if by_position:
            return split_at(round(num_tokens * (1 - (options.val_fraction or _POSITION_VAL_FRACTION))), num_tokens)
        default = _BUILTIN_VAL_FRACTION if source.kind == BUILTIN else _DOCUMENTS_VAL_FRACTION
        return split_documents(ends["all"], options.val_fraction or default, options.split_seed)
