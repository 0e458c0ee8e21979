"""Run on two simulated machines: Ray nodes with different boot ids, by which XLA distinguishes machines.

Each Ray node starts in a mount namespace in which another file covers the kernel's boot id. Its workers inherit the
namespace.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
from plain_loop import run_plain_loop
from support import COMMAND, wait_until

from pretrain._run.metrics import read_records
from pretrain._training.validation import Validation

BOOT_ID = "proc/sys/kernel/random/boot_id"
RAY_START = [
    sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats",
    "--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--metrics-export-port=0",
]  # fmt: skip
MAX_STEPS = 12
OPTIONS = [
    "--preset=baby",
    "--model.num-layers=2",
    "--model.embed-dim=64",
    f"--train.max-steps={MAX_STEPS}",
    "--train.log-every=1",
    "--train.eval-every=12",
    "--train.eval-tokens=3000",
    "--train.checkpoint-every=6",
    "--train.mask-documents",
    "--val-fraction=0.1",
    "--optimizer.warmup-steps=4",
    "--name=run",
]


def make_boot_id_prefix(folder: Path) -> list[str]:
    """Return the first words of a command that runs with another boot id. Skip the test where this is impossible."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("needs unshare, on Linux, to change the boot id of a process")
    path = folder / str(uuid.uuid4())
    path.write_text(f"{path.name}\n")
    command = ["unshare", "--mount", "sh", "-c", f'mount --bind {path} /{BOOT_ID} && exec "$@"', "sh"]
    seen = subprocess.run([*command, "cat", f"/{BOOT_ID}"], capture_output=True, text=True, check=False)
    if seen.stdout != path.read_text():
        pytest.skip(f"needs the permission to mount: {seen.stderr.strip()}")
    return command


@pytest.fixture
def machines(environment, tmp_path):
    """Variables to reach a Ray cluster of three machines with one CPU each: two for the workers, one for Ray Data."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A cluster of `ray start` requires a token.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    address = f"127.0.0.1:{port}"
    # The paths of Ray's sockets in this folder must be short.
    session = tempfile.mkdtemp(prefix="ray-")
    nodes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, session, ignore_errors=True)

        def start(name: str, *options: str) -> None:
            prefix = make_boot_id_prefix(tmp_path)
            log = tmp_path / f"{name}.log"
            with log.open("wb") as out:
                node = subprocess.Popen(
                    [*prefix, *RAY_START, *options], env=environment | token, stdout=out, stderr=out
                )
            nodes.append(node)
            stack.callback(node.wait)
            stack.callback(node.send_signal, signal.SIGTERM)
            wait_until(lambda: b"Ray runtime started" in log.read_bytes(), node, log)

        start("head", "--head", f"--port={port}", f"--temp-dir={session}", "--include-dashboard=false")
        for name in ("second", "third"):
            start(name, f"--address={address}")
        assert len({Path("/proc", str(node.pid), "root", BOOT_ID).read_text() for node in nodes}) == 3
        yield token | {"RAY_ADDRESS": address}


@pytest.fixture
def documents(corpus, tmp_path):
    """The corpus in documents of 100 bytes, which end in most windows."""
    text, path = corpus.read_text(), tmp_path / "documents.jsonl"
    pieces = (text[start : start + 100] for start in range(0, len(text), 100))
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


@pytest.fixture
def plain(documents, environment, monkeypatch):
    """Losses of a plain loop over the same windows, and the validation losses after the last step."""
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    run = run_plain_loop(["--data", str(documents), *OPTIONS])
    part, full = (
        Validation(run.model, run.data.val, num_tokens=count, batch_size=5, end_of_text=run.data.vocab_size - 1)
        for count in (run.config.train.eval_tokens, None)
    )
    return [record["loss"] for record in run.records], part.evaluate(run.params)[0], full.evaluate(run.params)[0]


@pytest.mark.slow
@pytest.mark.fault
def test_two_machines_have_the_losses_of_one_device(machines, plain, documents, environment, tmp_path, record_property):
    record_property("fault", "two machines, whose devices XLA assigns to two slices")
    record_property("lost", "nothing")
    storage = tmp_path / "storage"
    args = ["--data", str(documents), "--storage-path", str(storage), "--hardware=cpu:2", *OPTIONS]
    done = subprocess.run(
        [*COMMAND, *args], env=environment | machines, cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = storage / "run"
    assert json.loads((run / "result.json").read_text())["workers"] == 2  # one per machine
    records = read_records(run / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    np.testing.assert_allclose(losses, plain[0], rtol=0, atol=1e-5)
    assert records[-1]["val_loss"] == pytest.approx(plain[1], abs=1e-5)
    assert records[-1]["full_val_loss"] == pytest.approx(plain[2], abs=1e-5)
