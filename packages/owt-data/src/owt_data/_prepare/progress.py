"""Progress of a preparation, for its caller."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of `prepare`, or of the training of a tokenizer."""

    stage: str
    """`reading`, `checking` (what earlier starts have tokenized), `tokenizing` or `assembling`. For a tokenizer's
    training, `reading` or `merging`."""

    fraction: float | None
    """Share of the stage that is done; None if its length is unknown."""

    num_documents: int = 0
    """Documents tokenized so far, including those of earlier starts."""

    num_tokens: int = 0
    """Tokens of these documents."""

    num_bytes: int = 0
    """Text of these documents, in bytes of UTF-8."""


Report = Callable[[Progress], None]
