"""The command `doctor`: each check finds a real fault of the machine, the storage or the network."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain import main
from pretrain._doctor import accelerators, downloads, machine_limits
from pretrain._doctor.accelerators import check_driver, check_jax
from pretrain._doctor.disks import _clock, check_cache, check_storage, check_temporary_files, try_out
from pretrain._doctor.downloads import check_data, check_tokenizer
from pretrain._doctor.examine import Check, run_checks
from pretrain._doctor.finding import ok
from pretrain._doctor.python_packages import check_packages, check_python, check_settings
from pretrain._doctor.ray_cluster_start import check_ray
from pretrain._surroundings.child import run_program
from ray_jax_launch import parse_hardware

TOKENIZER_FILES = os.environ.get("TIKTOKEN_CACHE_DIR")
NOWHERE = "http://127.0.0.1:9"
PRINT = "import json, sys; from pretrain._doctor.{module} import {name} as check; print(json.dumps([(one.state, "
PRINT += "one.found, one.remedy) for one in check({arguments})]))"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    for name in ("RAY_ADDRESS", "VIRTUAL_ENV", "PYTHONPATH", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TIKTOKEN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="module")
def isolated():
    """Run a check in a Python process of its own, with other mounts or without a network."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to change mounts and the network")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces, to change mounts and the network")

    def run(shell, module, name, arguments="", before=""):
        code = f"{before}\n{PRINT.format(module=module, name=name, arguments=arguments)}"
        command = [*prefix, "sh", "-ec", f'{shell}\nexec "$0" -c "$1"', sys.executable, code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [tuple(finding) for finding in json.loads(done.stdout.splitlines()[-1])]

    return run


def in_one(findings):
    (finding,) = findings
    return finding.state, finding.found, finding.remedy


def test_all_is_well_without_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--hardware", "local", "--data", "builtin", "--tokenizer", "bytes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[6:18].strip() for line in lines[:-1] if line[:4].strip()]
    assert names == [
        "python", "packages", "settings", "open files", "/dev/shm", "driver", "jax", "ports", "ray", "storage", "disk",
        "clock", "cache", "temporary", "tokenizer", "data",
    ]  # fmt: skip
    assert "bytes has 257 ids" in "\n".join(lines)
    assert lines[-1].endswith(", 0 fail")
    assert max(len(line) for line in lines if "/" not in line) <= 80
    assert list(tmp_path.iterdir()) == []  # the folder of all runs was made and deleted


