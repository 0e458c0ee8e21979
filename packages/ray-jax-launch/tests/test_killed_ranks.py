"""Saves of a hundred ranks to object storage while ranks are killed, or fail, in the middle of a save."""

import json
import random
import subprocess
import sys

import pytest
from pyarrow.fs import FileSelector

from ray_jax_launch._checkpoint.object_store import ObjectStore
from ray_jax_launch._storage import open_uri

NUM_RANKS, NUM_HOSTS, NUM_SAVES, NUM_TO_KEEP = 100, 20, 2, 2

# A group of ranks, from its start to its end. A host is a process, a rank is a thread of it. The hosts call the store
# as `Checkpoints` and `ObjectWriter` do; the parent process takes the place of the barriers of jax. The last save has
# the fault: a host is killed during the upload, the first host is killed during the commit or the deletion after it,
# or one rank fails after its first archive.
GROUP = """
import copy, json, multiprocessing, os, random, signal, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import connection
from pathlib import Path

import pyarrow.fs  # before the fork, which then takes no time

from ray_jax_launch._checkpoint.object_store import ObjectStore

uri, run, fault, seed, num_ranks, num_hosts, num_saves, num_to_keep = json.loads(sys.argv[1])
ITEMS = ("params", "opt_state")


def content(step, rank, item):
    return f"{step} {rank} {item}\\n".encode() * 500


def upload(store, step, save, broken, rank):
    with tempfile.TemporaryDirectory() as folder:
        for item in ITEMS:
            leaf = Path(folder, "items", f"{item}.w")
            leaf.mkdir(parents=True)
            (leaf / ".zarray").write_text("{}")
            (leaf / f"{rank}.0").write_bytes(content(step, rank, item))
        if rank == broken:
            store, pack = copy.copy(store), store._pack

            def fail_later(name, *args):
                if name.endswith("params.tar"):
                    raise ValueError("broken")
                return pack(name, *args)

            store._pack = fail_later
        store.upload(step, rank, save, Path(folder))


def serve(host, pipe):
    store = ObjectStore(uri)
    each = num_ranks // num_hosts
    ranks = range(host * each, (host + 1) * each)
    threads = ThreadPoolExecutor(each)

    def open_storage():
        store.prepare()
        threading.Thread(target=store.clean_up).start()
        return sorted(store.steps())

    def verify(step):
        found = [*threads.map(lambda rank: store.find_damage(step, (rank, num_ranks)), ranks)]
        assert found == [None] * each, found

    def restore(step):
        with tempfile.TemporaryDirectory() as folder:
            needed = {f"items/{item}.w/{rank}.0" for item in ITEMS for rank in ranks}
            store.download(step, ITEMS, Path(folder), lambda: needed, [(rank, num_ranks) for rank in ranks])
            for item in ITEMS:
                for rank in ranks:
                    assert Path(folder, f"items/{item}.w/{rank}.0").read_bytes() == content(step, rank, item)

    def save(step, name, broken):
        [*threads.map(partial(upload, store, step, name, broken), ranks)]

    def commit(step, name):
        store.commit(step, num_ranks, name, {"step": step})

    def delete(step):
        store.unlist(step)
        threading.Thread(target=store.sweep).start()

    actions = {action.__name__: action for action in (open_storage, verify, restore, save, commit, delete)}
    while True:
        call, *args = pipe.recv()
        try:
            pipe.send((None, actions[call](*args)))
        except Exception as error:
            pipe.send((repr(error), None))


hosts = []
for host in range(num_hosts):
    pipe, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(host, end), daemon=True)
    process.start()
    hosts.append((pipe, process))


def ask(some, *call, killed=None, after_s=0.0):
    '''Return the errors and results of hosts. After a while, a host is killed: return None when it has ended.'''
    for host in some:
        hosts[host][0].send(call)
    deadline, answers = time.monotonic() + after_s, {}
    while len(answers) < len(some):
        if killed is not None and time.monotonic() >= deadline:
            os.kill(hosts[killed][1].pid, signal.SIGKILL)
            hosts[killed][1].join()
            return None
        waiting = [hosts[host][0] for host in some if host not in answers]
        for pipe in connection.wait(waiting, None if killed is None else max(0.0, deadline - time.monotonic())):
            host = next(host for host in some if hosts[host][0] is pipe)
            answers[host] = pipe.recv()
    if killed is not None:  # too late for this call
        os.kill(hosts[killed][1].pid, signal.SIGKILL)
        return None
    return [answers[host] for host in some]


def ask_well(*args):
    answers = ask(*args)
    assert all(error is None for error, _ in answers), answers
    return answers[0][1]


rng, everyone = random.Random(seed), range(num_hosts)
try:
    listed = ask_well([0], "open_storage")
    began = time.monotonic()
    if listed:
        ask_well(everyone, "verify", listed[-1])
        ask_well(everyone, "restore", listed[-1])
    print(json.dumps({"started_at": listed, "start_s": round(time.monotonic() - began, 1)}), flush=True)
    step, upload_s = listed[-1] if listed else 0, 1.0
    for number in range(num_saves):
        step, name, began = step + 1, f"{run}-{number}", time.monotonic()
        now = fault if number == num_saves - 1 else "none"
        print(json.dumps({"begins": step}), flush=True)
        if now == "host":
            ask(everyone, "save", step, name, None, killed=rng.randrange(num_hosts), after_s=rng.uniform(0, upload_s))
            break
        broken = rng.randrange(num_ranks) if now == "rank" else None
        failed = [error for error, _ in ask(everyone, "save", step, name, broken) if error is not None]
        upload_s = time.monotonic() - began
        if now == "rank":
            assert failed == ["ValueError('broken')"], failed
            ((error, _),) = ask([0], "commit", step, name)
            assert f"process {broken} has not uploaded its shards" in error, error
            break
        assert failed == [], failed
        began = time.monotonic()
        if now == "commit":
            ask([0], "commit", step, name, killed=0, after_s=rng.uniform(0, 1.2 * commit_s))
            break
        ask_well([0], "commit", step, name)
        commit_s = time.monotonic() - began
        print(json.dumps({"listed": step, "upload_s": round(upload_s, 1), "commit_s": round(commit_s, 3)}), flush=True)
        listed.append(step)
        for old in listed[:-num_to_keep]:
            if now == "deletion":
                ask([0], "delete", old, killed=0, after_s=rng.uniform(0, 0.3))
                break
            ask_well([0], "delete", old)
        del listed[:-num_to_keep]
finally:
    for _, process in hosts:
        process.kill()
"""
FAULTS = ("none", "host", "commit", "rank", "deletion", "host", "commit", "deletion")


