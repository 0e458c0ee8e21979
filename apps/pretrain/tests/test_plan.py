"""The command `plan`: each number against its definition, and what it rejects."""

import contextlib
import functools
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    device_facts,
    estimate_memory,
    flops_per_token,
    make_mesh,
    num_params,
)
from owt_data import PrepareOptions, TokenMixture, prepare
from pretrain import PRESETS, PretrainConfig, TrainConfig, main
from pretrain._cli import parse_command
from pretrain._commands import plan_run
from pretrain._commands.plan_run import _measured_step_s, _num_checkpoints, _peak, _source_epochs
from pretrain._data import load_tokens, open_prepared
from pretrain._resolve import step_memory, target_devices
from pretrain._resolve.target_devices import _name_of_absent, find_target
from pretrain._screen.plan_table import Plan, show_plan
from ray_jax_launch import gpu_memory_share, parse_hardware

TINY = (
    "--model.num-layers", "1", "--model.num-heads", "2", "--model.embed-dim", "32", "--model.seq-len", "32",
    "--train.global-batch-size", "8",
)  # fmt: skip
STEPS = ("--train.max-steps", "50")


@pytest.fixture(scope="module", autouse=True)
def each_step_is_compiled_once():
    """A compilation takes seconds, and most plans here have the same step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "estimate_memory", functools.cache(estimate_memory))
        yield


def planned(*options):
    """Return the exit code and the numbers of a plan."""
    length = () if any(option.startswith("--train.max-") for option in options) else STEPS
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["plan", "--json", *TINY, *length, *options])
    return code, json.loads(out.getvalue())


_OFTEN = ("--train.checkpoint-every", "3")


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
    assert found["checkpoints_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert (found["micro_batch_size"], found["grad_accum_steps"]) == (8 // mesh.size, 1)
    assert found["measured_step_s"] is None
    assert found["logs_bytes"] == 2 * 700  # records of the steps 25 and 50


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text that its user cache does not have."""
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    return tmp_path / "book.txt"


def test_text_that_is_not_prepared_is_not_read(book: Path):
    _, found = planned("--data", str(book))
    assert found["epochs"] is found["tokens_bytes"] is None


@pytest.mark.parametrize("form", ["folder", "splits", "mixture"])
def test_epochs_and_disk_are_those_of_the_prepared_tokens(form, book: Path):
    out, other = book.with_name("tokens"), book.with_name("other")
    for folder in (out, other):
        prepare(str(book), folder, PrepareOptions(tokenizer="bytes"), num_processes=1)
    names = {
        "folder": str(out),
        "splits": f"train={out}/train.bin,val={out}/val.bin",
        "mixture": f"one=1:{out},two=2:{other}",
    }
    config = parse_command(["train", "--data", names[form]])
    assert isinstance(config, PretrainConfig)
    data = load_tokens(config, Console(quiet=True))
    num_windows = data.train.num_windows(32)
    _, found = planned("--data", names[form], "--train.max-epochs", "3")
    assert found["num_steps"] == 3 * num_windows // 8
    assert found["epochs"] == found["num_steps"] * 8 / num_windows
    assert found["tokens_bytes"] == 2 * (len(data.train) + len(data.val))


def test_each_name_of_a_mixture_has_its_epochs(book: Path, capsys):
    for name in ("one", "two"):
        prepare(str(book), book.with_name(name), PrepareOptions(tokenizer="bytes"), num_processes=1)
    names = f"web=3>0@20:{book.with_name('one')},code=1>1@20:{book.with_name('two')}"
    _, found = planned("--data", names)
    config = parse_command(["train", "--data", names, *TINY, *STEPS])
    assert isinstance(config, PretrainConfig)
    tokens = open_prepared(config)
    assert tokens is not None
    assert isinstance(tokens.train, TokenMixture)
    which, _ = tokens.train.deal(np.arange(50 * 8), 2357)
    counts, num_windows = np.bincount(which), tokens.train.num_windows(32) / 2
    assert counts[0] == np.count_nonzero(which[: 20 * 8] == 0) > 0
    assert found["source_epochs"] == {"web": counts[0] / num_windows, "code": counts[1] / num_windows}
    assert main(["plan", *TINY, *STEPS, "--data", names]) == 0
    epochs = f"{400 / num_windows / 2:,.2f}: web {counts[0] / num_windows:,.2f}, code {counts[1] / num_windows:,.2f}"
    assert epochs in capsys.readouterr().out
    # The last 20 of the 50 steps, as those of a fork.
    of_fork = _source_epochs(config, 20, tokens.train)
    assert of_fork == {"web": 0.0, "code": np.count_nonzero(which[30 * 8 :]) / num_windows}


