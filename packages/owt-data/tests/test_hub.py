"""Datasets of the Hugging Face hub, by its own client, from a server on this machine that speaks the hub's protocol."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import (
    PrepareOptions,
    is_wikitext_title,
    load_tokenizer,
    open_documents,
    open_tokens,
    prepare,
    read_manifest,
    verify,
)

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


# As in the cards of HuggingFaceFW/fineweb and HuggingFaceFW/fineweb-edu.
FINEWEB_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def wikitext_rows(num_articles):
    rng = np.random.default_rng(1)
    rows = [""]
    for number in range(num_articles):
        rows += [f" = Article {number} = \n", "", " = = Section = = \n"]
        rows += [f" The {' '.join(rng.choice(['é', '=', ','], size=80))} \n" for _ in range(5)]
    return rows


@pytest.fixture(scope="module")
def expected(hub_server, tmp_path_factory) -> Path:
    """The same documents prepared from a file on disk."""
    folder = tmp_path_factory.mktemp("expected")
    pq.write_table(pa.table({"text": hub_server.texts}), folder / "corpus.parquet")
    prepare(str(folder / "corpus.parquet"), folder / "out", PrepareOptions(tokenizer="bytes"), num_processes=1)
    return folder / "out"


def environment(hub, home, *, offline=False):
    """The environment of a command, with the client's address of the hub set to the server."""
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}", "HF_HOME": str(home)}
    return {**os.environ, **address, "HF_HUB_OFFLINE": str(int(offline)), "DATASETS_VERBOSITY": "critical"}


def prepare_code(shard_bytes):
    """The start of a program with shards of this size."""
    return f"import sys, owt_data._prepare.planning as p; p.MIN_SHARD_BYTES = p.MAX_SHARD_BYTES = {shard_bytes}\n"


def arguments(folder, *sources, num_processes=1):
    sources = sources or ("org/corpus",)
    return ["prepare", *sources, str(folder / "out"), "--tokenizer", "bytes", "--num-processes", str(num_processes)]


def start(hub, home, arguments, *, offline=False, shard_bytes=50_000, before=""):
    """`owt-data` with these arguments, as a process of its own, after some code."""
    code = before + prepare_code(shard_bytes) + "from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment(hub, home, offline=offline),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def download(hub, home):
    """Keep a copy of the dataset, which is what HF_HUB_OFFLINE=1 reads."""
    code = "import datasets; datasets.load_dataset('org/corpus', split='train')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(hub, home), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def copy(hub_server, tmp_path_factory) -> Path:
    """A folder of the client with a copy of the first revision."""
    hub_server.reset()
    home = tmp_path_factory.mktemp("copy")
    download(hub_server, home)
    return home


RUN_EACH = """
import contextlib, io, json
from owt_data._cli import main
for line in sys.stdin:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(json.loads(line))
    print(json.dumps([code, err.getvalue()]), flush=True)
"""


