"""`manifest.json`: the contents of a folder of token files, and how they were made."""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from pyarrow.fs import FileType

from owt_data._errors import DataError, one_line
from owt_data._json_types import parse_json
from owt_data._paths import BYTES_PER_TOKEN, check_type, file_info, join, normalize, read_blocks

TRAIN_NAME, VAL_NAME, MANIFEST_NAME = "train.bin", "val.bin", "manifest.json"
DTYPE: Literal["<u2"] = "<u2"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One token file."""

    num_tokens: int
    """Tokens, end-of-text tokens included."""

    num_documents: int
    """Documents. Where one document was split by position, each side counts it."""

    sha256: str
    """Of the file's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is known of a folder of token files."""

    tokenizer: str
    """Name of the tokenizer."""

    vocab_size: int
    """Number of token ids, end-of-text included."""

    tokenizer_sha256: str
    """Of the tokenizer's pieces, in the order of their ids."""

    dtype: Literal["<u2"]
    """Type of a token on disk, as numpy writes it."""

    files: dict[str, FileRecord]
    """By file name: `train.bin` and `val.bin`."""

    source: str
    """What was prepared, as the user named it."""

    source_sha256: str
    """Of the source's contents, or of its name where it is on the hub."""

    options: dict[str, Any]
    """The options it was prepared with."""

    version: str
    """Version of owt-data that prepared it."""

    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Commit of each source on the hub: by split, `all` where one source was split."""

    def __post_init__(self) -> None:
        """Check that both token files are there."""
        if self.files.keys() != {TRAIN_NAME, VAL_NAME}:
            raise ValueError(f"files are {sorted(self.files)}")

    def to_json(self) -> str:
        """As it is written to disk."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def check_sizes(folder: str, manifest: Manifest) -> None:
    """Check that the token files of a folder have the sizes that its manifest says.

    Raises:
        DataError: a file is missing or of another size.
    """
    for name, record in manifest.files.items():
        size = check_type(join(folder, name), FileType.File, "a token file").size
        if size != BYTES_PER_TOKEN * record.num_tokens:
            raise DataError(
                f"{join(folder, name)} must have {BYTES_PER_TOKEN * record.num_tokens} bytes, as {MANIFEST_NAME} says, "
                f"got {size}. Restore it from a copy, or delete the folder and prepare it again."
            )


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a folder, or None where it has none.

    Args:
        folder: on disk, or in object storage.

    Raises:
        DataError: the manifest cannot be understood.
    """
    path = join(normalize(os.fspath(folder)), MANIFEST_NAME)
    found = file_info(path).type
    if found is FileType.NotFound:
        return None
    # Anything else than a file would be read without an error, or without an end.
    text = b"".join(read_blocks(path)) if found is FileType.File else b""
    try:
        return parse_json(Manifest, text)
    except ValueError as error:
        raise DataError(
            f"{path} must be a manifest of owt-data, got another or a damaged one: {one_line(error)}. Restore it from "
            "a copy, or delete the folder and prepare it again."
        ) from error