@pytest.mark.slow
@pytest.mark.fault
def test_nothing_is_lost_or_half_listed_whatever_is_killed_in_a_save_of_a_hundred_ranks(
    s3, tmp_path, monkeypatch, record_property
):
    record_property("fault", "of 100 simulated ranks, hosts are killed in saves, commits and deletions, and ranks fail")
    record_property("lost", "steps since the last checkpoint")
    place = f"{s3}/{tmp_path.name}"
    store, newest, steps, seed = ObjectStore(place), 0, list[int](), random.randrange(1_000_000)
    for run, fault in enumerate(FAULTS):
        settings = [place, f"run{run}", fault, seed + run, NUM_RANKS, NUM_HOSTS, NUM_SAVES, NUM_TO_KEEP]
        command = [sys.executable, "-c", GROUP, json.dumps(settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"{settings}: {done.stdout}{done.stderr}"
        start, *lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert max(start["started_at"], default=0) == newest, settings
        steps, listed = sorted(store.steps()), [line["listed"] for line in lines if "listed" in line]
        newest = max(steps)
        begun = lines[-1].get("begins") or lines[-1]["listed"]
        assert newest in {listed[-1], begun if fault == "commit" else listed[-1]}, settings
        assert {*sorted([*start["started_at"], *listed])[-NUM_TO_KEEP:]} <= {*steps}, settings
        assert len(steps) <= NUM_TO_KEEP + 1, settings
        for step in steps:
            parts = store._names(f"{step}.{store.listing(step).save}/parts")
            assert parts == {f"{rank}.json" for rank in range(NUM_RANKS)}, settings
        print(run, fault, start, *lines, steps)  # noqa: T201  (the figures, with `pytest -s`)
    assert [store.find_damage(step) for step in steps] == [None] * len(steps)
    # All that the kills have left is deleted in the end: what was listed by the next start, the rest a day later.
    monkeypatch.setattr("ray_jax_launch._checkpoint.object_store._ABANDONED_AFTER_S", -60.0)
    store.clean_up()
    filesystem, root = open_uri(place)
    files = [info.path for info in filesystem.get_file_info(FileSelector(root, recursive=True)) if info.is_file]
    assert {path for path in files if path.count("/") == root.count("/") + 1} == {
        f"{root}/{step}.json" for step in steps
    }
    assert len(files) == len(steps) * (1 + 1 + 3 * NUM_RANKS)
