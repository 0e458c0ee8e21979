"""The microbatches of a new run."""

import dataclasses
import json

from rich.console import Console

from pretrain._config import PretrainConfig
from pretrain._errors import UsageError
from pretrain._resolve.devices import data_devices, with_microbatches
from pretrain._run.files import parse_json
from pretrain._screen.printing import waiting
from pretrain._surroundings.child import ChildError, call_in_child
from ray_jax_launch import Hardware, parse_hardware

# Some compilations, of minutes each for the largest models.
_WITHIN_S = 3600.0


def resolve_microbatches(config: PretrainConfig, hardware: Hardware, console: Console) -> PretrainConfig:
    """Return the configuration with the microbatches of a new run. The size `auto` is one that fits the devices.

    Args:
        config: the configuration, whose vocabulary is known.
        hardware: the checked hardware.
        console: shows that the compiler works.

    Raises:
        UsageError: the step does not fit the devices, or these or their compiler are not here.
    """
    if config.train.micro_batch_size == "auto":
        with waiting(console, "compiling, to find the largest microbatch"):
            size = _fitting_size(config, hardware)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))
    return with_microbatches(config, data_devices(config, hardware))


def _fitting_size(config: PretrainConfig, hardware: Hardware) -> int:
    if hardware.kind == "local":  # this process has the devices
        return _find(config, hardware)
    # JAX would keep the devices, which are for the workers.
    try:
        return call_in_child(_find_in_child, json.dumps(dataclasses.asdict(config)), str(hardware), within_s=_WITHIN_S)
    except ChildError as error:
        raise UsageError(f"{error}.") from error


def _find_in_child(config: str, hardware: str) -> int:
    return _find(parse_json(PretrainConfig, config, "the configuration", ""), parse_hardware(hardware))


def _find(config: PretrainConfig, hardware: Hardware) -> int:
    from pretrain._resolve.step_memory import find_fitting_size  # imports jax, which the driver does without

    return find_fitting_size(config, hardware)
