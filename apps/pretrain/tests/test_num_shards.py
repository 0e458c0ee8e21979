"""Runs with `train.num_shards`: the same bits, whatever the number of workers and CPUs."""

import json
import os
import subprocess
import sys

import pytest

from pretrain import PRESETS
from pretrain._errors import UsageError
from pretrain._resolve.devices import check_batch, with_microbatches
from pretrain._run.checkpoint_digests import DIGESTS
from pretrain._run.metrics import of_sources, read_records
from ray_jax_launch import checkpoint_metadata, checkpoint_steps, parse_hardware

OPTIONS = {
    "data": "book=2>0.5@2:book.txt,end=1>0@3>4@5:end.txt",
    "trackers": (),
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.embed_dim": 32,
    "model.seq_len": 24,
    "model.dropout_rate": 0.1,
    "train.global_batch_size": 8,
    "train.max_steps": 6,
    "train.grad_accum_steps": 2,
    "train.log_every": 1,
    "train.eval_every": 3,
    "train.eval_tokens": 200,
    "train.sample_tokens": 0,
    "train.checkpoint_every": 3,
    "train.num_shards": 4,
}
TRAIN = """
import json, sys
from pretrain import PRESETS, train
train(PRESETS["quickstart"]().with_options(json.loads(sys.argv[1])))
"""
# A process with jax that has started, as in a notebook.
IN_A_STARTED_PROCESS = """
import jax
jax.devices()
from pretrain import PRESETS, train
train(PRESETS["quickstart"]().with_options({"train.num_shards": 4, "hardware": "local", "train.global_batch_size": 8}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts."""
    folder = tmp_path_factory.mktemp("num_shards")
    (folder / "book.txt").write_text("".join(f"{i} green bottles, {i * i} on the wall. " for i in range(300)))
    (folder / "end.txt").write_text("".join(f"{i} blue bottles. " for i in range(40)))
    return folder


def train(place, hardware, name, variables=None, **options):
    options = OPTIONS | {"hardware": hardware, "name": name, **options}
    subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(options)],
        cwd=place, env={**os.environ, "JAX_PLATFORMS": "cpu", **(variables or {})}, check=True, timeout=300,
    )  # fmt: skip
    folder = place / "runs" / name
    digests = [checkpoint_metadata(folder / "checkpoints", step)[DIGESTS] for step in (3, 6)]
    losses = [(folder / file).read_bytes() for file in ("step_losses.f32", "val_losses.f32")]
    assert checkpoint_steps(folder / "checkpoints") == [3, 6]
    records = {record["step"]: record for record in read_records(folder.joinpath("metrics.jsonl"))}
    assert all({*of_sources(records[step])} == {"book", "end"} for step in (0, 3, 6))
    sources = [of_sources(records[step]) for step in (0, 3, 6)]
    return digests, losses, sources, [record.get("windows") for record in records.values()]


@pytest.fixture(scope="module")
def alone(place):
    """The digests and losses of a run in one process."""
    return train(place, "local", "alone")


def test_two_workers_change_no_bit(alone, place):
    assert train(place, "cpu:2", "two") == alone


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["cpu:1", "cpu:4"])
def test_other_numbers_of_workers_change_no_bit(hardware, alone, place):
    assert train(place, hardware, hardware.replace(":", "-")) == alone


@pytest.mark.slow
def test_threads_and_dispatch_of_the_environment_change_no_bit(alone, place):
    assert train(place, "local", "threads", {"NPROC": "1", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "1"}) == alone


@pytest.mark.slow
def test_another_number_of_shards_is_another_run(alone, place):
    assert train(place, "local", "shards", **{"train.num_shards": 2}) != alone


def test_a_process_with_started_devices_is_rejected(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_STARTED_PROCESS],
        cwd=tmp_path, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "UsageError: train.num_shards must be given to a process in which JAX has not started" in done.stderr


