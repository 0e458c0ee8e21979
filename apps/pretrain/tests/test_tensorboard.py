"""TensorBoard's view of a run: its event files, and the answers of its server."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample, read_history, read_samples, read_starts
from pretrain._run.metrics import read_records
from pretrain._trackers.tensorboard import TensorBoard
from pretrain._trackers.tracker import open_trackers
from pretrain._training.run_log import RunLog

events: Any = event_pb2  # its import makes the classes; type checkers do not see them
CONFIG = dataclasses.replace(PRESETS["quickstart"](), trackers=("tensorboard",), prompts=("a|b\n",))
DESCRIPTION = describe(CONFIG, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")
COMMAND = [sys.executable, str(Path(__file__).parents[1])]


def opened(folder, start):
    return open_trackers(CONFIG, DESCRIPTION, folder, start)


def read_events(path):
    """The complete events of a file. A kill may have cut off the last one."""
    data, position = path.read_bytes(), 0
    while position + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, position)
        if position + 16 + size > len(data):
            break
        yield events.Event.FromString(data[position + 12 : position + 12 + size])
        position += 16 + size


def shown(folder, run):
    """By step, what TensorBoard shows: of the files in order, less what a later start hides."""
    found: dict[int, dict[str, float]] = {}
    for path in sorted((folder.tensorboard / run).iterdir()):
        for event in read_events(path):
            if event.session_log.status == events.SessionLog.START:
                found = {step: values for step, values in found.items() if step < event.step}
            for value in event.summary.value:
                if not value.metadata.plugin_data.plugin_name:
                    assert value.tag not in found.setdefault(event.step, {})
                    found[event.step][value.tag] = value.simple_value
    return found


def test_a_later_start_hides_what_it_records_again(tmp_path):
    folder = RunFolder(tmp_path)
    for start, loss in ((0, 3.0), (2, 2.0)):
        trackers = opened(folder, start)
        for step in range(start, 4):
            trackers.write({"step": step, "loss": loss, "val_loss": loss + 1})
        trackers.close()
    assert shown(folder, "train") == {0: {"loss": 3.0}, 1: {"loss": 3.0}, 2: {"loss": 2.0}, 3: {"loss": 2.0}}
    assert shown(folder, "val") == {0: {"loss": 4.0}, 1: {"loss": 4.0}, 2: {"loss": 3.0}, 3: {"loss": 3.0}}


def test_events_have_the_time_of_their_record(tmp_path):
    """Without a time, it is the present."""
    folder, before = RunFolder(tmp_path), time.time()
    trackers = opened(folder, 0)
    trackers.write({"step": 0, "loss": 3.0, "val_loss": 4.0, "time_s": 12345.5})
    trackers.write({"step": 1, "loss": 2.0})
    trackers.write_sample(Sample(step=1, prompt="a|b\n", text="b"))
    trackers.close()
    times = {
        (path.parent.name, value.tag, event.step): event.wall_time
        for path in folder.tensorboard.glob("*/events*")
        for event in read_events(path)
        for value in event.summary.value
    }
    assert [times.pop((name, "loss", 0)) for name in ("train", "val")] == [12345.5] * 2
    assert len(times) == 4
    assert all(before <= time_s <= time.time() for time_s in times.values())


def test_events_are_on_disk_before_the_number_of_their_steps(tmp_path, monkeypatch):
    """The next start does not record these steps again."""
    calls, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (calls.append((os.fstat(file).st_ino, os.fstat(file).st_size)), sync(file))
    )
    folder = RunFolder(tmp_path)
    trackers = opened(folder, 0)
    trackers.write({"step": 0, "loss": 3.0, "val_loss": 4.0})
    trackers.close()
    files = [path.stat() for path in folder.tensorboard.glob("*/events*")]
    marker = (folder.tensorboard / "recorded_steps").stat()
    before = calls[: calls.index((marker.st_ino, marker.st_size))]
    assert len(files) == 2
    assert {(file.st_ino, file.st_size) for file in files} <= {*before}
    assert {(folder.tensorboard / name).stat().st_ino for name in ("train", "val")} <= {inode for inode, _ in before}


def test_a_full_event_file_is_not_changed_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain._trackers.tensorboard._FULL_BYTES", 1000)
    folder = RunFolder(tmp_path)
    trackers = opened(folder, 0)
    full: dict[Path, bytes] = {}
    for step in range(100):
        trackers.write({"step": step, "loss": float(step)})
        trackers.flush()
        *earlier, newest = sorted((folder.tensorboard / "train").iterdir())
        assert {path: path.read_bytes() for path in full} == full
        assert newest.stat().st_size < 1000
        full = {path: path.read_bytes() for path in earlier}
    trackers.close()
    assert len(full) > 3
    assert shown(folder, "train") == {step: {"loss": float(step)} for step in range(100)}


def test_a_continued_run_without_event_files_gets_each_sample_before_its_start(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(4):
        append_line(folder.metrics, {"step": step, "loss": float(step)})
        append_line(folder.samples, dataclasses.asdict(Sample(step=step, prompt="a|b\n", text=f"text {step}")))
    opened(folder, 3).close()
    texts = [
        (event.step, value.tag)
        for path in sorted((folder.tensorboard / "val").iterdir())
        for event in read_events(path)
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    ]
    assert [step for step, tag in texts if tag.startswith("samples")] == [0, 1, 2]


def test_a_continued_run_without_event_files_gets_the_whole_curve(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(3):
        append_line(folder.metrics, {"step": step, "loss": float(step), "grad_norm_max": 1.0})
    trackers = opened(folder, 3)
    trackers.write({"step": 3, "loss": 3.0, "grad_norm_max": 2.0})
    trackers.close()
    assert shown(folder, "train") == {
        **{step: {"loss": float(step), "optimizer/grad_norm_max": 1.0} for step in range(3)},
        3: {"loss": 3.0, "optimizer/grad_norm_max": 2.0},
    }


def test_a_run_that_had_no_tensorboard_for_a_while_gets_the_whole_curve(tmp_path):
    folder = RunFolder(tmp_path)
    for start in (0, 3):  # another start, without trackers, has recorded the steps 1 and 2
        trackers = opened(folder, start)
        trackers.write({"step": start, "loss": float(start)})
        trackers.close()
        for step in range(3 - start):
            append_line(folder.metrics, {"step": step, "loss": float(step)})
    assert shown(folder, "train") == {step: {"loss": float(step)} for step in range(4)}


# The start of TensorBoard in a run of three steps, killed before the first flush.
STARTING = """
import os, signal, sys
from pathlib import Path
from pretrain._trackers.tensorboard import TensorBoard

