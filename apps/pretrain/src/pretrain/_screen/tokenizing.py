"""The progress of tokenizing, while the run trains."""

from owt_data import Progress


class Tokenizing:
    """The last progress of a preparation in another thread."""

    def __init__(self) -> None:
        self.last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Note the progress."""
        self.last = progress

    def summary(self) -> str:
        """Return the share of the text that is tokenized; an empty text after the end."""
        if self.last is None or self.last.stage not in ("checking", "tokenizing") or self.last.fraction == 1:
            return ""
        if self.last.fraction is None:
            return f"{self.last.num_tokens:,} tokens tokenized"
        return f"{self.last.fraction:.0%} tokenized"