def test_fineweb_is_known():
    _, found = planned("--data", "fineweb", "--prepare.tokenizer", "gpt2", "--train.max-tokens", "10255073280")
    assert found["epochs"] == pytest.approx(0.99, abs=2e-3)
    assert (found["tokens_bytes"], found["source_epochs"]) == (2 * 10_355_000_000, {})


def test_openwebtext_is_known():
    _, found = planned("--data", "openwebtext", "--prepare.tokenizer", "gpt2", "--train.max-tokens", "9035582198")
    assert found["epochs"] == pytest.approx(1.0, abs=1e-4)
    assert found["tokens_bytes"] == 2 * 9_040_017_095


@pytest.mark.parametrize(
    ("preset", "kind", "capability", "peak"),
    [
        ("gpt2", "NVIDIA H100 80GB HBM3", "9.0", 989e12),
        ("wikitext", "NVIDIA H100 80GB HBM3", "9.0", None),  # float32
        ("gpt2", "Tesla T4", "7.5", None),  # no bfloat16
    ],
)
def test_a_peak_of_another_type_is_not_taken(preset, kind, capability, peak):
    device = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    found = _peak(PRESETS[preset](), device)
    assert found == (None if peak is None else pytest.approx(peak, rel=0.01))


def test_the_measured_time_and_price_are_those_of_all_steps(monkeypatch):
    """The compilations of the first steps, and a step that something else delays, do not count."""
    monkeypatch.setattr(plan_run, "_measured_step_s", lambda config, mesh: 7.2)
    _, found = planned("--measure", "--price-per-hour", "3")
    assert (found["measured_step_s"], found["measured_hours"]) == (7.2, pytest.approx(0.1))
    assert found["measured_price"] == pytest.approx(0.3)
    monkeypatch.undo()

    now, taken, batches, waits = [0.0], [], [], []

    def step(state, windows, key):
        batches.append(windows)
        return state, {"loss": np.zeros(()).view(SimpleArray)}

    class SimpleArray(np.ndarray):
        def block_until_ready(self):
            now[0] += taken.pop(0)
            waits.append(len(batches))
            return self

    monkeypatch.setattr(plan_run, "train_step_of", lambda *_: step)
    monkeypatch.setattr(plan_run, "create_train_state", lambda *_: None)
    monkeypatch.setattr(plan_run, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for vocab_size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        taken[:] = [9.0, 8.0, 7.0, 900.0, *[0.5, 0.25] * 9, 0.25]
        config = PRESETS["quickstart"]().with_options({"model.vocab_size": vocab_size, "model.seq_len": 5})
        assert _measured_step_s(config, make_mesh()) == (0.25 + 0.5) / 2
        assert (taken, batches[-1].dtype, batches[-1].shape) == ([], dtype, (16, 6))
        assert waits == [*range(2, 24), 23]  # one step ahead
        batches.clear()
        waits.clear()


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 4),  # the newest two, the best one, and the one that is being written
        ({"max_steps": 25}, 3),  # no more than there are
        ({"keep_every": 15}, 7),  # checkpoints are kept at the steps 30, 60 and 90
        ({"keep_every": 10, "checkpoints_to_keep": 1}, 10),
        ({"eval_tasks": ("piqa",), "eval_tasks_every": 20}, 6),
        ({"eval_tasks": ("piqa",)}, 4),
    ],
)
def test_the_checkpoints_on_the_disk_are_those_that_each_option_keeps(changes, number):
    assert _num_checkpoints(TrainConfig(**{"max_steps": 100, "checkpoint_every": 10, **changes})) == number


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("gpu:8:H100", "gpu:8:h100"),
        ("gpu:1x8:h100", "gpu:1x8:h100"),
        ("gpu:2x4:h100", "gpu:2x4:h100"),
        ("gpu:2-4x8:h100", "gpu:2x8:h100"),
        ("gpu:4-8:h100", "gpu:4:h100"),
        ("tpu:v6e:4x4", "tpu:v6e:4x4"),
        ("tpu:v6e:4x4:1-3", "tpu:v6e:4x4"),
    ],
)
def test_absent_devices_are_those_of_the_smallest_group_with_what_jax_takes_of_their_memory(
    hardware, name, monkeypatch
):
    assert _name_of_absent(parse_hardware(hardware)) == name
    asked = []
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--own=1")
    monkeypatch.setattr(target_devices, "find_spec", lambda module: module)
    monkeypatch.setattr(target_devices, "absent_devices", lambda name: asked.append(name) or jax.devices())
    found = find_target(parse_hardware(hardware), only_here=False)
    assert (asked, found.facts) == ([name], None)
    share = 1 if name.startswith("tpu") else gpu_memory_share()
    assert found.usable_bytes == int(share * device_facts(name).memory_bytes)
    assert gpu_memory_share() < 1
    has_flags = os.environ["LIBTPU_INIT_ARGS"].startswith("--xla_enable_async_all_reduce=true")
    assert (has_flags, os.environ["LIBTPU_INIT_ARGS"][-7:]) == (name.startswith("tpu"), "--own=1")


