"""Preparation of `train.bin`, `val.bin` and `manifest.json` from text."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from owt_data._complete_files import made_folder, rename_durably, write_file
from owt_data._errors import DataError, RejectedDocumentsError, file_errors, show, show_name
from owt_data._options import PrepareOptions, check_arguments
from owt_data._paths import Names, is_uri, list_names, local_path, name_text
from owt_data._prepare.assemble import assemble
from owt_data._prepare.cpus import num_usable_cpus
from owt_data._prepare.local_encoder import local_encoder
from owt_data._prepare.planning import Request, name_differences, open_documents, recover_plan, write_plan
from owt_data._prepare.progress import Progress, Report
from owt_data._prepare.shards import MIN_SHARD_BYTES, Encoder, Follower, tokenize
from owt_data._sources.source import Source, SourceStates, digest_of, find_splits
from owt_data._tokenizer_files import TOKENIZER_FILE, name_from_folder, name_in_folder, tokenizer_json
from owt_data._tokenizers import load_tokenizer, tokenizer_digest
from owt_data._tokens.journal import ShardRecord, shard_folder, staging_path
from owt_data._tokens.manifest import Manifest, check_sizes, read_manifest

_RESULT_NAME = "result"
# Names in the working folder of a preparation. Systems make hidden files, such as `.nfs000001`.
_STAGING_NAMES = ("plan.json*", "parts-*", "result", "wanted*", "running", "error.txt*", "tokenizer.json*", ".*")


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

    Memory: a few shards of at most 16 MiB of text for each process, 128 MiB of tokens, and about 100 bytes for each
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
        digest = digest_of(splits, lambda share: report(Progress(stage="reading", fraction=share)))
        name = " ".join(list_names(sources))
        existing = _find_existing(out, digest, options)
        if existing is not None and not staging_path(out).exists():
            return existing
        with _staging_folder(out) as staging:
            existing = _find_existing(out, digest, options)
            if existing is not None:
                shutil.rmtree(staging)  # left by a kill after the renaming
                return existing
            try:
                request = Request(staging=staging, out=out, name=name, digest=digest, splits=splits, options=options)
                plan = recover_plan(request)
                request = dataclasses.replace(request, options=_with_own_tokenizer(options, staging))
                tokenizer = request.options.tokenizer
                with _encoder(splits, tokenizer, num_processes, use_ray) as encoder:
                    tokenizer_sha256 = tokenizer_digest(load_tokenizer(tokenizer))
                    documents = open_documents(request, plan, tokenizer_sha256)
                    plan = plan or write_plan(request, documents, tokenizer_sha256)
                    count = _counter(plan.num_bytes, report)
                    shards = {}
                    # Validation comes first: training needs all of it when it begins.
                    for split in sorted(splits, reverse=True):
                        shards[split] = tokenize(
                            documents[split],
                            shard_folder(staging, split),
                            shard_bytes=plan.part_bytes,
                            encoder=encoder,
                            report=count,
                            follower=None if split == "val" else follower,
                        )
                    before.check_unchanged()
                    manifest = assemble(request, plan, shards, staging / _RESULT_NAME, report)
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
        raise DataError(f"The output must be a folder, got {show(name)}, which is something else.")
    if not name or is_uri(name):
        raise DataError(
            f"The output must be a local or mounted folder, got {show(name)}. Prepare into one and copy it."
        )
    return path


def _with_own_tokenizer(options: PrepareOptions, staging: Path) -> PrepareOptions:
    """Return the options with a copy of the tokenizer's file in the working folder, if it has one.

    All processes and machines read the copy, which does not change, and readers of unfinished tokens find it.
    """
    content = tokenizer_json(options.tokenizer)
    if content is None:
        return options
    name = name_in_folder(options.tokenizer)
    write_file(staging / TOKENIZER_FILE, memoryview(content))
    return dataclasses.replace(options, tokenizer=name_from_folder(str(staging), name))


def _silent(progress: Progress) -> None:
    """Ignore the progress."""


def _find_existing(out: Path, digest: str, options: PrepareOptions) -> Manifest | None:
    """Return the manifest of `out` if it was prepared from this source and these options; None if `out` is empty."""
    manifest = read_manifest(out)
    if manifest is None and not (out.exists() and any(out.iterdir())):
        return None
    if manifest is None:
        found = "files that prepare has not written"
    elif (manifest.source_sha256, manifest.options) == (digest, options.record()):
        check_sizes(os.fspath(out), manifest)
        return manifest
    else:
        different = name_differences(manifest.options, options, manifest.source_sha256 == digest)
        found = f"token files of {show_name(manifest.source)}: {different} differ"
    raise DataError(f"{show_name(out)} holds {found}. Choose another folder.")


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
    with made_folder(staging):
        folder = os.open(staging, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"Another process prepares into {show_name(out)}. Wait for it, or choose another folder."
                ) from error
            _check_staging(staging)
            yield staging
        finally:
            os.close(folder)
            with contextlib.suppress(OSError):
                staging.rmdir()  # works only if the folder is empty


def _check_staging(staging: Path) -> None:
    """Raise DataError if the working folder holds a file of somebody else: the end of the preparation deletes it."""
    for path in staging.iterdir():
        if not any(map(path.match, _STAGING_NAMES)):
            raise DataError(
                f"{show_name(staging)} holds {show_name(path.name)}, which prepare has not written. Move it away."
            )


def _encoder(
    splits: dict[str, Source], tokenizer: str, num_processes: int | None, use_ray: bool
) -> AbstractContextManager[Encoder]:
    """Return the encoder. Its processes start at once, while the caller opens the documents."""
    if use_ray:
        # The import takes seconds, which a run without Ray must not wait for.
        from owt_data._prepare.ray_encoder import ray_encoder

        return ray_encoder(tokenizer, num_processes)
    most_shards = most_shards_of(source.num_bytes for source in splits.values())
    return local_encoder(tokenizer, min(num_processes or num_usable_cpus(), most_shards))


def most_shards_of(sizes: Iterable[int | None]) -> int:
    """Return the largest number of shards of sources with these sizes in bytes; None is an unknown size."""
    return max(1, -(-sum(1 << 62 if size is None else size for size in sizes) // MIN_SHARD_BYTES))


def _counter(total_bytes: int | None, report: Report) -> Callable[[ShardRecord, bool], None]:
    """Return a function that reports the sums of the shards it is called with."""
    num_documents = num_tokens = num_bytes = 0

    def count(record: ShardRecord, is_kept: bool) -> None:
        nonlocal num_documents, num_tokens, num_bytes
        num_documents += record.num_documents
        num_tokens += record.num_tokens
        num_bytes += record.num_bytes
        report(
            Progress(
                stage="checking" if is_kept else "tokenizing",
                fraction=min(1.0, num_bytes / total_bytes) if total_bytes else None,
                num_documents=num_documents,
                num_tokens=num_tokens,
                num_bytes=num_bytes,
            )
        )

    return count
