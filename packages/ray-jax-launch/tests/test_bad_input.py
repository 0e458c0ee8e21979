"""Invalid arguments: each is rejected with one sentence before anything starts, and leaves no file behind."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ray

from ray_jax_launch import (
    Checkpoints,
    DistributedConfig,
    LaunchError,
    RankedDataConfig,
    auto,
    backend_config,
    check_resources,
    connect,
    cpu,
    join_path,
    latest_step,
    launch,
    open_uri,
    parse_hardware,
    request_stop,
    scaling_config,
    worker_environment,
)

NAN = float("nan")


def no_loop(config):
    raise AssertionError("must not start")


def launching(**changed: Any):
    """Return a launch with changed arguments."""

    def call(folder):
        given = {
            "train_loop": no_loop,
            "config": {},
            "hardware": cpu(1),
            "storage_path": folder / "runs",
            "name": "run",
        }
        launch(**given | changed)

    return call


def launching_below(name, make):
    """Return a launch in a storage path that `make` prepares."""

    def call(folder):
        make(folder / name)
        launch(no_loop, {}, hardware=cpu(1), storage_path=folder / name, name="run")

    return call


def make_loop(path):
    path.symlink_to(path)


def opening(name, make, action: Callable[[Path], Any] = Checkpoints):
    def call(folder):
        make(folder / name)
        action(folder / name)

    return call


def saving(step: Any = 1, items: Any = None, metadata: Any = "default"):
    items = {"params": {"w": jnp.ones(1)}} if items is None else items
    metadata = {} if metadata == "default" else metadata

    def call(folder):
        with Checkpoints(folder / "runs") as checkpoints:
            checkpoints.save(step, items, metadata=metadata)

    def call_and_clean_up(folder):
        try:
            call(folder)
        finally:
            shutil.rmtree(folder / "runs")

    return call_and_clean_up


def closed(folder):
    """Return checkpoints in a folder that is deleted again, after their `with` block."""
    with Checkpoints(folder / "runs") as checkpoints:
        pass
    checkpoints.__exit__(None, None, None)
    checkpoints.wait()
    shutil.rmtree(folder / "runs")
    return checkpoints


def endless_list():
    value: list[Any] = []
    value.append(value)
    return value


def write_file(path):
    path.write_text("x")


def make_file_of_run(path):
    path.mkdir()
    (path / "run").write_text("x")


def keeping(**changed: Any):
    return lambda folder: Checkpoints(folder, **changed)


LONG = "a" * 300
WRITABLE = "storage_path must be a folder that can be written, got "


class BadText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(100_000), 1)
NO_PLACE = "a storage path must be a folder, or the text of a URI, got "
UNWRITABLE = "the folder of the checkpoints cannot be written: "
NO_FOLDER = "the place of the checkpoints is no folder: [Errno 17] File exists: "
BAD_INTS: list[Any] = [True, 1.5, -1, "2", NAN]
BAD_TIMEOUTS: list[Any] = [-1, "a", 10**400]
BAD_SECONDS: list[Any] = [NAN, float("inf"), -1.0, "9"]

# Each action gets something that is no hardware.
USERS_OF_HARDWARE: dict[str, Callable[[Any], Any]] = {
    "scaling_config": scaling_config,
    "backend_config": backend_config,
    "worker_environment": worker_environment,
    "check_resources": check_resources,
    "connect": connect,
}

CASES = {
    **{
        f"{name}({value!r})": (
            lambda _, action=action, value=value: action(value),
            f"hardware must be a Hardware, got {value!r}. Make one",
        )
        for name, action in USERS_OF_HARDWARE.items()
        for value in ("cpu:1", 5)
    },
    "auto before connect": (lambda _: auto(), "no Ray cluster is connected. Call connect() first."),
    "check before connect": (lambda _: check_resources(cpu(1)), "no Ray cluster is connected. "),
    "kind": (lambda _: dataclasses.replace(cpu(1), kind="x"), "kind must be one of cpu, gpu, tpu, local, got 'x'"),
    **{
        f"num_workers={value!r}": (
            lambda _, value=value: dataclasses.replace(cpu(1), num_workers=value),
            "num_workers must be a whole number of at least 1",
        )
        for value in (-1, "a", 10**400)
    },
    "cpu(10**400)": (lambda _: cpu(10**400), "of at least 1 and at most 1000000, got 1000000"),
    "too many CPUs": (launching(data_cpus=10**30), "data_cpus must be a whole number of at least 0 and at most 1000"),
    "CPUs to check": (lambda _: check_resources(cpu(1), data_cpus="a"), "data_cpus must be a whole number"),  # pyright: ignore[reportArgumentType]
    "on_metrics": (launching(on_metrics=5), "on_metrics must be a function, got 5"),
    "label_selector": (launching(label_selector=5), "label_selector must be a dict, or a list of dicts, got 5"),
    "config": (launching(config=5), "the config of the loop must be a dict, got 5"),
    **{
        f"env_vars={value!r}": (launching(env_vars=value), "env_vars must have names without = and values without a")
        for value in ({"A=B": "c"}, {"": "c"}, {"A": "\0"})
    },
    **{
        f"{name}={value!r}": (
            lambda _, name=name, value=value: DistributedConfig(**{name: value}),
            f"{name} must be a whole number of at least ",
        )
        for name in ("initialization_timeout_s", "heartbeat_timeout_s", "shutdown_timeout_s")
        for value in BAD_TIMEOUTS
    },
    "RankedDataConfig": (lambda _: RankedDataConfig(5), "base must be a DataConfig or None, got 5"),  # pyright: ignore[reportArgumentType]
    "request_stop": (lambda _: request_stop(5), "why must be a text, got 5"),  # pyright: ignore[reportArgumentType]
    "open_uri": (lambda _: open_uri(None), "the storage must be the text of a URI, got None"),  # pyright: ignore[reportArgumentType]
    "join_path": (lambda _: join_path("a", None), "names must be texts, got (None,)"),  # pyright: ignore[reportArgumentType]
    **{f"items={value!r}": (saving(items=value), "items must be trees by name, got ") for value in ("x", [1])},
    **{
        f"metadata of {name}": (saving(metadata=value), "metadata must be a dict of JSON values, got one that is not (")
        for name, value in {
            "None": None, "a list": [1], "an object": {"a": object()}, "a cycle": {"a": endless_list()},
            "5,000 digits": {"a": 10**5000}, "levels": {"a": functools.reduce(lambda a, _: [a], range(100_000), 1)},
        }.items()
    },
    "restore None": (lambda folder: closed(folder).restore(1, None), "like must be trees by name, got None"),  # pyright: ignore[reportArgumentType]
    "restore latest": (lambda folder: closed(folder).restore_latest([1]), "like must be trees by name, got [1]"),  # pyright: ignore[reportArgumentType]
    "closed": (lambda folder: closed(folder).restore_latest({}), "are closed. Make a new"),
    "closed metadata": (lambda folder: closed(folder).broadcast_metadata(1), "are closed. Make a new"),
    "text of 6,000 characters": (launching(storage_path="x" * 6000), WRITABLE),
    "checkpoints of 6,000": (lambda _: Checkpoints("x" * 6000), UNWRITABLE),
    "step of 6,000": (lambda _: latest_step("x" * 6000), "cannot be accessed: "),
    "URI of 9,000": (lambda _: open_uri("nowhere://" + "x" * 9000), "that can be reached, got nowhere://xxxx"),
    "long name": (launching(name=LONG), "name must have at most 255 bytes, got 'aaaa"),
    "long folder": (launching_below(LONG, lambda path: None), WRITABLE),
    "long path": (launching_below("/".join(["a" * 200] * 30), lambda path: None), WRITABLE),
    "symlink loop": (launching_below("loop", make_loop), WRITABLE),
    "file as storage": (launching_below("file", write_file), WRITABLE),
    "file as run": (launching_below("folder", make_file_of_run), WRITABLE),
    "number as storage": (launching(storage_path=3), f"{NO_PLACE}3"),
    "deep list as storage": (lambda _: latest_step(DEEP), f"{NO_PLACE}a very large list"),
    "deep list as config": (launching(config=DEEP), "the config of the loop must be a dict, got a very large list"),
    "hardware without a text": (lambda _: parse_hardware(BadText()), "got one BadText, which has no text. Choose"),  # pyright: ignore[reportArgumentType]
    "hardware of 7 digits": (lambda _: parse_hardware("cpu:1000000"), "these forms, with numbers of at most 6 digits."),
    "lines as storage": (lambda _: latest_step("x\n" * 3000), r"x\nx\nx"),
    "hardware of 5,000 digits": (lambda _: parse_hardware(10**5000), "got a very large int"),  # pyright: ignore[reportArgumentType]
    "null in path": (launching(storage_path="a\0b"), NO_PLACE),
    "storage of nobody": (launching(storage_path="nowhere://x"), "the storage must be a folder, s3://bucket/path or gs://bucket/"),
    **{
        f"name={name!r}": (launching(name=name), "name must be a printable text")
        for name in ("..", "a/b", "", ".hidden", " ")
    },
    "half a character": (lambda _: latest_step("\ud800"), "a storage path must be a text in UTF-8, got '\\ud800'."),
    "byte in a URI": (lambda _: latest_step("s3://\udcff"), "a storage path must be a text in UTF-8, got 's3://\\udcff'"),
    "null in name": (launching(name="a\0b"), "name must be a printable text"),
    "newline in name": (launching(name="a\nb"), "name must be a printable text"),
    "name in bytes": (launching(name=b"run"), "name must be a printable text"),
    **{
        f"{name}={value!r}": (
            launching(**{name: value}),
            f"{name} must be a whole number of at least {least}, got {value!r}",
        )
        for name, least in (("max_failures", -1), ("data_cpus", 0))
        for value in (-2 if value == -1 else value for value in BAD_INTS)
    },
    **{
        f"{name}={value!r}": (launching(**{name: value}), f"{name} must be a number of at least 0, got {value!r}")
        for name in ("wait_for_resources_s", "preemption_grace_s")
        for value in BAD_SECONDS
    },
    "endless number": (lambda _: parse_hardware(f"cpu:{'9' * 5000}"), "hardware must be auto"),
    "Arabic digit": (lambda _: parse_hardware("tpu:v6e:4x1\N{ARABIC-INDIC DIGIT THREE}"), "the TPU topology must be "),
    **{
        f"cpu({value!r})": (
            lambda _, value=value: cpu(value),
            f"the number of CPU workers must be a whole number of at least 1, got {value!r}",
        )
        for value in BAD_INTS
    },
    "checkpoints in a file": (opening("checkpoints", write_file), NO_FOLDER),
    "checkpoints in a loop": (opening("loop", make_loop), NO_FOLDER),
    "loop that is read": (opening("loop", make_loop, latest_step), "loop cannot be accessed: [Errno "),
    "checkpoints nowhere": (lambda _: Checkpoints(3), f"{NO_PLACE}3"),  # pyright: ignore[reportArgumentType]
    "none kept": (keeping(num_to_keep=0), "num_to_keep must be a whole number of at least 1, got 0"),
    **{
        f"num_to_keep={value!r}": (keeping(num_to_keep=value), "num_to_keep must be a whole number of at least 1, got ")
        for value in BAD_INTS
        if value is not None
    },
    "keep a step": (keeping(keep=10), "keep must be a function of a step, or None, got 10."),
    **{
        f"step={value!r}": (saving(value), f"/runs must be a whole number of at least 0, got {value!r}")
        for value in (True, NAN, float("inf"), np.int64(-1))
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def stop_ray():
    """Stop Ray after a case that was not rejected: the next case must find none."""
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_rejected_with_one_sentence_before_anything_starts(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    call, message = CASES[name]
    (tmp_path / "inputs").mkdir()
    with pytest.raises(LaunchError) as rejected:
        call(tmp_path / "inputs")
    text = str(rejected.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 1000
    assert text.endswith(".")
    assert ".. " not in text
    assert not ray.is_initialized()
    left = {path.name for path in (tmp_path / "inputs").iterdir()} - {"loop", "file", "folder", "checkpoints"}
    assert left == set()


FORBIDDEN = """
import sys
from pathlib import Path
from ray_jax_launch import *

