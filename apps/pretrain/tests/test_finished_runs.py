"""The end of a run, and a kill in the midst of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, LocalFileSystem

from ray_jax_launch import open_uri

APPLICATION = str(Path(__file__).parent.parent)
OPTIONS = (
    "--data book.txt --tokenizer bytes --hardware local --name run --model.num-layers 1 --model.num-heads 2 "
    "--model.embed-dim 16 --train.max-steps 10 --train.eval-tokens 1000 --train.log-every 5 --trackers"
)
LIMIT_S = 240


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_kill_after_the_result_loses_neither_picture_nor_sample(kind, s3, tmp_path, record_property):
    record_property("fault", f"the command is killed as soon as result.json is there ({kind})")
    record_property("lost", "nothing: the next start draws the picture")
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 500)
    storage_path = f"{s3}/{tmp_path.name}" if kind == "s3" else str(tmp_path / "runs")
    filesystem, root = open_uri(f"{storage_path}/run") if kind == "s3" else (LocalFileSystem(), f"{storage_path}/run")

    def names():
        infos = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
        return {info.base_name for info in infos if info.is_file}

    command = [sys.executable, APPLICATION, *OPTIONS.split(), "--storage-path", storage_path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment)
    try:
        limit = time.monotonic() + LIMIT_S
        while "result.json" not in names() and time.monotonic() < limit:
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert {"result.json", "sample.txt"} <= names(), (tmp_path / "log").read_text()
    if "loss.png" in names():  # the kill came late
        filesystem.delete_file(f"{root}/loss.png")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "is finished" in done.stdout
    assert {"result.json", "sample.txt", "loss.png"} <= names()
