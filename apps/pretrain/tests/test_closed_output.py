"""The end of a run whose output nobody reads any more, as `pretrain | grep -m1 done`."""

import os
import subprocess
import sys

import pytest

CODE = """
import io, os, sys
from pretrain._cli import main

read_end, write_end = os.pipe()


class UntilDone(io.TextIOWrapper):
    is_read = True

    def write(self, text):
        if self.is_read and "done in" in text:
            os.close(read_end)
            self.is_read = False
        return super().write(text)


sys.stdout = UntilDone(open(write_end, "wb"), encoding="utf-8")
sys.exit(main(sys.argv[1:]))
"""
OPTIONS = (
    "--data book.txt --tokenizer bytes --hardware local --name run --model.num-layers 1 --model.num-heads 2 "
    "--model.embed-dim 16 --train.max-steps 2 --train.eval-tokens 1000 --train.sample-tokens 0 --trackers"
)


@pytest.mark.slow
def test_a_finished_run_whose_reader_has_gone_is_no_failed_run(tmp_path):
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 500)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *OPTIONS.split()],
        cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "runs/run/result.json").exists()
