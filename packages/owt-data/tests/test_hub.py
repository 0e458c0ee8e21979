"""Datasets of the Hugging Face hub, by its own client, from a server on this machine that speaks the hub's protocol."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import flask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from werkzeug.serving import make_server

from owt_data import PrepareOptions, is_wikitext_title, prepare, read_manifest, verify

NUM_FILES, ROWS = 4, 300
CARD = """---
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
---
"""
WIKITEXT_CARD = """---
configs:
- config_name: wikitext
  data_files:
  - split: train
    path: wikitext/train-*
  - split: validation
    path: wikitext/validation-*
---
"""


def documents():
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list("abc é\n"), size=rng.integers(3000))) for _ in range(NUM_FILES * ROWS)]


def wikitext_rows(num_articles):
    rng = np.random.default_rng(1)
    rows = [""]
    for number in range(num_articles):
        rows += [f" = Article {number} = \n", "", " = = Section = = \n"]
        rows += [f" The {' '.join(rng.choice(['é', '=', ','], size=80))} \n" for _ in range(5)]
    return rows


def parquet(rows):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), buffer, row_group_size=50)
    return buffer.getvalue()


class Hub:
    """A dataset repository of some parquet files, whose newest revision can be moved."""

    def __init__(self) -> None:
        self.revision = "a" * 40
        self.requests: list[str] = []
        self.sent: Counter[str] = Counter()
        self.seconds_per_read = 0.0
        self.fails_with: int | None = None
        texts = documents()
        self.files = {"README.md": CARD.encode()}
        for number in range(NUM_FILES):
            self.files[f"plain_text/train-{number}.parquet"] = parquet(texts[number * ROWS : (number + 1) * ROWS])
        app = flask.Flask("hub")
        app.before_request(self.fail)
        app.add_url_rule("/api/datasets/org/corpus", view_func=self.info)
        app.add_url_rule("/api/datasets/org/corpus/revision/<revision>", view_func=self.info)
        app.add_url_rule("/api/datasets/org/corpus/tree/<revision>", view_func=self.tree)
        app.add_url_rule("/api/datasets/org/corpus/tree/<revision>/<path:folder>", view_func=self.tree)
        app.add_url_rule("/datasets/org/corpus/resolve/<revision>/<path:path>", view_func=self.resolve)
        self.server = make_server("127.0.0.1", 0, app, threaded=True)

    def fail(self):
        """Answer every request with the status that was set, if one was."""
        if self.fails_with is not None:
            return flask.Response(status=self.fails_with, headers={"Retry-After": "0"})
        return None

    def info(self, revision=None):
        siblings = [{"rfilename": name} for name in self.files]
        return {"_id": "0" * 24, "id": "org/corpus", "sha": revision or self.revision, "siblings": siblings}

    def tree(self, revision, folder=""):
        below = {name.removeprefix(folder).lstrip("/"): name for name in self.files if name.startswith(folder)}
        entries = [
            {"type": "file", "oid": "b" * 40, "size": len(self.files[path]), "path": path}
            for name, path in below.items()
            if "/" not in name
        ]
        folders = {path.partition("/")[0] for name, path in below.items() if "/" in name}
        entries += [{"type": "directory", "oid": "c" * 40, "size": 0, "path": path} for path in sorted(folders)]
        return flask.jsonify(entries)

    def resolve(self, revision, path):
        self.requests.append(f"{revision[0]} {path}")
        if path not in self.files:
            return flask.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        if path == f"plain_text/train-{NUM_FILES - 1}.parquet":
            time.sleep(self.seconds_per_read)
        commit = self.revision if revision == "main" else revision
        headers = {"ETag": f'"{path}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        response = flask.Response(self.files[path], headers=headers)
        response.make_conditional(flask.request, accept_ranges=True, complete_length=len(self.files[path]))
        if flask.request.method == "GET":
            self.sent[path] += len(response.get_data())
        return response


@pytest.fixture
def hub():
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()


@pytest.fixture
def expected(tmp_path) -> Path:
    """The same documents prepared from a file on disk."""
    pq.write_table(pa.table({"text": documents()}), tmp_path / "corpus.parquet")
    prepare(str(tmp_path / "corpus.parquet"), tmp_path / "expected", PrepareOptions(tokenizer="bytes"))
    return tmp_path / "expected"


def environment(hub, folder, *, offline=False):
    """The environment of a command, with the client's address of the hub set to the server."""
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}", "HF_HOME": str(folder / "hf")}
    return {**os.environ, **address, "HF_HUB_OFFLINE": str(int(offline)), "DATASETS_VERBOSITY": "critical"}


