"""`plan.json`: the record of a preparation that its resume depends on."""

import dataclasses
import json
import logging
import os
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from owt_data._errors import DataError, show, show_name
from owt_data._json_types import parse_record, read_json
from owt_data._options import PrepareOptions, check_record
from owt_data._paths import open_regular
from owt_data._prepare.durable import write_durably
from owt_data._prepare.shards import MAX_SHARD_BYTES, MIN_SHARD_BYTES, staging_path
from owt_data._sources.documents import Documents
from owt_data._sources.rows import is_wikitext_title
from owt_data._sources.source import HubLayout, Source
from owt_data._tokens.manifest import Manifest

_log = logging.getLogger("owt_data")

_NAME = "plan.json"
_FORMAT = 2

# The goal for the number of shards, within the bounds on their sizes.
_NUM_SHARDS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Contents of `plan.json`."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    format: Literal[2]
    """Format of the working folder."""

    version: str
    """Version of owt-data that wrote the plan."""

    source: str
    """The sources, as the user named them."""

    source_sha256: str
    """Digest of the sources."""

    options: dict[str, Any]
    """Result of `PrepareOptions.record`."""

    tokenizer_sha256: str
    """Digest of the tokenizer."""

    num_bytes: int | None
    """Approximate bytes of text; None if unknown."""

    part_bytes: PositiveInt
    """Bytes of text in a shard."""

    layouts: dict[str, HubLayout | None]
    """By split, the layout of a hub dataset; None for files."""

    def __post_init__(self) -> None:
        """Check the options."""
        check_record(self.options)


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


def find_plan(request: Request) -> Plan | None:
    """Return the plan of an interrupted preparation that left shards. Shards without a valid plan are deleted.

    Raises:
        DataError: the interrupted preparation had another source or other options.
    """
    staging = request.staging
    plan = _read(staging / _NAME)
    has_shards = any(staging.glob("parts-*/*.bin"))
    if plan is None or not has_shards:
        if has_shards:
            _log.warning("%s is missing or cannot be read: all shards are made again", staging / _NAME)
        for folder in staging.glob("parts-*"):
            shutil.rmtree(folder)
        return None
    if (plan.source_sha256, plan.options) != (request.digest, request.options.record()):
        same_contents = plan.source_sha256 == request.digest
        raise _another(plan, name_differences(plan.options, request.options, same_contents), request)
    return plan


def _read(path: Path) -> Plan | None:
    """Return the plan in a file; None if the file is missing or damaged.

    Raises:
        DataError: another version wrote the plan, or its name is that of a pipe or a device.
    """
    try:
        with open_regular(path, "rb") as file:
            return parse_record(Plan, read_json(file), path, number=_FORMAT)
    except DataError:
        raise
    except (FileNotFoundError, ValueError):
        return None


def open_documents(request: Request, plan: Plan | None, tokenizer_sha256: str) -> tuple[Plan, dict[str, Documents]]:
    """Open the sources as the plan records them. Without a plan, make and write one.

    Args:
        request: the preparation.
        plan: the result of `find_plan`.
        tokenizer_sha256: digest of the tokenizer.

    Raises:
        DataError: the tokenizer or the layout of a hub dataset differs from the plan's, or a dataset cannot be opened.
    """
    if plan is not None and plan.tokenizer_sha256 != tokenizer_sha256:
        raise _another(plan, "tokenizer", request)
    documents, layouts = {}, {}
    for split, source in request.splits.items():
        before = plan.layouts.get(split) if plan is not None else None
        revision = before.revision if before is not None else None
        documents[split] = _open(source, request.options, revision)
        layouts[split] = documents[split].layout
        if before not in (None, layouts[split]):
            raise DataError(
                f"{show_name(source.name)} must be read as before its interruption, {before}, got {layouts[split]}. "
                f"Restore that, or delete {show_name(request.staging)} to start again."
            )
    if plan is not None:
        return plan, documents
    sizes = [opened.num_bytes() for opened in documents.values()]
    total = sum(size for size in sizes if size) if all(sizes) else None
    most = total or (0 if request.options.limit_rows is not None else MAX_SHARD_BYTES * _NUM_SHARDS)
    shard_bytes = min(max(most // _NUM_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    plan = Plan(
        format=_FORMAT,
        version=version("owt-data"),
        source=request.name,
        source_sha256=request.digest,
        options=request.options.record(),
        tokenizer_sha256=tokenizer_sha256,
        layouts=layouts,
        num_bytes=total,
        part_bytes=shard_bytes,
    )
    write_durably(request.staging / _NAME, json.dumps(dataclasses.asdict(plan)))
    return plan, documents


def _open(source: Source, options: PrepareOptions, revision: str | None) -> Documents:
    return Documents(
        source,
        text_column=options.text_column,
        revision=revision,
        starts_document=is_wikitext_title if options.documents == "wikitext-titles" else None,
        row_end=options.row_end,
        limit_rows=options.limit_rows,
    )


def _another(plan: Plan, different: str, request: Request) -> DataError:
    return DataError(
        f"The preparation into {show_name(request.out)} must be the interrupted one of {show_name(plan.source)}, got "
        f"one of {show_name(request.name)}: {different} differ. Repeat the interrupted one, choose another folder, or "
        f"delete {show_name(request.staging)}."
    )


def name_differences(before: dict[str, Any], options: PrepareOptions, same_contents: bool) -> str:
    """Return the names and values in which two preparations differ."""
    now = options.record()
    fields = [f"{key} {show(before[key])} and {show(now[key])}" for key in now if before[key] != now[key]]
    return " and ".join(fields if same_contents else ["contents", *fields])


def revisions(plan: Plan) -> dict[str, str]:
    """Return the commit of each dataset that was streamed from the hub, by split."""
    layouts = {split: layout for split, layout in plan.layouts.items() if layout and not layout.offline}
    return {split: layout.revision for split, layout in layouts.items() if layout.revision}


def read_plan(folder: Path) -> Plan | None:
    """Return the plan of a folder that is being prepared, or whose preparation was interrupted; None for others."""
    staging = staging_path(folder)
    # False also for a name that is too long, which the caller reports.
    return _read(staging / _NAME) if os.path.lexists(staging) else None


def source_fingerprint(of: Plan | Manifest) -> dict[str, Any]:
    """Return a fingerprint of the tokens of a folder, the same before and after the folder is complete."""
    return {
        "source_sha256": of.source_sha256,
        "options": of.options,
        "tokenizer_sha256": of.tokenizer_sha256,
        "revisions": revisions(of) if isinstance(of, Plan) else of.revisions,
    }