@contextlib.contextmanager
def one_process(hub, home, *, offline=False):
    """Runs `owt-data` in one process, which imports the client once. Gives exit code and stderr."""
    with subprocess.Popen(
        [sys.executable, "-c", prepare_code(50_000) + RUN_EACH],
        env=environment(hub, home, offline=offline),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(*arguments):
            print(json.dumps(arguments), file=stdin, flush=True)
            return json.loads(stdout.readline())

        yield run


@pytest.fixture(scope="module")
def run_online(hub_server, tmp_path_factory):
    with one_process(hub_server, tmp_path_factory.mktemp("home")) as run:
        yield run


@pytest.fixture(scope="module")
def run_offline(hub_server, copy):
    with one_process(hub_server, copy, offline=True) as run:
        yield run


@pytest.fixture(scope="module")
def killed(hub_server, copy, tmp_path_factory, hold_at, wait_until_held):
    """Gives the folder of a prepare that was SIGKILLed after the first file and before the last."""

    def kill(*, offline):
        hub_server.reset()
        folder = tmp_path_factory.mktemp("killed")
        journal = folder / ".out.partial/parts-all/parts.jsonl"
        home = copy if offline else tmp_path_factory.mktemp("home")

        # Each of the four files has about ten shards.
        held = hold_at("owt_data._prepare.shards.append_record", 15)
        process = start(hub_server, home, arguments(folder, num_processes=2), offline=offline, before=held)
        wait_until_held(process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert re.search(r'"stop": \[[1-9]', journal.read_text())
        assert process.returncode == -signal.SIGKILL
        assert not (folder / "out").exists()
        return folder

    return functools.cache(kill)


@pytest.fixture
def interrupt(killed, hub, tmp_path):
    """Copies the working folder of a killed prepare. Gives its shards."""

    def copy_it(*, offline=False):
        shutil.copytree(killed(offline=offline) / ".out.partial", tmp_path / ".out.partial")
        hub.reset()
        before = shards(tmp_path)
        assert len(before) >= 3
        return before

    return copy_it


def shards(folder):
    """Name, content and time of every shard file."""
    found = sorted((folder / ".out.partial").glob("parts-*/*.bin"))
    return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in found]


def assert_same_tokens(out, expected):
    for file in ("train.bin", "val.bin"):
        assert (out / file).read_bytes() == (expected / file).read_bytes()
    assert verify(out) == []


def test_a_dataset_is_streamed_and_leaves_no_copy(hub, expected, tmp_path):
    process = start(hub, tmp_path / "home", arguments(tmp_path, num_processes=2))
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_same_tokens(tmp_path / "out", expected)
    copies = [path for path in (tmp_path / "home").rglob("*") if path.suffix in (".parquet", ".arrow")]
    assert copies == []


@pytest.mark.fault
def test_a_killed_hub_preparation_resumes_with_the_same_revision_and_the_remaining_files(
    hub, expected, tmp_path, record_property, interrupt
):
    record_property("fault", "SIGKILL of a hub preparation, and the dataset moved to another revision")
    record_property("lost", "the shards in progress")
    interrupt()
    hub.revision = "d" * 40
    began = time.monotonic()
    process = start(hub, tmp_path / "home", arguments(tmp_path))
    _, err = process.communicate()
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert process.returncode == 0, err
    assert {request[0] for request in hub.requests} == {"a"}
    _, first, *_, last = hub.files
    assert hub.sent[first] < 0.5 * len(hub.files[first])  # its footer, for the columns
    assert hub.sent[last] >= 0.9 * len(hub.files[last])
    assert_same_tokens(tmp_path / "out", expected)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.revisions == {"all": "a" * 40}


def test_a_name_that_is_not_on_the_hub_is_rejected(hub, tmp_path, run_online):
    code, err = run_online(*arguments(tmp_path, "org/nothing"))
    assert code == 2
    assert err.startswith("error: 'org/nothing' must be a file or a dataset of the Hugging Face hub, got neither (")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.fault
@pytest.mark.parametrize("began_offline", [False, True], ids=["online-first", "offline-first"])
def test_a_preparation_resumed_in_the_other_mode_is_rejected_and_resumes_in_its_own(
    began_offline, expected, tmp_path, record_property, interrupt, run_online, run_offline
):
    mode = "offline" if began_offline else "online"
    record_property("fault", f"hub preparation killed {mode}, resumed in the other mode")
    record_property("lost", "nothing")
    before = interrupt(offline=began_offline)
    run, run_in_the_other = (run_offline, run_online) if began_offline else (run_online, run_offline)
    code, err = run_in_the_other(*arguments(tmp_path))
    assert code == 2, err
    assert err.startswith(f"error: org/corpus was revision {'a' * 40} in ")
    copy, stream = " as a copy with HF_HUB_OFFLINE=1", " as a stream without HF_HUB_OFFLINE"
    assert err.index(copy) < err.index(stream) if began_offline else err.index(stream) < err.index(copy)
    assert err.count("\n") == 1
    assert shards(tmp_path) == before
    began = time.monotonic()
    code, err = run(*arguments(tmp_path))
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert code == 0, err
    assert_same_tokens(tmp_path / "out", expected)


@pytest.mark.fault
def test_a_copy_downloaded_again_at_another_revision_is_not_mixed_with_the_first(
    hub, tmp_path, record_property, interrupt
):
    record_property("fault", "hub preparation killed offline, the copy replaced by another revision")
    record_property("lost", "nothing")
    before = interrupt(offline=True)
    hub.revision = "d" * 40
    download(hub, tmp_path / "home")
    process = start(hub, tmp_path / "home", arguments(tmp_path), offline=True)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert "error: org/corpus was revision aaaaaaaa" in err
    assert err.count("\n") == 1
    assert shards(tmp_path) == before


@pytest.mark.fault
def test_the_mode_may_change_before_the_first_shard(expected, tmp_path, record_property, interrupt, run_offline):
    record_property("fault", "hub preparation killed before its first shard, resumed in the other mode")
    record_property("lost", "nothing")
    interrupt()
    shutil.rmtree(tmp_path / ".out.partial/parts-all")
    began = time.monotonic()
    code, err = run_offline(*arguments(tmp_path))
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert code == 0, err
    assert_same_tokens(tmp_path / "out", expected)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.source, manifest.revisions) == ("org/corpus", {})  # the copy does not tell its commit


