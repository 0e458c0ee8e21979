"""Options of `prepare` and names of orders and tokenizers. Cheap to import, for command lines."""

from dataclasses import dataclass
from typing import Literal

from owt_data._errors import DataError, check_integer

TokenizerName = Literal["bytes", "gpt2"]
OrderKind = Literal["shuffle", "random", "sequential", "sequential-first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Tokenizer and split of a preparation.

    Raises:
        DataError: a field is out of its range.
    """

    tokenizer: TokenizerName = "gpt2"
    """`gpt2`, or `bytes`, which needs no download and has 257 ids."""

    split: Literal["auto", "documents", "position", "start"] = "auto"
    """`documents` takes random documents for validation, `position` takes the end of the tokens, `start` takes the
    first 128th of the text, at most 16 MiB. `auto` is `position` for a single document, else `documents`."""

    val_fraction: float | None = None
    """Share of the data for validation. Default: 0.1 by position, 0.0005 by documents (0.05 for the built-in
    corpus)."""

    split_seed: int = 2357
    """Seed of the random choice of documents."""

    text_column: str = "text"
    """Column with the text, in JSON lines, parquet files and hub datasets."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise DataError(f"val_fraction must be between 0 and 1, got {self.val_fraction}. Choose another share.")
        if self.split == "start" and self.val_fraction is not None:
            raise DataError(f"val_fraction must be absent with split start, got {self.val_fraction}. Leave it out.")
        check_integer("split_seed", self.split_seed, least=0)
