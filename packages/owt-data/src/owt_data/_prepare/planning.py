"""The plan of a preparation: that of an interrupted one, or a new one."""

import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from owt_data._complete_files import write_file
from owt_data._errors import DataError, show, show_name
from owt_data._options import PrepareOptions
from owt_data._prepare.shards import MAX_SHARD_BYTES, MIN_SHARD_BYTES
from owt_data._sources.documents import Documents
from owt_data._sources.rows import is_wikitext_title
from owt_data._sources.source import Source
from owt_data._tokenizer_files import name_in_folder
from owt_data._tokenizer_names import is_tokenizer_file
from owt_data._tokens.plan import PLAN_FORMAT, PLAN_NAME, Plan, read_plan

_log = logging.getLogger("owt_data")

# The goal for the number of shards, within the bounds on their sizes.
_NUM_SHARDS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Inputs of one preparation."""

    staging: Path
    """The working folder, with the plan and the shards."""

    out: Path
    """The folder to write into."""

    name: str
    """The sources, as the user named them."""

    digest: str
    """Digest of the sources."""

    splits: dict[str, Source]
    """The sources by split, or one source as `all`."""

    options: PrepareOptions
    """Tokenizer and split."""


def recover_plan(request: Request) -> Plan | None:
    """Return the plan of an interrupted preparation that left shards. Shards without a valid plan are deleted.

    Raises:
        DataError: the interrupted preparation had another source or other options.
    """
    staging = request.staging
    plan = read_plan(staging)
    has_shards = any(staging.glob("parts-*/*.bin"))
    if plan is None or not has_shards:
        if has_shards:
            _log.warning("%s is missing or cannot be read: all shards are made again", staging / PLAN_NAME)
        for folder in staging.glob("parts-*"):
            shutil.rmtree(folder)
        return None
    if (plan.source_sha256, plan.options) != (request.digest, request.options.record()):
        same_contents = plan.source_sha256 == request.digest
        raise _mismatch_error(plan, name_differences(plan.options, request.options, same_contents), request)
    return plan


def open_documents(request: Request, plan: Plan | None, tokenizer_sha256: str) -> dict[str, Documents]:
    """Open the sources as the plan records them, or without a plan as they are now.

    Args:
        request: the preparation.
        plan: the result of `recover_plan`.
        tokenizer_sha256: digest of the tokenizer.

    Raises:
        DataError: the tokenizer or the layout of a hub dataset differs from the plan's, or a dataset cannot be opened.
    """
    if plan is not None and plan.tokenizer_sha256 != tokenizer_sha256:
        raise _mismatch_error(plan, "tokenizer", request)
    documents = {}
    for split, source in request.splits.items():
        before = plan.layouts.get(split) if plan is not None else None
        revision = before.revision if before is not None else None
        documents[split] = _open(source, request.options, revision)
        now = documents[split].layout
        if before not in (None, now):
            raise DataError(
                f"{show_name(source.name)} was {before} before the interruption, and is {now}. Restore the "
                f"first, or delete {show_name(request.staging)} to start again."
            )
    return documents


def write_plan(request: Request, documents: dict[str, Documents], tokenizer_sha256: str) -> Plan:
    """Make the plan of a new preparation, and write it.

    Args:
        request: the preparation.
        documents: the result of `open_documents`.
        tokenizer_sha256: digest of the tokenizer.
    """
    sizes = [opened.num_bytes() for opened in documents.values()]
    total = sum(size for size in sizes if size) if all(sizes) else None
    most = total or (0 if request.options.limit_rows is not None else MAX_SHARD_BYTES * _NUM_SHARDS)
    shard_bytes = min(max(most // _NUM_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    plan = Plan(
        format=PLAN_FORMAT,
        version=version("owt-data"),
        source=request.name,
        source_sha256=request.digest,
        options=request.options.record(),
        tokenizer_sha256=tokenizer_sha256,
        layouts={split: opened.layout for split, opened in documents.items()},
        num_bytes=total,
        part_bytes=shard_bytes,
        tokenizer=name_in_folder(request.options.tokenizer) if is_tokenizer_file(request.options.tokenizer) else None,
    )
    write_file(request.staging / PLAN_NAME, json.dumps(dataclasses.asdict(plan)), durable=True)
    return plan


def _open(source: Source, options: PrepareOptions, revision: str | None) -> Documents:
    return Documents(
        source,
        text_column=options.text_column,
        revision=revision,
        starts_document=is_wikitext_title if options.documents == "wikitext-titles" else None,
        row_end=options.row_end,
        limit_rows=options.limit_rows,
    )


def _mismatch_error(plan: Plan, different: str, request: Request) -> DataError:
    return DataError(
        f"A preparation of {show_name(plan.source)} into {show_name(request.out)} was interrupted, and that of "
        f"{show_name(request.name)} is another one: {different} differ. Repeat the interrupted one, choose another "
        f"folder, or delete {show_name(request.staging)}."
    )


def name_differences(before: dict[str, Any], options: PrepareOptions, same_contents: bool) -> str:
    """Return the names and values in which two preparations differ."""
    now = options.record()
    fields = [f"{key} {show(before[key])} and {show(now[key])}" for key in now if before[key] != now[key]]
    return " and ".join(fields if same_contents else ["contents", *fields])
