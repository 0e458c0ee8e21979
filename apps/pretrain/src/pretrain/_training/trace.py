"""The operations of a trace that JAX's profiler has written."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from pretrain._run.files import check_kind

# These operations only run others, which the trace has too.
_CONTAINERS = ("call", "conditional", "while")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """All calls of an operation in a trace."""

    name: str
    """Name in the compiled program, or of a kernel that no operation of the program has started."""

    total_s: float
    """Seconds of all calls. On a CPU, operations run side by side, and share its cores."""

    calls: int
    """Number of calls."""

    source: str
    """JAX's name of the operation, and the function that calls it; empty if the trace has neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The operations of one device."""

    device: str
    """Name of the device in the trace."""

    operations: list[Operation]
    """Operations that took time, the costliest first."""

    idle: float | None
    """Share of the time from the first operation to the end of the last in which no operation ran. None on a CPU, which
    other programs use too."""


def newest_trace(folder: Path) -> Path | None:
    """Return the newest trace in a folder of TensorBoard's files, or None."""
    # The folder of a trace has the name of its time.
    return max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.parent.name, default=None)


def read_trace(path: Path) -> Trace:
    """Read the operations of the first device of a trace.

    Raises:
        ValueError: the file is damaged.
        OSError: the file is a pipe or a device, or cannot be read.
    """
    check_kind(path)
    content = path.read_bytes()
    try:
        planes: list[Any] = [*ProfileData.from_serialized_xspace(content).planes]
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    devices = sorted((plane for plane in planes if plane.name.startswith("/device:")), key=lambda plane: plane.name)
    for plane in devices:
        if calls := [*_device_calls(plane)]:
            return _summarize(plane.name, calls, content, _idle(calls))
    hosts = (plane for plane in planes if plane.name == "/host:CPU")
    return _summarize("CPU", [call for plane in hosts for call in _host_calls(plane)], content, None)


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    module: str
    start_ns: float
    end_ns: float


def _device_calls(plane: Any) -> Iterator[_Call]:
    """Yield the calls on a device: a TPU has a line of operations, a GPU a line for each stream of kernels."""
    lines = {line.name: line for line in plane.lines}
    chosen = ["XLA Ops"] if "XLA Ops" in lines else [name for name in lines if name.startswith("Stream")]
    for event in (event for name in chosen for event in lines[name].events):
        stats = dict(event.stats)
        name = str(stats.get("hlo_op") or event.name).partition(" = ")[0].removeprefix("%")
        yield _Call(name, str(stats.get("hlo_module", "")), event.start_ns, event.start_ns + event.duration_ns)


def _host_calls(plane: Any) -> Iterator[_Call]:
    """Yield the calls on a CPU. A matrix product returns before its end, which another event marks."""
    events = [(event, dict(event.stats)) for line in plane.lines for event in line.events]
    ends = {stats.get("_c"): event.start_ns for event, stats in events if event.name.startswith("end: ")}
    for event, stats in events:
        if "hlo_op" in stats:
            end_ns = max(event.start_ns + event.duration_ns, ends.get(stats.get("_p"), 0.0))
            yield _Call(str(stats["hlo_op"]), str(stats["hlo_module"]), event.start_ns, end_ns)


def _summarize(device: str, calls: list[_Call], content: bytes, idle: float | None) -> Trace:
    sources = _sources(content, {(call.module, call.name) for call in calls})
    groups: dict[tuple[str, str], list[_Call]] = defaultdict(list)
    for call in calls:
        opcode, _ = sources.get((call.module, call.name), (call.name.partition(".")[0], ""))
        if opcode not in _CONTAINERS:
            groups[call.module, call.name].append(call)
    operations = [
        Operation(
            name=key[1],
            total_s=sum(call.end_ns - call.start_ns for call in group) / 1e9,
            calls=len(group),
            source=sources.get(key, ("", ""))[1],
        )
        for key, group in groups.items()
    ]
    costly = sorted((one for one in operations if one.total_s), key=lambda operation: -operation.total_s)
    return Trace(device=device, operations=costly, idle=idle)


def _idle(calls: list[_Call]) -> float:
    """Return the share of the time from the first call to the end of the last in which no call runs."""
    calls = sorted(calls, key=lambda call: call.start_ns)
    busy_ns, end_ns = 0.0, calls[0].start_ns
    for call in calls:
        busy_ns += max(0.0, call.end_ns - max(end_ns, call.start_ns))
        end_ns = max(end_ns, call.end_ns)
    total_ns = end_ns - calls[0].start_ns
    return 1 - busy_ns / total_ns if total_ns else 0.0


def _sources(space: bytes, called: set[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the opcode and the source of each of these instructions, by the names of its module and itself.

    `ProfileData` does not give the programs that the trace contains. The numbers below are those of the fields in
    XLA's xplane.proto and hlo.proto.
    """
    sources, modules = {}, {module for module, _ in called}
    for plane in _all(space, 1):
        if _text(plane, 2) == "/host:metadata":
            for entry in _all(plane, 4):
                for stat in (stat for metadata in _all(entry, 2) for stat in _all(metadata, 5)):
                    for module in (module for program in _all(stat, 6) for module in _all(program, 1)):
                        if _text(module, 1) in modules:
                            sources |= _instructions(module, called)
    return sources


def _instructions(module: bytes, called: set[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    name = _text(module, 1)
    index = next(_all(module, 17), b"")
    files, functions = ([text.decode() for text in _all(index, number)] for number in (1, 2))
    locations, frames = ([dict(_fields(message)) for message in _all(index, number)] for number in (3, 4))

    def place(frame: int) -> str:
        """Return the innermost function that is not in an installed package. Numbers start at 1; 0 is none."""
        while frame:
            location = locations[frames[frame - 1][1] - 1]
            file = Path(files[location[1] - 1])
            if "site-packages" not in file.parts:
                function = functions[location[2] - 1].replace("<locals>.", "")
                line = f":{location[3]}" if 3 in location else ""  # a field that is 0 is absent
                return f"{function}, {file.name}{line}"
            frame = frames[frame - 1].get(2, 0)
        return ""

    for instruction in (found for computation in _all(module, 3) for found in _all(computation, 2)):
        if (key := (name, _text(instruction, 1))) not in called:
            continue
        fields = dict(_fields(instruction))
        metadata = dict(_fields(fields.get(7, b"")))
        parts = (metadata.get(2, b"").decode().partition("/")[2], place(metadata.get(15, 0)))
        yield key, (fields[2].decode(), " in ".join(filter(None, parts)))


def _all(message: bytes, number: int) -> Iterator[bytes]:
    return (value for found, value in _fields(message) if found == number)


def _text(message: bytes, number: int) -> str:
    return next(_all(message, number), b"").decode()


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message of protocol buffers."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position, value, shift = position + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while position < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            yield key >> 3, message[position : position + size]
            position += size