tracker = TensorBoard(Path(sys.argv[1]), 3, {}, {}, ())
tracker.write({"step": 0, "loss": 0.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.fault
def test_a_kill_before_the_first_flush_loses_no_metric(tmp_path, record_property):
    record_property("fault", "SIGKILL while TensorBoard's events of earlier steps are written")
    record_property("lost", "nothing: the next start writes them again")
    folder = RunFolder(tmp_path)
    killed = subprocess.run([sys.executable, "-c", STARTING, str(folder.tensorboard)], check=False)
    assert killed.returncode == -signal.SIGKILL
    for step in range(3):
        append_line(folder.metrics, {"step": step, "loss": float(step)})
    opened(folder, 3).close()
    assert shown(folder, "train") == {step: {"loss": float(step)} for step in range(3)}


# A run's log from a step on. Once it is told that step 20 is saved, it goes on until it is killed.
LOGGING = """
import dataclasses, sys, time
from pathlib import Path
from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.folder import RunFolder
from pretrain._training.run_log import RunLog

folder, start, stop = RunFolder(Path(sys.argv[1])), *map(int, sys.argv[2:])
config = dataclasses.replace(PRESETS["quickstart"](), trackers=("tensorboard",))
description = describe(config, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")
with RunLog(folder, config, description, send=lambda record: None) as log:
    log.begin(start, 0.0)
    log.open("cpu", 1)
    for step in range(start, stop):
        if step == 20:
            log.push()  # then the checkpoint of step 20 is saved
            print("saved", flush=True)
        log.write({"step": step, "loss": float(step)})
    while start == 0:
        time.sleep(1)
"""


@pytest.mark.fault
def test_a_kill_after_a_save_loses_no_metric_before_it(tmp_path, record_property):
    record_property("fault", "SIGKILL between a save and the next flush of TensorBoard's events")
    record_property("lost", "steps since the last checkpoint")
    folder = RunFolder(tmp_path)
    for start, stop in ((0, 30), (20, 40)):
        command = [sys.executable, "-c", LOGGING, str(tmp_path), str(start), str(stop)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saved\n"
            if start == 0:
                process.send_signal(signal.SIGKILL)
        assert process.returncode == (-signal.SIGKILL if start == 0 else 0)
        # Whatever of the steps after the save is there: all those before it are.
        assert {step: {"loss": float(step)} for step in range(20)}.items() <= shown(folder, "train").items()
    assert [*shown(folder, "train")] == [*range(40)]
    assert [record["step"] for record in read_records(folder.metrics)] == [*range(40)]


@pytest.mark.fault
def test_event_files_that_cannot_be_written_do_not_stop_the_run(tmp_path, caplog, record_property):
    record_property("fault", "TensorBoard's folder cannot be made")
    record_property("lost", "TensorBoard's curves")
    folder = RunFolder(tmp_path)
    folder.tensorboard.write_text("a file in its place")
    trackers = opened(folder, 0)
    trackers.write({"step": 0, "val_loss": 5.0})
    trackers.close()
    (warning,) = caplog.messages
    assert re.match(r"the run goes on without TensorBoard's events: ", warning)


@contextlib.contextmanager
def server(folder: Path, *, load_fast: str) -> Iterator[Callable[..., Any]]:
    """Start TensorBoard on a folder, and wait until it has read the event files. Yield a function that asks it.

    Args:
        folder: the folder of the event files.
        load_fast: `true` for TensorBoard's data server, its default, `false` for its reader in Python.
    """
    command = [
        sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0",
        "--load_fast", load_fast, "--reload_interval", "1",
    ]  # fmt: skip
    log = folder.parent / f"tensorboard-{load_fast}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline, url = time.monotonic() + 60, None
        while url is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            url = re.search(r"http://127.0.0.1:\d+/", log.read_text())
            time.sleep(0.1)

        def ask(path: str, **arguments: str) -> Any:
            query = urllib.parse.urlencode(arguments)
            with urllib.request.urlopen(f"{url.group()}data/plugin/{path}?{query}", timeout=30) as answer:
                return json.load(answer)

        before, now = None, {}
        while not now or now != before:  # the folders are read one after the other
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(2)
            before, now = now, ask("scalars/tags") | {"text": ask("text/tags")}
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def served(ask, kind, run, tag):
    """Step and value of each scalar, or step and HTML of each text."""
    points = ask(f"{kind}/{kind}", run=run, tag=tag)
    return [(point["step"], point["text"]) if kind == "text" else (point[1], point[2]) for point in points]


@pytest.mark.trackers
@pytest.mark.parametrize("load_fast", ["true", "false"])
def test_the_training_and_the_validation_loss_are_on_one_chart(load_fast, tmp_path):
    folder = RunFolder(tmp_path / "run")
    trackers = opened(folder, 0)
    for step in (0, 10, 20):
        trackers.write({"step": step, "time_s": 1e9 + step, "loss": 3.0, "val_loss": 4.0, "mfu": 0.5})
        trackers.write_sample(Sample(step=step, prompt="a|b\n", text=f"a|b\n<b>{step}</b> *x*"))
    trackers.close()
    with server(folder.tensorboard, load_fast=load_fast) as ask:
        charts = ask("timeseries/tags")["scalars"]["runTagInfo"]  # Time Series has a chart for each tag
        assert charts == {"train": ["loss", "speed/mfu"], "val": ["loss"]}
        assert ask("scalars/scalars", run="train", tag="loss") == [[1e9 + step, step, 3.0] for step in (0, 10, 20)]
        samples = served(ask, "text", "val", "samples/1/text_summary")
        ((step, config),) = served(ask, "text", "train", "config/text_summary")
    assert [step for step, _ in samples] == [0, 10, 20]
    assert "<pre><code>a|b\n&lt;b&gt;20&lt;/b&gt; *x*\n</code></pre>" in samples[-1][1]
    assert step == 0
    assert re.search(r"<td>model\.num_layers</td>\s*<td>\d+</td>", config)
    assert re.search(r'<td>prompts</td>\s*<td>\["a|b\\n"\]</td>', config)


@pytest.mark.trackers
@pytest.mark.parametrize("load_fast", ["true", "false"])
def test_the_page_hparams_has_a_row_for_each_run(load_fast, tmp_path):
    """With the options that change the result, and the last validation losses. One run is continued, and not ended."""
    expected = {}
    for rate, decay, ends in ((3e-4, None, True), (1e-3, 900, False)):
        optimizer = dataclasses.replace(CONFIG.optimizer, learning_rate=rate, decay_steps=decay)
        config = dataclasses.replace(CONFIG, optimizer=optimizer)
        folder = RunFolder(tmp_path / "runs" / f"rate-{rate}")
        for start in (0, 20):
            description = dataclasses.replace(DESCRIPTION, config=config)
            trackers = open_trackers(config, description, folder, start)
            trackers.write({"step": start, "loss": 3.0, "val_loss": 1e3 * rate + start})
            trackers.write({"step": start + 10, "loss": 2.0})
            trackers.close()
        if ends:
            trackers = open_trackers(config, dataclasses.replace(DESCRIPTION, config=config), folder, 40)
            trackers.write({"step": 40, "val_loss": 7.5, "full_val_loss": 8.5})
            trackers.close()
        values = {("loss", 40): 7.5, ("full_loss", 40): 8.5} if ends else {("loss", 20): pytest.approx(21.0)}
        expected[f"rate-{rate}/tensorboard/val"] = (rate, decay, values, "STATUS_SUCCESS" if ends else "STATUS_UNKNOWN")
    with server(tmp_path / "runs", load_fast=load_fast) as ask:
        experiment = ask("hparams/experiment", request="{}")
        columns = {info["name"]: info for info in experiment["hparamInfos"]}
        metrics = [info["name"] for info in experiment["metricInfos"]]
        request = {
            "startIndex": 0, "sliceSize": 10, "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_RUNNING"],
            "colParams": [{"metric": name, "includeInResult": True} for name in metrics]
            + [{"hparam": name, "includeInResult": True} for name in columns],
        }  # fmt: skip
        groups = ask("hparams/session_groups", request=json.dumps(request))["sessionGroups"]
    assert [name for name, info in columns.items() if info.get("differs")] == ["optimizer.learning_rate"]
    assert not {"train.log_every", "hardware", "name"} & columns.keys()
    assert [metric["tag"] for metric in metrics] == ["full_loss", "loss"]
    found = {}
    for group in groups:
        (session,) = group["sessions"]
        values = {(v["name"]["tag"], v["trainingStep"]): v["value"] for v in session["metricValues"]}
        options = group["hparams"]
        found[session["name"]] = (
            options["optimizer.learning_rate"], options.get("optimizer.decay_steps"), values, session["status"]
        )  # fmt: skip
    assert found == expected


@pytest.fixture(scope="module")
def killed_twice(tmp_path_factory):
    """The folder of a real run that was killed twice and then finished."""
    storage = tmp_path_factory.mktemp("runs")
    folder = RunFolder(storage / "run")
    corpus = storage / "corpus.txt"
    corpus.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(5_000)))
    command = [
        *COMMAND, "--preset=baby", f"--data={corpus}", "--hardware=local", f"--storage-path={storage}", "--name=run",
        "--tokenizer=bytes", "--model.num-layers=1", "--model.num-heads=1", "--model.embed-dim=16",
        "--model.seq-len=16", "--train.global-batch-size=4", "--train.max-steps=400", "--train.log-every=2",
        "--train.eval-every=50", "--train.eval-tokens=256", "--train.checkpoint-every=30",
        "--train.sample-tokens=8",
    ]  # fmt: skip
    caches = {"XDG_CACHE_HOME": str(storage / "cache"), "JAX_COMPILATION_CACHE_DIR": str(storage / "compiled")}
    for last_step in (100, 250, None):
        with (storage / "log").open("wb") as log:
            process = subprocess.Popen(command, env=os.environ | caches, stdout=log, stderr=subprocess.STDOUT)
        while last_step is not None and process.poll() is None:
            if any(record["step"] >= last_step for record in read_records(folder.metrics)):
                process.kill()
                break
            time.sleep(0.02)
        code = process.wait(120)
        assert code == (0 if last_step is None else -signal.SIGKILL), (storage / "log").read_text()
    assert len(read_starts(folder)) == 3
    return folder


