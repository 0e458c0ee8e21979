"""How text becomes token files. Light to import, for command lines."""

from dataclasses import dataclass
from typing import Literal

from owt_data._errors import DataError, check_integer

TokenizerName = Literal["bytes", "gpt2"]
OrderKind = Literal["shuffle", "random", "sequential"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How text becomes token files.

    Raises:
        DataError: a field is out of its range.
    """

    tokenizer: TokenizerName = "gpt2"
    """`gpt2`, or `bytes` for no download and a vocabulary of 257."""

    split: Literal["auto", "documents", "position"] = "auto"
    """`documents` puts random documents aside for validation, `position` the end of the tokens. `auto` is
    `position` for a single document and `documents` otherwise."""

    val_fraction: float | None = None
    """Share put aside for validation. Default: 0.1 by position, 0.0005 of documents (0.05 of the built-in
    corpus)."""

    split_seed: int = 2357
    """Seed of the random documents."""

    text_column: str = "text"
    """The column that holds the text, in JSON lines, parquet and hub datasets."""

    def __post_init__(self) -> None:
        """Check every field once."""
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise DataError(f"val_fraction must be between 0 and 1, got {self.val_fraction}. Choose another share.")
        check_integer("split_seed", self.split_seed, least=0)
