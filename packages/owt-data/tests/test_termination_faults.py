"""Termination of `owt-data prepare`: SIGTERM gives one sentence, SIGKILL no output, and neither a traceback."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pytest

from owt_data import PrepareOptions, prepare, verify
from owt_data._cli import _signals_as_ctrl_c, main

OPTIONS = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
SCHEMA = pa.schema([("text", pa.large_string()), ("starts", pa.bool_()), ("ends", pa.bool_())])
COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
APPEND = "owt_data._prepare.shards.append_record"
NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "


def start(corpus, out, before=""):
    """`owt-data prepare` of the corpus, given four times over, with three tokenizing processes."""
    arguments = ["prepare", *[str(corpus)] * 4, str(out), "--tokenizer", "bytes", "--val-fraction", "0.1"]
    command = [sys.executable, "-c", before + COMMAND, *arguments, "--num-processes", "3"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.fault
@pytest.mark.parametrize("num_shards", [0, 1])
def test_a_terminated_prepare_ends_as_after_ctrl_c(
    num_shards, corpus, tmp_path, record_property, hold_at, wait_until_held
):
    record_property("fault", f"SIGTERM to prepare once it has tokenized {num_shards} shards")
    record_property("lost", "the shards in progress")
    out = tmp_path / "out"
    process = start(corpus, out, hold_at(APPEND, num_shards + 1))
    wait_until_held(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()  # ends once no tokenizing process has the pipe
    assert process.returncode == 130
    assert err == "interrupted: run the same command again to resume\n"
    assert not out.exists()
    began = time.monotonic()
    prepare([str(corpus)] * 4, out, OPTIONS, num_processes=1)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert verify(out) == []


@pytest.mark.fault
@pytest.mark.parametrize("signals", ["SIGTERM " * 8, "SIGINT " * 8, "SIGHUP", "SIGHUP SIGTERM"])
def test_repeated_signals_end_prepare_as_one_does(signals, corpus, tmp_path, record_property, hold_at, wait_until_held):
    record_property("fault", f"{', '.join(signals.split())} to prepare, 30 ms apart")
    record_property("lost", "the shards in progress")
    process = start(corpus, tmp_path / "out", hold_at(APPEND, 2))
    wait_until_held(process)
    for name in signals.split():
        process.send_signal(signal.Signals[name])
        time.sleep(0.03)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted: run the same command again to resume\n")


def test_a_prepare_under_nohup_ignores_the_end_of_its_terminal(corpus, tmp_path, hold_at, wait_until_held):
    process = start(corpus, tmp_path / "out", NOHUP + hold_at(APPEND, 2))
    wait_until_held(process)
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 0


@pytest.mark.fault
def test_tokenizing_processes_of_a_killed_prepare_end_silently(
    corpus, tmp_path, record_property, hold_at, wait_until_held
):
    record_property("fault", "SIGKILL of prepare with three tokenizing processes")
    record_property("lost", "the shards in progress")
    process = start(corpus, tmp_path / "out", hold_at(APPEND, 2))
    wait_until_held(process)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()  # ends once no tokenizing process has the pipe
    assert process.returncode == -signal.SIGKILL
    assert err == ""


@pytest.mark.fault
@pytest.mark.parametrize("received", ["nothing", "schema", "length", "head", "text"])
def test_a_tokenizing_process_whose_stream_is_cut_ends_silently(received, tmp_path, record_property):
    record_property("fault", f"prepare killed when a tokenizing process has received: {received}")
    record_property("lost", "the shard in progress")
    data, after_schema = stream_of_a_shard(tmp_path / "shard.bin"), SCHEMA.serialize().size
    lengths = {"nothing": 0, "schema": after_schema, "length": after_schema + 6, "head": after_schema + 20}
    done = worker(data[: lengths.get(received, after_schema + 50_000)], subprocess.PIPE)
    assert done.stderr == b""
    assert done.stdout == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault
@pytest.mark.parametrize("tokenizer", ["bytes", "unknown"])
def test_a_tokenizing_process_whose_answer_is_not_read_ends_silently(tokenizer, tmp_path, record_property):
    record_property("fault", f"prepare killed before a tokenizing process answers, tokenizer {tokenizer}")
    record_property("lost", "the shard in progress")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = worker(stream_of_a_shard(tmp_path / "shard.bin"), writer, tokenizer)
    finally:
        os.close(writer)
    assert done.stderr == b""


def stream_of_a_shard(path):
    """Return the input of a tokenizing process: the schema, and one shard to write to a path."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        batch = pa.record_batch([["a" * 100_000], [False], [True]], schema=SCHEMA)
        stream.write_batch(batch, custom_metadata={"path": str(path)})
    return sink.getvalue()


def worker(received, answers, tokenizer="bytes"):
    """A tokenizing process that receives some bytes and then the end of its input."""
    command = [sys.executable, "-m", "owt_data._prepare.tokenize_worker", tokenizer]
    return subprocess.run(command, input=received, stdout=answers, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("set_before", [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None])
def test_the_command_line_leaves_the_handler_of_a_signal_as_it_was(set_before, number, articles, tmp_path):
    before = signal.signal(number, set_before)
    try:
        assert main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
        assert signal.getsignal(number) is set_before
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("repeated_within_s", "num_interruptions"), [(60.0, 1), (0.0, 3)])
def test_a_later_signal_interrupts_a_clean_up_that_takes_too_long(
    repeated_within_s: float, num_interruptions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._cli._REPEATED_WITHIN_S", repeated_within_s)
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers[:2]] + [signal.getsignal(signal.SIGINT)]
    found = []
    try:
        with _signals_as_ctrl_c():
            for number in numbers:
                try:
                    signal.raise_signal(number)
                except KeyboardInterrupt:
                    found.append(number)
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 3
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert found == list(numbers[:num_interruptions])


def test_the_command_line_runs_in_another_thread(articles, tmp_path):
    codes = []
    arguments = ["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]
    thread = threading.Thread(target=lambda: codes.append(main(arguments)))
    thread.start()
    thread.join()
    assert codes == [0]
