"""A profile of real train steps, and the table of its operations."""

import io
import re

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData
from rich.console import Console

from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, make_mesh, make_train_step
from pretrain import PRESETS, main
from pretrain._commands.profile import show_profile
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.folder import RunFolder
from pretrain._training.profiling import Profiling
from pretrain._training.trace import Trace, newest_trace, read_trace

MODEL = GPT2Config(vocab_size=65, seq_len=32, num_layers=2, num_heads=2, embed_dim=64)


@pytest.fixture(scope="module")
def train():
    """A function that runs steps under a profiler, and returns the steps that it has run."""
    optimizer, mesh, key = create_optimizer(OptimizerConfig(), 100), make_mesh(), jax.random.key(0)
    train_step = make_train_step(MODEL, optimizer, mesh)
    windows = jax.device_put(np.zeros((4, MODEL.seq_len + 1), np.uint16))
    state, metrics = train_step(create_train_state(MODEL, optimizer, key, mesh), windows, key)
    jax.block_until_ready(metrics)

    def run(profile, folder, *, start=0, max_steps=10, stop=10):
        nonlocal state
        with Profiling(profile, folder) as profiling:
            profiling.begin(start, max_steps)
            for step in range(start + 1, stop + 1):
                profiling.before_step(step)
                state, metrics = train_step(state, windows, key)
                profiling.after_step(step, metrics)

    return run


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    data = DataDescription(tokens="a", tokenizer="bytes", fingerprint={})
    write_description(folder, describe(PRESETS["quickstart"](), data, "cpu:1"))
    return folder


def printed(folder, *, width=200, is_terminal=False, **options):
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=is_terminal, color_system=None)
    show_profile(str(folder.path), console=console, **options)
    return output.getvalue()


def calls_of_products(path):
    return {operation.calls for operation in read_trace(path).operations if operation.name.startswith("dot")}


