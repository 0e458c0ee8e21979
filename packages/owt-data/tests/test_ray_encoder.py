"""Parts as tasks of a real Ray cluster."""

import os
import subprocess
import sys

import pytest

from owt_data import PrepareOptions, prepare, verify


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("owt_data._plan.MIN_PART_BYTES", 5000)


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=pytest.mark.shared_data)])
def test_tasks_write_the_same_files(tokenizer, articles, tmp_path, cluster, request):
    if tokenizer == "gpt2":
        request.getfixturevalue("gpt2")
    options = PrepareOptions(tokenizer=tokenizer, val_fraction=0.1)
    expected = prepare(str(articles), tmp_path / "expected", options, num_processes=1)
    assert prepare(str(articles), tmp_path / "out", options, use_ray=True) == expected
    assert verify(tmp_path / "out") == []


def test_the_command_starts_a_cluster_where_there_is_none(articles, tmp_path):
    code = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes", "--ray"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert verify(tmp_path / "out") == []


def test_a_cluster_that_is_not_there_is_said(articles, tmp_path):
    code = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes", "--ray"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: RAY_ADDRESS must name a Ray cluster that answers, got 127.0.0.1:9 ("
    )
    assert "Traceback" not in done.stderr
