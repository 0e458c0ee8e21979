"""Devices that this machine lacks: rejected before text is tokenized and before Ray starts."""

import subprocess
import sys
from pathlib import Path

import pytest
import ray

from pretrain import main
from pretrain._data import cache_folder

CODE = """
import sys
from ray_jax_launch import check_local_resources, parse_hardware

try:
    check_local_resources(parse_hardware("gpu:1"))
except ValueError as error:
    print(error, "jax" in sys.modules)
"""


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("gpu:1", "This machine must have 1 GPUs for gpu:1, got 0. Ask for other hardware, or set RAY_ADDRESS to a "),
        ("tpu:v6e:1x1", "This machine must have 1 TPUs for tpu:v6e:1x1, got 0. Ask for other hardware, or set "),
    ],
)
@pytest.mark.parametrize("mode", ["prepared", "stream"])
def test_nothing_is_tokenized_and_ray_does_not_start(tmp_path, monkeypatch, capsys, hardware, message, mode):
    ray.shutdown()  # that of a run of an earlier test
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("book.txt").write_text("words of a book " * 3000)
    for _ in range(2):
        assert main(["--data", "book.txt", "--hardware", hardware, "--data-mode", mode]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: {message}")
        assert captured.err.count("\n") == 1
        assert captured.out == "loading JAX and Ray\n"
    assert not ray.is_initialized()
    assert not cache_folder().exists() or not any(cache_folder().iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_devices_are_counted_without_jax():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert done.stdout.startswith("This machine must have 1 GPUs")
