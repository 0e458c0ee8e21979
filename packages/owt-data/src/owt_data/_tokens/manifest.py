"""`manifest.json`: the record of the token files in a folder and of their preparation."""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pyarrow.fs import FileType

from owt_data._errors import DataError, check_integer, check_type, file_errors, one_line, show, show_name
from owt_data._json_types import parse_record, read_json
from owt_data._options import check_record
from owt_data._paths import (
    MANIFEST_NAME,
    TRAIN_NAME,
    VAL_NAME,
    connect,
    join,
    look_up,
    look_up_as,
    normalize,
)
from owt_data._tokenizer_files import is_name_in_folder
from owt_data._tokens.layout import MOST_IDS, Layout

FORMAT = 1
"""Format of the manifest and the token files."""

SplitKind = Literal["documents", "position", "start", "sources"]
"""Kind of a split."""

_SHA256 = re.compile("[0-9a-f]{64}")
_REMEDY = "Restore it from a copy, or delete the folder and prepare it again."


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Record of a token file."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    num_tokens: int
    """Number of tokens, including end-of-text tokens."""

    num_documents: int
    """Number of documents. A document that was split by position counts in both files."""

    sha256: str
    """SHA-256 of the file."""

    def __post_init__(self) -> None:
        check_integer("num_tokens", self.num_tokens, least=0)
        check_integer("num_documents", self.num_documents, least=0)
        _check_sha256("sha256", self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of `manifest.json`."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    format: Literal[1]
    """Format of the manifest and the token files."""

    version: str
    """Version of owt-data that wrote the files."""

    tokenizer: str
    """Name of the tokenizer; `tokenizer.json::TOKEN` for the file in the folder, with its end-of-text token."""

    vocab_size: int
    """Number of token ids, including end-of-text."""

    tokenizer_sha256: str
    """SHA-256 of the tokenizer's pieces, in order of their ids."""

    dtype: Literal["<u2", "<u4"]
    """numpy type of a token on disk."""

    files: dict[str, FileRecord]
    """Records of `train.bin` and `val.bin`, by file name."""

    source: str
    """The sources, as the user named them."""

    source_sha256: str
    """SHA-256 of the file contents, or of the name for a hub dataset."""

    options: dict[str, Any]
    """Result of `PrepareOptions.record`."""

    split: SplitKind
    """Kind of the split: `sources` if each split had its own source, else as in `PrepareOptions.split`."""

    revisions: dict[str, str]
    """Commit of each hub dataset, by split; `all` for one source that was split."""

    def __post_init__(self) -> None:
        for name in ("files", "options"):
            check_type(name, getattr(self, name), dict, "a dict")
        if self.files.keys() != {TRAIN_NAME, VAL_NAME}:
            raise ValueError(f"files are {sorted(self.files)}")
        if not is_name_in_folder(self.tokenizer):
            raise ValueError(f"tokenizer is {show(self.tokenizer)}")
        check_integer("vocab_size", self.vocab_size, least=1, most=MOST_IDS)
        _check_sha256("tokenizer_sha256", self.tokenizer_sha256)
        _check_sha256("source_sha256", self.source_sha256)
        check_record(self.options)

    def to_json(self) -> str:
        """Return the contents of the file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def _check_sha256(name: str, digits: str) -> None:
    if not isinstance(digits, str) or _SHA256.fullmatch(digits) is None:
        raise DataError(f"{name} must be a SHA-256 of 64 hexadecimal digits, got {show(digits)}.")


def check_sizes(folder: str, manifest: Manifest) -> None:
    """Check that the token files of a folder have the sizes in its manifest.

    Raises:
        DataError: a file is missing or has another size.
    """
    for name, record in manifest.files.items():
        path = join(folder, name)
        num_bytes = Layout(manifest.dtype).place(record.num_tokens)
        size = look_up_as(path, FileType.File, "a token file", _REMEDY, suggest=False).size
        if size != num_bytes:
            raise DataError(
                f"{show_name(path)} must have {num_bytes} bytes as in {MANIFEST_NAME}, got {size}. {_REMEDY}"
            )


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """Read the manifest of a folder; None if the folder does not have one.

    Args:
        folder: a folder on disk or in object storage.

    Raises:
        DataError: the manifest is damaged, cannot be read, or has the format of another version.
    """
    path = join(normalize(folder), MANIFEST_NAME)
    if look_up(path).type is FileType.NotFound:
        return None
    look_up_as(path, FileType.File, "a manifest of owt-data", _REMEDY)  # reading a pipe could block
    filesystem, place = connect(path)
    try:
        with file_errors("readable", path), filesystem.open_input_stream(place) as stream:
            data = read_json(stream)
        return parse_record(Manifest, data, path, number=FORMAT)
    except DataError:
        raise
    except ValueError as error:
        found = f"another or a damaged one: {one_line(error)}"
        raise DataError(f"{show_name(path)} must be a manifest of owt-data, got {found}. {_REMEDY}") from error
