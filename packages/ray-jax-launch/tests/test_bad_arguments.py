"""Arguments of a wrong type that no launch is needed for: each is rejected with one sentence, and leaves no file."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

from ray_jax_launch import (
    Checkpoints,
    DistributedConfig,
    Hardware,
    JaxTrainer,
    LaunchError,
    SavedCheckpoint,
    check_resources,
    connect,
    cpu,
    intact_step,
    local,
    open_uri,
    scaling_config,
)

# Its `==` gives no bool.
ARRAY = np.array([1, 2])


def no_loop(config):
    raise AssertionError("must not start")


@pytest.fixture(autouse=True)
def stop_ray():
    """Stop Ray after a case that was not rejected: the next case must find none."""
    yield
    ray.shutdown()


# An action with a folder and a value, the values, and the beginning of the sentence.
ARGUMENTS: list[tuple[str, Callable[[Any, Any], Any], list[Any], str]] = [
    *(
        (name, action, ["x", b"x", 0, ARRAY], f"{name} must be True or False, got ")
        for name, action in {
            "read_only": lambda folder, value: Checkpoints(folder, read_only=value),
            "verify": lambda folder, value: Checkpoints(folder, verify=value),
            "use_tpu": lambda _, value: DistributedConfig(use_tpu=value),
            "use_gpu": lambda _, value: DistributedConfig(use_gpu=value),
            "quarantine": lambda folder, value: intact_step(folder, quarantine=value),
            "create": lambda _, value: open_uri("s3://bucket", create=value),
            "dashboard": lambda _, value: connect(dashboard=value),
        }.items()
    ),
    (
        "kind",
        lambda _, value: dataclasses.replace(cpu(1), kind=value),
        [ARRAY, []],
        "kind must be one of cpu, gpu, tpu, local, got ",
    ),
    *(
        (
            name,
            lambda _, value, name=name: dataclasses.replace(cpu(1), **{name: value}),
            [5, ARRAY],
            f"{name} must be a text or",
        )
        for name in ("accelerator_type", "topology")
    ),
    (
        "data_cpus",
        lambda _, value: JaxTrainer(no_loop, data_cpus=value),
        [ARRAY, "", 1.5],
        "data_cpus must be a whole number of at least 0, got ",
    ),
    (
        "placement_strategy",
        lambda _, value: scaling_config(cpu(1), placement_strategy=value),
        [ARRAY, [], 5],
        "placement_strategy must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got ",
    ),
    (
        "label_selector",
        lambda _, value: scaling_config(cpu(1), label_selector=value),
        [{"a": 5}, {5: "a"}, [{"a": 5}], [5]],
        "label_selector must have texts by name, got ",
    ),
    *(
        (name, lambda _, value, action=action: action(local(), resources_per_worker=value), [value], f"{message}, got ")
        for name, action in {"scaling_config": scaling_config, "check_resources": check_resources}.items()
        for value, message in (
            (5, "resources_per_worker must be a dict of amounts"),
            ({5: 1}, "each name in resources_per_worker must be a text"),
            ({"CPU": "a"}, "resources_per_worker['CPU'] must be a number of at least 0"),
        )
    ),
    ("step", SavedCheckpoint, ["\u00e9\ud800", "a\0b", -1, ARRAY], "step must be a whole number of at least 0, got "),
    (
        "datasets",
        lambda _, value: JaxTrainer(no_loop, datasets=value),
        [len, ARRAY, 0, ""],
        "datasets must be Ray Datasets or functions by name, got ",
    ),
]


@pytest.mark.parametrize(
    ("action", "value", "message"),
    [
        pytest.param(action, value, message, id=f"{name} {value!r}")
        for name, action, values, message in ARGUMENTS
        for value in values
    ],
)
def test_an_argument_of_a_wrong_type_is_rejected(action, value, message, tmp_path):
    with pytest.raises(LaunchError) as rejected:
        action(tmp_path, value)
    text = str(rejected.value)
    assert text.startswith(message)
    assert text.isprintable()
    assert text.endswith(".")
    assert [*tmp_path.iterdir()] == []
    assert not ray.is_initialized()


def test_numbers_of_other_types_count_as_plain_ones():
    hardware = Hardware(kind="cpu", num_workers=np.int8(100), devices_per_worker=np.int8(100), min_workers=np.int8(3))  # pyright: ignore[reportArgumentType]
    assert hardware == cpu(100, 100, min_workers=3)
    assert hardware.num_devices == 10_000


def test_a_resource_that_no_worker_needs_is_no_shortage():
    connect(cpu(1))
    check_resources(cpu(1), resources_per_worker={"CPU": 1, "GPU": 0})
