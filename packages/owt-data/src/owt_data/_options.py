"""Options of `prepare` and names of orders, tokenizers and kinds of documents. Cheap to import, for command lines."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from owt_data._errors import (
    MOST_PROCESSES,
    DataError,
    check_choice,
    check_flag,
    check_function,
    check_integer,
    check_text,
    check_type,
    is_number,
    show,
)
from owt_data._json_types import UnknownFieldError
from owt_data._tokenizer_names import is_tokenizer_file

DocumentsKind = Literal["rows", "wikitext-titles"]
_Split = Literal["auto", "documents", "position", "start"]
OrderKind = Literal["shuffle", "random", "sequential", "sequential-first"]

STREAM_ORDERS: tuple[OrderKind, ...] = ("sequential", "sequential-first")
"""Orders whose first epoch can be read before the last token exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Tokenizer, documents and split of a preparation.

    Raises:
        DataError: a field has another type, or is out of its range.
    """

    tokenizer: str = "gpt2"
    """`gpt2`; `bytes`, which needs no download and has 257 ids; `r50k_base`, `p50k_base`, `cl100k_base` or `o200k_base`
    of tiktoken; or the path of a `tokenizer.json`, or of a folder with one. `PATH::TOKEN` gives its end of text."""

    split: _Split = "auto"
    """`documents` takes random documents for validation, `position` takes the end of the tokens, `start` takes the
    first 128th of the text, at least 256 KiB and at most 16 MiB, up to the end of a row, or of a word of a .txt file.
    `auto` is `documents`, unless the share of the tokens in validation would differ from `val_fraction` by more than a
    tenth of all tokens, as with one or a few documents. It is then `position`."""

    val_fraction: float | None = None
    """Share of the data for validation. Default: 0.1 by position, 0.0005 by documents (0.05 for the built-in
    corpus)."""

    split_seed: int = 2357
    """Seed of the random choice of documents."""

    text_column: str = "text"
    """Column with the text, in JSON lines, parquet files and hub datasets."""

    documents: DocumentsKind = "rows"
    """`rows`: each row is a document, and an end-of-text token follows it. `wikitext-titles`: a document begins at a
    row with an article's title, and an end-of-text token precedes this row. Each line of a .txt file is then a row."""

    row_end: str = ""
    """Text to append to each row, before it is tokenized. In a shell, $'\\n' is a line break."""

    limit_rows: int | None = None
    """Number of rows to read of each source, for a short test. Without titles, a .txt file is one row."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, str) or is_tokenizer_file(self.tokenizer):
            from owt_data._tokenizer_files import tokenizer_name  # imports pyarrow

            object.__setattr__(self, "tokenizer", tokenizer_name(self.tokenizer))
        check_choice("split", self.split, get_args(_Split))
        if self.val_fraction is not None and not (is_number(self.val_fraction) and 0 < self.val_fraction < 1):
            raise DataError(f"val_fraction must be between 0 and 1, got {show(self.val_fraction)}.")
        if self.split == "start" and self.val_fraction is not None:
            raise DataError(
                f"val_fraction must be absent with split start, got {show(self.val_fraction)}. Leave it out."
            )
        check_integer("split_seed", self.split_seed, least=0)
        if self.limit_rows is not None:
            check_integer("limit_rows", self.limit_rows, least=1)
        check_choice("documents", self.documents, get_args(DocumentsKind))
        check_text("text_column", self.text_column, least=1)
        check_text("row_end", self.row_end)
        # Numbers of numpy cannot be written as JSON.
        for name, kind in (("val_fraction", float), ("split_seed", int), ("limit_rows", int)):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else kind(value))

    def record(self) -> dict[str, Any]:
        """Return the fields for a manifest. A tokenizer of a file is recorded by its digest.

        Raises:
            DataError: the file of the tokenizer cannot be read.
        """
        from owt_data._tokenizer_files import tokenizer_label  # imports pyarrow

        return dataclasses.asdict(self) | {"tokenizer": tokenizer_label(self.tokenizer)}


def check_arguments(options: PrepareOptions, num_processes: int | None, use_ray: bool, progress: Any) -> int | None:
    """Check the arguments of `prepare` that are no names. Return `num_processes` as Python's integer.

    Raises:
        DataError: one has another type, or is out of its range.
    """
    check_type("options", options, PrepareOptions, "PrepareOptions", "Make them with PrepareOptions(...).")
    if num_processes is not None:
        num_processes = check_integer("num_processes", num_processes, least=1, most=MOST_PROCESSES)
    check_flag("use_ray", use_ray)
    check_function("progress", progress)
    return num_processes


def check_record(record: dict[str, Any]) -> None:
    """Check that a record has the fields of `PrepareOptions`.

    Raises:
        UnknownFieldError: it has another field.
        ValueError: it lacks a field.
    """
    names = {field.name for field in dataclasses.fields(PrepareOptions)}
    for name in record.keys() - names:
        raise UnknownFieldError(f"options.{name}")
    for name in names - record.keys():
        raise ValueError(f"options.{name}: Field required")