@pytest.mark.slow
def test_steps_are_measured_here_if_they_fit(monkeypatch):
    _, found = planned("--measure", "--price-per-hour", "3")
    assert 0 < found["measured_step_s"] < 60
    assert found["measured_hours"] == pytest.approx(found["measured_step_s"] * found["num_steps"] / 3600)
    assert found["measured_price"] == pytest.approx(3 * found["measured_hours"])
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: 1000)
    code, found = planned("--measure")
    assert (code, found["measured_step_s"], found["measured_hours"], found["measured_price"]) == (1, None, None, None)
    assert found["reason"].startswith("the step needs ")
    assert found["reason"].endswith(" bytes on each device, which has 1000")


def test_a_schedule_need_not_fit_into_a_thousand_steps():
    options = ("--optimizer.schedule", "wsd", "--optimizer.warmup-steps", "2000", "--train.max-steps", "600000")
    assert planned(*options)[0] == 0


def test_cpu_devices_are_made_for_a_plan():
    options = [*TINY, *STEPS, "--train.global-batch-size", "12", "--hardware", "cpu:1-3x2", "--mesh.tensor", "2"]
    options += ["--peak-tflops", "0.000001"]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    code = f"from pretrain import main; main({['plan', '--json', *options]})"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["num_devices"], found["worker_counts"]) == (2, [1, 2, 3])  # an elastic group at its smallest
    assert (found["mesh"]["tensor"], found["micro_batch_size"]) == (2, 12)  # the two share each window
    assert found["hours"] == pytest.approx([found["flops"] / (share * 2e6) / 3600 for share in (0.5, 0.3)])


def test_the_numbers_of_workers_of_a_range_are_shown(capsys):
    def row(hardware):
        assert main(["plan", *TINY, *STEPS, "--train.global-batch-size", "8", "--hardware", hardware]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("workers")]

    assert row("cpu:1-5") == ["workers     1, 2 or 4; planned with the fewest"]
    assert row("cpu:1-999999") == ["workers     1, 2, 4 or 8; planned with the fewest"]
    assert row("cpu:1") == []