@pytest.mark.trackers
@pytest.mark.fault
@pytest.mark.parametrize("load_fast", ["true", "false"])
def test_a_run_that_was_killed_twice_is_served_without_a_hole_or_a_double(killed_twice, load_fast, record_property):
    record_property("fault", "SIGKILL of a run, twice")
    record_property("lost", "nothing that TensorBoard serves")
    records, samples = read_records(killed_twice.metrics), read_samples(killed_twice)
    with server(killed_twice.tensorboard, load_fast=load_fast) as ask:
        train, val = (served(ask, "scalars", run, "loss") for run in ("train", "val"))
        texts = served(ask, "text", "val", "samples/1/text_summary")
        configs = served(ask, "text", "train", "config/text_summary")
    assert train == [(record["step"], pytest.approx(record["loss"])) for record in records if "loss" in record]
    assert val == [(record["step"], pytest.approx(record["val_loss"])) for record in records if "val_loss" in record]
    assert [step for step, _ in train] == [*range(2, 401, 2)]
    assert [step for step, _ in val] == [*range(0, 401, 50)]
    assert [step for step, _ in texts] == [sample.step for sample in samples] == [*range(0, 401, 50)]
    assert [step for step, _ in configs] == [0]


@pytest.mark.parametrize("damage", ["pipe", b"", b"-3", b"2.5", b"\xff"])
def test_a_damaged_number_of_recorded_steps_counts_as_none(damage, tmp_path):
    marker = tmp_path / "recorded_steps"
    if damage == "pipe":
        os.mkfifo(marker)
    else:
        marker.write_bytes(damage)
    tracker = TensorBoard(tmp_path, 7, {}, {}, ())
    assert tracker.first_step == 0
    tracker.write({"step": 7, "loss": 1.0})
    tracker.close()
    assert marker.read_text() == "8"
    with contextlib.closing(TensorBoard(tmp_path, 9, {}, {}, ())) as tracker:
        assert tracker.first_step == 8


