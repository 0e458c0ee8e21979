"""Uploads of reported checkpoints in local mode: where they go, and which folders are deleted. Without Ray."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig

from ray_jax_launch import JaxTrainer, LaunchError

SNAPSHOT = "checkpoint_manager_snapshot.json"


def delete_after_report(config):
    folder = Path(config["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "number").write_text("1")
    ray.train.report({}, checkpoint=Checkpoint.from_directory(folder), delete_local_checkpoint_after_upload=True)


@pytest.mark.parametrize(("folder", "is_deleted"), [("local", True), (".", False), ("a run", False)])
def test_a_reported_folder_is_deleted_unless_the_run_is_in_it(tmp_path, folder, is_deleted):
    trainer = JaxTrainer(
        delete_after_report,
        train_loop_config={"folder": str(tmp_path / folder)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="a run", storage_path=str(tmp_path)),
    )
    if is_deleted:
        trainer.fit()
    else:
        with pytest.raises(LaunchError, match="checkpoint must be a folder outside the run's, got "):
            trainer.fit()
    assert (tmp_path / folder / "number").exists() == (not is_deleted)


def report_from(folder: Path, **given: Any) -> Callable[[], None]:
    """Return a loop that reports a folder three times, with the numbers 3, 7 and 9 in it."""

    def loop() -> None:
        for number in (3, 7, 9):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "number").write_text(str(number))
            chosen = {name: value(number) if name.endswith("name") else value for name, value in given.items()}
            ray.train.report({"number": number}, checkpoint=Checkpoint.from_directory(folder), **chosen)

    return loop


def fit_in(place: Path, loop: Callable[[], None]) -> Any:
    run_config = RunConfig(name="a run", storage_path=str(place))
    return JaxTrainer(loop, scaling_config=ScalingConfig(num_workers=0), run_config=run_config).fit()


def test_a_loop_names_the_folders_of_its_checkpoints(tmp_path: Path) -> None:
    result = fit_in(tmp_path, report_from(tmp_path / "local", checkpoint_dir_name="at-{}".format))
    folders = [Path(checkpoint.path) for checkpoint, _ in result.best_checkpoints]
    assert folders == [tmp_path / "a run" / f"at-{number}" for number in (3, 7, 9)]
    assert [(folder / "number").read_text() for folder in folders] == ["3", "7", "9"]
    assert (tmp_path / "local" / "number").read_text() == "9"


def test_a_checkpoint_that_is_in_the_run_already_is_not_copied(tmp_path: Path) -> None:
    folder = tmp_path / "a run" / "mine"
    result = fit_in(tmp_path, report_from(folder, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD))
    assert result.checkpoint.path == str(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([SNAPSHOT, "mine"])


def test_a_loop_may_upload_its_checkpoints_itself(tmp_path: Path) -> None:
    names: list[str] = []

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        names.append(name)
        place = tmp_path / "a run" / f"uploaded-{len(names)}"
        shutil.copytree(checkpoint.path, place)
        return Checkpoint(str(place))

    result = fit_in(tmp_path, report_from(tmp_path / "local", checkpoint_upload_fn=upload))
    assert result.checkpoint.path == str(tmp_path / "a run" / "uploaded-3")
    assert len({*names}) == 3
    assert all(name.startswith("checkpoint_") for name in names)
    assert [*(tmp_path / "a run").glob("checkpoint_2*")] == []


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({}, True),
        ({"checkpoint_upload_mode": CheckpointUploadMode.ASYNC}, False),  # Ray's default
        ({"delete_local_checkpoint_after_upload": True}, False),
        ({"checkpoint_upload_mode": CheckpointUploadMode.ASYNC, "delete_local_checkpoint_after_upload": False}, True),
    ],
)
def test_a_reported_folder_is_deleted_after_its_upload_as_in_ray(
    tmp_path: Path, given: dict[str, Any], stays: bool
) -> None:
    result = fit_in(tmp_path, report_from(tmp_path / "local", **given))
    assert (tmp_path / "local").exists() == stays
    assert (Path(result.checkpoint.path) / "number").read_text() == "9"


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({"delete_local_checkpoint_after_upload": True}, False),
        ({"delete_local_checkpoint_after_upload": False}, True),
        ({"checkpoint_upload_mode": CheckpointUploadMode.ASYNC}, False),
    ],
)
def test_a_folder_that_a_function_uploads_is_deleted_after_it_as_in_ray(
    tmp_path: Path, given: dict[str, Any], stays: bool
) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        target = tmp_path / "a run" / name
        shutil.copytree(checkpoint.path, target)
        return Checkpoint(str(target))

    result = fit_in(tmp_path, report_from(tmp_path / "local", checkpoint_upload_fn=upload, **given))
    assert (tmp_path / "local").exists() == stays
    assert (Path(result.checkpoint.path) / "number").read_text() == "9"


def test_the_only_copy_of_a_reported_checkpoint_is_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "a run" / "mine"
    given = {"checkpoint_upload_fn": lambda checkpoint, name: checkpoint, "delete_local_checkpoint_after_upload": True}
    result = fit_in(tmp_path, report_from(folder, **given))
    assert (Path(result.checkpoint.path), (folder / "number").read_text()) == (folder, "9")


def report_to_validate():
    with tempfile.TemporaryDirectory() as folder:
        ray.train.report({}, checkpoint=Checkpoint.from_directory(folder), validation=True)


def test_validation_in_local_mode_is_rejected(tmp_path):
    run_config = RunConfig(name="a run", storage_path=str(tmp_path))
    trainer = JaxTrainer(report_to_validate, scaling_config=ScalingConfig(num_workers=0), run_config=run_config)
    with pytest.raises(LaunchError, match=r"validation must be False in local mode, got True\. "):
        trainer.fit()
    assert [*tmp_path.iterdir()] == []