@pytest.mark.fault
@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_answers_with_an_error_keeps_finished_shards(
    status, hub, expected, tmp_path, record_property, interrupt, run_online
):
    record_property("fault", f"the hub answers {status} when a killed preparation is resumed")
    record_property("lost", "nothing")
    before = interrupt()
    hub.fails_with = status
    code, err = run_online(*arguments(tmp_path))
    assert code == 2, err
    assert f"{status}" in err
    assert err.count("\n") == 1
    assert shards(tmp_path) == before
    hub.fails_with = None
    began = time.monotonic()
    code, err = run_online(*arguments(tmp_path))
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert code == 0, err
    assert_same_tokens(tmp_path / "out", expected)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["made", pytest.param("real", marks=pytest.mark.shared_data)])
def test_wikitext_of_the_hub_has_the_tokens_of_a_local_file_also_after_kills(
    kind, hub, tmp_path, request, record_property, wait_until, hold_at, run_online
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
            hub.files[f"wikitext/{split}-{number}.parquet"] = hub.parquet(half)
    local = [f"train={tmp_path}/train.txt", f"val={tmp_path}/validation.txt"]
    options = PrepareOptions(tokenizer="bytes", documents="wikitext-titles", row_end="\n")
    prepare(local, tmp_path / "local", options, num_processes=1)
    names = ["train=org/corpus:wikitext:train", "val=org/corpus:wikitext:validation"]
    command = [*arguments(tmp_path, *names), "--documents", "wikitext-titles", "--row-end", "\n"]
    staging, held = tmp_path / ".out.partial", hold_at("owt_data._prepare.prepare.rename_durably", 1)
    journal, result = staging / "parts-train/parts.jsonl", staging / "result"
    for _ in range(3):
        before = journal.stat().st_size if journal.exists() else 0
        process = start(hub, tmp_path / "home", command, shard_bytes=20_000, before=held)
        # If this machine is slow here, an earlier start may have tokenized everything.
        wait_until(
            lambda before=before: result.exists() or (journal.exists() and journal.stat().st_size > before), process
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "out").exists()
    began = time.monotonic()
    process = start(hub, tmp_path / "home", command, shard_bytes=20_000)
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
    # Another split of the same dataset is another text.
    swapped = ["train=org/corpus:wikitext:validation", "val=org/corpus:wikitext:train"]
    code, err = run_online(*arguments(tmp_path, *swapped), "--documents", "wikitext-titles", "--row-end", "\n")
    assert (code, "contents differ" in err) == (2, True)


@pytest.mark.parametrize("name", ["fineweb", "fineweb-edu"])
def test_fineweb_is_a_sample_of_the_hub_with_the_tokens_of_its_files(name, hub, tmp_path, run_online):
    (tmp_path / "10BT").mkdir()
    hub.files = {"README.md": FINEWEB_CARD.encode(), "data/CC-MAIN-2013-20/000.parquet": hub.parquet(["another row"])}
    for number in range(3):
        content = hub.parquet(hub.texts[number * 101 : number * 101 + 101])
        hub.files[f"sample/10BT/{number:03}_00000.parquet"] = content
        (tmp_path / "10BT" / f"{number:03}_00000.parquet").write_bytes(content)
    prepare(f"{tmp_path}/10BT/*.parquet", tmp_path / "files", PrepareOptions(tokenizer="bytes"), num_processes=1)
    code, err = run_online(*arguments(tmp_path, name))
    assert code == 0, err
    assert_same_tokens(tmp_path / "out", tmp_path / "files")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.source, manifest.split, manifest.revisions) == (name, "documents", {"all": "a" * 40})


@pytest.mark.parametrize("offline", [False, True])
def test_the_rows_of_a_dataset_are_numbered_over_all_its_files(offline, hub, copy, tmp_path):
    process = start(hub, copy if offline else tmp_path / "home", arguments(tmp_path), offline=offline)
    assert "error" not in process.communicate()[1]
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    rows = []
    for documents in (open_documents(data), open_documents(data, "val")):
        for document in documents.describe(np.arange(len(documents))):
            text = load_tokenizer("bytes").decode(documents.read(document.id).tolist())
            assert document.file == "org/corpus"
            assert text == f"{hub.texts[document.row or 0]}<|endoftext|>"
            rows.append(document.row)
    assert sorted(rows) == list(range(1200))
