"""Trackers get each step once, whatever kills the run. The tests of wandb and trackio use the real packages offline."""

import dataclasses
import importlib
import json
import signal
import sqlite3
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pretrain import PRESETS
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription, describe
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample
from pretrain._trackers.row_tracker import RowTracker
from pretrain._trackers.shown_values import settings, tagged
from pretrain._trackers.tracker import Trackers, check_trackers, open_trackers
from pretrain._trackers.tracker import _run_id as run_id
from pretrain._trackers.trackio_tracker import TrackioTracker
from pretrain._trackers.wandb_tracker import WandbTracker

CONFIG = PRESETS["quickstart"]()
DESCRIPTION = describe(CONFIG, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")

# A start of a run: it writes the steps from its first one, and a sample at each tenth step, and may then be killed. The
# wait gives trackio's thread time to write some of the rows.
START = """
import dataclasses, os, signal, sys, time
from pathlib import Path
from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample
from pretrain._run.metrics import cut_lines
from pretrain._trackers.tracker import open_trackers

folder, tracker, start, stop, killed = RunFolder(Path(sys.argv[1])), sys.argv[2], *map(int, sys.argv[3:])
config = dataclasses.replace(PRESETS["quickstart"](), trackers=(tracker,))
description = describe(config, DataDescription(tokens="a", tokenizer="bytes", fingerprint={}), "cpu:1")
cut_lines(folder.metrics, start - 1)
cut_lines(folder.samples, start - 1, texts=("prompt", "text"))
trackers = open_trackers(config, description, folder, start)
for step in range(start, stop):
    if step % 10 == 0:
        sample = Sample(step=step, prompt="a", text=f"a {step}")
        append_line(folder.samples, dataclasses.asdict(sample))
        trackers.write_sample(sample)
    if step % 10 == 5:
        trackers.flush()
        time.sleep(1.5)
    record = {"step": step, "time_s": 1e9 + step, "loss": step / 2}
    append_line(folder.metrics, record)
    trackers.write(record)
if killed:
    os.kill(os.getpid(), signal.SIGKILL)
trackers.close()
"""


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No account, no network, and no file outside of the test's folder."""
    for name, value in {
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }.items():
        monkeypatch.setenv(name, value)


def run_with_two_kills(folder, tracker):
    """Run 40 steps. Kills after steps 26 and 33 lose the steps from 20 and from 30 on."""
    for start, stop, killed in ((0, 27, 1), (20, 34, 1), (30, 40, 0)):
        args = [str(folder), tracker, str(start), str(stop), str(killed)]
        done = subprocess.run([sys.executable, "-c", START, *args], capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
        assert "the run goes on without" not in done.stderr


def wandb_rows(path):
    """The rows of a file that `wandb sync` uploads: blocks of 32 KiB with parts of records."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")  # type checkers do not see its classes
    data, position, record, rows = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32_768 - position % 32_768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + size]
        position += 7 + size
        record = part if kind in (1, 2) else record + part  # 1: all of a record; 2, 3, 4: its begin, middle, end
        if kind in (1, 4):
            items = proto.Record.FromString(record).history.item
            rows += [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}]
    return [row for row in rows if row]


@pytest.mark.trackers
@pytest.mark.fault
def test_wandb_has_each_step_once_after_two_kills(tmp_path, offline, record_property):
    record_property("fault", "SIGKILL of a run with wandb offline, twice")
    record_property("lost", "nothing: the curve is written again")
    run_with_two_kills(tmp_path, "wandb")
    run_id = (tmp_path / "tracker_id").read_text()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = wandb_rows(file)
    assert file.name == f"run-{run_id}.wandb"
    assert [(row["_step"], row["train/loss"]) for row in rows] == [(step, step / 2) for step in range(40)]
    tables = [json.loads((file.parent / "files" / row["samples.path"]).read_text()) for row in rows[::10]]
    assert [table["data"] for table in tables] == [[["a", f"a {step}"]] for step in range(0, 40, 10)]


@pytest.mark.trackers
@pytest.mark.fault
def test_trackio_has_each_step_once_after_two_kills(tmp_path, offline, record_property):
    record_property("fault", "SIGKILL of a run with trackio, twice")
    record_property("lost", "nothing: the next start writes what is missing")
    run_with_two_kills(tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "pretrain.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {f"{tmp_path.name}-{(tmp_path / 'tracker_id').read_text()}"}
    metrics = [(step, json.loads(values)) for _, step, values in rows]
    assert [(step, values["train/loss"]) for step, values in metrics] == [(step, step / 2) for step in range(40)]
    samples = {step: values["samples/1"]["_value"] for step, values in metrics if "samples/1" in values}
    assert samples == {step: f"a {step}" for step in range(0, 40, 10)}
    assert json.loads(config)["optimizer"]["learning_rate"] == CONFIG.optimizer.learning_rate


@pytest.mark.trackers
def test_wandb_without_an_account_does_not_stop_the_run(tmp_path, offline, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_MODE")
    config = dataclasses.replace(CONFIG, trackers=("wandb",))
    trackers = open_trackers(config, DESCRIPTION, RunFolder(tmp_path), 0)
    trackers.write({"step": 0, "loss": 1.0})
    trackers.close()
    (warning,) = caplog.messages
    assert warning.startswith("the run goes on without wandb: No API key configured.")


@pytest.mark.trackers
def test_the_check_does_not_import_the_packages(tmp_path):
    code = (
        "import dataclasses, sys; from pretrain import PRESETS; from pretrain._trackers.tracker import check_trackers\n"
        "check_trackers(dataclasses.replace(PRESETS['quickstart'](), trackers=('tensorboard', 'wandb', 'trackio')))\n"
        "assert not {'wandb', 'trackio', 'tensorboardX'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("has_folder", [False, True], ids=["nothing", "a folder of that name"])
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_without_its_package_is_rejected(name, has_folder, tmp_path, monkeypatch):
    if has_folder:
        (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    message = (
        f"trackers must have their packages, got {name}, which is not installed. Install it with `--extra {name}`."
    )
    with pytest.raises(UsageError) as caught:
        check_trackers(dataclasses.replace(CONFIG, trackers=("tensorboard", name)))
    assert str(caught.value) == message


def test_a_run_without_trackers_writes_nothing(tmp_path):
    trackers = open_trackers(dataclasses.replace(CONFIG, trackers=()), DESCRIPTION, RunFolder(tmp_path), 0)
    trackers.write({"step": 0, "loss": 1.0})
    trackers.close()
    assert [*tmp_path.iterdir()] == []


class Rows(RowTracker):
    """A tracker that keeps its rows."""

    def __init__(self, first_step: int = 0, fails_at: int | None = None) -> None:
        super().__init__()
        self.first_step, self.fails_at, self.rows, self.is_open = first_step, fails_at, [], True

    def send(self, step, values, samples):
        assert self.is_open
        if step == self.fails_at:
            raise OSError("the service does not answer")
        self.rows.append((step, dict(values), [sample.text for sample in samples]))

    def finish(self):
        self.is_open = False


def sample_of(step, text):
    return Sample(step=step, prompt="a", text=text)


def test_a_row_has_all_of_a_step_and_is_sent_when_the_next_step_begins():
    tracker = Rows()
    tracker.write_sample(sample_of(0, "first"))
    tracker.write_sample(sample_of(0, "second"))
    tracker.write({"step": 0, "time_s": 1e9, "val_loss": 5.5})
    tracker.flush()
    assert tracker.rows == []
    tracker.write({"step": 3, "loss": 2.0})
    assert tracker.rows == [(0, {"val/loss": 5.5}, ["first", "second"])]
    tracker.write({"step": 7, "loss": 1.5})
    tracker.write_sample(sample_of(7, "third"))
    tracker.write({"step": 7, "val_loss": 1.75})
    tracker.write_sample(sample_of(9, "fourth"))
    tracker.close()
    assert tracker.rows[1:] == [
        (3, {"train/loss": 2.0}, []),
        (7, {"train/loss": 1.5, "val/loss": 1.75}, ["third"]),
        (9, {}, ["fourth"]),
    ]
    assert not tracker.is_open


def test_each_tracker_gets_the_steps_that_it_lacks_and_one_that_fails_is_dropped(caplog):
    trackers = Trackers()
    behind, ahead, failing = Rows(), Rows(first_step=3), Rows(fails_at=1)
    trackers.add("wandb", lambda: failing)
    trackers.add("tensorboard", lambda: behind)
    trackers.add("trackio", lambda: ahead)
    for step in range(5):
        trackers.write_sample(sample_of(step, f"text {step}"))
        trackers.write({"step": step, "loss": step / 2})
    trackers.close()
    assert [row[0] for row in failing.rows] == [0]
    assert behind.rows == [(step, {"train/loss": step / 2}, [f"text {step}"]) for step in range(5)]
    assert ahead.rows == behind.rows[3:]
    assert (behind.is_open, ahead.is_open, failing.is_open) == (False, False, True)
    (warning,) = caplog.messages
    assert warning.startswith("the run goes on without wandb: ")
    assert "the service does not answer" in warning


# Stand-ins for the packages, which the tests with the mark `trackers` use.


@pytest.mark.parametrize("is_offline", [False, True])
def test_wandb_gets_the_steps_that_it_lacks_and_offline_all_in_place_of_the_former_ones(
    is_offline, tmp_path, monkeypatch
):
    given, rows, ended = {}, [], []
    place = SimpleNamespace(sync_dir=str(tmp_path / "wandb" / "offline-run-2-id"))

    def init(**options):
        given.update(options)
        return SimpleNamespace(
            url=None, offline=is_offline, starting_step=7, settings=place, finish=lambda: ended.append(True),
            log=lambda values, **row: rows.append((values, row)),
        )  # fmt: skip

    module = SimpleNamespace(init=init, Table=lambda **table: table, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    names = {"offline-run-1-id", "offline-run-2-id", "offline-run-1-other", "run-1-id"}
    for name in names:
        (tmp_path / "wandb" / name).mkdir(parents=True)
    tracker = WandbTracker(tmp_path, "a run", "id", {"seed": 1})
    assert tracker.first_step == (0 if is_offline else 7)
    left = names - ({"offline-run-1-id"} if is_offline else set())
    assert {path.name for path in (tmp_path / "wandb").iterdir()} == left
    expected = {"project": "mine", "id": "id", "name": "a run", "resume": "allow", "config": {"seed": 1}}
    assert {name: given[name] for name in expected} == expected
    assert given["dir"] == tmp_path
    tracker.write_sample(sample_of(9, "text"))
    tracker.write({"step": 9, "loss": 2.0})
    tracker.write({"step": 12, "loss": 1.0})
    tracker.close()
    table = {"columns": ["prompt", "text"], "data": [["a", "text"]]}
    assert rows == [
        ({"train/loss": 2.0, "samples": table}, {"step": 9, "commit": True}),
        ({"train/loss": 1.0}, {"step": 12, "commit": True}),
    ]
    assert ended == [True]


def test_trackio_gets_the_steps_that_it_lacks_and_prints_nothing(monkeypatch, capsys):
    given, rows = {}, []

    def init(**options):
        print("trackio")  # noqa: T201 - as the package does
        given.update(options)
        return SimpleNamespace(_next_step=5, log=lambda values, **row: rows.append((values, row)))

    module = SimpleNamespace(init=init, Markdown=lambda text: ("Markdown", text), finish=lambda: print("trackio"))  # noqa: T201
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    tracker = TrackioTracker("a run", "id", {"seed": 1})
    assert (tracker.first_step, given["name"], given["project"]) == (5, "a run-id", "pretrain")
    assert (given["resume"], given["config"]) == ("allow", {"seed": 1})
    for text in ("first", "second"):
        tracker.write_sample(sample_of(6, text))
    tracker.write({"step": 6, "loss": 2.0})
    tracker.close()
    texts = {"samples/1": ("Markdown", "first"), "samples/2": ("Markdown", "second")}
    assert rows == [({"train/loss": 2.0, **texts}, {"step": 6})]
    assert capsys.readouterr().out == ""


def test_each_metric_has_its_own_tag():
    records = {
        "loss": "train/loss", "val_loss": "val/loss", "full_val_loss": "val/full_loss",
        "val_bits_per_byte": "val/bits_per_byte", "full_val_bits_per_byte": "val/full_bits_per_byte",
        "grad_norm_max": "optimizer/grad_norm_max", "learning_rate": "optimizer/learning_rate",
        "num_skipped": "optimizer/num_skipped", "skipped_step": "optimizer/skipped_step",
        "spike_step": "optimizer/spike_step", "spike_score": "optimizer/spike_score",
        "epoch": "progress/epoch", "tokens": "progress/tokens",
        "data_wait_s": "speed/data_wait_s", "memory_bytes": "speed/memory_bytes", "mfu": "speed/mfu",
        "step_s": "speed/step_s", "tokens_per_s": "speed/tokens_per_s", "another": "another",
        "val_loss/my-web": "val/loss/my-web", "full_val_loss/my-web": "val/full_loss/my-web",
    }  # fmt: skip
    record = {name: float(number) for number, name in enumerate(records)}
    assert tagged({"step": 7, "time_s": 1e9} | record) == {records[name]: value for name, value in record.items()}


def test_the_configuration_that_trackers_show_has_the_origin_of_the_run():
    description = dataclasses.replace(DESCRIPTION, commit="0123abc-dirty")
    shown = settings(description)
    assert (shown["hardware"], shown["versions"], shown["commit"]) == ("cpu:1", description.versions, "0123abc-dirty")
    assert shown["optimizer"]["learning_rate"] == CONFIG.optimizer.learning_rate
    assert shown["trackers"] == CONFIG.trackers


def test_a_run_has_one_id_for_the_trackers_of_all_its_starts(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, again, second = (run_id(RunFolder(tmp_path / name)) for name in ("first", "first", "second"))
    assert first == again == (tmp_path / "first" / "tracker_id").read_text()
    assert first != second
    assert len(bytes.fromhex(first)) == 4


def test_a_tracker_that_is_named_twice_is_opened_once(tmp_path):
    config = dataclasses.replace(CONFIG, trackers=("tensorboard", "tensorboard"))
    trackers = open_trackers(config, DESCRIPTION, RunFolder(tmp_path), 0)
    trackers.write({"step": 0, "loss": 1.0})
    trackers.close()
    assert len([*tmp_path.glob("tensorboard/train/*")]) == 1
