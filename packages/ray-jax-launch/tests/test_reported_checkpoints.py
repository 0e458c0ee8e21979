"""Checkpoints that a loop reports: found by the next start, also after a kill or damage. In local mode, without Ray."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import ray.train
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig

from ray_jax_launch import Checkpoints, JaxTrainer, LaunchError
from ray_jax_launch._checkpoint import retry
from ray_jax_launch._checkpoint.ray_snapshot import repair_snapshot

SNAPSHOT = "checkpoint_manager_snapshot.json"


def report(config):
    """Return the number in the newest checkpoint, after reporting more of them."""
    before = ray.train.get_checkpoint()
    start = 0
    if before is not None:
        with before.as_directory() as folder:
            start = int((Path(folder) / "number").read_text())
    for number in range(start + 1, start + 1 + config["count"]):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "number").write_text(str(number))
            ray.train.report({"number": number, "loss": 1 / number}, checkpoint=Checkpoint.from_directory(folder))
    ray.train.report({"last": True, "loss": -1.0})
    return start


def fit(place, count, **checkpoint_config):
    return JaxTrainer(
        report,
        train_loop_config={"count": count},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="a run", storage_path=str(place), checkpoint_config=CheckpointConfig(**checkpoint_config)
        ),
    ).fit()


def numbers(result):
    return [metrics["number"] for _, metrics in result.best_checkpoints]


def test_a_reported_checkpoint_is_kept_in_the_run_and_found_by_the_next_start(place):
    result = fit(place, 3, num_to_keep=2)
    assert result.return_value == 0
    assert result.metrics == {"number": 3, "loss": -1.0, "last": True}
    assert numbers(result) == [2, 3]
    assert result.path.endswith("/a run")
    assert result.checkpoint is not None
    assert result.checkpoint.path.startswith(f"{result.path}/checkpoint_")
    result = fit(place, 0, num_to_keep=2)
    assert result.return_value == 3
    assert result.metrics == {"number": 3, "loss": -1.0, "last": True}


def save_then_report():
    with Checkpoints() as checkpoints:
        checkpoints.save(9, {"state": {"number": 9}}, metadata={})
    report({"count": 1})


def test_the_result_has_the_reported_checkpoint_rather_than_the_saved_one(tmp_path):
    run_config = RunConfig(name="a run", storage_path=str(tmp_path))
    result = JaxTrainer(save_then_report, scaling_config=ScalingConfig(num_workers=0), run_config=run_config).fit()
    assert result.checkpoint is not None
    assert [path.name for path in Path(result.checkpoint.path).iterdir()] == ["number"]


def test_a_filesystem_of_the_users_own_is_used_as_it_is(tmp_path):
    run_config = RunConfig(
        name="a run", storage_path="folder", storage_filesystem=SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    )
    scaling_config = ScalingConfig(num_workers=0)
    trainer = JaxTrainer(report, train_loop_config={"count": 2}, scaling_config=scaling_config, run_config=run_config)
    assert trainer.fit().path == "folder/a run"
    (tmp_path / "folder" / "a run" / SNAPSHOT).write_text("{")  # repaired there, too
    assert trainer.fit().return_value == 2
    assert len([*(tmp_path / "folder" / "a run").glob("checkpoint_2*")]) == 4


def test_the_best_checkpoints_are_kept(tmp_path):
    result = fit(tmp_path, 4, num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="max")
    assert sorted(numbers(result)) == [1, 2]
    assert fit(tmp_path, 0).return_value == 4  # the newest is kept, too


@pytest.mark.fault
@pytest.mark.parametrize("num_bytes", [0, 1, 100, 600, -1])
def test_a_half_written_list_is_rebuilt(tmp_path, num_bytes, caplog, record_property):
    record_property("fault", "the list of a run's reported checkpoints is half-written")
    record_property("lost", "nothing")
    fit(tmp_path, 3)
    snapshot = tmp_path / "a run" / SNAPSHOT
    snapshot.write_bytes(snapshot.read_bytes()[:num_bytes])
    assert fit(tmp_path, 1).return_value == 3
    assert f"{SNAPSHOT} is damaged" in caplog.text
    assert fit(tmp_path, 0).return_value == 4


@pytest.mark.fault
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"checkpoint_results": [{"checkpoint_dir_name": ["a"]}]}',
        '{"checkpoint_results": [], "latest_checkpoint_result": 1}',
        '{"checkpoint_results": [], "current_report_index": 1e400, "checkpoint_report_indices": 1}',
        None,
    ],
    ids=["deep", "name", "latest", "number", "pipe"],
)
def test_a_list_of_another_kind_is_rebuilt_or_repaired(tmp_path, text, record_property):
    record_property("fault", "the list of a run's reported checkpoints holds something else")
    record_property("lost", "nothing")
    (tmp_path / "checkpoint_a").mkdir()
    if text is None:
        os.mkfifo(tmp_path / SNAPSHOT)
    else:
        (tmp_path / SNAPSHOT).write_text(text)
    repair_snapshot(LocalFileSystem(), str(tmp_path))
    state = json.loads((tmp_path / SNAPSHOT).read_text())
    named = [entry["checkpoint_dir_name"] for entry in state["checkpoint_results"]]
    assert named == ([] if text is not None and "current" in text else ["checkpoint_a"])
    assert isinstance(state["current_report_index"], int)


@pytest.mark.fault
@pytest.mark.parametrize("deleted", [[-1], [0], [0, 1, 2]])
def test_a_deleted_checkpoint_is_dropped_from_the_list(tmp_path, deleted, record_property):
    record_property("fault", "a reported checkpoint was deleted")
    record_property("lost", "the steps since the checkpoint before")
    result = fit(tmp_path, 3)
    assert result.best_checkpoints is not None
    for index in deleted:
        shutil.rmtree(result.best_checkpoints[index][0].path)
    left = [number for index, number in enumerate([1, 2, 3]) if index not in deleted and index - 3 not in deleted]
    result = fit(tmp_path, 0)
    assert result.return_value == max(left, default=0)
    assert numbers(result) == left


@pytest.mark.parametrize("change", [{"ray_version": "2.55.0"}, {"pending_training_results": None}, {"new": 1}])
def test_a_list_of_another_version_of_ray_is_read(tmp_path, change):
    fit(tmp_path, 2)
    snapshot = tmp_path / "a run" / SNAPSHOT
    state = json.loads(snapshot.read_text())
    for key, value in change.items():
        if value is None:
            del state[key]
        else:
            state[key] = value
    snapshot.write_text(json.dumps(state))
    assert fit(tmp_path, 0).return_value == 2


def test_a_good_list_is_left_as_it_is(tmp_path):
    fit(tmp_path, 2)
    snapshot = tmp_path / "a run" / SNAPSHOT
    before = snapshot.stat()
    repair_snapshot(LocalFileSystem(), str(tmp_path / "a run"))
    assert snapshot.stat() == before


def test_a_damaged_list_is_rebuilt_in_the_order_in_which_the_checkpoints_were_made(tmp_path):
    for name in ("checkpoint_b", "checkpoint_c", "checkpoint_a"):
        (tmp_path / name).mkdir()
        time.sleep(0.01)
    (tmp_path / SNAPSHOT).write_text("{")
    repair_snapshot(LocalFileSystem(), str(tmp_path))
    state = json.loads((tmp_path / SNAPSHOT).read_text())
    names = [entry["checkpoint_dir_name"] for entry in state["checkpoint_results"]]
    assert names == ["checkpoint_b", "checkpoint_c", "checkpoint_a"]
    assert state["latest_checkpoint_result"]["checkpoint_dir_name"] == "checkpoint_a"


def test_a_damaged_list_is_rebuilt_from_what_it_names_and_from_rays_names(tmp_path: Path) -> None:
    for time_s, name in enumerate(("checkpoints", "checkpoint_b", "mine", "other", "checkpoint_a")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time_s + 1, time_s + 1))
    (tmp_path / "checkpoint_file").touch()
    named = "".join(f'{{"checkpoint_dir_name": "{name}", "version": 0}}, ' for name in ("mine", "gone", "checkpoint_a"))
    (tmp_path / SNAPSHOT).write_text(f'{{"checkpoint_results": [{named}')
    repair_snapshot(LocalFileSystem(), str(tmp_path))
    state = json.loads((tmp_path / SNAPSHOT).read_text())
    names = [entry["checkpoint_dir_name"] for entry in state["checkpoint_results"]]
    assert names == ["checkpoint_b", "mine", "checkpoint_a"]
    assert state["latest_checkpoint_result"]["checkpoint_dir_name"] == "checkpoint_a"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_list_keeps_all_else_when_a_checkpoint_is_dropped(tmp_path: Path, is_old: bool) -> None:
    for name in ("a", "b", "d"):
        (tmp_path / name).mkdir()
    a, b, c = ({"checkpoint_dir_name": name, "version": 0, "metrics": {"of": name}} for name in "abc")
    rest = {
        "ray_version": version("ray"),
        "validated_checkpoint_dir_names": ["a"],
        "timed_out_validation_checkpoint_dir_names": ["b"],
        "failed_validation_checkpoint_dir_names": ["d"],
    }
    indices = {} if is_old else {"checkpoint_report_indices": [7, 4, 9], "current_report_index": 12}
    state = (
        rest
        | indices
        | {
            "checkpoint_results": [a, b, c],
            "latest_checkpoint_result": c,
            "pending_training_results": [{"checkpoint_dir_name": "c"}, {"checkpoint_dir_name": "d"}],
            "pending_validation_specs": ["of c", "of d"],
        }
    )
    (tmp_path / SNAPSHOT).write_text(json.dumps(state))
    for _ in range(2):
        repair_snapshot(LocalFileSystem(), str(tmp_path))
        assert json.loads((tmp_path / SNAPSHOT).read_text()) == rest | {
            "checkpoint_results": [a, b],
            "checkpoint_report_indices": [0, 1] if is_old else [7, 4],
            "latest_checkpoint_result": b if is_old else a,
            "pending_training_results": [{"checkpoint_dir_name": "d"}],
            "pending_validation_specs": ["of d"],
            "current_report_index": 3 if is_old else 12,
        }


@pytest.mark.fault
def test_a_list_that_cannot_be_read_is_one_error(proxy, s3, tmp_path, monkeypatch, record_property):
    record_property("fault", "the storage answers 503 to every request for the list of reported checkpoints")
    record_property("lost", "nothing: rejected before the first step")
    fit(f"{s3}/{tmp_path.name}", 1)
    monkeypatch.setattr(retry, "DELAYS_S", ())
    proxy.failing, proxy.num_failures = SNAPSHOT, 10**9
    with pytest.raises(LaunchError, match=rf"{SNAPSHOT} cannot be accessed: "):
        fit(proxy.uri(f"{s3}/{tmp_path.name}"), 1)


REPORT_FOREVER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_reported_checkpoints
test_reported_checkpoints.fit(sys.argv[1], 10**9, num_to_keep=2)
"""


@pytest.mark.slow
@pytest.mark.fault
def test_kills_while_a_loop_reports_lose_at_most_the_report(tmp_path, record_property):
    record_property("fault", "SIGKILL while a loop reports a checkpoint every few milliseconds, five times")
    record_property("lost", "at most the checkpoint that was being reported")
    newest, rng = 0, np.random.default_rng(0)
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", REPORT_FOREVER, str(tmp_path)], env=dict(os.environ))
        while (
            len([*tmp_path.glob("a run/checkpoint_2*")]) < 2
            or json.loads((tmp_path / "a run" / SNAPSHOT).read_text())["latest_checkpoint_result"]["metrics"]["number"]
            < newest + 20
        ):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(rng.random() / 10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        text = (tmp_path / "a run" / SNAPSHOT).read_text()
        listed = json.loads(text)["latest_checkpoint_result"]["metrics"]["number"]
        assert fit(tmp_path, 0, num_to_keep=2).return_value == listed >= newest + 20
        newest = listed