def start(hub, folder, name="org/corpus", *, offline=False, num_processes=2):
    """`owt-data prepare NAME` in shards of 50 kB."""
    code = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
    small = "import owt_data._prepare.plan as p; p.MIN_SHARD_BYTES = p.MAX_SHARD_BYTES = 50_000; "
    options = ["--tokenizer", "bytes", "--num-processes", str(num_processes)]
    return subprocess.Popen(
        [sys.executable, "-c", small + code, "prepare", name, str(folder / "out"), *options],
        env=environment(hub, folder, offline=offline),
        stderr=subprocess.PIPE,
        text=True,
    )


def download(hub, folder):
    """Keep a copy of the dataset, which is what HF_HUB_OFFLINE=1 reads."""
    code = "import datasets; datasets.load_dataset('org/corpus', split='train')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(hub, folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kill_in_the_middle(wait_until):
    """SIGKILLs `owt-data prepare` after some shards and before the last."""

    def kill(hub, folder, **options):
        journal = folder / ".out.partial/parts-all/parts.jsonl"
        hub.seconds_per_read = 2.0  # of the last file, before which those of the first will have been recorded
        process = start(hub, folder, **options)
        wait_until(lambda: journal.exists() and journal.read_text().count("\n") > 3, process)  # and a header
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (folder / "out").exists()
        hub.seconds_per_read = 0.0

    return kill


def shards(folder):
    """Name, content and time of every shard file."""
    found = sorted((folder / ".out.partial").glob("parts-*/*.bin"))
    return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in found]


def assert_same_tokens(out, expected):
    for file in ("train.bin", "val.bin"):
        assert (out / file).read_bytes() == (expected / file).read_bytes()
    assert verify(out) == []


def test_a_dataset_is_streamed_and_leaves_no_copy(hub, expected, tmp_path):
    process = start(hub, tmp_path)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_same_tokens(tmp_path / "out", expected)
    copies = [path for path in (tmp_path / "hf").rglob("*") if path.suffix in (".parquet", ".arrow")]
    assert copies == []