def test_matrix_products_are_among_the_costliest_operations(train, run):
    train("3:6", run.profiles)
    lines = printed(run).splitlines()
    rows = [line.split(maxsplit=5) for line in lines if re.match(r" *\d+ ", line)][:10]
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 11)]
    shares = [float(row[1].removesuffix("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    products = [row for row in rows if "dot_general in " in row[-1]]
    assert products
    assert all(re.search(r" in [\w.]+, _\w+\.py:\d+$", row[-1].strip()) for row in products)
    assert any(line.startswith(f"trace: {run.profiles}/plugins/profile/") for line in lines)


def test_only_the_named_steps_are_profiled(train, tmp_path):
    train("3:6", tmp_path)
    path = newest_trace(tmp_path)
    assert path is not None
    assert path.relative_to(tmp_path).match("plugins/profile/*/*.xplane.pb")
    steps = [
        dict(event.stats)["step_num"]
        for plane in ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert steps == [3, 4, 5]
    assert calls_of_products(path) == {3}


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        pytest.param({"stop": 4}, 2, id="stopped", marks=pytest.mark.slow),
        pytest.param({"max_steps": 4, "stop": 4}, 2, id="shorter run", marks=pytest.mark.slow),
        pytest.param({"start": 4}, 1, id="continued run"),
    ],
)
def test_the_part_of_the_steps_that_runs_is_profiled(options, calls, train, tmp_path, caplog):
    train("3:6", tmp_path, **options)
    path = newest_trace(tmp_path)
    assert path is not None
    assert calls_of_products(path) == {calls}
    assert caplog.messages == []


@pytest.mark.parametrize(("start", "max_steps"), [(0, 2), (5, 10)], ids=["after the end", "before the start"])
def test_steps_that_do_not_run_are_a_warning(start, max_steps, train, tmp_path, caplog):
    train("3:6", tmp_path, start=start, max_steps=max_steps, stop=max_steps)
    assert caplog.messages == [f"nothing is profiled: --profile 3:6 must name steps from {start + 1} to {max_steps}"]
    assert newest_trace(tmp_path) is None


def test_a_run_that_continues_after_its_profile_has_no_warning(train, tmp_path, caplog):
    train("1:2", tmp_path, stop=2)
    train("1:2", tmp_path, start=2)
    assert caplog.messages == []
    assert len([*tmp_path.glob("plugins/profile/*")]) == 1


@pytest.mark.fault
def test_a_profile_that_cannot_be_written_does_not_stop_the_run(train, tmp_path, caplog, record_property):
    record_property("fault", "the folder of the profile is a file")
    record_property("lost", "the profile")
    (tmp_path / "plugins").write_text("a file in its place")
    train("1:3", tmp_path)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the run goes on without the profile: ")


def test_only_rank_0_profiles(train, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    train("3:6", tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_without_a_profile_nothing_is_written(train, tmp_path):
    train(None, tmp_path)
    assert [*tmp_path.iterdir()] == []


# Parts of a trace of a GPU with two streams, one of a TPU, and a line that repeats the operations.
GPU = """
name: "/device:GPU:0"
event_metadata { key: 1 value { id: 1 name: "gemm_kernel" } }
event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
lines { id: 1 name: "Stream #13(Compute)"
  events { metadata_id: 1 offset_ps: 0 duration_ps: 3000000
           stats { metadata_id: 1 str_value: "dot.1" } stats { metadata_id: 2 str_value: "jit_step" } }
  events { metadata_id: 1 offset_ps: 8000000 duration_ps: 2000000
           stats { metadata_id: 1 str_value: "dot.1" } stats { metadata_id: 2 str_value: "jit_step" } } }
lines { id: 2 name: "Stream #14(MemcpyD2D)" events { metadata_id: 2 offset_ps: 2000000 duration_ps: 2000000 } }
lines { id: 3 name: "Steps" events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 } }
"""
TPU = """
name: "/device:TPU:0"
event_metadata { key: 1 value { id: 1 name: "%while.1 = (s32[]) while(...)" } }
event_metadata { key: 2 value { id: 2 name: "%fusion.3 = f32[8] fusion(...)" } }
lines { id: 1 name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 8000000 } }
lines { id: 2 name: "XLA Ops"
  events { metadata_id: 1 offset_ps: 0 duration_ps: 8000000 }
  events { metadata_id: 2 offset_ps: 0 duration_ps: 4000000 } }
"""


@pytest.mark.parametrize(
    ("plane", "operations", "idle"),
    [
        (GPU, [("dot.1", 5e-6, 2), ("MemcpyD2D", 2e-6, 1)], 0.4),
        (TPU, [("fusion.3", 4e-6, 1)], 0.0),
    ],
    ids=["GPU", "TPU"],
)
def test_the_operations_of_a_device_are_those_of_its_kernels(plane, operations, idle, tmp_path):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(f"planes {{ {plane} }}"))
    trace = read_trace(path)
    assert trace.device == re.findall('name: "(/device:.*)"', plane)[0]
    assert [(found.name, pytest.approx(found.total_s), found.calls) for found in trace.operations] == operations
    assert trace.idle == pytest.approx(idle)


def write_trace(path, *planes):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = " ".join(f"planes {{ {plane} }}" for plane in planes)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))


@pytest.mark.parametrize("opcode", ["while", "conditional", "call"])
def test_an_operation_that_only_runs_others_is_left_out(opcode, tmp_path):
    write_trace(tmp_path / "host.xplane.pb", TPU.replace("while", opcode))
    assert [found.name for found in read_trace(tmp_path / "host.xplane.pb").operations] == ["fusion.3"]


def test_the_first_device_with_operations_is_shown(tmp_path):
    """A process may see devices that it does not use."""
    unused = 'name: "/device:GPU:0" lines { id: 1 name: "Steps" }'
    others = [GPU.replace("GPU:0", f"GPU:{number}").replace("dot.1", f"dot.{number}") for number in (2, 1)]
    write_trace(tmp_path / "host.xplane.pb", *others, unused)
    trace = read_trace(tmp_path / "host.xplane.pb")
    assert (trace.device, trace.operations[0].name) == ("/device:GPU:1", "dot.1")


def test_operations_of_one_name_in_two_programs_are_two(tmp_path):
    """The last call is of another program."""
    first, found, last = GPU.rpartition("jit_step")
    write_trace(tmp_path / "host.xplane.pb", first + found.replace("step", "eval") + last)
    operations = read_trace(tmp_path / "host.xplane.pb").operations
    assert [(one.name, pytest.approx(one.total_s), one.calls) for one in operations] == [
        ("dot.1", 3e-6, 1), ("dot.1", 2e-6, 1), ("MemcpyD2D", 2e-6, 1),
    ]  # fmt: skip


# A matrix product that another thread ends, and one that ends itself after its mark.
HOST = """
name: "/host:CPU"
event_metadata { key: 1 value { id: 1 name: "dot" } }
event_metadata { key: 2 value { id: 2 name: "end: dot" } }
stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
stat_metadata { key: 3 value { id: 3 name: "_p" } }
stat_metadata { key: 4 value { id: 4 name: "_c" } }
lines { id: 1 name: "XLA"
  events { metadata_id: 1 offset_ps: 1000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "dot.1" }
           stats { metadata_id: 2 str_value: "jit_step" } stats { metadata_id: 3 int64_value: 7 } }
  events { metadata_id: 1 offset_ps: 3000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "dot.2" }
           stats { metadata_id: 2 str_value: "jit_step" } stats { metadata_id: 3 int64_value: 9 } }
  events { metadata_id: 1 offset_ps: 3000000 duration_ps: 9000000 } }
lines { id: 2 name: "Eigen"
  events { metadata_id: 2 offset_ps: 8000000 duration_ps: 5000000 stats { metadata_id: 4 int64_value: 7 } }
  events { metadata_id: 2 offset_ps: 3500000 duration_ps: 5000000 stats { metadata_id: 4 int64_value: 9 } } }
"""


def test_a_matrix_product_on_a_cpu_ends_at_its_mark(tmp_path):
    write_trace(tmp_path / "host.xplane.pb", HOST)
    trace = read_trace(tmp_path / "host.xplane.pb")
    assert [(one.name, pytest.approx(one.total_s)) for one in trace.operations] == [("dot.1", 7e-6), ("dot.2", 1e-6)]
    assert (trace.device, trace.idle) == ("CPU", None)


def test_the_newest_trace_of_a_run_is_shown(run):
    for day, op in (("02", "dot.2"), ("10", "dot.10"), ("09", "dot.9")):
        path = run.profiles / "plugins" / "profile" / f"2026_01_{day}_00_00_00" / "host.xplane.pb"
        write_trace(path, GPU.replace("dot.1", op))
    lines = printed(run).splitlines()
    assert lines[1].split() == ["1", "71.4%", "0.005", "2", "dot.10"]
    assert lines[3] == "2 operations on /device:GPU:0: 0.007 ms, idle 40.0% of the time"


def test_an_operation_without_a_duration_is_left_out(tmp_path):
    path = tmp_path / "host.xplane.pb"
    plane = """name: "/device:TPU:0" event_metadata { key: 1 value { id: 1 name: "%fusion.3 = f32[8] fusion(...)" } }
        lines { id: 2 name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 0 } }"""
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(f"planes {{ {plane} }}"))
    assert read_trace(path) == Trace(device="/device:TPU:0", operations=[], idle=0.0)


