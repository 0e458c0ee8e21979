"""The command `plan`: each number against its definition, and what it rejects."""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    estimate_memory,
    flops_per_token,
    make_mesh,
    num_params,
)
from pretrain import main
from pretrain._commands.plan_run import Plan, show_plan

TINY = (
    "--model.num-layers", "1", "--model.num-heads", "2", "--model.embed-dim", "32", "--model.seq-len", "32",
    "--train.global-batch-size", "8", "--train.max-steps", "50",
)  # fmt: skip


def planned(*options):
    """Return the exit code and the numbers of a plan."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["plan", "--json", *TINY, *options])
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def plain():
    """Returns the exit code and the numbers of a plan without further options."""
    return planned()


def test_the_numbers_are_those_of_the_run(plain):
    code, found = plain
    config = GPT2Config(vocab_size=257, seq_len=32, num_layers=1, num_heads=2, embed_dim=32)
    mesh = make_mesh()
    memory = estimate_memory(config, global_batch_size=8, mesh=mesh)
    assert code == 0
    assert found["fits"]
    assert (found["num_devices"], found["mesh"]) == (mesh.size, dict(mesh.shape))
    assert found["num_parameters"] == num_params(config)
    assert (found["tokens_per_step"], found["num_steps"], found["num_tokens"]) == (256, 50, 12_800)
    assert found["flops"] == 12_800 * flops_per_token(config)
    assert found["state_bytes"] == memory.state_bytes
    assert found["temporary_bytes"] == memory.temporary_bytes + memory.code_bytes
    state = create_train_state(config, create_optimizer(OptimizerConfig(), 50), jax.random.key(0))
    assert found["checkpoints_bytes"] == 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("options", "name", "change"),
    [
        (("--train.max-tokens", "2561"), "num_steps", lambda steps, _: steps == 11),
        (("--train.max-steps", "100"), "flops", lambda flops, before: flops == 2 * before),
        (("--train.mask-documents",), "temporary_bytes", lambda size, before: size > before),
        (("--train.grad-accum-steps", "8"), "temporary_bytes", lambda size, before: size < before),
        (("--optimizer.name", "muon"), "state_bytes", lambda size, before: size < before),
        (("--train.checkpoints-to-keep", "5"), "checkpoints_bytes", lambda size, before: size == 2 * before),
        (("--prepare.tokenizer", "gpt2"), "num_parameters", lambda number, before: number == before + 50_000 * 32),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_option_has_its_effect(plain, options, name, change):
    assert change(planned(*options)[1][name], plain[1][name])


def test_the_time_and_the_price_follow_from_the_peak(plain):
    assert plain[1]["hours"] is plain[1]["price"] is None  # a CPU has no known peak
    _, found = planned("--peak-tflops", "0.000001", "--price-per-hour", "3")
    hours = [found["flops"] / (share * 1e6 * found["num_devices"]) / 3600 for share in (0.5, 0.3)]
    assert found["hours"] == pytest.approx(hours)
    assert found["price"] == pytest.approx([3 * hour for hour in hours])


@pytest.mark.parametrize(
    ("hours", "shown"),
    [
        ((17.714, 29.5), "17.71 to 29.50 hours, at 50% to 30% of the peak"),
        ((0.9, 1.0), "0.90 to 1.00 hours,"),
        ((0.25, 0.5), "15.00 to 30.00 minutes,"),
        ((0.001, 0.002), "3.60 to 7.20 seconds,"),
    ],
)
def test_times_are_shown_in_their_unit(hours, shown):
    plan = Plan(
        device="H100", num_devices=8, mesh={"data": 8}, num_parameters=1, tokens_per_step=1, num_steps=1, num_tokens=1,
        flops=1.0, checkpoints_bytes=1, state_bytes=1, temporary_bytes=1, usable_bytes=None, fits=True, reason="",
        hours=hours, price=hours,
    )  # fmt: skip
    out = io.StringIO()
    show_plan(plan, console=Console(file=out, width=200))
    lines = dict(line.split(maxsplit=1) for line in out.getvalue().splitlines())
    assert lines["time"].startswith(shown)
    assert lines["price"] == f"{hours[0]:.2f} to {hours[1]:.2f}, at 50% to 30% of the peak"


def test_a_run_that_does_not_fit_has_exit_code_1(capsys):
    assert main(["plan", *TINY, "--train.global-batch-size", "80000000"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("It does not fit. Raise --train.grad-accum-steps")
    assert [line.split()[0] for line in lines[:-1]] == [
        "devices", "parameters", "tokens", "FLOPs", "checkpoints", "memory", "time",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "wikitext"), "train.max_epochs must be none in a plan, which reads no data, got 5. Give"),
        (("--price-per-hour", "-1"), "--price-per-hour must be a number of at least 0, got -1.0. Change it."),
        (("--price-per-hour", "nan"), "--price-per-hour must be a"),
        (
            ("--devices", "h100"),
            "devices must be tpu:TYPE:TOPOLOGY (v5e, v5p, v6e) or gpu:",
        ),
        (("--mesh.fsdp", "3"), "mesh axis fsdp must divide model.embed_dim (128), got 3. Choose another size."),
        (("--mesh.fsdp", "64"), "mesh axes fsdp and tensor must be at least 1 and their product must divide the"),
        (("--device", "gpu:8:h100"), "no option --device of plan; did you mean --devices?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_sentence(capsys, options, message):
    assert main(["plan", *options]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="the compiler is installed")
def test_a_missing_compiler_is_one_sentence(capsys):
    assert main(["plan", "--devices", "gpu:8:h100"]) == 2
    assert "Install nnx-gpt2[tpu] or nnx-gpt2[cuda12] on Linux" in capsys.readouterr().err


def test_a_plan_starts_nothing_and_writes_nothing(tmp_path: Path):
    code = f"import sys; from pretrain import main; print(main({['plan', *TINY]}), 'ray' in sys.modules)"
    env = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"
    assert [*tmp_path.iterdir()] == []