def no_loop(config):
    pass

folder = Path(sys.argv[1])
for action in (
    lambda: launch(no_loop, {}, hardware=cpu(1), storage_path=folder / "closed" / "runs", name="run"),
    lambda: launch(no_loop, {}, hardware=cpu(1), storage_path=folder / "closed", name="run"),
    lambda: launch(no_loop, {}, hardware=cpu(1), storage_path=folder / "seen", name="run"),
    lambda: Checkpoints(folder / "closed"),
    lambda: Checkpoints(folder / "closed", read_only=True),
    lambda: latest_step(folder / "closed"),
    lambda: intact_step(folder / "closed"),
    lambda: newest_metadata(folder / "closed" / "checkpoints"),
):
    try:
        action()
    except LaunchError as error:
        print(error)
"""


def test_a_folder_without_permissions_is_an_error_that_names_it(tmp_path):
    prefix = []
    if os.geteuid() == 0:
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        if shutil.which("setpriv") is None or subprocess.run([*prefix, "true"], check=False).returncode != 0:
            pytest.skip("root may read everything, and setpriv cannot drop that right here")
    for name, mode in (("closed", 0), ("seen", 0o555)):
        (tmp_path / name).mkdir(mode=mode)
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", FORBIDDEN, str(tmp_path)], capture_output=True, text=True, check=False
        )
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    *launched, writing, reading, step, intact, metadata = done.stdout.splitlines()
    for path, message in zip(("closed/runs/run", "closed/run", "seen/run"), launched, strict=True):
        assert message.startswith(f"{WRITABLE}{tmp_path}/{path} (Permission denied). ")
    assert writing.startswith("the folder of the checkpoints cannot be written: [Errno 13] Permission denied")
    for message in (reading, step, intact, metadata):
        assert "cannot be accessed: [Errno 13] Permission denied" in message
    assert [*tmp_path.glob("*/*")] == []
