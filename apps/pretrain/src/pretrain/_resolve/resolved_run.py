"""The value that a run becomes before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from owt_data import TokenData
from pretrain._config import PretrainConfig
from pretrain._run.description import RunDescription
from pretrain._run.folder import RunFolder
from pretrain._surroundings.environment import FIXED_THREADS
from ray_jax_launch import Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """A run that can start. The driver and each worker get the same one."""

    config: PretrainConfig
    """The configuration of this start. The vocabulary, the steps, the microbatches and the order are known."""

    folder: RunFolder
    """The run's folder, locked."""

    data: TokenData
    """The tokens."""

    hardware: Hardware
    """The workers and their devices."""

    description: RunDescription
    """The description of the first start. Each checkpoint gets a copy."""

    @property
    def uses_ray_data(self) -> bool:
        """True if tasks of Ray Data read ahead. They do so by megabytes, which a stream does not have yet."""
        return self.hardware.kind != "local" and self.config.data_mode == "prepared"

    @property
    def worker_variables(self) -> Mapping[str, str]:
        """Environment variables of the workers, beside those that their hardware needs."""
        has_shards = self.config.train.num_shards is not None
        return FIXED_THREADS if has_shards and self.hardware.kind == "cpu" else {}
