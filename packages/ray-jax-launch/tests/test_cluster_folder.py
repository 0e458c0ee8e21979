"""Real clusters on this machine: the ports and files that they open to others, and what they leave behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_jax_launch import LaunchError
from ray_jax_launch._cluster_folder import NUM_KEPT, ClusterFolder, clean_up, mark_failed
from ray_jax_launch._reaper import KILLED

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DRIVER = """
import signal, sys, time
from pathlib import Path
from ray_jax_launch import TrainingFailed, launch

folder = Path(sys.argv[1])
def train():
    import jax
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("gloo has its sockets")
    (folder / f"ready-{jax.process_index()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    assert not (folder / "fail").exists()

# Background processes of a shell inherit that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    result = launch(train, hardware="cpu:2", storage_path=folder / "storage", name="run", max_failures=0)
except TrainingFailed as error:
    print(error.log_folder)
else:
    print(result.log_folder)
"""

# The raylet of the first start never answers. Ray itself then waits for 30 s.
HANGING_RAYLET = """
import os, signal, time
from pathlib import Path
import ray
from ray_jax_launch import connect
from ray_jax_launch._reaper import Reaper

watch, stopped = Reaper.watch, []

def stop(reaper, pid):
    watch(reaper, pid)
    deadline_s = time.monotonic() + 1
    while not stopped and time.monotonic() < deadline_s:
        if Path(f"/proc/{pid}/comm").read_text() == "raylet\\n":
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        time.sleep(0.01)

Reaper.watch = stop
connect()
print(*stopped, ray.get(ray.remote(lambda: 7).remote()))
"""


def environment_of(home, temporary):
    environment = os.environ | {"HOME": str(home), "RAY_TMPDIR": str(temporary), "TMPDIR": str(temporary)}
    environment.pop("RAY_AUTH_MODE", None)  # Ray sets it in a process that started a cluster
    environment.pop("XLA_FLAGS", None)
    return environment


@pytest.fixture
def start(tmp_path, temporary):
    """Function that starts the driver, with a command prefix, and waits until its two workers have computed."""
    home = tmp_path / "home"
    home.mkdir()
    drivers = []

    def start(*prefix):
        command = [*prefix, sys.executable, "-c", DRIVER, str(tmp_path)]
        environment = environment_of(home, temporary)
        with (tmp_path / "errors").open("w") as errors:
            driver = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        drivers.append(driver)
        deadline_s = time.monotonic() + 180
        while len([*tmp_path.glob("ready-*")]) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        return driver

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


@pytest.fixture
def parent(temporary, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    return temporary / f"ray-jax-{os.getuid()}"


def finish(driver, folder):
    """Let the workers return, and return the folder of the logs."""
    (folder / "go").touch()
    output, _ = driver.communicate(timeout=300)
    return Path(output.strip())


def wait_until(condition):
    deadline_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def clusters(temporary):
    return [*temporary.glob("ray-jax-*/*")]


def foreign_name():
    """Return a command prefix that gives this machine a name which is an address of its network, if that is possible.

    gloo listens on the address of the machine's name.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address = probe.getsockname()[0]
        except OSError:
            return []
    prefix = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', address]
    try:
        return prefix if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0 else []
    except FileNotFoundError:
        return []


def session_members(session):
    """Return the processes of a session by pid, with their command lines."""
    members = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                members[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return members


def listening(pids):
    """Return the addresses on which processes listen, as /proc/net/tcp and tcp6 write them, with the pid."""
    owners = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                owners[str(descriptor.readlink())] = pid
            except FileNotFoundError:
                continue
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owners:
                found.append((fields[1].partition(":")[0], owners[f"socket:[{fields[9]}]"]))
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def readable_by_others(folder):
    """Return what another user can read in a folder, at any depth."""
    found = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            continue
        if mode & (stat.S_IROTH | stat.S_IRGRP):
            found.append(path)
        if stat.S_ISDIR(mode) and mode & (stat.S_IXOTH | stat.S_IXGRP):
            found += readable_by_others(path)
    return found


@on_linux
def test_a_run_of_two_workers_is_closed_to_others_and_leaves_nothing(start, tmp_path, temporary):
    driver = start(*foreign_name())
    members = session_members(driver.pid)
    assert sum("RayTrainWorker" in command for command in members.values()) == 2
    sockets = listening(members)
    assert len(sockets) > 12
    assert [(address, members[pid]) for address, pid in sockets if address not in LOOPBACK] == []
    assert len(clusters(temporary)) == 1
    assert readable_by_others(temporary) == []
    home = tmp_path / "home"
    assert (home / ".ray" / "auth_token").exists()
    assert readable_by_others(home) == []
    logs = finish(driver, tmp_path)
    assert logs.is_relative_to(temporary)
    wait_until(lambda: clusters(temporary) == [])
    assert [path.name for path in temporary.rglob("*")] == [f"ray-jax-{os.getuid()}"]
    assert KILLED not in (tmp_path / "errors").read_text()


@pytest.mark.slow
@on_linux
@pytest.mark.fault
def test_a_killed_driver_leaves_a_sentence_and_no_folder(start, tmp_path, temporary, record_property):
    record_property("fault", "SIGKILL of the command: its cluster's files")
    record_property("lost", "steps since the last checkpoint")
    driver = start()
    assert len(clusters(temporary)) == 1
    time.sleep(3)  # the reaper looks for workers every second
    newest = max(pid for pid, command in session_members(driver.pid).items() if command.startswith("ray::"))
    os.kill(newest, signal.SIGSTOP)  # it cannot end by itself
    driver.kill()
    driver.wait()
    killed_s = time.monotonic()
    wait_until(lambda: clusters(temporary) == [] and not session_members(driver.pid))
    record_property("recovery_s", round(time.monotonic() - killed_s, 1))
    assert (tmp_path / "errors").read_text().splitlines()[-1] == KILLED


INTERRUPTED_START = """
import os, signal, sys, time
import ray._raylet
from ray_jax_launch import connect

start = ray._raylet.CoreWorker

def start_and_interrupt(*args):
    start(*args)
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(5)

ray._raylet.CoreWorker = start_and_interrupt
try:
    connect()
except (KeyboardInterrupt, SystemExit):  # Ray's handler of SIGTERM raises SystemExit
    print("interrupted")
"""


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_in_the_middle_of_rays_start_is_no_crash(number, tmp_path, temporary, record_property):
    record_property("fault", f"{number.name} while Ray starts, between its C++ part and the rest")
    record_property("lost", "nothing")
    command = [sys.executable, "-c", INTERRUPTED_START, str(number.value)]
    environment = environment_of(tmp_path, temporary)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (130, "interrupted\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if "Ray did not start within 30 s" not in line] == []
    wait_until(lambda: clusters(temporary) == [])


@pytest.mark.slow
@on_linux
@on_linux
@pytest.mark.fault
def test_ray_that_does_not_start_in_time_is_started_again(tmp_path, temporary, record_property):
    command = [sys.executable, "-c", HANGING_RAYLET]
    environment = environment_of(tmp_path, temporary)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    pid, answer = done.stdout.split()
    assert answer == "7"
    assert (
        done.stderr.count("Ray did not start within 30 s, as on a machine with too much work: starting it again") == 1
    )
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    record_property("fault", "SIGSTOP of the raylet while Ray starts")
    record_property("lost", "nothing")


@pytest.mark.slow
@pytest.mark.fault
def test_the_next_start_deletes_what_a_driver_and_its_reaper_left(start, temporary, monkeypatch, record_property):
    record_property("fault", "SIGKILL of the command and of the process that cleans up after it")
    record_property("lost", "steps since the last checkpoint")
    driver = start()
    members = session_members(driver.pid)
    os.kill(next(pid for pid, command in members.items() if "ray_jax_launch._reaper" in command), signal.SIGKILL)
    for pid in members:
        if pid in session_members(driver.pid):
            os.kill(pid, signal.SIGKILL)
    driver.wait()
    left = clusters(temporary)
    assert len(left) == 1
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    new = ClusterFolder()
    assert clusters(temporary) == [new.path]
    new.close()


def test_what_a_late_process_writes_is_deleted_too(parent):
    """A process that Ray has started just before the end is not known to the reaper."""
    parent.mkdir()
    folder = parent / "abcdef"
    folder.mkdir()
    command = [sys.executable, "-m", "ray_jax_launch._reaper", str(parent)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reaper:
        wait_until(lambda: not folder.exists())
        (folder / "session" / "sockets").mkdir(parents=True)
        assert reaper.wait(timeout=300) == 0
    assert not folder.exists()


@pytest.mark.slow
def test_the_logs_of_a_failed_run_stay_and_nothing_else(start, tmp_path, temporary):
    driver = start()
    (tmp_path / "fail").touch()
    logs = finish(driver, tmp_path)
    (folder,) = clusters(temporary)
    wait_until(lambda: [*folder.glob("*/*")] == [logs])
    assert any("AssertionError" in path.read_text(errors="replace") for path in logs.glob("**/*.log"))


def test_the_logs_of_the_newest_failures_stay(parent):
    folders = []
    for number in range(NUM_KEPT + 2):
        folder = ClusterFolder()
        (folder.path / "session" / "logs").mkdir(parents=True)
        mark_failed(folder.path)
        os.utime(folder.path / "failed", (number + 1, number + 1))
        folder.close()
        folders.append(folder.path)
    clean_up(parent)
    assert sorted(parent.iterdir()) == sorted(folders[2:])


def test_a_cluster_that_fails_again_is_the_newest_failure(parent):
    folder = ClusterFolder()
    mark_failed(folder.path)
    os.utime(folder.path / "failed", (1, 1))
    mark_failed(folder.path)
    assert (folder.path / "failed").stat().st_mtime > 1
    folder.close()


def test_a_cluster_whose_driver_lives_is_left_alone(parent):
    first = ClusterFolder()
    (first.path / "session").mkdir()
    code = "from ray_jax_launch._cluster_folder import ClusterFolder; print(ClusterFolder().path)"
    second = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert (first.path / "session").exists()
    clean_up(parent)
    assert [*parent.iterdir()] == [first.path] != [Path(second)]
    first.close()


def test_a_folder_open_to_others_is_closed(parent):
    parent.mkdir(mode=0o755)
    parent.chmod(0o777)
    ClusterFolder().close()
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700


def make_link(parent):
    (parent.parent / "elsewhere").mkdir()
    parent.symlink_to(parent.parent / "elsewhere")


def make_file(parent):
    parent.touch()


@pytest.mark.parametrize("make", [make_link, make_file])
def test_a_folder_that_another_user_could_have_made_is_rejected(parent, make):
    make(parent)
    with pytest.raises(LaunchError, match=r"^RAY_TMPDIR must be a folder of at most \d+ characters .*, got "):
        ClusterFolder()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("/dev/null", "File exists"),
        ("/dev/null/x", "Not a directory"),
        ("/proc/x", "("),
        ("/tmp/" + "x" * 5000, "5005"),
    ],
)
def test_a_folder_for_temporary_files_that_cannot_be_used_is_rejected_in_one_sentence(monkeypatch, value, reason):
    monkeypatch.setenv("RAY_TMPDIR", value)
    with pytest.raises(LaunchError, match=r"^RAY_TMPDIR must be a folder of at most \d+ characters .*, got ") as raised:
        ClusterFolder()
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("name", ["absent", "x" * 100])
def test_a_tmpdir_that_does_not_fit_is_replaced(monkeypatch, temporary, name):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(temporary / name))
    folder = ClusterFolder()
    assert folder.path.parent.parent == Path("/tmp")
    folder.close()
    clean_up(folder.path.parent)