@pytest.mark.fault
def test_a_killed_hub_preparation_resumes_with_the_same_revision_and_the_remaining_files(
    hub, expected, tmp_path, record_property, wait_until
):
    record_property("fault", "SIGKILL of a hub preparation, and the dataset moved to another revision")
    record_property("lost", "the shards in progress")
    journal = tmp_path / ".out.partial/parts-all/parts.jsonl"
    hub.seconds_per_read = 2.0  # of the last file, before which those of the first will have been recorded
    process = start(hub, tmp_path)
    wait_until(lambda: journal.exists() and '"stop": [1, ' in journal.read_text(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    hub.revision = "d" * 40
    hub.requests.clear()
    hub.sent.clear()
    hub.seconds_per_read = 0.0
    began = time.monotonic()
    process = start(hub, tmp_path)
    _, err = process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0, err
    assert {request[0] for request in hub.requests} == {"a"}
    first, *_, last = (f"plain_text/train-{number}.parquet" for number in range(NUM_FILES))
    assert hub.sent[first] < 0.5 * len(hub.files[first])  # its footer, for the columns
    assert hub.sent[last] >= 0.9 * len(hub.files[last])
    assert_same_tokens(tmp_path / "out", expected)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.revisions == {"all": "a" * 40}


def test_a_name_that_is_not_on_the_hub_is_rejected(hub, tmp_path):
    process = start(hub, tmp_path, "org/nothing")
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith("error: 'org/nothing' must be a file or a dataset of the Hugging Face hub, got neither (")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.fault
@pytest.mark.parametrize("began_offline", [False, True], ids=["online-first", "offline-first"])
def test_a_preparation_resumed_in_the_other_mode_is_rejected_and_resumes_in_its_own(
    began_offline, hub, expected, tmp_path, record_property, kill_in_the_middle
):
    mode = "offline" if began_offline else "online"
    record_property("fault", f"hub preparation killed {mode}, resumed in the other mode")
    record_property("lost", "nothing")
    download(hub, tmp_path)
    kill_in_the_middle(hub, tmp_path, offline=began_offline)
    before = shards(tmp_path)
    assert len(before) >= 3
    process = start(hub, tmp_path, offline=not began_offline)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert err.startswith(f"error: org/corpus must be read as before its interruption, revision {'a' * 40} in ")
    copy, stream = " as a copy with HF_HUB_OFFLINE=1", " as a stream without HF_HUB_OFFLINE"
    assert err.index(copy) < err.index(stream) if began_offline else err.index(stream) < err.index(copy)
    assert err.count("\n") == 1
    assert shards(tmp_path) == before
    began = time.monotonic()
    process = start(hub, tmp_path, offline=began_offline)
    _, err = process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0, err
    assert_same_tokens(tmp_path / "out", expected)


@pytest.mark.fault
def test_a_copy_downloaded_again_at_another_revision_is_not_mixed_with_the_first(
    hub, tmp_path, record_property, kill_in_the_middle
):
    record_property("fault", "hub preparation killed offline, the copy replaced by another revision")
    record_property("lost", "nothing")
    download(hub, tmp_path)
    kill_in_the_middle(hub, tmp_path, offline=True)
    before = shards(tmp_path)
    shutil.rmtree(tmp_path / "hf")
    hub.revision = "d" * 40
    download(hub, tmp_path)
    process = start(hub, tmp_path, offline=True)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert "error: org/corpus must be read as before its interruption, revision aaaaaaaa" in err
    assert err.count("\n") == 1
    assert shards(tmp_path) == before


@pytest.mark.fault
def test_the_mode_may_change_before_the_first_shard(hub, expected, tmp_path, record_property, kill_in_the_middle):
    record_property("fault", "hub preparation killed before its first shard, resumed in the other mode")
    record_property("lost", "nothing")
    download(hub, tmp_path)
    kill_in_the_middle(hub, tmp_path)
    shutil.rmtree(tmp_path / ".out.partial/parts-all")
    began = time.monotonic()
    process = start(hub, tmp_path, offline=True)
    _, err = process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0, err
    assert_same_tokens(tmp_path / "out", expected)


@pytest.mark.fault
@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_answers_with_an_error_keeps_finished_shards(
    status, hub, expected, tmp_path, record_property, kill_in_the_middle
):
    record_property("fault", f"the hub answers {status} when a killed preparation is resumed")
    record_property("lost", "nothing")
    kill_in_the_middle(hub, tmp_path)
    before = shards(tmp_path)
    hub.fails_with = status
    process = start(hub, tmp_path)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert f"{status}" in err
    assert err.count("\n") == 1
    assert shards(tmp_path) == before
    hub.fails_with = None
    began = time.monotonic()
    process = start(hub, tmp_path)
    _, err = process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0, err
    assert_same_tokens(tmp_path / "out", expected)


def wikitext_command(hub, folder, out, *sources, shard_bytes=20_000):
    """`owt-data prepare` of wikitext, as the Ray tutorial reads it."""
    code = f"""
import sys
import owt_data._prepare.plan as plan
from owt_data._cli import main
plan.MIN_SHARD_BYTES = plan.MAX_SHARD_BYTES = {shard_bytes}
sys.exit(main(sys.argv[1:]))
"""
    options = ["--tokenizer", "bytes", "--documents", "wikitext-titles", "--row-end", "\n"]
    return subprocess.Popen(
        [sys.executable, "-c", code, "prepare", *sources, str(out), *options],
        env=environment(hub, folder),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["made", pytest.param("real", marks=pytest.mark.shared_data)])
def test_wikitext_of_the_hub_has_the_tokens_of_a_local_file_also_after_kills(
    kind, hub, tmp_path, request, record_property, wait_until
):
    record_property("fault", "SIGKILL of a preparation of the hub's wikitext, three times")
    record_property("lost", "the shards in progress")
    if kind == "real":
        path = request.getfixturevalue("corpora") / "wikitext-2-valid.txt"
        rows = [row if row.strip() else "" for row in path.read_text().splitlines(keepends=True)]
    else:
        rows = wikitext_rows(400)
    hub.files["README.md"] = WIKITEXT_CARD.encode()
    splits = {"train": rows, "validation": rows[: len(rows) // 2]}
    for split, part in splits.items():
        (tmp_path / f"{split}.txt").write_text("".join(row or " \n" for row in part))
        for number, half in enumerate((part[:101], part[101:])):
            hub.files[f"wikitext/{split}-{number}.parquet"] = parquet(half)
    local = [f"train={tmp_path}/train.txt", f"val={tmp_path}/validation.txt"]
    process = wikitext_command(hub, tmp_path, tmp_path / "local", *local, shard_bytes=1 << 24)
    assert process.communicate()[1].count("error") == 0
    names = ["train=org/corpus:wikitext:train", "val=org/corpus:wikitext:validation"]
    journal = tmp_path / ".out.partial/parts-train/parts.jsonl"
    for _ in range(3):
        before = journal.stat().st_size if journal.exists() else 0
        process = wikitext_command(hub, tmp_path, tmp_path / "out", *names)
        wait_until(lambda before=before: journal.exists() and journal.stat().st_size > before, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "out").exists()
    began = time.monotonic()
    process = wikitext_command(hub, tmp_path, tmp_path / "out", *names)
    _, err = process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0, err
    assert_same_tokens(tmp_path / "out", tmp_path / "local")
    titles = [sum(map(is_wikitext_title, part)) for part in splits.values()]
    tokens = [np.fromfile(tmp_path / "out" / name, "<u2") for name in ("train.bin", "val.bin")]
    assert [np.count_nonzero(part == 256) for part in tokens] == titles
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert [record.num_documents for record in manifest.files.values()] == titles
