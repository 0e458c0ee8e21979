"""Options of a run that only other packages use reach them."""

import pytest

import ray_jax_launch
from pretrain import main
from pretrain._training import loop

SMALL = "--data book.txt --tokenizer bytes --hardware local --model.seq-len 16 --model.num-layers 1 --model.num-heads 1 --model.embed-dim 8"
OPTIONS = "--train.grad-accum-steps 2 --train.mask-documents --train.max-failures 7 --wait-for-resources-s 9"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"grad_accum_steps": 1, "end_of_text": None, "max_failures": 3, "wait_for_resources_s": 0}),
        (OPTIONS, {"grad_accum_steps": 2, "end_of_text": 256, "max_failures": 7, "wait_for_resources_s": 9}),
    ],
)
def test_an_option_reaches_the_step_or_the_launch(options, expected, tmp_path, monkeypatch):
    passed = {}

    def noting(function):
        def call(*args, **kwargs):
            passed.update(kwargs)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(ray_jax_launch, "launch", noting(ray_jax_launch.launch))
    monkeypatch.setattr(loop, "make_train_step", noting(loop.make_train_step))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    assert main([*f"{SMALL} --train.max-steps 2 --train.global-batch-size 4".split(), *options.split()]) == 0
    assert {name: passed[name] for name in expected} == expected
