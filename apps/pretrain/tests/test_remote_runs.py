"""The commands `watch` and `runs` on object storage: a local S3 server."""

import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSelector, copy_files
from rich.console import Console

from pretrain import PRESETS
from pretrain._commands.report import report
from pretrain._commands.runs import show_runs
from pretrain._commands.watch import watch
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.find import find_run
from pretrain._run.folder import RunFolder, locate
from pretrain._run.log_parts import METRICS, PHASES, LogWriter
from pretrain._run.remote_copy import pull_changed, reader_copy
from pretrain._trackers.tracker import _run_id as run_id
from ray_jax_launch import LaunchError, open_uri

BEGAN_S = 1_700_000_000.0


@pytest.fixture
def run(s3, tmp_path):
    """The copy of a run at its driver, from where `push` uploads it."""
    folder = RunFolder(tmp_path / "driver", f"{s3}/{tmp_path.name}/run")
    folder.path.mkdir()
    config = PRESETS["quickstart"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
    write_description(folder, describe(config, data, "cpu:1"))
    folder.push()
    return folder


@pytest.fixture
def log(run):
    """The log of the run, whose workers train."""
    log = run.log_writer()
    log.append(PHASES, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
    log.flush()
    return log


@pytest.mark.parametrize(("interval_s", "expected"), [(1.0, 5.0), (9.0, 9.0)])
def test_a_run_in_object_storage_is_watched_by_its_uri(run, log, interval_s, expected):
    out, waited = io.StringIO(), []

    def sleep(interval_s):
        waited.append(interval_s)
        log.append(METRICS, {"step": 25 * len(waited), "time_s": BEGAN_S + 1, "loss": 3.0})
        if len(waited) == 2:
            log.append(PHASES, {"step": 50, "time_s": BEGAN_S + 2, "phase": "stopped"})
        log.flush()

    console = Console(file=out, width=200)
    watch(run.uri, console=console, interval_s=interval_s, clock=lambda: BEGAN_S + 3, sleep=sleep)
    assert out.getvalue().splitlines() == [
        f"watching {run.uri}, started on cpu:1",
        "step   25/1500  loss 3.0000",
        "step   50/1500  loss 3.0000",
        "the run is stopped at step 50: run the same command again to continue",
    ]
    assert waited == [expected, expected]


def test_runs_in_object_storage_are_listed(run, log):
    out = io.StringIO()
    show_runs(run.uri.rpartition("/")[0], console=Console(file=out, width=200), clock=lambda: BEGAN_S + 60)
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["run", "state", "step", "loss", "val", "tokens", "device", "time", "age"],
        ["run", "training", "0/1500", "cpu:1", "1", "min"],
    ]


def test_a_copy_has_the_age_of_its_objects(run):
    """A run whose workers have not started yet tells no time, and the table of runs shows the age of its files."""
    storage, path = open_uri(run.uri)
    time.sleep(1.1)  # the server may tell the time in seconds
    folder, _ = find_run(run.uri)
    assert folder.config.stat().st_mtime_ns == storage.get_file_info(f"{path}/config.json").mtime_ns


def test_a_reader_leaves_the_copy_of_the_training_command_alone(run):
    training = locate(run.uri)
    training.path.mkdir(parents=True)
    training.metrics.write_text("not uploaded yet")
    run.push()
    folder, _ = find_run(run.uri)
    assert folder.config.read_bytes() == run.config.read_bytes()
    assert training.metrics.read_text() == "not uploaded yet"


def test_a_reader_downloads_what_has_changed_and_forgets_what_is_deleted(run, log):
    folder, _ = find_run(run.uri)
    assert not pull_changed(folder)
    log.append(METRICS, {"step": 1, "loss": 3.0})
    log.flush()
    assert pull_changed(folder)
    assert folder.metrics.read_bytes() == run.metrics.read_bytes()
    storage, path = open_uri(run.uri)
    storage.delete_dir(f"{path}/log")
    find_run(run.uri)
    assert not folder.phases.exists()


def test_a_storage_that_does_not_answer_is_no_damaged_run(run, monkeypatch):
    place = run.uri.rpartition("/")[0]
    listed = FileSelector

    def vanish(*args, **options):
        """The server goes away after the list of the runs."""
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        return listed(*args, **options)

    monkeypatch.setattr("pretrain._commands.runs.FileSelector", vanish)
    with pytest.raises(LaunchError, match="the storage must be"):
        show_runs(place, console=Console(quiet=True))


@pytest.mark.parametrize("text", ["another sample", "B sample"], ids=["other size", "equal size"])
def test_a_file_is_uploaded_when_it_has_changed(run, text):
    filesystem, root = open_uri(run.uri)
    run.sample.write_text("a sample")
    run.push()
    for path in (run.config, run.sample):
        filesystem.delete_file(f"{root}/{path.name}")
    run.sample.write_text(text)
    run.push()
    assert [found.base_name for found in filesystem.get_file_info(FileSelector(root))] == ["sample.txt"]
    assert filesystem.open_input_stream(f"{root}/sample.txt").read() == text.encode()


def test_a_copy_that_differs_from_its_object_in_its_time_alone_is_downloaded_again(run):
    folder, _ = find_run(run.uri)
    folder.config.write_text(folder.config.read_text().swapcase())
    assert pull_changed(folder)
    assert folder.config.read_bytes() == run.config.read_bytes()
    assert not pull_changed(folder)


def names(run: RunFolder) -> set[str]:
    """The names of the objects of a run."""
    assert run.uri is not None
    filesystem, root = open_uri(run.uri)
    infos = filesystem.get_file_info(FileSelector(root, recursive=True))
    return {info.path[len(root) + 1 :] for info in infos if info.is_file}


def test_a_result_that_is_deleted_in_the_storage_is_gone_for_its_readers(run: RunFolder) -> None:
    """Another command continues the run after its result was damaged."""
    run.result.write_text("{}")
    run.push()
    folder, _ = find_run(f"{run.uri}")
    assert folder.result.exists()
    filesystem, root = open_uri(f"{run.uri}")
    filesystem.delete_file(f"{root}/result.json")
    assert pull_changed(folder)
    assert not folder.result.exists()
    assert not pull_changed(folder)


def test_a_run_that_is_extended_has_no_result_for_its_readers_and_its_next_command(run: RunFolder) -> None:
    run.result.write_text("{}")
    run.push()
    reader = reader_copy(str(run.uri))
    pull_changed(reader)
    assert reader.result.exists()
    run.delete_result()
    run.delete_result()  # the second time, nothing is there
    run.push()
    pull_changed(reader)
    run.pull()
    assert not run.result.exists()
    assert not reader.result.exists()


def test_logs_are_uploaded_as_files_at_the_end_only_and_the_journal_is_read(run: RunFolder, log: LogWriter) -> None:
    run.push()
    assert {name.partition("/")[0] for name in names(run)} == {"config.json", "log"}
    run.push(with_logs=True)
    assert {name.partition("/")[0] for name in names(run)} == {"config.json", "log", "phases.jsonl"}
    filesystem, root = open_uri(f"{run.uri}")
    with filesystem.open_output_stream(f"{root}/phases.jsonl") as stream:
        stream.write(b'{"step": 9}\n')
    for pull in (RunFolder.pull, pull_changed):
        copy = RunFolder(run.path.parent / pull.__name__, run.uri)
        copy.path.mkdir()
        pull(copy)
        assert copy.phases.read_bytes() == run.phases.read_bytes()


def test_a_result_in_the_storage_has_its_logs_there(
    run: RunFolder, log: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with a result is finished, and uploads no logs any more. A kill may end the uploads after any of them."""
    uploaded, upload = list[str](), copy_files

    def note(*args: Any) -> None:
        upload(*args)
        uploaded.append(Path(args[1]).name)

    monkeypatch.setattr("pretrain._run.folder.copy_files", note)
    log.append(METRICS, {"step": 7})
    run.result.write_text("{}")
    run.push(with_logs=True)
    assert {*uploaded[:2]} == {"metrics.jsonl", "phases.jsonl"}
    assert "result.json" in uploaded


def test_a_copy_has_neither_checkpoints_nor_hidden_files_nor_what_the_storage_lacks(
    run: RunFolder, tmp_path: Path
) -> None:
    filesystem, root = open_uri(f"{run.uri}")
    for name in ("checkpoints/7/params", ".lease/a.json", "tensorboard/plugins/events", "tensorboard/recorded_steps"):
        filesystem.create_dir(f"{root}/{name}".rpartition("/")[0])
        with filesystem.open_output_stream(f"{root}/{name}") as stream:
            stream.write(b"remote")
    copy = RunFolder(tmp_path / "copy", run.uri)
    for name in ("checkpoints/9/params", ".lock", "sample.txt", "tensorboard/old", "tensorboard/.partial"):
        path = copy.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("local")
    copy.pull()
    found = {f"{path.relative_to(copy.path)}" for path in copy.path.rglob("*") if path.is_file()}
    hidden = {"checkpoints/9/params", ".lock", "tensorboard/.partial"}
    assert found == {*hidden, ".log.json", "config.json", "tensorboard/recorded_steps"}
    before = names(run)
    copy.push()
    assert names(run) == before


def test_a_worker_has_a_copy_of_its_own_which_it_deletes_at_its_end(run: RunFolder) -> None:
    training = dataclasses.replace(locate(f"{run.uri}"), owner="the command")
    left = training.for_worker()
    (left.path / "sample.txt").write_text("of a killed worker")
    worker = training.for_worker()
    assert worker.owner == "the command"
    assert len({worker.path, training.path, reader_copy(f"{run.uri}").path}) == 3
    assert worker.config.read_bytes() == run.config.read_bytes()
    assert not worker.sample.exists()
    worker.delete_copy()
    assert not worker.path.exists()
    assert run.config.exists()
    here = RunFolder(run.path)
    assert here.for_worker() == here
    here.delete_copy()
    assert run.config.exists()


@pytest.mark.parametrize("place", ["absent", "run/checkpoints"])
def test_a_uri_without_runs_is_rejected(run, place):
    with pytest.raises(UsageError, match="the storage path must hold the folder of a run"):
        show_runs(f"{run.uri.rpartition('/')[0]}/{place}", console=Console(quiet=True))


def test_the_page_of_a_run_in_object_storage_is_in_the_working_folder(run, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report([run.uri], out=None, console=Console(quiet=True)) == Path("report.html")
    assert "<h1>run</h1>" in Path("report.html").read_text()


def test_another_machine_has_the_id_for_the_trackers_from_the_begin_of_a_run(run, tmp_path):
    """A run that is killed before its first checkpoint continues the curve of its trackers too."""
    first = run_id(run)
    copy = RunFolder(tmp_path / "copy", run.uri)
    copy.pull()
    assert run_id(copy) == first
