"""The tokens of a run and their documents, opened for an audit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from owt_data import (
    WINDOW_ORDER_VERSION,
    DataError,
    GrowingTokens,
    OrderKind,
    TokenData,
    TokenDocuments,
    open_documents,
    open_tokens,
)
from pretrain._errors import UsageError, short
from pretrain._run.description import RunDescription
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import TEXT_METRICS
from pretrain._run.partial_reads import last_lines
from ray_jax_launch import checkpoint_steps


@dataclass(frozen=True)
class RunTokens:
    """The training tokens of a run, and their documents."""

    folder: RunFolder
    """The run's folder."""

    description: RunDescription
    """The run's configuration and data."""

    data: TokenData
    """The tokens."""

    documents: TokenDocuments
    """The documents of the training tokens. Those of a stream exist up to some token."""

    @property
    def seq_len(self) -> int:
        """Inputs per window."""
        return self.description.config.model.seq_len

    @property
    def batch_size(self) -> int:
        """Windows per step, over all workers."""
        return self.description.config.train.global_batch_size

    @property
    def order(self) -> OrderKind:
        """The order of the windows."""
        assert self.description.config.train.order is not None, "it is resolved"
        return self.description.config.train.order

    @property
    def first_step(self) -> int:
        """The first step of the run: 1, or that after the checkpoint that the run starts from."""
        origin = self.description.origin
        return 1 + (0 if origin is None else origin.start_step)

    @property
    def last_step(self) -> int:
        """The last step of the run, past or to come."""
        return self.description.config.train.max_steps

    @cached_property
    def reached_step(self) -> int:
        """The step that the run has reached: that of its newest record or checkpoint."""
        records = [record["step"] for record in last_lines(self.folder.metrics, 1, TEXT_METRICS)]
        return max([self.first_step - 1, *records, *checkpoint_steps(self.folder.checkpoints)])

    @property
    def growing(self) -> GrowingTokens | None:
        """The training tokens, if they are still being prepared."""
        train = self.data.train
        return train if isinstance(train, GrowingTokens) and not train.is_complete else None


def open_run_tokens(
    folder: RunFolder, description: RunDescription, *, report: Callable[[float], None] | None = None
) -> RunTokens:
    """Open the tokens of a run, checked against the digests in its description.

    Args:
        folder: the run's folder.
        description: the run's description.
        report: called with the share done, if the documents must be found by reading the tokens.

    Raises:
        UsageError: the token files are missing, or hold other tokens than those of the run.
        DataError: the tokens cannot be read.
    """
    stored = description.data
    if stored.window_order_version != WINDOW_ORDER_VERSION:
        raise UsageError(
            f"the window order of {folder} must have version {WINDOW_ORDER_VERSION}, got "
            f"{stored.window_order_version}. Use the owt-data of the run: {description.versions.get('owt-data')}."
        )
    names = ", ".join([stored.tokens] if isinstance(stored.tokens, str) else stored.tokens)
    try:
        data = open_tokens(stored.tokens, tokenizer=stored.tokenizer)
    except DataError as error:
        raise UsageError(f"the token files of {folder} cannot be opened: {error}") from error
    if stored.fingerprint not in (data.fingerprint, data.source_fingerprint):
        raise UsageError(
            f"{short(names)} must hold the tokens of {folder}, got others: {_difference(stored.fingerprint, data)}. "
            "Restore the files."
        )
    return RunTokens(folder, description, data, open_documents(data, report=report))


def _difference(stored: dict[str, object], data: TokenData) -> str:
    """Return the first fields of a fingerprint that differ."""
    found = data.fingerprint if stored.keys() & {"manifest", "mixture", "sequence"} else data.source_fingerprint or {}
    names = [name for name in stored if stored[name] != found.get(name)]
    return f"{' and '.join(names)} differ{'s' if len(names) == 1 else ''}"