def config(**changes):
    options = {"train.num_shards": 8, "train.global_batch_size": 16, **changes}
    return PRESETS["quickstart"]().with_options({name.replace("__", "."): value for name, value in options.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__num_shards": 6}, "train.num_shards must be a power of two, got 6. Choose 4 or 8."),
        ({"train__num_shards": 0}, "train.num_shards must be at least 1"),
        ({"mesh__fsdp": 2}, "train.num_shards must not be given with mesh.fsdp or mesh.tensor above 1"),
        ({"mesh__tensor": 2}, "train.num_shards must not be given with mesh.fsdp or mesh.tensor above 1"),
    ],
)
def test_wrong_numbers_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("hardware", "changes", "message"),
    [
        ("cpu:3", {}, "must have a number of devices that divides train.num_shards, 8, got 3. Choose 1, 2, 4 or 8."),
        (
            "cpu:5-7",
            {},
            "must have a number of workers that fits the mesh and the batch, got cpu:5-7. With 5: --hardware must have "
            "a number of devices that divides train.num_shards, 8, got 5. Choose 1, 2, 4 or 8.",
        ),
        ("cpu:16", {}, "must have a number of devices that divides train.num_shards, 8, got 16"),
        ("cpu:2x2", {}, "each worker must have one CPU device with train.num_shards, got 2 of cpu:2x2"),
        ("cpu:2", {"train__global_batch_size": 12}, r"divisible by 8 \(8 shards x 1 accumulation steps\), got 12"),
        ("cpu:2", {"train__grad_accum_steps": 4}, r"divisible by 32 \(8 shards x 4 accumulation steps\), got 16"),
    ],
)
def test_devices_and_batches_that_do_not_fit_are_rejected(hardware, changes, message):
    with pytest.raises(UsageError, match=message):
        check_batch(config(**changes), parse_hardware(hardware))


@pytest.mark.parametrize("hardware", ["cpu:1", "cpu:2", "cpu:8", "cpu:1-2", "gpu:4x2", "gpu:1x8"])
def test_numbers_of_devices_that_divide_the_shards_are_accepted(hardware):
    assert check_batch(config(), parse_hardware(hardware)) == parse_hardware(hardware)


@pytest.mark.parametrize(
    ("hardware", "changes", "counts", "text"),
    [
        ("cpu:1-4", {}, [1, 2, 4], "cpu:1-4"),
        ("cpu:1-9", {}, [1, 2, 4, 8], "cpu:1-8"),
        ("cpu:3-6", {}, [4], "cpu:4"),
        ("gpu:1-4x2", {}, [1, 2, 4], "gpu:1-4x2"),
        ("tpu:v6e:2x4:1-3", {"train__num_shards": 16, "train__global_batch_size": 16}, [1, 2], "tpu:v6e:2x4:1-2"),
        ("cpu:1-6", {"train__num_shards": None, "train__global_batch_size": 30}, [1, 2, 3, 5, 6], "cpu:1-6"),
        ("gpu:1-4x2", {"train__num_shards": None, "mesh__fsdp": 4}, [2, 4], "gpu:2-4x2"),
        ("cpu:1-4", {"train__num_shards": None, "train__micro_batch_size": 4}, [1, 2, 4], "cpu:1-4"),
        (
            "cpu:1-4x2",
            {"train__num_shards": None, "train__global_batch_size": 4, "mesh__tensor": 2},
            [1, 2, 4],
            "cpu:1-4x2",
        ),
    ],
)
def test_elastic_hardware_keeps_the_numbers_of_workers_that_fit(hardware, changes, counts, text):
    kept = check_batch(config(**changes), parse_hardware(hardware))
    assert list(kept.worker_counts) == counts
    assert str(kept) == text


def test_a_microbatch_is_a_part_of_a_shard():
    changed = config(train__global_batch_size=64, train__micro_batch_size=2)
    assert with_microbatches(changed, [2]).train.grad_accum_steps == 4