@pytest.mark.parametrize(
    ("options", "name", "change"),
    [
        (("--train.max-tokens", "2561"), "num_steps", lambda steps, _: steps == 11),
        (("--train.max-steps", "100"), "flops", lambda flops, before: flops == 2 * before),
        (("--train.mask-documents",), "temporary_bytes", lambda size, before: size > before),
        (("--train.grad-accum-steps", "8"), "temporary_bytes", lambda size, before: size < before),
        (("--train.micro-batch-size", "1"), "temporary_bytes", lambda size, before: size < before),
        (("--train.log-every", "5"), "logs_bytes", lambda size, before: size == 5 * before),
        (("--optimizer.name", "muon"), "state_bytes", lambda size, before: size < before),
        # The newest two, the best one, and the one that is being written.
        (_OFTEN, "checkpoints_bytes", lambda size, before: size == 4 * before),
        ((*_OFTEN, "--train.no-keep-best"), "checkpoints_bytes", lambda size, before: size == 3 * before),
        ((*_OFTEN, "--train.checkpoints-to-keep", "5"), "checkpoints_bytes", lambda size, before: size == 7 * before),
        (
            (*_OFTEN, "--train.checkpoints-to-keep", "none"),
            "checkpoints_bytes",
            lambda size, before: size == 17 * before,
        ),
        ((*_OFTEN, "--train.keep-every", "9"), "checkpoints_bytes", lambda size, before: size == 9 * before),
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
        device="H100", num_devices=8, mesh={"data": 8}, worker_counts=(), num_parameters=1, tokens_per_step=1,
        num_steps=100, num_tokens=1, epochs=1.0, source_epochs={}, micro_batch_size=1, grad_accum_steps=1, flops=1.0,
        tokens_bytes=20_000_000,
        checkpoints_bytes=3_000_000_000, logs_bytes=4000, state_bytes=1, temporary_bytes=1, usable_bytes=3 << 20,
        fits=True, reason="", hours=hours, price_per_hour=1.0, price=hours, measured_step_s=1.5,
        measured_hours=150 / 3600, measured_price=150 / 3600,
    )  # fmt: skip
    out = io.StringIO()
    show_plan(plan, console=Console(file=out, width=200))
    lines = dict(line.split(maxsplit=1) for line in out.getvalue().splitlines())
    assert lines["time"].startswith(shown)
    assert lines["measured"] == "1,500.0 ms a step here: 2.50 minutes, price 0.04"
    assert lines["memory"] == "0.00 of 3.0 MiB on each device, by its compiler: state 0.00, temporary 0.00"
    assert lines["disk"] == "tokens 20.00 MB, checkpoints 3.00 GB at most, logs 4 kB"
    assert lines["price"] == f"{hours[0]:.2f} to {hours[1]:.2f}, at 50% to 30% of the peak"


@pytest.mark.parametrize(
    ("memory_bytes", "remedy"),
    [(1000, "--mesh.fsdp, or a smaller model."), (None, "--mesh.fsdp, --model.remat full, or a smaller model.")],
)
def test_only_what_can_be_smaller_is_advised(memory_bytes, remedy, capsys, monkeypatch, plain):
    """The state is too large by itself, or fits by itself."""
    limit = memory_bytes or plain[1]["state_bytes"] + 1000
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: limit)
    assert main(["plan", *TINY, *STEPS, "--train.global-batch-size", "2", "--train.micro-batch-size", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"It does not fit. Take more devices with {remedy}"


def test_a_step_that_the_compiler_rejects_has_the_memory_of_its_state(capsys, monkeypatch, plain):
    def reject(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: it exceeds the memory")

    monkeypatch.setattr(step_memory, "estimate_memory", reject)
    code, found = planned()
    assert (code, found["fits"], found["reason"]) == (1, False, "it exceeds the memory")
    assert found["state_bytes"] == pytest.approx(plain[1]["state_bytes"], rel=0.01)  # less the windows of a step
    assert found["temporary_bytes"] is None
    assert main(["plan", *TINY, *STEPS]) == 1
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["memory"] == "the compiler rejects the step: it exceeds the memory"


@pytest.mark.parametrize(("gpu", "is_slow"), [("t4", True), ("l4", False)])
def test_a_plan_for_a_gpu_without_bfloat16_says_that_float32_is_faster(gpu, is_slow, caplog, monkeypatch):
    monkeypatch.setattr(target_devices, "_COMPILERS", {"gpu": []})
    main(["plan", *TINY, *STEPS, "--model.dtype", "bfloat16", "--hardware", f"gpu:1:{gpu}"])
    assert ("Tesla T4 computes bfloat16 slowly" in caplog.text) == is_slow


def test_a_price_without_a_known_peak_is_unknown(capsys):
    """The memory of a tiny model is not shown as 0.00 GiB."""
    assert main(["plan", *TINY, *STEPS, "--price-per-hour", "3"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["price"] == lines["time"] == "unknown: give --peak-tflops"
    needed, *_ = lines["memory"].split()
    assert " MiB on each device" in lines["memory"]
    assert float(needed) > 0


def test_a_run_that_does_not_fit_has_exit_code_1(capsys):
    assert main(["plan", *TINY, *STEPS, "--train.global-batch-size", "80000000"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("It does not fit. Take more devices with --mesh.fsdp, --model.remat full, a smaller")
    assert [line.split()[0] for line in lines[:-1]] == [
        "devices", "parameters", "tokens", "epochs", "microbatch", "FLOPs", "disk", "memory", "time",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--preset", "wikitext"),
            "train.max_epochs must be none in a plan for text that is not prepared, got 5. Give",
        ),
        (
            ("--model.vocab-size", "100"),
            "--model.vocab-size must be at least 257, the vocabulary of the tokenizer bytes",
        ),
        (("--data", "nowhere.txt"), "nowhere.txt must be a file or a folder of files, got a name that does not"),
        (("--price-per-hour", "-1"), "--price-per-hour must be a number of at least 0, got -1.0."),
        (("--price-per-hour", "nan"), "--price-per-hour must be a"),
        (("--hardware", "h100"), "hardware must be auto, cpu:WORKERS"),
        (("--hardware", "gpu:8"), "got gpu:8 with 0 such devices here. Add the type, such as gpu:8:h100."),
        (
            ("--hardware", "gpu:8:v100"),
            "--hardware gpu:8:v100: devices must be tpu:TYPE:TOPOLOGY (v5e, v5p, v6e, v7x) or gpu:HOSTSxGPUS:TYPE (t4",
        ),
        (("--hardware", "gpu:8:h100", "--measure"), "--hardware must be devices of this machine with --measure, got"),
        (("--hardware", "cpu:4", "--mesh.tensor", "2"), "for mesh.tensor 2, got cpu:4. Give --hardware cpu:2x2."),
        (("--hardware", "gpu:8:b200", "--mesh.tensor", "4"), "got gpu:8:b200. Give --hardware gpu:2x4:b200."),
        (("--hardware", "cpu:3", "--mesh.tensor", "2"), "their product must divide the 3 devices, got 1 and 2. Choose"),
        (
            ("--hardware", "gpu:8:h100", "--model.attention", "splash", "--model.seq-len", "128"),
            "model.attention must not be splash, a kernel for TPUs, on a GPU, got gpu:8:h100. Choose auto.",
        ),
        (
            ("--hardware", "cpu:3", "--train.global-batch-size", "8"),
            "must be divisible by 3 (3 data-parallel devices",
        ),
        (("--hardware", "cpu:1", "--model.dtype", "float64"), "must be bfloat16 or float32, got float64. Choose"),
        (
            ("--hardware", "tpu:v6e:4x4:2", "--train.global-batch-size", "32"),
            "--hardware must be one slice of TPUs to compile for it, got tpu:v6e:4x4:2. Give",
        ),
        (("--hardware", "cpu:64", "--train.global-batch-size", "64"), "Start a new process."),
        (("--mesh.fsdp", "3"), "mesh axis fsdp must divide embed_dim (128), got 3. Choose another size."),
        (("--mesh.fsdp", "64"), "mesh axes fsdp and tensor must be at least 1 and their product must divide the"),
        (("--measured",), "no option --measured of plan; did you mean --measure?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_sentence(capsys, options, message):
    jax.devices()  # jax has started, with fewer devices than 64
    assert main(["plan", *options]) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert message in shown
    assert shown.startswith("error: ")


@pytest.fixture
def without_compilers(monkeypatch):
    monkeypatch.setattr(target_devices, "find_spec", lambda module: None)


@pytest.mark.usefixtures("without_compilers")
@pytest.mark.parametrize(
    ("hardware", "device", "peak", "gib", "fsdp"),
    [
        ("gpu:8:h100", "NVIDIA H100 80GB HBM3", 989e12, 0.9 * 79.1, 1),
        ("gpu:2x4:h100", "NVIDIA H100 80GB HBM3", 989e12, 0.9 * 79.1, 8),
        ("tpu:v6e:2x4", "TPU v6 lite", 918e12, 32, 2),
        ("tpu:v5e:2x2", "TPU v5 lite", 197e12, 16, 4),
    ],
)
def test_without_the_compiler_a_plan_has_all_but_the_temporary_memory(hardware, device, peak, gib, fsdp, plain):
    options = ("--hardware", hardware, "--mesh.fsdp", str(fsdp), "--model.dtype", "bfloat16", "--price-per-hour", "24")
    code, found = planned(*options)
    assert (code, found["fits"], found["temporary_bytes"]) == (1, None, None)
    number = 4 if hardware == "tpu:v5e:2x2" else 8
    assert (found["device"], found["mesh"]) == (device, {"data": number // fsdp, "fsdp": fsdp, "tensor": 1})
    assert found["usable_bytes"] == pytest.approx(gib * 2**30, rel=1e-3)
    # The inputs of the compiled step less the batch. Most of them are divided by fsdp.
    inputs_bytes = plain[1]["state_bytes"]
    assert found["state_bytes"] == pytest.approx(inputs_bytes / fsdp, rel=0.01 if fsdp == 1 else 0.2)
    assert inputs_bytes / fsdp - 8 * 33 * 2 - 100 <= found["state_bytes"]
    hours = [found["flops"] / (share * peak * number) / 3600 for share in (0.5, 0.3)]
    assert (found["hours"], found["price"]) == (pytest.approx(hours), pytest.approx([24 * one for one in hours]))
    assert found["reason"].startswith(
        "The compiler of these devices is not installed; on Linux, it comes with: uv run "
    )


@pytest.mark.usefixtures("without_compilers")
def test_without_the_compiler_a_state_that_is_too_large_does_not_fit(capsys):
    options = ["plan", "--preset", "gpt2-xl", "--data", "builtin", "--tokenizer", "bytes", "--hardware", "gpu:1:t4"]
    assert main(options) == 1
    shown = capsys.readouterr().out
    assert "of 13.3 GiB on each device, for the state alone\n" in shown
    assert "It does not fit. Take more devices with --mesh.fsdp, or a smaller model." in shown
    assert main([*options, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["reason"].startswith("the state needs ")


@pytest.mark.usefixtures("without_compilers")
def test_a_chip_of_two_devices_counts_twice():
    target = find_target(parse_hardware("tpu:v7x:2x2x2"), only_here=False)
    assert [device.process_index for device in target.devices] == [0] * 8 + [1] * 8
    assert (target.usable_bytes, str(target)) == (96 << 30, "16 x TPU7x")


@pytest.mark.usefixtures("without_compilers")
def test_a_missing_compiler_is_named_with_the_command_that_has_it(capsys, monkeypatch, tmp_path):
    """It has all options that were typed. From Python, it has none."""
    typed = ["plan", "--hardware", "gpu:8:h100", "--data", "my book.txt", "--price-per-hour", "3"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pretrain", *typed])
    Path("my book.txt").write_text("A book. " * 100)
    assert main() == 1
    shown = capsys.readouterr()
    before, _, command = shown.out.rstrip().partition(" uv run --extra cuda12 apps/pretrain ")
    *_, verdict = before.splitlines()
    assert verdict.startswith(
        "Whether it fits is not known. The compiler of these devices is not installed; on Linux, "
    )
    assert shlex.split(command) == typed
    assert "compiling" not in shown.err
    monkeypatch.setattr(sys, "argv", ["pytest", "-q"])
    assert main(typed) == 1
    assert capsys.readouterr().out.endswith("apps/pretrain plan\n")
    assert main([*typed, "--train.micro-batch-size", "auto"]) == 2
    expected = "--train.micro-batch-size must be a number without the compiler of the devices, which comes with uv run "
    assert f"{expected}--extra cuda12 on Linux, got auto." in capsys.readouterr().err


@pytest.mark.usefixtures("without_compilers")
@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("gpu:3:h100", "train.global_batch_size must be divisible by 3 (3 data-parallel devices"),
        (
            "gpu:8:k80",
            "devices must be tpu:TYPE:TOPOLOGY (v5e, v5p, v6e, v7x) or gpu:HOSTSxGPUS:TYPE (t4, l4, a100, h100",
        ),
    ],
)
def test_without_the_compiler_bad_hardware_is_one_sentence(hardware, message, capsys):
    assert main(["plan", "--hardware", hardware]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_starts_nothing_and_writes_nothing(tmp_path: Path):
    code = f"import sys; from pretrain import main; print(main({['plan', *TINY, *STEPS]}), 'ray' in sys.modules)"
    env = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"
    assert [*tmp_path.iterdir()] == []
