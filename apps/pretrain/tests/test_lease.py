"""The lease of a run in object storage: a local S3 server, and commands in processes of their own."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from pyarrow.fs import FileSelector

from pretrain._errors import RunFailedError, UsageError
from pretrain._run import lease
from pretrain._run.folder import locate
from pretrain._run.lease import leasing, this_command
from pretrain._run.lock import lock_run
from ray_jax_launch import LaunchError, open_uri

LIMIT_S = 60
COMMAND = """
import sys, time
from pretrain._run.lock import lock_run
with lock_run(sys.argv[1]):
    print("holds", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(s3, tmp_path):
    return f"{s3}/{tmp_path.name}/run"


@pytest.fixture
def command(tmp_path):
    """A function that makes a command of another machine."""

    def make(name, machine="other"):
        file = tmp_path / f"{name}.lock"
        file.touch()
        return replace(this_command(file.stat()), owner=name, host=f"host-{name}", machine=f"{machine}-{name}")

    return make


def objects(run):
    filesystem, root = open_uri(run)
    infos = filesystem.get_file_info(FileSelector(f"{root}/.lease", allow_not_found=True))
    return sorted(info.base_name for info in infos if info.is_file)


def put(run: str, owner: lease.Owner, content: bytes | None = None) -> None:
    """Write the object of a command, as that command does."""
    filesystem, root = open_uri(run)
    with filesystem.open_output_stream(f"{root}/.lease/{owner.owner}.json") as stream:
        stream.write(json.dumps(asdict(owner)).encode() if content is None else content)


def ignored(sentence):
    raise AssertionError(sentence)


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore that each write of an object of a lease releases. Renewals follow each other fast."""
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.05)
    written, write = threading.Semaphore(0), lease._Lease._write

    def write_and_tell(self: lease._Lease) -> None:
        write(self)
        written.release()

    monkeypatch.setattr(lease._Lease, "_write", write_and_tell)
    return written


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The looks at the objects of a lease, each with the number of the others. More than three are an error."""
    found, others = list[int](), lease._Lease._update_others

    def look(self: lease._Lease) -> list[lease.Owner]:
        assert len(found) < 3, "the command waits"
        found.append(len(owners := others(self)))
        return owners

    monkeypatch.setattr(lease._Lease, "_update_others", look)
    return found


Command = Callable[[str], lease.Owner]


def test_a_second_command_on_another_machine_is_rejected_until_the_first_has_ended(run, command):
    with leasing(run, command("b"), ignored):
        with (
            pytest.raises(UsageError, match=r"Another command uses .* host-b \(process .*\) since 20"),
            leasing(run, command("a"), ignored),
        ):
            pass
        assert objects(run) == ["b.json"]
    with leasing(run, command("a"), ignored):
        assert objects(run) == ["a.json"]
    assert objects(run) == []


def test_a_second_command_with_a_local_copy_of_its_own_is_rejected_on_the_same_machine(run, command):
    """Such as that of another user. A command that has locked the same copy would be the only one left."""
    first, second = command("b"), replace(command("a"), machine="other-b")
    assert (first.machine, first.lock) != (second.machine, second.lock)
    with leasing(run, first, ignored):
        with pytest.raises(UsageError, match=", on host-b"), leasing(run, second, ignored):
            pass
        elsewhere = replace(command("c"), lock=first.lock)  # a number of a file, on another machine
        with pytest.raises(UsageError, match=", on host-b"), leasing(run, elsewhere, ignored):
            pass
        assert objects(run) == ["b.json"]
        with leasing(run, replace(second, lock=first.lock), lambda _: None):
            assert objects(run) == ["a.json"]


def test_of_commands_that_start_at_once_one_goes_on(run, command):
    """The order of their requests differs from round to round. Never do two hold the lease."""
    for round_ in range(5):
        held, most, rejected, guard = 0, 0, 0, threading.Lock()
        barrier = threading.Barrier(4)

        def go_on(name, barrier=barrier, guard=guard):
            nonlocal held, most, rejected
            barrier.wait(LIMIT_S)
            try:
                with leasing(run, command(name), ignored):
                    with guard:
                        held += 1
                        most = max(most, held)
                    time.sleep(0.3)
                    with guard:
                        held -= 1
            except UsageError:
                with guard:
                    rejected += 1

        threads = [threading.Thread(target=go_on, args=(f"{name}{round_}",)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert most == 1
        assert rejected >= 1
        assert objects(run) == []


def test_a_lease_that_is_not_renewed_lapses(run, command, monkeypatch):
    put(run, replace(command("dead"), state="holds", generation=3))
    with pytest.raises(UsageError, match="host-dead"), leasing(run, command("a"), ignored):
        pass
    monkeypatch.setattr(lease, "LAPSES_AFTER_S", 1.0)
    time.sleep(3)  # the server tells times in seconds
    with leasing(run, command("a"), ignored):
        assert objects(run) == ["a.json"]


def test_a_command_follows_all_that_have_lapsed(run, command, monkeypatch):
    """One of them may wake, and must see that its generation is an earlier one."""
    monkeypatch.setattr(lease, "LAPSES_AFTER_S", -10.0)
    for number in range(8):
        put(run, replace(command(f"dead-{number}"), state="holds", generation=9 if number == 3 else number))
    own = command("a")
    with leasing(run, own, ignored):
        filesystem, root = open_uri(run)
        with filesystem.open_input_stream(f"{root}/.lease/a.json") as stream:
            assert json.loads(stream.read())["generation"] == 10


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_machine_with_a_wrong_clock_takes_no_lease(ahead_s, run, command, monkeypatch):
    real_s, real_ns = time.time, time.time_ns
    put(run, replace(command("b"), state="holds", generation=3))
    monkeypatch.setattr(time, "time", lambda: real_s() + ahead_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + ahead_s * 10**9)
    with pytest.raises(UsageError, match="host-b"), leasing(run, command("a"), ignored):
        pass
    assert objects(run) == ["b.json"]


def test_a_lease_is_renewed_while_its_command_runs(run, command, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.2)
    filesystem, root = open_uri(run)

    def written_ns():
        return filesystem.get_file_info(f"{root}/.lease/a.json").mtime_ns

    with leasing(run, command("a"), ignored):
        taken_ns, until_s = written_ns(), time.monotonic() + LIMIT_S
        while written_ns() == taken_ns:
            assert time.monotonic() < until_s
            time.sleep(0.1)


@pytest.mark.parametrize("generation", [1, 2])
def test_a_command_that_has_lost_its_lease_is_told_once(generation, run, command, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.2)
    lost, told = threading.Event(), []

    def note(sentence):
        told.append(sentence)
        lost.set()

    with leasing(run, command("a"), note):
        put(run, replace(command("b"), state="holds", generation=generation))
        assert lost.wait(LIMIT_S)
        time.sleep(1)
    (sentence,) = told
    assert "another command uses the run now, on host-b (process" in sentence
    assert objects(run) == ["b.json"]


def test_a_renewal_in_progress_does_not_write_a_released_lease(run, command, monkeypatch):
    """The next command would wait for a lease that nobody holds."""
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.05)
    renews, write = threading.Event(), lease._Lease._write

    def write_late(self):
        if self._own.state == "holds" and objects(run):
            renews.set()
            time.sleep(1)
        write(self)

    with leasing(run, command("a"), ignored):
        monkeypatch.setattr(lease._Lease, "_write", write_late)
        assert renews.wait(LIMIT_S)
    time.sleep(2)
    assert objects(run) == []


def test_a_command_that_loses_its_lease_ends_in_one_sentence(run, command, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.2)
    filesystem, root = open_uri(run)

    def lose():
        with lock_run(run):
            until_s = time.monotonic() + LIMIT_S
            while time.monotonic() < until_s:  # a renewal that had begun writes a deleted object again
                for name in objects(run):
                    with contextlib.suppress(FileNotFoundError):
                        filesystem.delete_file(f"{root}/.lease/{name}")
                time.sleep(0.5)

    with pytest.raises(RunFailedError, match="another command has used the run since"):
        lose()


def test_a_killed_command_on_this_machine_frees_the_run_at_once(run):
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            with (
                pytest.raises(UsageError, match=f"Another command uses .* \\(process {process.pid} of"),
                lock_run(run),
            ):
                pass
        finally:
            process.kill()
    assert len(objects(run)) == 1
    with lock_run(run):
        assert len(objects(run)) == 1
    assert objects(run) == []


def test_a_rejected_command_deletes_nothing_of_the_first_one(run, command):
    filesystem, root = open_uri(run)
    with leasing(run, command("b"), ignored):
        with filesystem.open_output_stream(f"{root}/config.json") as stream:
            stream.write(b"{}")
        with contextlib.suppress(UsageError), lock_run(run):
            pass
        assert filesystem.get_file_info(f"{root}/config.json").size == 2
    assert not locate(run).path.exists()


def test_a_lease_survives_two_renewals_that_fail() -> None:
    assert lease.LAPSES_AFTER_S >= 3 * lease.RENEW_EVERY_S


def test_a_command_that_asks_forever_is_not_waited_for(
    run: str, command: Command, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_PATIENCE_S", 0.0)
    put(run, command("b"))
    with pytest.raises(UsageError, match=", on host-b"), leasing(run, command("a"), ignored):
        pass
    assert looks == [1]
    assert objects(run) == ["b.json"]


def test_a_command_that_is_interrupted_while_it_asks_leaves_no_object(
    run: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lease._Lease, "_reject", interrupt)
    put(run, command("b"))
    with pytest.raises(KeyboardInterrupt), leasing(run, command("a"), ignored):
        pass
    assert objects(run) == ["b.json"]


def test_a_damaged_object_keeps_the_run_until_it_lapses(
    run: str, command: Command, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, command("b"), b"{")
    with pytest.raises(UsageError, match=", on unknown"), leasing(run, command("a"), ignored):
        pass
    assert looks == [1]
    assert objects(run) == ["b.json"]
    monkeypatch.setattr(lease, "LAPSES_AFTER_S", -1.0)
    with leasing(run, command("a"), ignored):
        assert objects(run) == ["a.json"]


def test_a_command_that_finds_another_holder_gives_up(
    run: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen themselves alone. The other one writes its object first."""
    write = lease._Lease._write

    def write_second(self: lease._Lease) -> None:
        if self._own.state == "holds":
            put(run, replace(command("b"), state="holds", generation=1))
        write(self)

    monkeypatch.setattr(lease._Lease, "_write", write_second)
    with pytest.raises(UsageError, match=", on host-b"), leasing(run, command("a"), ignored):
        pass
    assert objects(run) == ["b.json"]


@pytest.mark.parametrize("other", [{"state": "holds", "generation": 3}, {"state": "asks", "generation": 9}])
def test_a_holder_keeps_its_lease_against_an_earlier_one_that_wakes_and_against_one_that_asks(
    other: dict[str, Any],
    run: str,
    command: Command,
    renewed: threading.Semaphore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[str]()
    put(run, replace(command("b"), state="holds", generation=3))
    monkeypatch.setattr(lease, "LAPSES_AFTER_S", -1.0)
    with leasing(run, command("a"), told.append):
        monkeypatch.setattr(lease, "LAPSES_AFTER_S", 90.0)
        put(run, replace(command("b"), **other))
        for _ in range(5):  # two writes at the start, and three renewals
            assert renewed.acquire(timeout=LIMIT_S), told
        filesystem, root = open_uri(run)
        with filesystem.open_input_stream(f"{root}/.lease/a.json") as stream:
            assert json.loads(stream.read())["generation"] == 4
    assert told == []
    assert objects(run) == ["b.json"]
    assert "lease" not in {thread.name for thread in threading.enumerate()}


def test_a_lease_is_renewed_after_a_storage_that_fails_for_a_while(
    run: str,
    command: Command,
    renewed: threading.Semaphore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures, others = [OSError("no route"), LaunchError("no answer")], lease._Lease._update_others

    def fail_twice(self: lease._Lease) -> list[lease.Owner]:
        if threading.current_thread().name == "lease" and failures:
            raise failures.pop()
        return others(self)

    monkeypatch.setattr(lease._Lease, "_update_others", fail_twice)
    with leasing(run, command("a"), ignored):
        for _ in range(3):  # two writes at the start, and a renewal
            assert renewed.acquire(timeout=LIMIT_S)
    assert len(caplog.messages) == 2


class Failing:
    """The filesystem of a lease, whose requests fail at first."""

    def __init__(self, filesystem: Any, num_failures: int) -> None:
        self.filesystem, self.num_failures = filesystem, num_failures

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.num_failures -= 1
            if self.num_failures >= 0:
                raise OSError("the object was replaced")
            return getattr(self.filesystem, name)(*args)

        return request


@pytest.mark.parametrize("num_failures", [0, 4, 5])
def test_an_object_that_its_owner_replaces_is_read_again_some_times(
    num_failures: int, run: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_ASK_AGAIN_S", 0.0)
    put(run, other := replace(command("b"), state="holds", generation=3))
    asking = lease._Lease(run, command("a"), ignored)
    asking._filesystem = Failing(asking._filesystem, num_failures)
    with contextlib.nullcontext() if num_failures < 5 else pytest.raises(OSError, match="was replaced"):
        assert asking._read("b") == other
    asking._filesystem.num_failures = 0
    with pytest.raises(FileNotFoundError):  # released
        asking._read("c")
    assert asking._filesystem.num_failures == -1  # at once


def test_a_lease_that_cannot_be_given_back_lapses_and_is_no_failure_of_its_command(
    run: str, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    holding = lease._Lease(run, command("a"), ignored)
    holding.take()
    holding._stop.set()
    holding._thread.join(LIMIT_S)
    holding._filesystem = Failing(holding._filesystem, 1)
    holding.release()
    assert caplog.messages == [f"the lease of {run} lapses only in 90 s: the object was replaced"]
    assert objects(run) == ["a.json"]
    holding.release()
    holding.release()  # there is none
    assert (objects(run), len(caplog.messages)) == ([], 1)
