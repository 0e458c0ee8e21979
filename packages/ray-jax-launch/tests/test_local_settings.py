"""Settings of a loop in this process, and what it leaves behind. Without Ray."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from ray.train import LoggingConfig, RunConfig

from ray_jax_launch import Checkpoints, JaxTrainer, SavedCheckpoint, latest_step, launch, mark_finished

NAMES = ("ray.train", "ray.data")


def levels() -> list[int]:
    return [logging.getLogger(name).level for name in NAMES]


@pytest.mark.parametrize("before", [None, "before"])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_loop_that_fails_leaves_environment_and_log_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], before: str | None
) -> None:
    seen: list[Any] = []

    def fail() -> None:
        seen.append((os.environ["A_NAME"], levels()))
        raise error

    monkeypatch.delenv("A_NAME", raising=False)
    if before is not None:
        monkeypatch.setenv("A_NAME", before)
    environment, before_levels = dict(os.environ), levels()
    for _ in range(2):
        with pytest.raises(error):
            launch(fail, hardware="local", storage_path=tmp_path, name="run", env_vars={"A_NAME": "1"})
        assert dict(os.environ) == environment
        assert levels() == before_levels
    assert seen == [("1", [logging.ERROR] * 2)] * 2


def test_the_level_that_a_script_chooses_is_that_of_rays_log(tmp_path: Path) -> None:
    run_config = RunConfig(name="run", storage_path=str(tmp_path), logging_config=LoggingConfig("DEBUG"))
    assert JaxTrainer(levels, hardware="local", run_config=run_config).fit().return_value == [logging.DEBUG] * 2


def test_the_path_of_a_run_in_a_relative_folder_does_not_depend_on_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = launch(lambda: 7, hardware="local", storage_path="runs", name="a run")
    assert result.path == tmp_path / "runs" / "a run"
    assert result.log_folder == ""
    assert result.path.is_dir()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_only_an_exception_after_the_end_is_no_failure(tmp_path: Path, error: type[BaseException]) -> None:
    def loop() -> None:
        mark_finished()
        raise error

    given: dict[str, Any] = {"hardware": "local", "storage_path": tmp_path, "name": "run"}
    if error is OSError:
        assert launch(loop, **given).return_value is None
    else:
        with pytest.raises(KeyboardInterrupt):
            launch(loop, **given)


def test_a_saved_checkpoint_is_read_at_its_step_and_changes_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 7):
            checkpoints.save(step, {"state": {"step": step}}, metadata={})
            checkpoints.wait()
    damaged = max(
        (path for path in (tmp_path / "7").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    damaged.write_bytes(b"damaged")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert SavedCheckpoint(tmp_path, 3).restore({"state": {"step": 0}}) == {"state": {"step": 3}}
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert latest_step(tmp_path) == 7