@pytest.mark.slow
def test_a_cluster_that_does_not_answer(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    state, found, _ = in_one(check_ray(None))
    assert state == "fail"
    assert found.startswith("RAY_ADDRESS must be a Ray cluster that answers, got '127.0.0.1:9'")


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "code"), [("auto", 0), ("gpu:3", 1)])
def test_ray_starts_and_says_whether_it_has_the_hardware(tmp_path, capsys, hardware, code):
    given = ["--hardware", hardware, "--storage-path", str(tmp_path / "a/b"), "--json"]
    assert main(["doctor", *given]) == code
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["ray"]["state"] == "ok"
    assert "ran a task after" in found["ray"]["found"]
    assert (found["hardware"]["state"] == "ok") == (code == 0)
    assert code == 0 or "must have 3 GPUs for gpu:3, got 0" in found["hardware"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_variable_is_a_finding_and_the_exit_code_is_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")  # every other command rejects it
    assert main(["doctor", "--hardware", "local", "--storage-path", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    failed = [check for check in found["checks"] if check["state"] == "fail"]
    assert [check["name"] for check in failed] == ["settings"]
    assert failed[0]["found"] == "RAY_TRAIN_V2_ENABLED must be 1, got 0. Unset it."
    assert failed[0]["remedy"]
    assert not found["ok"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "cpu:0"], "CPU workers"),
        (["--data", "a,b=c"], "data must be"),
        (["--tokenizer", "gpt5"], "gpt5"),
        (["--storage-path", ""], "storage path"),
        (["--storage-path", "s3://key:secret@bucket"], "without credentials"),
    ],
)
def test_bad_input_is_one_sentence(capsys, options, message):
    assert main(["doctor", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.fault
def test_a_full_disk(isolated, tmp_path, record_property):
    record_property("fault", "the storage is full before the run (doctor)")
    record_property("lost", "nothing")
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    storage, disk = isolated(mount, "disks", "check_storage", f"'{tmp_path}/runs'")
    assert storage[:2] == ("fail", f"{tmp_path}/runs cannot be written: No space left on device")
    assert storage[2] == "Free some space, or give another --storage-path."
    assert disk[0] == "warn"
    assert "1.05 MB free" in disk[1]
    # Nothing is left on the disk, and it works with more space.
    again = f"{mount}; mkdir {tmp_path}/b; mount -t tmpfs -o size=1m tmpfs {tmp_path}/b"
    before = f"""
import os, subprocess
from pretrain._doctor.disks import check_storage
assert check_storage("{tmp_path}/b")[0].state == "fail" and os.listdir("{tmp_path}/b") == []
subprocess.run(["mount", "-o", "remount,size=100m", "{tmp_path}/b"], check=True)
"""
    assert isolated(again, "disks", "check_storage", f"'{tmp_path}/b'", before)[0][0] == "ok"


def test_read_only_storage(isolated, tmp_path):
    mount = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    for place, step in ((tmp_path, "written"), (tmp_path / "runs", "opened")):
        (storage,) = isolated(mount, "disks", "check_storage", f"'{place}'")
        error = f"{place} cannot be {step}: Read-only file system"
        assert storage == ("fail", error, "Give another --storage-path.")


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fadvise is of Linux")
def test_the_file_is_on_the_disk_before_it_leaves_the_memory_to_be_read(tmp_path, monkeypatch):
    """Linux keeps what is not yet on the disk."""
    calls = []
    for name in ("fsync", "posix_fadvise"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: (calls.append(name), call(*args)))
    assert try_out(str(tmp_path), 4096)["bytes"] == 4096
    assert calls == ["fsync", "posix_fadvise"]


def test_the_speed_of_a_slow_disk_is_that_of_the_bytes_that_it_took(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain._doctor.disks._WRITE_FOR_S", 0.0)
    assert try_out(str(tmp_path), 3 << 20)["bytes"] == 1 << 20


def test_a_disk_that_is_slow_or_small_is_marked(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain._doctor.disks._SLOW_BYTES_PER_S", 1e15)
    monkeypatch.setattr("pretrain._doctor.disks._ENOUGH_BYTES", 1e18)
    storage, disk, clock = check_storage(str(tmp_path))
    assert (storage.state, disk.state, clock.state) == ("warn", "warn", "ok")


@pytest.mark.parametrize(("write_s", "read_s", "state"), [(10.0, 0.5, "warn"), (0.5, 10.0, "ok")])
def test_the_speed_of_a_folder_is_that_of_its_file_and_slow_writes_are_marked(
    tmp_path, monkeypatch, write_s, read_s, state
):
    found = {"error": "", "bytes": 10**8, "write_s": write_s, "read_s": read_s, "clock_s": 0.0}
    monkeypatch.setattr("pretrain._doctor.disks.call_in_child", lambda *arguments, **options: found)
    storage = check_storage(str(tmp_path))[0]
    speeds = {0.5: "200.00 MB/s", 10.0: "10.00 MB/s"}
    assert storage.found.endswith(f"deleted: write {speeds[write_s]}, read {speeds[read_s]}")
    assert storage.state == state


@pytest.mark.parametrize(
    ("free", "total", "temporary", "cache"),
    [
        (51e8, 1e11, "ok", "ok"),
        (49e8, 1e11, "warn", "ok"),  # fuller than 95 %: Ray stops to write objects
        (9e8, 1e10, "warn", "warn"),
    ],
)
def test_a_full_disk_of_temporary_files_stops_ray_and_one_of_the_cache_does_not(
    free, total, temporary, cache, monkeypatch
):
    monkeypatch.setattr("pretrain._doctor.disks.call_in_child", lambda *arguments, **options: {"error": ""})
    usage = SimpleNamespace(free=free, total=total, used=total - free)
    monkeypatch.setattr("pretrain._doctor.disks.shutil", SimpleNamespace(disk_usage=lambda path: usage))
    found = in_one(check_temporary_files())
    assert (found[0], in_one(check_cache())[0]) == (temporary, cache)
    assert ("Ray stops to write objects to a disk that is 95% full" in found[1]) == (free == 49e8)


@pytest.mark.parametrize(
    ("fast_s", "is_folder", "state", "found"),
    [
        (4.9, False, "ok", "agree"),
        (-4.9, True, "ok", "agree"),
        (5.0, True, "warn", "the storage's is 5 s ahead of this machine's"),
        (-7.5, False, "warn", "the storage's is 7 s behind this machine's"),
        (900.0, False, "warn", "15:00 ahead of"),
        (-901.0, False, "fail", "15:01 behind"),
        (901.0, True, "warn", "15:01 ahead of"),  # no server rejects a request
    ],
)
def test_the_clock_of_the_storage_may_differ_by_seconds(fast_s, is_folder, state, found):
    finding = _clock(fast_s, is_folder=is_folder)
    assert (finding.state, found in finding.found) == (state, True)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "runs").touch()
    assert check_storage(str(tmp_path / "runs"))[0].found == f"{tmp_path}/runs cannot be opened: File exists"


def test_object_storage_is_written_and_left_as_it_was(s3, monkeypatch):
    from moto.s3 import models
    from pyarrow.fs import FileSelector, FileSystem

    storage, clock = check_storage(f"{s3}/runs/a")
    assert (storage.state, clock.state) == ("ok", "ok")
    filesystem, path = FileSystem.from_uri(s3)
    left = filesystem.get_file_info(FileSelector(path, recursive=True))
    assert [info.path for info in left if info.is_file] == []
    now = getattr(models, "utcnow")  # noqa: B009 - moto does not export it
    monkeypatch.setattr(models, "utcnow", lambda: now() + timedelta(hours=1))  # the clock of the server
    clock = check_storage(f"{s3}/runs")[1]
    assert clock.state == "fail"
    assert re.match(r"the storage's is (59:5\d|1:00:\d\d) ahead of this machine's$", clock.found)


def test_object_storage_that_does_not_exist_or_answer(s3, monkeypatch):
    assert check_storage("s3://other/runs")[0].state == "fail"
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    monkeypatch.setattr("pretrain._doctor.disks._WITHIN_S", 2.0)
    storage = check_storage(f"{s3}/runs")[0]
    assert (storage.state, storage.found) == ("fail", "no answer within 2 s")


def test_missing_tokenizer_files_without_a_network(isolated, tmp_path):
    for given, state in (("'gpt2'", "fail"), ("None", "warn")):
        before = f"import os; os.environ['TIKTOKEN_CACHE_DIR'] = '{tmp_path}'"
        found = isolated("true", "downloads", "check_tokenizer", given, before)
        assert found == [
            (
                state,
                f"the files of gpt2 are not in {tmp_path}, and their server cannot be reached",
                "Connect, or set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer bytes.",
            )
        ]


@contextlib.contextmanager
def answering(status):
    """A server that answers each request with a status; 0 does not answer."""
    asked = []
    end = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            if not status:
                end.wait(30)
                return
            self.send_response(status)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        end.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_missing_tokenizer_files_with_a_network_are_downloaded_later(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with answering(404) as (address, _):
        monkeypatch.setattr(downloads, "_TOKENIZER_HOST", address)
        state, found, _ = in_one(check_tokenizer("gpt2"))
    assert (state, found) == ("ok", f"the files of gpt2 are not in {tmp_path}: the first use downloads them")


@pytest.mark.shared_data
@pytest.mark.skipif(not TOKENIZER_FILES, reason="needs TIKTOKEN_CACHE_DIR")
def test_the_files_of_a_tokenizer_are_checked(tmp_path, monkeypatch):
    assert TOKENIZER_FILES is not None
    shutil.copytree(TOKENIZER_FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(downloads, "_TOKENIZER_HOST", NOWHERE)
    assert in_one(check_tokenizer("gpt2"))[:2] == ("ok", "gpt2 has 50,257 ids")
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-10])  # as of a download that was cut
    assert in_one(check_tokenizer("gpt2"))[0] == "fail"


def test_a_hub_name_without_a_network(isolated):
    found = isolated("true", "downloads", "check_data", "'openwebtext'")
    assert found[0][:2] == ("fail", "https://huggingface.co cannot be reached for Skylion007/openwebtext")


@pytest.mark.parametrize(
    ("status", "state", "found"),
    [
        (200, "ok", "{hub} has a/b"),
        (401, "fail", "{hub} has no dataset a/b, or shows it to others alone"),
        (404, "fail", "{hub} has no dataset a/b, or shows it to others alone"),
        (503, "warn", "{hub} answers with status 503 for a/b"),
        (0, "fail", "{hub} cannot be reached for a/b"),
    ],
)
def test_a_hub_answers(monkeypatch, status, state, found):
    monkeypatch.setattr(downloads, "call_in_child", lambda function, *arguments, **_: function(*arguments))
    monkeypatch.setattr(downloads, "_ANSWER_WITHIN_S", 30.0 if status else 0.5)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with answering(status) as (hub, asked):
        monkeypatch.setenv("HF_ENDPOINT", f"{hub}/")
        assert in_one(check_data("a/b:c"))[:2] == (state, found.format(hub=hub))
    assert asked == [("/api/datasets/a/b", "Bearer hf_x")]


def test_an_offline_copy_of_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "call_in_child", lambda function, *arguments, **_: function(*arguments))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert in_one(check_data("roneneldan/TinyStories"))[0] == "warn"
    (tmp_path / "datasets/roneneldan___tiny_stories").mkdir(parents=True)
    assert in_one(check_data("roneneldan/TinyStories"))[0] == "ok"


def test_data_that_does_not_exist(tmp_path):
    state, found, _ = in_one(check_data(str(tmp_path / "no.txt")))
    assert state == "fail"
    assert "no.txt" in found


def test_occupied_ports(isolated):
    taken = "import socket; held = [socket.create_server(('', port)) for port in (8265, 6379)]"
    state, found, remedy = isolated("ip link set lo up", "ray_cluster_start", "check_ports", "", taken)[0]
    assert state == "warn"
    assert found.startswith("in use: 6379 (control store), 8265 (dashboard). ")
    assert remedy == "If it is a cluster to train on, set RAY_ADDRESS."
    joined = f"{taken}; import os; os.environ['RAY_ADDRESS'] = '127.0.0.1:6379'"
    assert isolated("ip link set lo up", "ray_cluster_start", "check_ports", "", joined)[0][0] == "ok"
    assert isolated("ip link set lo up", "ray_cluster_start", "check_ports") == [("ok", "free", "")]


def test_no_loopback_interface(isolated):
    state, found, _ = isolated("true", "ray_cluster_start", "check_ports")[0]
    assert (state, found) == ("fail", "no port of 127.0.0.1 can be used: Network is unreachable")


def test_a_small_shared_memory(isolated):
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    imports = "from ray_jax_launch import parse_hardware"
    for hardware, state, found in (
        ("None", "warn", "0.1 GiB free of the "),
        ("parse_hardware('gpu:2')", "fail", "0.1 GiB free, and NCCL needs 1.0 GiB between GPUs"),
        ("parse_hardware('local')", "ok", "not needed for --hardware local"),
    ):
        seen = isolated(mount, "machine_limits", "check_shared_memory", hardware, imports)[0]
        assert seen[0] == state
        assert seen[1].startswith(found)
        assert state == "ok" or "--shm-size=" in seen[2]


@pytest.mark.parametrize(("memory_gib", "advised"), [(4, 2), (8, 3), (24, 8), (31, 10), (512, 10)])
def test_the_advised_shared_memory_is_enough(memory_gib, advised, monkeypatch):
    monkeypatch.setattr(machine_limits, "_memory_bytes", lambda: memory_gib << 30)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    (finding,) = machine_limits.check_shared_memory(None)
    assert (finding.state, f"--shm-size={advised}g, or" in finding.remedy) == ("warn", True)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=advised << 30, f_frsize=1))
    assert [finding.state for finding in machine_limits.check_shared_memory(None)] == ["ok"]


