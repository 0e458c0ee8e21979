"""The command `data`: windows of steps, and the steps that read a text, against the batches of the training."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from owt_data import PrepareOptions, load_tokenizer, open_documents, open_tokens, prepare, prepare_in_background
from pretrain import PRESETS, main
from pretrain._audit.run_tokens import open_run_tokens
from pretrain._audit.step_windows import WindowDocument, read_document, step_windows
from pretrain._commands.data import _step_lines, _steps
from pretrain._config import with_vocab_size
from pretrain._run.description import Origin, describe, describe_data, write_description
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import read_records
from pretrain._training.train_batches import train_batches

SEQ_LEN, BATCH, STEPS = 48, 6, 70
BYTES = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
WORDS = ["the", "Tyger", "naïve", "日本", "night\n", "what", "eye"]


def write_rows(path, name, count, seed):
    rng = np.random.default_rng(seed)
    texts = [f"{name}{row}: " + " ".join(rng.choice(WORDS, int(rng.integers(0, 30)))) for row in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Token files in many forms, by name: what `open_tokens` takes."""
    place = tmp_path_factory.mktemp("corpora")
    for number, name in enumerate(("first", "second")):
        source = write_rows(place / f"{name}.jsonl", name, 90 + 30 * number, number)
        prepare(str(source), place / name, BYTES, num_processes=1)
    first, second = str(place / "first"), str(place / "second")
    (place / "bare").mkdir()
    shutil.copy(place / "first" / "train.bin", place / "bare" / "a.bin")
    shutil.copy(place / "second" / "val.bin", place / "bare" / "b.bin")
    bare = [str(place / "bare" / name) for name in ("a.bin", "b.bin")]
    return {
        "folder": first,
        "folders": [first, second],
        "mixture": {first: 3.0, second: 1.0},
        "stages": {first: [(0, 3.0), (20 * BATCH, 0.0), (55 * BATCH, 1.0)], second: 1.0},
        "bare": bare[0],
        "bare files": bare,
        "splits": [f"train={bare[0]}", f"train={bare[1]}", f"val={second}/val.bin"],
    }


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Makes a run of given tokens in `runs`. Returns its folder, description and tokens."""
    monkeypatch.chdir(tmp_path)

    def make(names, *, order="shuffle", reached=30, name="run", origin=None, max_steps=STEPS):
        quickstart = with_vocab_size(PRESETS["quickstart"](), 257)
        config = dataclasses.replace(
            quickstart,
            seed=11,
            model=dataclasses.replace(quickstart.model, seq_len=SEQ_LEN),
            train=dataclasses.replace(quickstart.train, order=order, global_batch_size=BATCH, max_steps=max_steps),
        )
        data = open_tokens(names, tokenizer="bytes")
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        description = describe(config, describe_data(data), "local", origin)
        write_description(folder, description)
        folder.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(0, reached + 1, 10)))
        return folder, description, data

    return make


@pytest.fixture
def shown(capsys):
    """Returns what the command prints as JSON."""

    def show(*arguments):
        assert main(["data", "run", *arguments, "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return show


@pytest.fixture
def rejected(capsys):
    """Returns the error of the command."""

    def reject(*arguments):
        assert main(["data", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    return reject


ORDERS = [
    (form, order)
    for form in ("folder", "folders", "mixture", "stages", "bare", "bare files", "splits")
    for order in ("shuffle", "random", "sequential", "sequential-first")
    if order != "sequential" or form not in ("mixture", "stages")
]


@pytest.mark.parametrize(("form", "order"), ORDERS)
def test_the_windows_of_a_step_are_those_of_the_training(form, order, corpora, make_run):
    folder, description, data = make_run(corpora[form], order=order)
    run = open_run_tokens(folder, description)
    assert data.train.num_windows(SEQ_LEN) < BATCH * STEPS  # more than an epoch
    encoding = load_tokenizer("bytes")
    for step, rows in enumerate(train_batches(description.config, data, 0, uses_ray_data=False), start=1):
        windows = step_windows(run, step)
        assert [window.number for window in windows] == list(range(BATCH))
        assert np.array([window.tokens for window in windows]).tolist() == rows.tolist()
        for window, row in zip(windows, rows, strict=True):
            assert window.text == encoding.decode(row.tolist())
            pieces = [
                run.documents.read(part.document.id)[max(0, window.position - part.document.start) :]
                for part in window.documents
            ]
            assert np.concatenate(pieces)[: SEQ_LEN + 1].tolist() == row.tolist()
            assert [part.stop for part in window.documents[:-1]] == [part.start for part in window.documents[1:]]
            assert (window.documents[0].start, window.documents[-1].stop) == (0, SEQ_LEN + 1)


@pytest.mark.parametrize(("form", "order"), ORDERS)
def test_a_document_is_read_at_the_steps_whose_batches_have_its_tokens(form, order, corpora, make_run, shown):
    _, description, data = make_run(corpora[form], order=order)
    documents = open_documents(data)
    # The ids of the documents of each row of each step, from the windows that the training reads.
    expected = {}
    rows = np.concatenate([*train_batches(description.config, data, 0, uses_ray_data=False)])
    content = documents.tokens.read()
    places = {}
    for position in range(len(content) - SEQ_LEN):
        places.setdefault(content[position : position + SEQ_LEN + 1].tobytes(), []).append(position)
    for index, row in enumerate(rows):
        (position,) = places[row.tobytes()]  # no window occurs twice in these tokens
        first, last = documents.find(np.array([position, position + SEQ_LEN])).tolist()
        for document in range(first, last + 1):
            expected.setdefault(document, []).append(divmod(index, BATCH))
    for document in (0, 1, 17, len(documents) // 2, len(documents) - 1):
        found = shown("--document", str(document))
        reads = [(read["step"] - 1, read["window"]) for read in found["reads"]]
        assert reads == expected.get(document, [])
        assert [read["is_past"] for read in found["reads"]] == [step < 30 for step, _ in reads]
        assert found["text"] == read_text(documents, document)


def read_text(documents, document):
    tokens = documents.read(document)
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode(errors="replace")


@pytest.mark.parametrize("form", ["folder", "folders", "mixture", "stages"])
def test_a_text_is_found_at_the_steps_that_read_it(form, corpora, make_run, shown):
    _, description, data = make_run(corpora[form])
    documents = open_documents(data)
    wanted = next(one for one in documents.describe(np.arange(len(documents))) if one.row == 8)
    text = read_text(documents, wanted.id)[:9]
    found = shown("--find", text)
    assert found["num_documents"] == 1
    (match,) = found["documents"]
    assert (match["id"], match["file"], match["row"], match["num_matches"]) == (wanted.id, wanted.file, 8, 1)
    batches = [*train_batches(description.config, data, 0, uses_ray_data=False)]
    has_first_byte = {(read["step"], read["window"]) for read in match["match_reads"]}
    for step, rows in enumerate(batches, start=1):
        for number, row in enumerate(rows):
            decoded = bytes(np.where(row < 256, row, 0).astype(np.uint8))
            if text.encode() in decoded:
                assert (step, number) in has_first_byte
    assert has_first_byte
    assert has_first_byte <= {(read["step"], read["window"]) for read in match["reads"]}


def test_epochs_and_sources_are_those_of_the_windows(corpora, make_run, shown):
    _, _, data = make_run(corpora["folder"])
    count = data.train.num_windows(SEQ_LEN)
    for step in (1, count // BATCH, count // BATCH + 1, STEPS):
        found = shown("--step", str(step))
        assert (found["step"], found["reached_step"], found["is_past"]) == (step, 30, step <= 30)
        for window in found["windows"]:
            assert window["index"] == (step - 1) * BATCH + window["window"]
            assert window["epoch"] == window["index"] // count + 1
            assert window["length"] == SEQ_LEN + 1
            for part in window["documents"]:
                row = json.loads(Path(part["file"]).read_text().splitlines()[part["row"]])
                piece = window["text"].encode()  # the borders may cut characters
                assert row["text"][:9] == read_text(open_documents(data), part["id"])[:9]
                assert piece


def test_each_row_of_the_screen_has_its_documents_and_a_short_text(corpora, make_run, capsys):
    make_run(corpora["folder"])
    assert main(["data", "run", "--step", "31"]) == 0
    short = capsys.readouterr().out
    assert short.startswith("step 31 of 70, to come: 6 windows\n\nwindow w0: 49 tokens from position ")
    assert short.count("\nwindow w") == BATCH
    assert "of " + corpora["folder"] + ".jsonl" in short
    assert main(["data", "run", "--step", "31", "--full"]) == 0
    full = capsys.readouterr().out
    assert "night\n" in full
    assert "night\n" not in short


def test_the_screen_tells_past_from_future(corpora, make_run, capsys):
    make_run(corpora["folder"])
    assert main(["data", "run", "--find", "Tyger"]) == 0
    out = capsys.readouterr().out
    assert "read at step" in out
    assert "; to be read at step" in out
    assert "more: --full or --json shows all" in out
    assert main(["data", "run", "--find", "Tyger", "--full"]) == 0
    assert capsys.readouterr().out.count("\ndocument ") > out.count("\ndocument ") == 20
    assert main(["data", "run", "--find", "no such text"]) == 1
    assert capsys.readouterr().out == "0 documents of 81 have this text\n"


def steps_of(text):
    """The steps in a line of the screen, such as 1 to 3, 7."""
    ranges = [(int(one), int(last or one)) for one, last in re.findall(r"(\d+)(?: to (\d+))?(?=,|;|$)", text)]
    return {step for first, last in ranges for step in range(first, last + 1)}


def test_the_screen_has_the_steps_of_the_document_and_those_of_the_match(corpora, make_run, shown, capsys):
    _, _, data = make_run(corpora["folder"])
    documents = open_documents(data)
    longest = int(np.argmax(np.diff(np.array(documents.ranges(np.arange(len(documents)))), axis=0)))
    text = read_text(documents, longest)[:9]
    (match,) = shown("--find", text)["documents"]
    of_document, of_match = ({read["step"] for read in match[name]} for name in ("reads", "match_reads"))
    assert of_match < of_document
    assert main(["data", "run", "--find", text, "--full"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"  tokens {match['start']:,} to {match['stop'] - 1:,}: ")
    assert steps_of(first.partition(": ")[2]) == of_document
    assert second.startswith(f"  the first time at {match['match_position']:,}: ")
    assert steps_of(second.partition(": ")[2]) == of_match


def test_a_fork_has_the_steps_after_its_checkpoint(corpora, make_run, shown, rejected):
    origin = Origin(place="/elsewhere/parent", step=20, tokenizer="bytes", weights_only=False)
    make_run(corpora["folder"], origin=origin)
    assert shown("--step", "21")["step"] == 21
    assert "step must be at least 21, the first of" in (error := rejected("run", "--step", "20"))
    assert "it starts from: /elsewhere/parent." in error
    reads = shown("--document", "3")["reads"]
    assert reads
    assert min(read["step"] for read in reads) > 20
    first = shown("--step", "21")["windows"][0]["documents"][0]["id"]
    assert 21 in {read["step"] for read in shown("--document", str(first))["reads"]}


@pytest.fixture
def unfinished(tmp_path):
    """A folder of a text that is tokenized in part."""
    source = tmp_path / "book.txt"
    source.write_text("".join(f"line {number} of a book\n" for number in range(300_000)))
    options = PrepareOptions(tokenizer="bytes", split="start")
    with prepare_in_background(str(source), tmp_path / "out", options, num_processes=1):
        pass
    return source, tmp_path / "out", options


def test_a_stream_has_the_same_windows_before_and_after_its_end(unfinished, make_run, shown, rejected):
    source, out, options = unfinished
    _, description, data = make_run(str(out), order="sequential-first", max_steps=100_000)
    last = data.train.num_windows(SEQ_LEN) // BATCH
    before = [shown("--step", str(step)) for step in (1, 2, last)]
    batches = train_batches(description.config, data, 0, uses_ray_data=False)
    for found in before[:2]:
        text = [load_tokenizer("bytes").decode(row.tolist()) for row in next(batches)]
        assert [window["text"] for window in found["windows"]] == text
        assert {part["file"] for window in found["windows"] for part in window["documents"]} == {str(source)}
    assert f"step must be at most {last}, the last whose text is tokenized so far, got {last + 1}." in rejected(
        "run", "--step", str(last + 1)
    )
    (found,) = shown("--find", before[0]["windows"][3]["text"])["documents"]
    assert [(read["step"], read["window"]) for read in found["match_reads"]] == [
        (1, 2),
        (1, 3),
    ]
    assert {read["step"] for read in found["reads"]} >= set(range(1, last + 1))
    del batches
    prepare(str(source), out, options)
    after = [shown("--step", str(step)) for step in (1, 2, last)]
    for one, two in zip(before, after, strict=True):
        assert [window["text"] for window in one["windows"]] == [window["text"] for window in two["windows"]]
    assert shown("--step", str(last + 1))["step"] == last + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "data must have one of --step N, --find TEXT and --document ID, got none."),
        (("run", "--step", "1", "--find", "x"), "data must have one of --step N, --find TEXT and --document ID, got "),
        (("run", "--step", "0"), "step must be from 1 to 70, the steps of "),
        (("run", "--step", "71"), "step must be from 1 to 70, the steps of "),
        (("run", "--step", "x"), "--step must be an integer or none, got x."),
        (("run", "--document", "-1"), "document must be from 0 to 80, the documents of "),
        (("run", "--document", "81"), "document must be from 0 to 80, the documents of "),
        (("run", "--find", ""), "text must be UTF-8 text of at least 1 character, got ''."),
        (("run", "--find", "a\0b"), "text must be without null characters, got "),
        (("other", "--step", "1"), "run must be the folder or URI of a run, or its name in runs, got other. "),
        (("run@20", "--step", "1"), "RUN must be a run without a checkpoint, got run@20. Write run, and --step 20."),
        (("run@best", "--step", "1"), "RUN must be a run without a checkpoint, got run@best. Write run."),
    ],
)
def test_input_that_cannot_be_used_is_named(arguments, message, corpora, make_run, rejected):
    make_run(corpora["folder"])
    assert message in rejected(*arguments)


def test_token_files_that_are_gone_or_changed_are_named(corpora, make_run, rejected, tmp_path):
    for name in ("moved", "changed", "bare"):
        shutil.copytree(corpora["folder"], tmp_path / name)
    make_run(str(tmp_path / "moved"), name="moved")
    make_run(str(tmp_path / "changed"), name="changed")
    make_run(str(tmp_path / "bare/train.bin"), name="bare")
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    error = rejected("moved", "--step", "1")
    assert f"the token files of {tmp_path}/runs/moved cannot be opened: {tmp_path}/moved must be" in error
    shutil.rmtree(tmp_path / "changed")
    shutil.copytree(corpora["folders"][1], tmp_path / "changed")
    error = rejected("changed", "--step", "1")
    assert f"changed must hold the tokens of {tmp_path}/runs/changed, got others: train.bin and val.bin differ" in error
    with (tmp_path / "bare/train.bin").open("r+b") as file:
        file.write(b"\1\0")
    assert "got others: whole differs. Restore the files." in rejected("bare", "--step", "1")


def test_a_run_of_another_window_order_is_rejected(corpora, make_run, rejected):
    folder, _, _ = make_run(corpora["folder"])
    content = json.loads(folder.config.read_text())
    content["data"]["window_order_version"] = 1
    folder.config.write_text(json.dumps(content))
    assert "must have version 2, got 1. Use the owt-data of the run: " in rejected("run", "--step", "1")


def test_a_run_that_has_trained_shows_the_text_of_its_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", "row", 200, 5)
    line = (
        "--data rows.jsonl --tokenizer bytes --hardware local --name run --trackers --model.seq-len 32 "
        "--model.num-layers 1 --model.num-heads 1 --model.embed-dim 8 --train.global-batch-size 3 --train.max-steps 12 "
        "--train.log-every 4 --train.eval-tokens 96 --train.sample-tokens 0 --prepare.val-fraction 0.1"
    )
    assert main(line.split()) == 0
    capsys.readouterr()
    assert main(["data", "run", "--step", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in read_records(tmp_path / "runs/run/metrics.jsonl")][-1] == found["reached_step"]
    rows = [json.loads(row)["text"] for row in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for window in found["windows"]:
        texts = [rows[part["row"]] for part in window["documents"]]
        assert {part["file"] for part in window["documents"]} == {"rows.jsonl"}
        assert window["text"].strip("\N{REPLACEMENT CHARACTER}") in "<|endoftext|>".join([*texts, ""])


def test_a_document_can_be_read_by_its_id(corpora, make_run):
    folder, description, _ = make_run(corpora["folders"])
    run = open_run_tokens(folder, description)
    document, text = read_document(run, 100)
    lines = Path(str(document.file)).read_text().splitlines()
    assert text == json.loads(lines[document.row or 0])["text"]


def test_a_window_of_many_documents_shows_the_first_ones_and_a_long_text_its_beginning_and_its_end(corpora, make_run):
    run = open_run_tokens(*make_run(corpora["bare"])[:2])
    (window, *_) = step_windows(run, 31)
    part = window.documents[0]
    assert part.document.file is None
    parts = tuple(WindowDocument(document=part.document, start=number, stop=number + 2) for number in range(9))
    window = dataclasses.replace(
        window, number=3, epoch=2, position=1234, documents=parts, text="a" * 150 + "c" + "b" * 150
    )
    lines = [*_step_lines(run, 31, [window], full=False)]
    document = part.document
    name = f"document {document.id:,}: number {document.number} of {document.token_file}, source unknown"
    assert lines == [
        "step 31 of 70, to come: 1 window",
        "",
        "window w3: 49 tokens from position 1,234, epoch 2",
        *(f"  tokens {number} to {number + 1}: {name}" for number in range(8)),
        "  and 1 more documents",
        '  "' + "a" * 150 + " \N{HORIZONTAL ELLIPSIS} " + "b" * 150 + '"',
    ]
    whole = [*_step_lines(run, 30, [dataclasses.replace(window, epoch=None)], full=True)]
    assert whole[0] == "step 30 of 70, past: 1 window"
    assert whole[2] == "window w3: 49 tokens from position 1,234"
    assert whole[-2:] == [f"  tokens 8 to 9: {name}", window.text]
    assert _steps(run, (), False) == "not read from step 1 to step 70"
