"""`manifest.json`: what a folder of token files holds and how it came to be."""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileType

from owt_data._errors import DataError
from owt_data._files import file_type, join, normalize, read_blocks

TRAIN_NAME, VAL_NAME, MANIFEST_NAME = "train.bin", "val.bin", "manifest.json"
DTYPE = "<u2"


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

    dtype: str
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

    def to_json(self) -> str:
        """As it is written to disk."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a folder, or None where it has none.

    Args:
        folder: on disk, or in object storage.

    Raises:
        DataError: the manifest cannot be understood.
    """
    path = join(normalize(os.fspath(folder)), MANIFEST_NAME)
    if file_type(path) is not FileType.File:
        return None
    try:
        fields = dict(json.loads(b"".join(read_blocks(path))))
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        return Manifest(files=files, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} must be a manifest of owt-data, got a file that does not read as one ({error}). Delete the folder "
            "and prepare it again."
        ) from error
