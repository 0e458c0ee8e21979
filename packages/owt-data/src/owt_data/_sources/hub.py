"""Datasets of the Hugging Face hub: streamed at one revision, or read from a copy that was downloaded before."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import datasets.config
import pyarrow as pa
from datasets.config import HF_HUB_OFFLINE as DATASETS_OFFLINE
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx

from owt_data._errors import DataError
from owt_data._sources.names import Source

_TIMEOUT_S = 10
_ROWS_PER_READ = 1024
_OFFLINE_SHARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class HubLayout:
    """What the number of a shard and of a row in it depend on. Cursors of one layout mean other rows in another."""

    offline: bool
    """Whether the rows come from a copy on this machine (`HF_HUB_OFFLINE=1`)."""

    revision: str | None
    """Commit of the dataset."""

    num_shards: int
    """Number of shards."""

    def __str__(self) -> str:
        """As errors name it."""
        return f"revision {self.revision} in {self.num_shards} shards"


def is_offline() -> bool:
    """Whether the user asked for copies instead of the network."""
    return bool(HF_HUB_OFFLINE or DATASETS_OFFLINE)


class HubRows:
    """The rows of a hub dataset.

    Args:
        source: the dataset.
        revision: the commit to stream; by default the newest. A copy has the one that it was downloaded at.

    Raises:
        DataError: the hub is out of reach, or has no such dataset.
    """

    def __init__(self, source: Source, revision: str | None) -> None:
        self._name = source.name
        repository, configuration, split = source.hub_address
        self._rows: datasets.IterableDataset
        try:
            if is_offline():
                revision = datasets.load_dataset_builder(repository, configuration).hash
                copy = datasets.load_dataset(repository, configuration, split=split)
                self._rows = copy.to_iterable_dataset(num_shards=min(_OFFLINE_SHARDS, max(1, len(copy))))
            else:
                # One question first: load_dataset repeats its own for half a minute where there is no network.
                revision = HfApi().dataset_info(repository, revision=revision, timeout=_TIMEOUT_S).sha
                self._rows = datasets.load_dataset(
                    repository, configuration, split=split, streaming=True, revision=revision
                )
        except (DatasetNotFoundError, HFValidationError, httpx.HTTPError, OSError, ValueError) as error:
            raise DataError(
                f"{source.name!r} is no file here, and as a dataset of the Hugging Face hub it could not be loaded "
                f"({type(error).__name__}: {_first_line(error)}): check the name and the network, or set "
                "HF_HUB_OFFLINE=1 to use a copy downloaded before"
            ) from error
        self.layout = HubLayout(offline=is_offline(), revision=revision, num_shards=self._rows.num_shards)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the dataset, where the hub says so."""
        return self._rows.info.dataset_size

    def read(self, shard: int) -> Iterator[pa.Table]:
        """The rows of a shard, in order.

        Raises:
            DataError: the hub does not answer, or not with rows.
        """
        rows: Any = self._rows.shard(self.layout.num_shards, shard)
        try:
            yield from rows.with_format("arrow").iter(_ROWS_PER_READ)
        except DataError:
            raise
        except (
            DatasetGenerationError, httpx.HTTPError, OSError, ValueError, TypeError, EOFError, zlib.error
        ) as error:  # fmt: skip
            # Even what reads as damage may be an answer cut short, so that no finished part is discarded for it.
            reason = _first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error).rstrip(".")
            raise DataError(
                f"{self._name} could not be read from the Hugging Face hub ({type(error).__name__}: {reason}). Run the "
                "same command again, which goes on from there."
            ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
