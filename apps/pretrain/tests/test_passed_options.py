"""Options of a run that only other packages use reach them."""

import ray_jax_launch
from nnx_gpt2 import make_train_step
from pretrain import main
from pretrain._training import loop

SMALL = (
    "--data book.txt --tokenizer bytes --hardware local --train.max-steps 2 --train.global-batch-size 4 "
    "--model.seq-len 16 --model.num-layers 1 --model.num-heads 1 --model.embed-dim 8"
)
OPTIONS = (
    "--train.grad-accum-steps 2 --train.mask-documents --train.max-failures 7 --wait-for-resources-s 9 --profile 1:2"
)


def test_options_reach_the_step_the_launch_and_the_profiler(tmp_path, monkeypatch):
    """None of these is the default."""
    passed = {}

    def noting(function):
        def call(*args, **kwargs):
            passed.update(kwargs)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(ray_jax_launch, "launch", noting(ray_jax_launch.launch))
    monkeypatch.setattr(loop, "make_train_step", noting(make_train_step))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    assert main(f"{SMALL} {OPTIONS}".split()) == 0
    expected = {"grad_accum_steps": 2, "end_of_text": 256, "max_failures": 7, "wait_for_resources_s": 9}
    assert {name: passed[name] for name in expected} == expected
    (trace,) = tmp_path.glob("runs/*/tensorboard/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0
