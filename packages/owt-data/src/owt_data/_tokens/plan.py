"""`plan.json`: the record of an unfinished preparation, which its resume and its readers depend on."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from owt_data._errors import DataError
from owt_data._json_types import parse_record, read_json
from owt_data._options import check_record
from owt_data._paths import open_regular
from owt_data._sources.source import HubLayout
from owt_data._tokens.manifest import Manifest

PLAN_NAME = "plan.json"
PLAN_FORMAT = 2


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

    tokenizer: str | None = None
    """Name of the tokenizer's copy in the working folder, as `Manifest.tokenizer`; None for one without a file, and in
    plans of versions before 0.8."""

    def __post_init__(self) -> None:
        check_record(self.options)

    @property
    def revisions(self) -> dict[str, str]:
        """Commit of each dataset that was streamed from the hub, by split."""
        layouts = {split: layout for split, layout in self.layouts.items() if layout and not layout.offline}
        return {split: layout.revision for split, layout in layouts.items() if layout.revision}


def read_plan(staging: Path) -> Plan | None:
    """Return the plan in the working folder of a preparation; None if it is missing or damaged.

    Raises:
        DataError: another version wrote the plan, or its name is that of a pipe or a device.
    """
    # False also for a name that is too long, which the caller reports.
    if not os.path.lexists(staging):
        return None
    path = staging / PLAN_NAME
    try:
        with open_regular(path, "rb") as file:
            return parse_record(Plan, read_json(file), path, number=PLAN_FORMAT)
    except DataError:
        raise
    except (FileNotFoundError, ValueError):
        return None


def source_fingerprint(of: Plan | Manifest) -> dict[str, Any]:
    """Return a fingerprint of the tokens of a folder, the same before and after the folder is complete."""
    return {
        "source_sha256": of.source_sha256,
        "options": of.options,
        "tokenizer_sha256": of.tokenizer_sha256,
        "revisions": of.revisions,
    }
