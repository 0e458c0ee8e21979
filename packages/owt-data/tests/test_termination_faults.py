"""What happens when `owt-data prepare` is terminated or killed: a sentence or nothing, and no traceback."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from owt_data import PrepareOptions, prepare, verify
from owt_data._cli import main

OPTIONS = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
SCHEMA = pa.schema([("text", pa.large_string()), ("ends", pa.bool_())])
COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """10 MB of documents."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = ({"text": "".join(rng.choices("abcdefgh \n", k=rng.randrange(5000)))} for _ in range(4000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(corpus, out):
    """`owt-data prepare` of the corpus, given four times over, with three tokenizing processes."""
    arguments = ["prepare", *[str(corpus)] * 4, str(out), "--tokenizer", "bytes", "--val-fraction", "0.1"]
    command = [sys.executable, "-c", COMMAND, *arguments, "--num-processes", "3"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.fault
@pytest.mark.parametrize("moment", ["plan.json", "parts-all/parts.jsonl"])
def test_a_terminated_prepare_says_so_as_after_ctrl_c(moment, corpus, tmp_path, record_property):
    record_property("fault", f"SIGTERM to prepare once it has {Path(moment).name}")
    record_property("lost", "the parts under way")
    out, reached = tmp_path / "out", tmp_path / ".out.partial" / moment
    process = start(corpus, out)
    while not (reached.exists() and reached.stat().st_size):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()  # ends once no tokenizing process has the pipe
    assert process.returncode == 130
    assert err == "interrupted: run the same command again to resume\n"
    assert not out.exists()
    began = time.monotonic()
    prepare([str(corpus)] * 4, out, OPTIONS)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert verify(out) == []


@pytest.mark.fault
def test_tokenizing_processes_of_a_killed_prepare_end_silently(corpus, tmp_path, record_property):
    record_property("fault", "SIGKILL of prepare with three tokenizing processes")
    record_property("lost", "the parts under way")
    out, journal = tmp_path / "out", tmp_path / ".out.partial/parts-all/parts.jsonl"
    process = start(corpus, out)
    while not (journal.exists() and journal.stat().st_size):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()  # ends once no tokenizing process has the pipe
    assert process.returncode == -signal.SIGKILL
    assert err == ""


@pytest.mark.fault
@pytest.mark.parametrize("part", ["nothing", "schema", "length", "head", "text"])
def test_a_tokenizing_process_whose_stream_is_cut_ends_silently(part, tmp_path, record_property):
    record_property("fault", f"prepare killed when a tokenizing process has received: {part}")
    record_property("lost", "the part under way")
    data, after_schema = stream_of_a_part(tmp_path / "part.bin"), SCHEMA.serialize().size
    lengths = {"nothing": 0, "schema": after_schema, "length": after_schema + 6, "head": after_schema + 20}
    done = worker(data[: lengths.get(part, after_schema + 50_000)], subprocess.PIPE)
    assert done.stderr == b""
    assert done.stdout == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault
@pytest.mark.parametrize("tokenizer", ["bytes", "unknown"])
def test_a_tokenizing_process_whose_answer_nobody_reads_ends_silently(tokenizer, tmp_path, record_property):
    record_property("fault", f"prepare killed before a tokenizing process answers, tokenizer {tokenizer}")
    record_property("lost", "the part under way")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = worker(stream_of_a_part(tmp_path / "part.bin"), writer, tokenizer)
    finally:
        os.close(writer)
    assert done.stderr == b""


def stream_of_a_part(path):
    """What a tokenizing process receives: the schema, and one part to write to a path."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        batch = pa.record_batch([["a" * 100_000], [True]], schema=SCHEMA)
        stream.write_batch(batch, custom_metadata={"path": str(path)})
    return sink.getvalue()


def worker(received, answers, tokenizer="bytes"):
    """A tokenizing process that receives some bytes and then the end of its input."""
    command = [sys.executable, "-m", "owt_data._prepare.tokenize_worker", tokenizer]
    return subprocess.run(command, input=received, stdout=answers, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("set_before", [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None])
def test_the_command_line_leaves_the_handler_of_sigterm_as_it_was(set_before, articles, tmp_path):
    before = signal.signal(signal.SIGTERM, set_before)
    try:
        assert main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
        assert signal.getsignal(signal.SIGTERM) is set_before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_line_runs_in_another_thread(articles, tmp_path):
    codes = []
    arguments = ["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]
    thread = threading.Thread(target=lambda: codes.append(main(arguments)))
    thread.start()
    thread.join()
    assert codes == [0]
