"""Two ranks, of which one is slow: processes joined by jax.distributed, without Ray."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state
from owt_data import TokenSequence, TokenSpan
from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.files import read_lines, write_json
from pretrain._run.folder import RunFolder
from pretrain._run.log_parts import STARTS, TEXTS
from pretrain._run.metrics import read_records
from pretrain._run.step_losses import read_step_losses, read_val_losses
from pretrain._training.validation import Validation

CONFIG = PRESETS["quickstart"]()
MODEL = dataclasses.replace(CONFIG.model, vocab_size=257, seq_len=8, num_layers=1, num_heads=2, embed_dim=16)
NUM_TOKENS = 1 + 11 * 8 + 3  # eleven windows, and three tokens more
BATCH_SIZE = 4
PARTS = (None, 56)
SOURCES = [("web", 61), ("code", 1), ("more", NUM_TOKENS - 62)]

# Rank 1 reads late, and lacks the tokenizer's files. Both hold a half of the parameters.
CODE = """
import json, sys, time
from pathlib import Path

import jax

from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state, make_mesh
from owt_data import TokenSequence, TokenSpan, load_tokenizer
from pretrain._run.description import read_description
from pretrain._run.folder import RunFolder
from pretrain._training.run_log import RunLog
from pretrain._training.sampling import Sampler
from pretrain._training.validation import Validation

place, rank, port, num_tokens, batch_size = Path(sys.argv[1]), *map(int, sys.argv[2:])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
description = read_description(RunFolder(place / "run"))
model, mesh = description.config.model, make_mesh(fsdp=2)
params = create_train_state(model, create_optimizer(OptimizerConfig(), 10), jax.random.key(0), mesh).params
tokens = TokenSequence((TokenSpan(path=str(place / "val.bin"), start=0, stop=num_tokens),))

def slowly(firsts):
    for first in firsts:
        time.sleep(0.2 * rank)
        yield first

sent, watched = [], []
folder = RunFolder(place / "run")
with RunLog(folder, description.config, description, send=sent.append, watch=watched.append) as log:
    log.begin(0, 1.0)
    log.open("cpu", 2)
    log.phase(0, "training")
    measured = [
        Validation(
            model, tokens, num_tokens=part, batch_size=batch_size, mesh=mesh, sources=SOURCES
        ).evaluate(params, slowly)
        for part in PARTS
    ]
    losses, of_sources = [loss for loss, _ in measured], [of_windows.of_sources for _, of_windows in measured]
    log.write_losses(3, [2.5, 1.5])
    validation = Validation(model, tokens, num_tokens=None, batch_size=batch_size, mesh=mesh)
    log.write_val_losses(validation.evaluate(params)[1])
    log.write({"step": 0, "val_loss": losses[0]})
    log.write({"step": 4, "loss": 2.5})
    log.push()
    kept = [step for step in range(6) if log.keep(step)]
sampler = Sampler(description.config, load_tokenizer("bytes") if rank == 0 else None, mesh)
samples = [sample.text for sample in sampler.samples(params, 0)]
found = {"losses": losses, "of_sources": of_sources, "num_sent": len(sent), "samples": samples}
print(json.dumps(found | {"kept": kept, "watched": watched}))
""".replace("PARTS", str(PARTS)).replace("SOURCES", str(SOURCES))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with validation tokens and a run."""
    place = tmp_path_factory.mktemp("place")
    np.random.default_rng(0).integers(0, 257, NUM_TOKENS).astype("<u2").tofile(place / "val.bin")
    config = dataclasses.replace(
        CONFIG,
        model=MODEL,
        mesh=dataclasses.replace(CONFIG.mesh, fsdp=2),
        train=dataclasses.replace(
            CONFIG.train, sample_tokens=3, checkpoint_every=4, eval_tasks=("piqa",), eval_tasks_every=4
        ),
        prompts=("ab", "cd"),
        trackers=(),
    )
    folder = RunFolder(place / "run")
    folder.path.mkdir()
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={})
    write_json(folder.config, describe(config, data, "cpu:2").to_json())
    return place


@pytest.fixture(scope="module")
def ranks(place):
    """Results of the two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers = [str(port), str(NUM_TOKENS), str(BATCH_SIZE)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(place), str(rank), *numbers],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_the_validation_loss_of_ranks_is_that_of_one_process(ranks, place):
    tokens = TokenSequence((TokenSpan(path=str(place / "val.bin"), start=0, stop=NUM_TOKENS),))
    params = create_train_state(MODEL, create_optimizer(OptimizerConfig(), 10), jax.random.key(0)).params
    alone = [
        Validation(MODEL, tokens, num_tokens=part, batch_size=BATCH_SIZE, sources=SOURCES).evaluate(params)
        for part in PARTS
    ]
    for rank in ranks:
        assert rank["losses"] == pytest.approx([loss for loss, _ in alone], rel=1e-6)
        for found, (_, of_windows) in zip(rank["of_sources"], alone, strict=True):
            assert found == pytest.approx(of_windows.of_sources, rel=1e-6)
            assert {*found} == {"web", "code", "more"}
    assert ranks[0]["of_sources"] == ranks[1]["of_sources"]


def test_rank_0_alone_writes_the_log(ranks, place):
    assert [rank["num_sent"] for rank in ranks] == [6, 0]  # three phases, two records and the end
    folder = RunFolder(place / "run")
    assert [line["step"] for line in read_records(folder.metrics)] == [0, 4]
    assert [line["workers"] for line in read_lines(folder.starts, texts=TEXTS[STARTS])] == [2]


def test_rank_0_alone_writes_the_losses_of_steps_and_of_all_windows(ranks, place):
    folder = RunFolder(place / "run")
    np.testing.assert_array_equal(read_step_losses(folder.step_losses), np.array([np.nan, 2.5, 1.5], np.float32))
    found = read_val_losses(folder.val_losses, 8)
    assert found is not None
    assert (len(found.losses), found.last_count) == (12, 3)
    assert np.average(found.losses, weights=[8] * 11 + [3]) == pytest.approx(ranks[0]["losses"][0], rel=1e-6)


def test_each_rank_keeps_the_checkpoint_that_rank_0_scores_and_tells_when_it_computes_steps(ranks):
    assert [rank["kept"] for rank in ranks] == [[4], [4]]
    # Rank 0 alone has a phase `loading`, and its end.
    assert [rank["watched"] for rank in ranks] == [[False, True, False], [True]]


def test_rank_0_takes_samples_without_the_tokenizer_of_the_others(ranks):
    first, second = ranks
    assert [text[:2] for text in first["samples"]] == ["ab", "cd"]
    assert second["samples"] == []