@pytest.mark.parametrize(
    ("limit", "share"), [("1073741824\n", 1), (f"{1 << 60}\n", None), ("max\n", None), (None, None)]
)
def test_a_container_has_the_memory_of_its_limit(limit, share, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_limits, "_CONTAINER_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine_limits._memory_bytes() == (share * 2**30 if share else of_machine)


@pytest.mark.parametrize(("limit", "state"), [(200, "fail"), (1000, "warn"), (4096, "ok")])
def test_the_limit_of_open_files(limit, state):
    code = PRINT.format(module="machine_limits", name="check_open_files", arguments="")
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ((found, text, _),) = json.loads(done.stdout)
    assert found == state
    assert f"{limit:,}" in text


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of this name on PATH."""

    def write(script):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return write


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install the metadata of jax's CUDA plugin."""

    def install(cuda, number):
        folder = tmp_path / f"packages/jax_cuda{cuda}_plugin-{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax-cuda{cuda}-plugin\nVersion: {number}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    return install


@pytest.mark.parametrize(
    ("driver", "capability", "cuda", "hardware", "state", "found", "remedy"),
    [
        ("550.54.14", "9.0", 12, "gpu:2", "ok", "2 x NVIDIA H100, 80GB, driver 550.54.14, for jax's CUDA 12", ""),
        ("550.54.14", "9.0", 12, "auto", "ok", "driver 550.54.14, for jax's CUDA 12", ""),
        (
            "550.54.14",
            "9.0",
            13,
            "auto",
            "fail",
            "jax's CUDA 13 needs 580",
            "Use --extra cuda12, or install driver 580",
        ),
        ("470.1", "8.0", 12, "auto", "fail", "and jax's CUDA 12 needs 525", "Install driver 525 or later."),
        ("590.1", "7.0", 13, "auto", "fail", "compute capability 7.0, and CUDA 13 needs 7.5", "Use --extra cuda12."),
        ("590.1", "9.0", None, "auto", "warn", "which jax does not use", "Add --extra cuda13 after `uv run`."),
        ("590.1", "7.0", None, "gpu:1", "fail", "which jax does not use", "Add --extra cuda12 after `uv run`."),
    ],
)
def test_the_driver_is_new_enough_for_the_cuda_of_jax(
    nvidia_smi, plugin, driver, capability, cuda, hardware, state, found, remedy
):
    line = f"NVIDIA H100, 80GB, {driver}, {capability}"
    nvidia_smi(f'[ "$1 $2" = "{" ".join(accelerators._QUERY)}" ] && echo "{line}" && echo "{line}"')
    if cuda:
        plugin(cuda, version("jaxlib"))
    seen = in_one(check_driver(None if hardware == "auto" else parse_hardware(hardware)))
    assert seen[0] == state
    assert found in seen[1]
    assert remedy in seen[2]


def test_another_cuda_toolkit_that_jax_would_load(nvidia_smi, plugin, tmp_path, monkeypatch):
    nvidia_smi('echo "NVIDIA L4, 590.1, 8.9"')
    plugin(13, version("jaxlib"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}:/nowhere")
    assert in_one(check_driver(None))[0] == "ok"
    (tmp_path / "libcudart.so.12").touch()
    state, found, remedy = in_one(check_driver(None))
    assert state == "warn"
    assert found.endswith(f"but LD_LIBRARY_PATH has another CUDA toolkit in {tmp_path}")
    assert remedy.startswith("Unset LD_LIBRARY_PATH")


@pytest.mark.parametrize("reverse", [False, True])
def test_the_oldest_of_several_gpus_decides(reverse, nvidia_smi, plugin):
    gpus = sorted(["NVIDIA H100, 590.1, 9.0", "NVIDIA V100, 590.1, 7.0"], reverse=reverse)
    nvidia_smi("".join(f'echo "{gpu}"; ' for gpu in gpus))
    plugin(13, version("jaxlib"))
    names = " and ".join(f"1 x {gpu.partition(',')[0]}" for gpu in gpus)
    found = f"{names}, driver 590.1, compute capability 7.0 of one, and CUDA 13 needs 7.5"
    assert in_one(check_driver(None)) == ("fail", found, "Use --extra cuda12.")


def test_a_plugin_of_another_version(nvidia_smi, plugin):
    nvidia_smi('echo "NVIDIA L4, 590.1, 8.9"')
    plugin(13, "0.1.2")
    assert in_one(check_driver(None))[:2] == (
        "fail",
        f"jax-cuda13-plugin is 0.1.2, and jaxlib is {version('jaxlib')}",
    )


def test_a_driver_that_is_missing_or_fails_or_hangs(nvidia_smi, tmp_path, monkeypatch):
    if shutil.which("nvidia-smi") is None:
        assert in_one(check_driver(None))[0] == "ok"
        assert in_one(check_driver(parse_hardware("gpu:1")))[0] == "fail"
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the GPUs are there
        assert in_one(check_driver(parse_hardware("gpu:1")))[0] == "ok"
        monkeypatch.delenv("RAY_ADDRESS")
    nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    for hardware, state in ((None, "warn"), (parse_hardware("gpu:1"), "fail")):
        seen = in_one(check_driver(hardware))
        assert seen[:2] == (state, "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch")
    nvidia_smi("echo No devices were found")
    assert in_one(check_driver(None))[1] == "nvidia-smi fails: its output is not that of a driver"
    monkeypatch.setattr(accelerators, "_DRIVER_WITHIN_S", 0.5)
    nvidia_smi(f"sleep 100 & echo $! > {tmp_path}/pid; wait")
    began_s = time.monotonic()
    assert in_one(check_driver(None))[1] == "nvidia-smi fails: no answer within 0 s"
    assert time.monotonic() - began_s < 5
    assert ended(int((tmp_path / "pid").read_text()))


def ended(pid):
    """Return whether a process ends within seconds."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2] if Path("/proc").is_dir() else ""
            if state == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_jax_without_the_devices_of_the_hardware(monkeypatch):
    seen = in_one(check_jax(parse_hardware("gpu:2x4")))
    assert seen[0] == "fail"
    assert seen[1].endswith("(cpu), and gpu:2x4 needs 8 of gpu")
    assert seen[2] == "Unset JAX_PLATFORMS=cpu."
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    seen = in_one(check_jax(None))
    assert seen[0] == "fail"
    assert "JAX must find a device" in seen[1]


def test_an_environment_that_is_not_the_active_one(tmp_path, monkeypatch):
    assert in_one(check_python())[0] == "ok"
    monkeypatch.setenv("PYTHONPATH", "/x")
    assert in_one(check_python())[0] == "warn"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    state, found, _ = in_one(check_python())
    assert state == "warn"
    assert found.endswith(f", but VIRTUAL_ENV is {tmp_path}")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.delenv("PYTHONPATH")
    assert in_one(check_python())[0] == "ok"


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_packages_that_do_not_fit_and_an_old_lock(tmp_path, monkeypatch):
    venv.create(tmp_path / ".venv", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert in_one(check_packages())[:2] == ("ok", "they fit each other")
    project = '[project]\nname = "a"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = []\n'
    (tmp_path / "pyproject.toml").write_text(project)
    subprocess.run(["uv", "lock", "--offline", "--project", tmp_path], capture_output=True, check=True)
    assert in_one(check_packages())[:2] == ("ok", "they fit each other, and the lock")
    (tmp_path / "pyproject.toml").write_text(project.replace('"1"', '"2"'))
    assert in_one(check_packages())[0] == "warn"
    folder = next((tmp_path / ".venv/lib").glob("python*/site-packages")) / "b-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: b\nVersion: 1\nRequires-Dist: c>=2\n")
    (folder / "RECORD").touch()
    state, found, _ = in_one(check_packages())
    assert state == "fail"
    assert found.startswith("they do not fit each other: ")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("UV", raising=False)
    assert in_one(check_packages())[:2] == ("warn", "not checked: there is no uv")


def test_settings(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "1")
    assert in_one(check_settings())[2] == "Unset RAY_ENABLE_UV_RUN_RUNTIME_ENV."
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    state, found, _ = in_one(check_settings())
    assert (state, found) == ("fail", "JAX_DISABLE_JIT must be off: sharded steps need the compiler, got 1. Unset it.")


def test_a_check_that_hangs_does_not_hold_up_the_others():
    end = threading.Event()
    began_s = time.monotonic()
    findings = [
        *run_checks([Check("a", lambda: [ok("a", "x")] * end.wait(60), 0.2), Check("b", lambda: [ok("b", "y")], 5)])
    ]
    assert time.monotonic() - began_s < 5
    end.set()
    assert [(finding.name, finding.state) for finding in findings] == [("a", "fail"), ("b", "ok")]


@pytest.mark.parametrize("returns_late", [False, True])
def test_an_interrupt_ends_the_programs_of_the_checks(returns_late, tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    start = subprocess.Popen.__init__

    def start_late(self, *args, **options):
        start(self, *args, **options)
        time.sleep(0.5)  # the program runs already

    if returns_late:
        monkeypatch.setattr(subprocess.Popen, "__init__", start_late)
    program = ["sh", "-c", f"sleep 100 & echo $! > {pid}; wait"]

    def hang():
        run_program(program, within_s=60)
        return []

    checks = run_checks([Check("a", lambda: [ok("a", "x")], 5), Check("b", hang, 65)])
    assert next(checks).name == "a"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    checks.close()  # as Ctrl-C ends it
    assert ended(int(pid.read_text()))
