"""Parts as tasks of a real Ray cluster."""

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import ray

from owt_data import Batches, PrepareOptions, open_tokens, prepare, prepare_in_background, read_steps, verify
from owt_data._prepare.ray_encoder import ray_encoder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 5000)


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=pytest.mark.shared_data)])
def test_tasks_write_the_same_files(tokenizer, articles, tmp_path, cluster, request, monkeypatch):
    if tokenizer == "gpt2":
        request.getfixturevalue("gpt2")
    options = PrepareOptions(tokenizer=tokenizer, val_fraction=0.1)
    expected = prepare(str(articles), tmp_path / "expected", options, num_processes=1)
    monkeypatch.delattr("owt_data._prepare.prepare.local_encoder")
    given = []
    monkeypatch.setattr(
        "owt_data._prepare.ray_encoder.ray_encoder", lambda *names: given.append(names[1:]) or ray_encoder(*names)
    )
    assert prepare(str(articles), tmp_path / "out", options, num_processes=3, use_ray=True) == expected
    assert given == [(3,)]
    assert verify(tmp_path / "out") == []


def test_tasks_encode_tokens_while_they_are_read(articles, tmp_path, cluster, monkeypatch):
    options = PrepareOptions(tokenizer="bytes", split="start")
    batches = Batches(seq_len=64, global_batch_size=8, order="sequential-first")
    prepare(str(articles), tmp_path / "expected", options, num_processes=1)
    expected = open_tokens(str(tmp_path / "expected"), tokenizer="bytes")
    monkeypatch.delattr("owt_data._prepare.prepare.local_encoder")
    with prepare_in_background(str(articles), tmp_path / "out", options, num_processes=1, use_ray=True) as data:
        growing, finished = (
            read_steps(tokens, batches, start_step=0, stop_step=80) for tokens in (data.train, expected.train)
        )
        for (_, windows), (_, same) in zip(growing, finished, strict=True):
            np.testing.assert_array_equal(windows, same)


@pytest.mark.parametrize(("num_tasks", "num_workers"), [(None, 8), (3, 3)])
def test_twice_the_cpus_encode_unless_a_number_is_given(num_tasks: int | None, num_workers: int, cluster: None) -> None:
    with ray_encoder("bytes", num_tasks) as encoder:
        assert encoder.num_workers == num_workers
    assert ray.is_initialized()  # a cluster that was connected before stays so


def prepare_on(address, articles, out, limit_s=60):
    """Run `prepare --on-cluster` in a process that knows the cluster by its address, and its time limit."""
    code = (
        "import sys; from owt_data._cli import main; from owt_data._prepare import ray_encoder;"
        "ray_encoder._ANSWER_TIMEOUT_S = float(sys.argv[1]); code = main(sys.argv[2:]);"
        "sys.exit(f'left connected after {code}' if ray_encoder.ray.is_initialized() else code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(limit_s), "prepare", articles, out, "--tokenizer", "bytes", "--on-cluster"],
        env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_command_joins_the_cluster_of_the_environment(articles, tmp_path, cluster):
    done = prepare_on(ray.get_runtime_context().gcs_address, articles, tmp_path / "out")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("address", ["", "local"])
def test_the_command_starts_no_cluster(address, articles, tmp_path):
    """One of its own would be no faster than the processes of this machine, and open to the network."""
    done = prepare_on(address, articles, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: RAY_ADDRESS must name a Ray cluster, which tokenizes the text, got {address or 'nothing'}. Set it, or "
        "tokenize on this machine alone, without --on-cluster.\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.fault
def test_tokenizer_files_that_the_cluster_lacks_keep_finished_shards(
    articles, tmp_path, ranks, no_ranks, record_property, cluster
):
    record_property("fault", "the driver has the tokenizer's files, the Ray cluster has not")
    record_property("lost", "nothing")
    script = """
import os, sys
import ray, tiktoken, tiktoken.registry
from tiktoken_ext.openai_public import r50k_pat_str
from owt_data._cli import main
lines = [line.split() for line in open(sys.argv[1], "rb").read().splitlines()]
import base64
pairs = {base64.b64decode(piece): int(rank) for piece, rank in lines}
special = {"<|endoftext|>": len(pairs)}
tiktoken.registry.ENCODINGS["gpt2"] = tiktoken.Encoding(
    "gpt2", pat_str=r50k_pat_str, mergeable_ranks=pairs, special_tokens=special
)
lacks = {name: os.environ[name] for name in ("TIKTOKEN_CACHE_DIR", "HTTPS_PROXY", "https_proxy")}
ray.init(log_to_driver=False, runtime_env={"env_vars": lacks})
sys.exit(main(sys.argv[2:]))
"""
    arguments = [str(ranks), "prepare", str(articles), str(tmp_path / "out"), "--ray"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=no_ranks | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert "A task of Ray that tokenizes has failed: " in done.stderr
    assert "The files of tokenizer 'gpt2' could not be downloaded: ProxyError." in done.stderr
    # Ray warns first if there is no network.
    assert done.stderr.splitlines()[-1].startswith("error: A task of Ray")
    assert "Traceback" not in done.stderr
    assert (tmp_path / ".out.partial/plan.json").exists()


@pytest.mark.fault
@pytest.mark.parametrize("what", ["no server", "a server that says nothing"])
def test_a_missing_cluster_is_reported(what, articles, tmp_path, record_property):
    record_property("fault", f"RAY_ADDRESS names {what}")
    record_property("lost", "nothing")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1] if what != 'no server' else 9}"
        done = prepare_on(address, articles, tmp_path / "out", limit_s=2)
    reason = r"\[Errno \d+\] [\w ]+" if what == "no server" else r"no answer for 2\.0 s"
    assert done.returncode == 2
    assert re.fullmatch(
        rf"error: RAY_ADDRESS must name a Ray cluster that answers, got {address} \({reason}\)\. Correct it, or "
        r"tokenize on this machine alone, without --on-cluster\.\n",
        done.stderr,
    )
