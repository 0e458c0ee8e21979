"""A run over two machines: Ray nodes that see boot ids of their own, as XLA tells machines apart.

A machine is a Ray node started in a mount namespace where another file lies over the kernel's boot id. Its workers
inherit it.
"""

import contextlib
import dataclasses
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from support import COMMAND, wait_until

from nnx_gpt2 import create_optimizer, create_train_state, make_mesh, make_train_step, put_batch
from pretrain import PretrainConfig
from pretrain._cli import parse_command
from pretrain._data import load_tokens
from pretrain._run.files import read_lines
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
    "--train.eval-batches=3",
    "--train.checkpoint-every=6",
    "--train.mask-documents",
    "--val-fraction=0.1",
    "--optimizer.warmup-steps=4",
    "--name=run",
]


def another_boot_id(folder: Path) -> list[str]:
    """A command in front of a command: it then sees another boot id. Skips the test where that cannot be had."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("a process has a boot id of its own on Linux alone, by unshare")
    path = folder / str(uuid.uuid4())
    path.write_text(f"{path.name}\n")
    command = ["unshare", "--mount", "sh", "-c", f'mount --bind {path} /{BOOT_ID} && exec "$@"', "sh"]
    seen = subprocess.run([*command, "cat", f"/{BOOT_ID}"], capture_output=True, text=True, check=False)
    if seen.stdout != path.read_text():
        pytest.skip(f"this user may not mount: {seen.stderr.strip()}")
    return command


@pytest.fixture
def machines(environment, tmp_path):
    """How to reach a Ray cluster of three machines of one CPU each: two for the workers, one for Ray Data."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A cluster of `ray start` wants a token.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    address = f"127.0.0.1:{port}"
    # Ray's sockets lie in here, and their paths may not be long.
    session = tempfile.mkdtemp(prefix="ray-")
    nodes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, session, ignore_errors=True)

        def start(name: str, *options: str) -> None:
            before = another_boot_id(tmp_path)
            log = tmp_path / f"{name}.log"
            with log.open("wb") as out:
                node = subprocess.Popen(
                    [*before, *RAY_START, *options], env=environment | token, stdout=out, stderr=out
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
    """The corpus in documents of 100 bytes: each window has the end of one in it."""
    text, path = corpus.read_text(), tmp_path / "documents.jsonl"
    pieces = (text[start : start + 100] for start in range(0, len(text), 100))
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


@pytest.fixture
def plain(documents, environment, monkeypatch):
    """The losses of the same steps on one device, without Ray, and the validation at their end."""
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    config = parse_command(["--data", str(documents), *OPTIONS])
    assert isinstance(config, PretrainConfig)
    data = load_tokens(config, Console(quiet=True))
    model = dataclasses.replace(config.model, vocab_size=data.vocab_size)
    optimizer, mesh, key = create_optimizer(config.optimizer, MAX_STEPS), make_mesh(), jax.random.key(config.seed)
    state = create_train_state(model, optimizer, jax.random.fold_in(key, MAX_STEPS), mesh)
    train_step = make_train_step(model, optimizer, mesh, end_of_text=data.vocab_size - 1)
    losses = []
    for step in range(MAX_STEPS):
        ids = np.arange(config.train.global_batch_size) + step * config.train.global_batch_size
        windows = data.train.windows(ids, seq_len=model.seq_len, order=config.train.order, seed=config.seed)
        state, found = train_step(state, put_batch(windows, mesh), key)
        losses.append(float(found["loss"]))
    num_windows = config.train.eval_batches * config.train.global_batch_size
    validation = Validation(model, data.val, num_windows=num_windows, batch_size=5, end_of_text=data.vocab_size - 1)
    return losses, validation.loss(state.params)


@pytest.mark.fault
def test_two_machines_train_like_one_device(machines, plain, documents, environment, tmp_path, record_property):
    record_property("fault", "two machines, whose devices XLA puts into two slices")
    record_property("lost", "nothing")
    storage = tmp_path / "storage"
    args = ["--data", str(documents), "--storage-path", str(storage), "--hardware=cpu:2", *OPTIONS]
    done = subprocess.run(
        [*COMMAND, *args], env=environment | machines, cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = storage / "run"
    assert json.loads((run / "result.json").read_text())["workers"] == 2  # of one CPU each, as the machines are
    records = read_lines(run / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    np.testing.assert_allclose(losses, plain[0], rtol=0, atol=1e-5)
    assert records[-1]["val_loss"] == pytest.approx(plain[1], abs=1e-5)
