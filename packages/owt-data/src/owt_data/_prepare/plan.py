"""`plan.json`: what an interrupted preparation was doing, which the next start goes on with or rejects."""

import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from owt_data._errors import DataError, check_integer
from owt_data._json_types import parse_json
from owt_data._options import PrepareOptions
from owt_data._prepare.durable import write_durably
from owt_data._prepare.shards import MAX_SHARD_BYTES, MIN_SHARD_BYTES
from owt_data._sources.documents import Documents
from owt_data._sources.hub import HubLayout, is_offline
from owt_data._sources.names import Source

_log = logging.getLogger("owt_data")

_NAME = "plan.json"
_FORMAT = 1  # raised when shards of an earlier version can no longer be gone on with

# How many shards to make, as far as their sizes allow.
_NUM_SHARDS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The contents of `plan.json`."""

    format: int
    """See `_FORMAT`."""

    source: str
    """The sources, as the user named them."""

    source_sha256: str
    """What identifies the sources."""

    options: dict[str, Any]
    """The options."""

    tokenizer_sha256: str
    """What identifies the tokenizer."""

    num_bytes: int | None
    """Bytes of text, roughly, where that is known."""

    part_bytes: int
    """Text in a shard, in bytes."""

    layouts: dict[str, HubLayout | None] = dataclasses.field(default_factory=dict)
    """By split, how a hub dataset is read; None for files. Missing in plans of versions before 0.3."""

    def __post_init__(self) -> None:
        """Check what a loop depends on."""
        check_integer("part_bytes", self.part_bytes, least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What this start is to prepare."""

    staging: Path
    """The folder with the plan and the shards."""

    out: Path
    """The folder that they are made for."""

    name: str
    """The sources, as the user named them."""

    digest: str
    """What identifies the sources."""

    splits: dict[str, Source]
    """The sources."""

    options: PrepareOptions
    """The options."""


def find_plan(request: Request) -> Plan | None:
    """The plan of an interrupted start, if it left shards to go on with. What cannot be gone on with is deleted.

    Raises:
        DataError: the interrupted start had another source or other options, or read the hub in another mode.
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
    options = dataclasses.asdict(request.options)
    if (plan.format, plan.source_sha256, plan.options) != (_FORMAT, request.digest, options):
        same_contents = plan.source_sha256 == request.digest
        raise _another(plan, name_differences(plan.options, request.options, same_contents), request)
    for split, source in request.splits.items():
        if source.kind == "hub":
            _check_mode(plan, split, source, staging)
    return plan


def _read(path: Path) -> Plan | None:
    """The plan in a file; None if there is none, or a power cut or a hand has spoiled it."""
    try:
        return parse_json(Plan, path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _check_mode(plan: Plan, split: str, source: Source, staging: Path) -> None:
    layout = plan.layouts.get(split)
    if layout is None:
        raise DataError(
            f"The preparation of {source.name} in {staging} must have been begun by this version of owt-data, got an "
            f"earlier one, which did not record how it read the hub. Delete {staging} to begin again."
        )
    if layout.offline != is_offline():
        needed, found = ("set", "unset") if layout.offline else ("unset", "set")
        raise DataError(
            f"HF_HUB_OFFLINE must be {needed}, as it was when the preparation of {source.name} began, got it {found}. "
            f"Change it back to go on, or delete {staging} to begin again."
        )


def open_documents(request: Request, plan: Plan | None, tokenizer_sha256: str) -> tuple[Plan, dict[str, Documents]]:
    """The sources, opened as the plan says; without a plan, one is made and written.

    Args:
        request: what to prepare.
        plan: what `find_plan` returned.
        tokenizer_sha256: what identifies the tokenizer.

    Raises:
        DataError: the tokenizer or a dataset of the hub is another than the plan's, or cannot be had.
    """
    if plan is not None and plan.tokenizer_sha256 != tokenizer_sha256:
        raise _another(plan, "tokenizer", request)
    documents, layouts = {}, {}
    for split, source in request.splits.items():
        before = plan.layouts.get(split) if plan is not None else None
        revision = before.revision if before is not None else None
        documents[split] = Documents(source, text_column=request.options.text_column, revision=revision)
        layouts[split] = documents[split].layout
        if before is not None and before != layouts[split]:
            raise DataError(
                f"{source.name} must be the dataset that its preparation began with, {before}, got {layouts[split]}. "
                f"Provide that one, or delete {request.staging} to begin again."
            )
    if plan is not None:
        return plan, documents
    sizes = [opened.num_bytes() for opened in documents.values()]
    total = sum(size for size in sizes if size) if all(sizes) else None
    shard_bytes = min(max((total or MAX_SHARD_BYTES * _NUM_SHARDS) // _NUM_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    plan = Plan(
        format=_FORMAT,
        source=request.name,
        source_sha256=request.digest,
        options=dataclasses.asdict(request.options),
        tokenizer_sha256=tokenizer_sha256,
        layouts=layouts,
        num_bytes=total,
        part_bytes=shard_bytes,
    )
    write_durably(request.staging / _NAME, json.dumps(dataclasses.asdict(plan)))
    return plan, documents


def _another(plan: Plan, different: str, request: Request) -> DataError:
    return DataError(
        f"The preparation into {request.out} must be the interrupted one of {plan.source}, got one of {request.name}: "
        f"{different} differ. Repeat the interrupted one, choose another folder, or delete {request.staging}."
    )


def name_differences(before: dict[str, Any], options: PrepareOptions, same_contents: bool) -> str:
    """Names what two preparations differ in."""
    now = dataclasses.asdict(options)
    fields = [f"{key} {before.get(key)} and {now[key]}" for key in now if before.get(key) != now[key]]
    return " and ".join(fields if same_contents else ["contents", *fields]) or "tokenizer"


def revisions(plan: Plan) -> dict[str, str]:
    """By split, the commit of each dataset that was streamed from the hub."""
    layouts = {split: layout for split, layout in plan.layouts.items() if layout and not layout.offline}
    return {split: layout.revision for split, layout in layouts.items() if layout.revision}
