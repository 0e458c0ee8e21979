"""A profile of real train steps."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, make_mesh, make_train_step
from pretrain._training.profiling import Profiling

MODEL = GPT2Config(vocab_size=65, seq_len=32, num_layers=2, num_heads=2, embed_dim=64)


@pytest.fixture(scope="module")
def train():
    """A function that runs steps under a profiler, and returns the steps that it has run."""
    optimizer, mesh, key = create_optimizer(OptimizerConfig(), 100), make_mesh(), jax.random.key(0)
    train_step = make_train_step(MODEL, optimizer, mesh)
    windows = jax.device_put(np.zeros((4, MODEL.seq_len + 1), np.uint16))
    state, metrics = train_step(create_train_state(MODEL, optimizer, key, mesh), windows, key)
    jax.block_until_ready(metrics)

    def run(profile, folder, *, start=0, max_steps=10, stop=10):
        nonlocal state, metrics
        with Profiling(profile, folder) as profiling:
            profiling.limit_steps(start, max_steps)
            for step in range(start + 1, stop + 1):
                profiling.before_step(step)
                state, metrics = train_step(state, windows, key)
                profiling.after_step(step, metrics)
        jax.block_until_ready(metrics)  # or these steps may be in the trace of the next run

    return run


def newest_trace(folder):
    return max(folder.glob("plugins/profile/*/*.xplane.pb"), default=None)


def profiled(path):
    """Return the steps in a trace, and how often each matrix product ran."""
    events = [
        event for plane in ProfileData.from_file(str(path)).planes for line in plane.lines for event in line.events
    ]
    steps = [dict(event.stats)["step_num"] for event in events if event.name == "train"]
    products = Counter(dict(event.stats).get("hlo_op") for event in events if event.name.startswith("dot"))
    return steps, {calls for name, calls in products.items() if name is not None}


def test_only_the_named_steps_are_profiled(train, tmp_path):
    train("3:6", tmp_path)
    path = newest_trace(tmp_path)
    assert path is not None
    assert profiled(path) == ([3, 4, 5], {3})


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param({"stop": 4}, [3, 4], id="stopped", marks=pytest.mark.slow),
        pytest.param({"max_steps": 4, "stop": 4}, [3, 4], id="shorter run", marks=pytest.mark.slow),
        pytest.param({"start": 4}, [5], id="continued run"),
    ],
)
def test_the_part_of_the_steps_that_runs_is_profiled(options, steps, train, tmp_path, caplog):
    train("3:6", tmp_path, **options)
    path = newest_trace(tmp_path)
    assert path is not None
    assert profiled(path) == (steps, {len(steps)})
    assert caplog.messages == []


@pytest.mark.parametrize(("start", "max_steps"), [(0, 2), (5, 10)], ids=["after the end", "before the start"])
def test_steps_that_do_not_run_are_a_warning(start, max_steps, train, tmp_path, caplog):
    train("3:6", tmp_path, start=start, max_steps=max_steps, stop=max_steps)
    assert caplog.messages == [f"nothing is profiled: --profile 3:6 must name steps from {start + 1} to {max_steps}"]
    assert newest_trace(tmp_path) is None


def test_a_run_that_continues_after_its_profile_has_no_warning(train, tmp_path, caplog):
    train("1:2", tmp_path, stop=2)
    train("1:2", tmp_path, start=2)
    assert caplog.messages == []
    assert len([*tmp_path.glob("plugins/profile/*")]) == 1


@pytest.mark.fault
def test_a_profile_that_cannot_be_written_does_not_stop_the_run(train, tmp_path, caplog, record_property):
    record_property("fault", "the folder of the profile is a file")
    record_property("lost", "the profile")
    (tmp_path / "plugins").write_text("a file in its place")
    train("1:3", tmp_path)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the run goes on without the profile: ")


def test_only_rank_0_profiles(train, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    train("3:6", tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_without_a_profile_nothing_is_written(train, tmp_path):
    train(None, tmp_path)
    assert [*tmp_path.iterdir()] == []
