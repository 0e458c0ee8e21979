"""Datasets of the Hugging Face hub: streamed at one revision, or read from a downloaded copy."""

import zlib
from collections.abc import Iterator
from typing import Any

import datasets
import datasets.config
import pyarrow as pa
from datasets.config import HF_HUB_OFFLINE as DATASETS_OFFLINE
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.utils import httpx

from owt_data._errors import DataError, one_line, show, show_name
from owt_data._paths import suggest_name
from owt_data._sources.source import HubLayout, Source

_TIMEOUT_S = 10
_ROWS_PER_READ = 1024
_OFFLINE_SHARDS = 64
_READ_ERRORS = (DatasetGenerationError, httpx.HTTPError, OSError, ValueError, TypeError, EOFError, zlib.error)


class HubRows:
    """Rows of a hub dataset.

    Args:
        source: the dataset.
        revision: the commit to stream, by default the newest. A downloaded copy has a fixed revision.

    Raises:
        DataError: the hub cannot be reached, or does not have the dataset.
    """

    def __init__(self, source: Source, revision: str | None) -> None:
        self._name = source.name
        repository, configuration, split = source.hub_address
        offline = bool(HF_HUB_OFFLINE or DATASETS_OFFLINE)
        self._rows: datasets.IterableDataset
        try:
            if offline:
                revision = datasets.load_dataset_builder(repository, configuration).hash
                copy = datasets.load_dataset(repository, configuration, split=split)
                self._rows = copy.to_iterable_dataset(num_shards=min(_OFFLINE_SHARDS, max(1, len(copy))))
            else:
                # A first request with a time limit, because load_dataset retries for 30 s without a network.
                revision = HfApi().dataset_info(repository, revision=revision, timeout=_TIMEOUT_S).sha
                self._rows = datasets.load_dataset(
                    repository, configuration, split=split, streaming=True, revision=revision
                )
        # A dataset or a name that does not exist is an OSError or a ValueError.
        except (httpx.HTTPError, OSError, ValueError) as error:
            remedy = "Check the name and the network, or set HF_HUB_OFFLINE=1 for a copy."
            got = f"neither ({_reason(error)}). {suggest_name(self._name, remedy)}"
            raise DataError(
                f"{show(self._name)} must be a file or a dataset of the Hugging Face hub, got {got}"
            ) from error
        self.layout = HubLayout(offline=offline, revision=revision, num_shards=self._rows.num_shards)

    @property
    def num_bytes(self) -> int | None:
        """Size of the dataset in bytes; None if the hub does not know it."""
        return self._rows.info.dataset_size

    def read(self, shard: int) -> Iterator[pa.Table]:
        """Yield the rows of one of the dataset's shards, in order.

        Raises:
            DataError: the hub does not answer, or its answer does not hold rows.
        """
        rows: Any = self._rows.shard(self.layout.num_shards, shard)
        try:
            yield from rows.with_format("arrow").iter(_ROWS_PER_READ)
        # Data that looks damaged may be a truncated answer. Hence no RejectedDocumentsError, which deletes shards.
        except _READ_ERRORS as error:
            found = f"{_reason(error)}. Run the same command again to resume."
            raise DataError(f"{show_name(self._name)} could not be read from the Hugging Face hub: {found}") from error


def _reason(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    # This error only says that it has a cause.
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    return f"{type(error).__name__}: {one_line(next(iter(str(cause).splitlines()), ''))}"