def field(number, value):
    """A field of a message of protocol buffers: an integer, or a short text or message."""
    content = value.encode() if isinstance(value, str) else value
    key = number << 3 | (0 if isinstance(value, int) else 2)
    keys = bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])
    return keys + (bytes([value]) if isinstance(value, int) else bytes([len(content)]) + content)


@pytest.mark.parametrize(("line", "source"), [(7, "step, a.py:7"), (None, "step, a.py")], ids=["line", "no line"])
def test_the_source_of_an_operation_may_lack_a_line(line, source, tmp_path):
    """Protocol buffers leave out a field that is 0."""
    place = field(1, 1) + field(2, 1) + (b"" if line is None else field(3, line))
    index = field(1, "/a.py") + field(2, "step") + field(3, place) + field(4, field(1, 1))
    dot = field(1, "dot.1") + field(2, "dot") + field(7, field(2, "jit(step)/dot_general") + field(15, 1))
    program = field(1, field(1, "jit_step") + field(3, field(2, dot)) + field(17, index))
    content = "".join(f"\\{byte:03o}" for byte in program)
    metadata = f"""planes {{ name: "/host:metadata" event_metadata {{ key: 1 value {{ id: 1 name: "jit_step"
        stats {{ metadata_id: 1 bytes_value: "{content}" }} }} }} }}"""
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(f"planes {{ {GPU} }} {metadata}"))
    assert read_trace(path).operations[0].source == f"dot_general in {source}"


def test_a_run_without_a_profile_is_rejected(run):
    with pytest.raises(UsageError, match=r"must have a profile, got none\. Train with --profile 100:105\.$"):
        printed(run)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_damaged_profile_is_rejected(content, run):
    path = run.profiles / "plugins" / "profile" / "2026_01_01_00_00_00" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"must (be a trace as JAX writes it|contain operations), got .*\."):
        printed(run)


@pytest.mark.parametrize("is_terminal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_table_fits_a_narrow_terminal_and_has_whole_lines_elsewhere(is_terminal, train, run):
    train("1:2", run.profiles)
    lines = printed(run, width=60, is_terminal=is_terminal, num_ops=2).splitlines()
    table = lines[: next(number for number, line in enumerate(lines) if " operations on CPU: " in line)]
    assert [line.split()[0] for line in table if re.match(r" *\d+ +\d", line)] == ["1", "2"]
    if is_terminal:
        assert max(map(len, table)) <= 60
    else:
        assert len(table) == 3


def test_the_table_has_the_times_of_the_trace(run, capsys):
    """Times of a trace are picoseconds."""
    path = run.profiles / "plugins" / "profile" / "2026_01_01_00_00_00" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    plane = GPU.replace("000000", "000000000")  # milliseconds
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(f"planes {{ {plane} }}"))
    rows = [["1", "71.4%", "5.000", "2", "dot.1"], ["2", "28.6%", "2.000", "1", "MemcpyD2D"]]
    for words, num_ops in (([], 2), (["--num-ops", "1"], 1)):
        assert main(["profile", str(run.path), *words]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[1:-3] == rows[:num_ops]
        assert " ".join(lines[-3]) == "2 operations on /device:GPU:0: 7.000 ms, idle 40.0% of the time"
        assert " ".join(lines[-2]) == f"trace: {path}"
