"""`JaxTrainer` with two workers on a real cluster: what a script of Ray's own trainer gains."""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import ray
import ray.cloudpickle
import ray.data
import ray.train
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    UserCallback,
    ValidationConfig,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch import JaxTrainer, LaunchError, TrainingFailed, launch

pytestmark = pytest.mark.usefixtures("cluster")

# Workers cannot import this file: their functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class CountReports(UserCallback):
    def __init__(self, file):
        self.file = file

    def after_report(self, run_context, metrics, checkpoint):
        with Path(self.file).open("a") as file:
            # The list of checkpoints is written by this module, in Ray's controller.
            writer = CheckpointManager._write_state_to_storage.__module__
            file.write(f"{run_context.run_config.name} {len(metrics)} {writer}\n")


def describe_worker():
    import jax

    rows = {name: ray.train.get_dataset_shard(name) for name in ("ranked", "split", "whole")}
    rows = {name: sorted(row["id"] for row in shard.iter_rows()) for name, shard in rows.items() if shard is not None}
    ray.train.report({"rows": sum(map(len, rows.values())), "rank": jax.process_index()})
    return {
        "processes": jax.process_count(),
        "platform": jax.default_backend(),
        "devices": jax.local_device_count(),
        "name": ray.train.get_context().get_experiment_name(),
        "variable": os.environ["A_NAME"],
        **rows,
    }


def test_a_script_of_rays_trainer_gets_joined_workers_metrics_and_mixed_datasets(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "ray_jax_launch"):
        result = JaxTrainer(
            describe_worker,
            jax_config=JaxConfig(),
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
            datasets={
                "ranked": lambda rank, world_size: ray.data.range(rank + world_size),
                "split": ray.data.range(10),
                "whole": lambda: ray.data.range(3),
            },
            dataset_config=DataConfig(datasets_to_split=["split"]),
            run_config=RunConfig(
                name="a run",
                storage_path=str(tmp_path),
                callbacks=[CountReports(str(tmp_path / "reports"))],
                worker_runtime_env={"env_vars": {"A_NAME": "a value", "JAX_NUM_CPU_DEVICES": "3"}},
            ),
        ).fit()
    assert isinstance(result, ray.train.Result)
    returned = result.return_value
    assert returned is not None
    assert len(returned.pop("split")) == 5
    assert returned == {
        "processes": 2,
        "platform": "cpu",
        "devices": 3,
        "name": "a run",
        "variable": "a value",
        "ranked": [0, 1],
        "whole": [0, 1, 2],
    }
    assert result.metrics == {"rows": 10, "rank": 0}
    assert (result.error, result.checkpoint, result.best_checkpoints) == (None, None, [])
    assert result.path == str(tmp_path / "a run")
    assert Path(result.log_folder).is_dir()
    assert (tmp_path / "reports").read_text() == "a run 2 ray_jax_launch._ray_internals.ray_train\n"
    lines = sorted(record.message for record in caplog.records if record.name == "ray_jax_launch")
    address = ray.util.get_node_ip_address()
    assert lines.pop(0) == "starting cpu:2"
    for rank, line in enumerate(lines):
        assert line.startswith(f"worker {rank} of 2: node {address}, 3 devices (")
    assert len(lines) == 2


def report_and_die_once(config):
    """Report four numbers. At the first start rank 1 is killed after the second."""
    before = ray.train.get_checkpoint()
    start = 0 if before is None else int((Path(before.path) / "number").read_text())
    rank = ray.train.get_context().get_world_rank()
    for number in range(start + 1, 5):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / ("number" if rank == 0 else "other")).write_text(str(number))
            reported = Checkpoint.from_directory(folder)
            ray.train.report({"number": number}, checkpoint=reported, validation=number == 4)
        if rank == 1 and number == 3 and not Path(config["marker"]).exists():
            Path(config["marker"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return start


def validate(checkpoint, **kwargs):
    with checkpoint.as_directory() as folder:
        return {"validated": int((Path(folder) / "number").read_text())}


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_script_continues_from_what_it_reported_and_so_does_the_next_start(tmp_path, caplog, record_property):
    record_property("fault", "SIGKILL of a worker whose loop reports its checkpoints to Ray")
    record_property("lost", "steps since the last report")
    trainer = JaxTrainer(
        report_and_die_once,
        train_loop_config={"marker": str(tmp_path / "marker")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=-1),
        ),
        validation_config=ValidationConfig(fn=validate),
    )
    result = trainer.fit()
    assert (tmp_path / "marker").exists()
    assert result.return_value in (1, 2, 3)  # Ray Train may not have seen the newest two reports
    assert "worker 1 died, or no longer answers; the workers start again (failure 1)" in caplog.text
    assert [metrics for _, metrics in result.best_checkpoints or []] == [{"number": 3}, {"number": 4, "validated": 4}]
    assert result.checkpoint is not None
    assert sorted(path.name for path in Path(result.checkpoint.path).iterdir()) == ["number", "other"]
    (tmp_path / "run" / "checkpoint_manager_snapshot.json").write_text("{")
    again = trainer.fit()
    assert again.return_value == 4
    assert again.checkpoint is not None
    assert again.checkpoint.path == result.checkpoint.path


def read_rows():
    return ray.train.get_dataset_shard("rows")


def test_a_failure_is_rays_error_too_and_is_not_retried_by_default(tmp_path, caplog):
    run_config = RunConfig(name="run", storage_path=str(tmp_path))
    with pytest.raises(TrainingFailedError) as failed:
        JaxTrainer(read_rows, scaling_config=ScalingConfig(num_workers=1), run_config=run_config).fit()
    assert isinstance(failed.value, TrainingFailed)
    assert failed.value.rank == 0
    assert "datasets must have 'rows', got no datasets. Pass it by datasets=." in failed.value.details
    assert "start again" not in caplog.text


def test_a_worker_that_needs_more_than_the_cluster_has_is_rejected(tmp_path):
    given = {"storage_path": tmp_path, "name": "run"}
    with pytest.raises(LaunchError, match=r"must have 100 CPUs for cpu:1, got 4. Ask for .* ray.init\(num_cpus=...\)"):
        launch(read_rows, hardware="cpu:1", resources_per_worker={"CPU": 100}, **given)
    with pytest.raises(LaunchError, match=r"must have 2 rooms for cpu:2, got 0"):
        launch(read_rows, scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"room": 1}), **given)
    assert [*tmp_path.iterdir()] == []