def test_scores_on_tasks_are_shown_once_whatever_is_killed(tmp_path):
    """They are at the step at which they came. A continued run reaches that step again."""
    folder = RunFolder(tmp_path)
    for step in (0, 10, 20):
        append_line(folder.metrics, {"step": step, "loss": float(step)})
    scores = [{"step": 10, "tasks/step": 8, "tasks/a/acc": 0.25}, {"step": 20, "tasks/step": 16, "tasks/a/acc": 0.5}]
    for line in scores:
        append_line(folder.scores, line)
    expected = {0: {"loss": 0.0}, 10: {"loss": 10.0, **scores[0]}, 20: {"loss": 20.0, **scores[1]}}
    expected = {step: {k: v for k, v in line.items() if k != "step"} for step, line in expected.items()}
    for start in (20, 10):  # each start writes the record of its step, and of later steps, again
        with RunLog(folder, CONFIG, DESCRIPTION, send=lambda record: None) as log:
            log.begin(start, 0.0)
            log.open("cpu", 1)
            for step in range(start, 30, 10):
                log.write({"step": step, "loss": float(step)})
        assert shown(folder, "train") == expected
    assert [line["tasks/a/acc"] for line in read_history(folder, DESCRIPTION).scores] == [0.25, 0.5]
    assert [line["step"] for line in read_history(folder, DESCRIPTION).scores] == [8, 16]
