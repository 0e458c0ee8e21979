"""The command `blame`, on a run that reads a document of random characters."""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import random
import re

import jax
import numpy as np
import pytest

from owt_data import Batches, load_tokenizer, open_tokens, read_steps
from pretrain import main
from pretrain._audit.blamed_step import BlamedStep, Comparison, _largest_difference
from pretrain._audit.rerun import Rerun
from pretrain._audit.run_tokens import open_run_tokens
from pretrain._audit.suspects import Suspect, replace_windows
from pretrain._commands.blame import _lines as blame_lines
from pretrain._config import MeshConfig
from pretrain._run.find import find_run
from pretrain._run.spikes import THRESHOLD, spike_scores
from pretrain._run.step_losses import read_step_losses

SENTENCES = ("A short book, of some words. ", "Another line of the same book. ", "It has a few lines, and no more. ")
SUSPECT = Suspect(
    id="w1", windows=[1], num_tokens=48, loss=2.5, excess=0.25, share=0.5, norm=1.0, source=None, text="a\nb"
)
GARBAGE = "".join(random.Random(0).choices([chr(code) for code in range(0x21, 0x7F)], k=60))
PLACE = 380
STEPS, BATCH, SEQ_LEN = 200, 4, 48
TRAIN = (
    f"--data corpus.jsonl --tokenizer bytes --hardware local --train.max-steps {STEPS} --train.global-batch-size "
    f"{BATCH} --model.seq-len {SEQ_LEN} --model.num-layers 1 --model.num-heads 1 --model.embed-dim 32 --trackers "
    "--train.log-every 10 --train.checkpoint-every 60 --train.checkpoints-to-keep none --train.order sequential "
    "--prepare.split position --optimizer.learning-rate 0.01 --optimizer.warmup-steps 10 --name run "
    "--train.mask-documents"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run, its output, and the step that reads most of the garbage."""
    folder = tmp_path_factory.mktemp("blame")
    rng = random.Random(1)
    documents = ["".join(rng.choices(SENTENCES, k=3)) for _ in range(600)]
    documents.insert(PLACE, GARBAGE)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(folder)
        with (folder / "out.txt").open("w") as out, contextlib.redirect_stdout(out):
            assert main(TRAIN.split()) == 0
        middle = len("".join(documents[:PLACE])) + PLACE + len(GARBAGE) // 2  # each document has an end-of-text token
        yield folder, (folder / "out.txt").read_text(), middle // SEQ_LEN // BATCH + 1


@pytest.fixture
def blame(trained, monkeypatch, capsys):
    """A function that returns the output of the command."""
    monkeypatch.chdir(trained[0])

    def call(*options, code=0):
        assert main(["blame", "run", *options]) == code
        found = capsys.readouterr()
        return found.err if code else found.out

    return call


@pytest.fixture(scope="module")
def blamed(trained):
    """The step that reads the garbage, as JSON, and the files of the run before and after."""
    folder, _, step = trained
    before = digests(folder / "runs/run")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.stdout", out)
        assert main(["blame", "run", "--step", str(step), "--json"]) == 0
    return json.loads(out.getvalue()), before, digests(folder / "runs/run")


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_the_step_that_reads_garbage_is_marked_as_a_spike(trained, blame):
    folder, out, step = trained
    (line,) = re.findall(r"the loss of step (\d+) is (\d+) deviations above the median before it: (.*)", out)
    scores = spike_scores(read_step_losses(folder / "runs/run/step_losses.f32"))
    largest = int(np.nanargmax(scores)) + 1
    assert (int(line[0]), int(line[1])) == (largest, round(scores[largest - 1]))
    assert largest == step
    assert line[2].endswith(f"blame run --step {largest}")
    records = [json.loads(text) for text in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [record["spike_step"] for record in records if "spike_step" in record] == [largest]
    assert json.loads(blame("--spike", "--json"))["step"] == largest


def test_the_garbage_is_the_first_document_of_its_step(trained, blamed):
    folder, _, step = trained
    found, before, after = blamed
    assert before == after  # no file of the run is written
    assert (found["step"], found["checkpoint"], found["largest_difference"]) == (step, (step - 1) // 60 * 60, 0.0)
    assert found["loss"] == read_step_losses(folder / "runs/run/step_losses.f32")[step - 1]
    first = found["documents"][0]
    assert (first["text"] in GARBAGE, first["source"]) == (True, f"corpus.jsonl:{PLACE}")
    assert max(found["documents"], key=lambda one: one["share"]) == first


def test_shares_sum_to_one_and_the_windows_are_those_of_the_step(trained, blamed):
    folder, _, step = trained
    found, _, _ = blamed
    for name in ("windows", "documents"):
        assert sum(one["share"] for one in found[name]) == pytest.approx(1, rel=1e-3)
        assert sum(one["excess"] for one in found[name]) == pytest.approx(0, abs=1e-6)
    assert np.mean([one["loss"] for one in found["windows"]]) == pytest.approx(found["loss"], rel=1e-4)
    data = open_tokens(json.loads((folder / "runs/run/config.json").read_text())["data"]["tokens"], tokenizer="bytes")
    batches = Batches(seq_len=SEQ_LEN, global_batch_size=BATCH, rank=0, world_size=1, order="sequential", seed=0)
    ((_, windows),) = read_steps(data.train, batches, start_step=step - 1, stop_step=step)
    texts = {f"w{row}": load_tokenizer("bytes").decode(window.tolist()) for row, window in enumerate(windows)}
    assert {one["id"]: one["text"] for one in found["windows"]} == texts


def test_an_early_step_has_no_score(blame):
    assert re.search(r"^step 2 has the loss \d\.\d+ \(no score in the first 50 steps\); norm", blame("--step", "2"))


def test_without_the_garbage_the_step_is_no_spike(trained, blamed, blame):
    _, _, step = trained
    found, _, _ = blamed
    document = found["documents"][0]["id"]
    compared = json.loads(blame("--step", str(step), "--without", document, "--steps", "5", "--json"))["comparison"]
    assert compared["losses"][0] == found["loss"]
    assert (len(compared["losses"]), len(compared["losses_without"])) == (5, 5)
    assert compared["losses_without"][0] < compared["losses"][0] - 0.5
    assert compared["score_without"] < THRESHOLD < found["score"]
    before = read_step_losses(trained[0] / "runs/run/step_losses.f32")[: step - 1].tolist()
    assert compared["score_without"] == spike_scores([*before, compared["losses_without"][0]])[-1]


@pytest.mark.slow
def test_tables_show_the_text_of_the_documents_and_both_curves(trained, blamed, blame):
    _, _, step = trained
    found, _, _ = blamed
    document = found["documents"][0]
    for by, order in (("loss", "what they add to the mean loss"), ("gradient", "their share in the gradient")):
        options = ["--by", by, "--top", "1", "--without", document["id"], "--steps", "3"]
        text = blame("--step", str(step), *options)
        row = text.partition(f"1 of {len(found['documents'])} documents, by {order}\n")[2].splitlines()[1]
        assert row.split()[0] == document["id"]
        assert document["text"][:20] in row
        lines = text.splitlines()
        assert re.fullmatch(rf"without it, the loss of step {step} is .* before it: no spike", lines[-1])
        assert [int(line.split()[0]) for line in lines[-4:-1]] == [step, step + 1, step + 2]


@pytest.mark.parametrize(
    ("recorded", "found", "expected"),
    [
        ([], [], None),
        ([2.0, 1.0], [2.0, 1.0], 0.0),
        ([2.0, 1.0, 3.0], [2.0, 1.5, 2.75], 0.5),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),  # skipped in both
        ([math.nan], [math.nan], 0.0),
        ([math.nan, 1.0], [2.0, 1.0], None),  # the run has lost a loss, or skipped a step
        ([2.0, math.nan, 1.5], [2.0, 3.0, 1.5], None),
        ([2.0, math.nan, 1.5], [2.0, 3.0, math.nan], math.inf),
        ([math.nan], [2.0], None),
        ([2.0, 1.0], [2.0, math.nan], math.inf),
        ([2.0, 1.0], [math.nan, 1.0], math.inf),
    ],
)
def test_losses_that_are_computed_again_are_compared_with_those_of_the_run(recorded, found, expected):
    assert _largest_difference(np.array(recorded, np.float32), found) == expected


@pytest.mark.parametrize(
    ("difference", "end"),
    [
        (None, ""),
        (0.0, ": the steps 6 to 8 have the losses of the run, to the bit"),
        (0.25, ": the steps 6 to 8 have the losses of the run, up to 2.5e-01"),
        (math.inf, ": a step after it was skipped, which has a loss in the run"),
    ],
)
def test_the_output_says_whether_the_steps_before_are_those_of_the_run(difference, end):
    found = BlamedStep(
        step=9, loss=2.0, score=None, checkpoint=5, largest_difference=difference, grad_norm=0.5, windows=[SUSPECT],
        documents=[SUSPECT], comparison=None,
    )  # fmt: skip
    assert [*blame_lines(found, 1, "loss", 1, "C")][1] == f"computed from checkpoint 5{end}"


@pytest.mark.parametrize(
    ("score", "without", "score_without", "end"),
    [
        (12.345, ("w1",), 3.0, "without it, the loss of step 6 is +3.0 deviations from the median before it: no spike"),
        (
            12.345,
            ("w1", "d3"),
            10.0,
            "without them, the loss of step 6 is +10.0 deviations from the median before it: still a spike",
        ),
        (
            9.96,
            ("w1",),
            -1.5,
            "without it, the loss of step 6 is -1.5 deviations from the median before it: no spike, as "
            "with all windows",
        ),
        (
            9.96,
            ("w1",),
            11.0,
            "without it, the loss of step 6 is +11.0 deviations from the median before it: still a spike",
        ),
    ],
)
def test_the_scores_with_and_without_windows_are_told(score, without, score_without, end):
    compared = Comparison(
        without=without, num_windows=2, losses=[2.0], losses_without=[1.5], score_without=score_without
    )
    found = BlamedStep(
        step=6, loss=2.0, score=score, checkpoint=4, largest_difference=0.0, grad_norm=0.5, windows=[SUSPECT],
        documents=[SUSPECT], comparison=compared,
    )  # fmt: skip
    lines = [*blame_lines(found, 1, "loss", 1, "C")]
    assert lines[:2] == [
        f"step 6 has the loss 2.0000, +{score:.1f} deviations from the median before it; norm of its gradient 0.5",
        "computed from checkpoint 4: step 5 has the losses of the run, to the bit",
    ]
    assert f"without {', '.join(without)}: another window takes the place of 2 windows" in lines
    assert lines[-1] == end


@pytest.mark.parametrize(("num_steps", "end"), [(3, []), (4, ["the run ends at step 9"])])
def test_the_tables_have_a_legend_and_the_end_of_the_run(num_steps, end):
    compared = Comparison(
        without=("w1",), num_windows=1, losses=[2.0, 1.0, math.nan], losses_without=[1.5, 1.0, 1.25], score_without=None
    )
    found = BlamedStep(
        step=7, loss=2.0, score=None, checkpoint=None, largest_difference=0.0, grad_norm=0.5, windows=[SUSPECT] * 2,
        documents=[dataclasses.replace(SUSPECT, id="d3", source="a.jsonl:3")], comparison=compared,
    )  # fmt: skip
    lines = [*blame_lines(found, 1, "loss", num_steps, "blame run --step 7")]
    assert lines == [
        "step 7 has the loss 2.0000 (no score in the first 50 steps); norm of its gradient 0.5",
        "computed from the random parameters of the start: the steps 1 to 6 have the losses of the run, to the bit",
        "",
        "1 of 2 windows, by what they add to the mean loss",
        "id      loss      adds  gradient  tokens  text",
        "w1    2.5000   +0.2500     50.0%      48  a\N{RETURN SYMBOL}b",
        "",
        "1 documents, by what they add to the mean loss",
        "id      loss      adds  gradient  tokens  text",
        "d3    2.5000   +0.2500     50.0%      48  a\N{RETURN SYMBOL}b",
        "    a.jsonl:3",
        "",
        "without w1: another window takes the place of 1 window",
        "step      loss   without  * loss, o without",
        f"   7    2.0000    1.5000  {' ' * 15}o{' ' * 14}*",
        "   8    1.0000    1.0000  o",
        f"   9         -    1.2500  {' ' * 8}o",
        *end,
    ]
    found = dataclasses.replace(found, comparison=None)
    assert [*blame_lines(found, 1, "loss", num_steps, "C")][-1] == "without the first document: C --without d3"


def test_the_steps_with_all_windows_are_those_of_the_run_to_its_end(trained, blame):
    """Step 50 is the last one with too few losses before it for a score."""
    found = json.loads(blame("--step", "50", "--without", "w0", "--steps", "400", "--json"))
    assert found["checkpoint"] is None  # the random parameters of the start
    assert found["largest_difference"] == 0.0
    compared = found["comparison"]
    assert (found["score"], compared["score_without"]) == (None, None)
    assert len(compared["losses"]) == STEPS - 49  # to the last step
    recorded = read_step_losses(trained[0] / "runs/run/step_losses.f32")
    assert compared["losses"] == recorded[49:].tolist()
    assert compared["losses_without"] != compared["losses"]


def test_a_window_is_left_out_of_its_step_alone_and_a_document_of_all_steps(blame, capsys):
    def documents_of(step):
        assert main(["data", "run", "--step", str(step), "--json"]) == 0
        windows = json.loads(capsys.readouterr().out)["windows"]
        return [[part["id"] for part in window["documents"]] for window in windows]

    # The last document of this step goes on in the next one.
    step = next(step for step in range(130, 170) if documents_of(step)[-1][-1] in documents_of(step + 1)[0])
    now, later = documents_of(step), documents_of(step + 1)
    document = now[-1][-1]
    found = json.loads(blame("--step", str(step), "--without", "w1", f"d{document}", "--steps", "2", "--json"))
    compared = found["comparison"]
    stays = np.array([number != 1 and document not in ids for number, ids in enumerate(now)])
    assert compared["num_windows"] == (~stays).sum() + sum(document in ids for ids in later)
    # The parameters are those before the step: the losses of the windows that stay are those of the table.
    losses = {one["id"]: one["loss"] for one in found["windows"]}
    rows = replace_windows(np.arange(BATCH, dtype=np.uint16)[:, None], stays).ravel()
    assert compared["losses_without"][0] == pytest.approx(np.mean([losses[f"w{row}"] for row in rows]), rel=1e-4)
    assert compared["losses"][0] == found["loss"]


def test_a_run_of_more_devices_is_computed_on_those_that_are_here(trained, monkeypatch):
    monkeypatch.chdir(trained[0])
    folder, description = find_run("run")
    mesh = MeshConfig(fsdp=2 * jax.device_count())
    description = dataclasses.replace(description, config=dataclasses.replace(description.config, mesh=mesh))
    rerun = Rerun(open_run_tokens(folder, description), 60)
    assert (rerun.checkpoint, rerun.step) == (60, 60)
    losses = read_step_losses(folder.step_losses)
    assert [rerun.compute(next(rerun.batches)) for _ in range(2)] == losses[60:62].tolist()
    assert rerun.step == 62


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--step or --spike must be given, got none of the two."),
        (["--step", "3", "--spike"], "--step or --spike must be given, got both."),
        (["--step", "0"], f"--step must be from 1 to {STEPS}, the last step of"),
        (["--step", f"{STEPS + 1}"], f"--step must be from 1 to {STEPS}, the last step of"),
        (["--step", "3", "--top", "0"], "--top must be at least 1, got 0."),
        (["--step", "3", "--without", "w0", "--steps", "0"], "--steps must be at least 1, got 0."),
        (["--step", "3", "--without", "w4"], "of the step, w0 to w3 and such as d4, got w4."),
        (["--step", "3", "--without", "w0", "w1", "w2", "w3"], "--without must leave a window of each step, got all 4"),
    ],
)
def test_bad_input_is_one_sentence(blame, options, message):
    err = blame(*options, code=2)
    assert message in err
    assert "Traceback" not in err


def test_a_run_without_a_spike_says_so(trained, monkeypatch, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    run = tmp_path / "runs" / "quiet"
    run.mkdir()
    (run / "config.json").write_bytes((trained[0] / "runs/run/config.json").read_bytes())
    np.full(150, 2.5, "<f4").tofile(run / "step_losses.f32")
    monkeypatch.chdir(tmp_path)
    assert main(["blame", "quiet", "--spike"]) == 2
    assert "must have a spike of its loss for --spike, got none: no loss is 10 deviations" in capsys.readouterr().err


def test_a_run_ends_after_so_many_skipped_steps_and_its_skipped_steps_can_be_blamed(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    wild = TRAIN.replace("--name run", "--name wild --train.stop-after-bad-steps 3 --train.checkpoint-every 7").split()
    wild += ["--optimizer.learning-rate", "1e30", "--optimizer.clip-norm", "0", "--optimizer.schedule", "constant"]
    assert main(wild) == 1
    error = capsys.readouterr().err
    # The checkpoint of step 7 would be the first, and would hold parameters that are not finite.
    assert re.search(r"the loss or the gradient of [3-6] steps in a row, up to step 7, is not finite\. Lower", error)
    assert not [*(trained[0] / "runs/wild/checkpoints").glob("[0-9]*")]
    losses = read_step_losses(trained[0] / "runs/wild/step_losses.f32")
    assert (len(losses), np.isnan(losses[-3:]).all(), np.isfinite(losses[0])) == (7, True, True)
    assert main(["blame", "wild", "--step", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["loss"], found["score"], found["largest_difference"]) == (None, None, 0.0)
    assert {one["loss"] for one in found["windows"]} == {None}
    assert main(["blame", "wild", "--step", "6", "--without", found["documents"][0]["id"], "--steps", "2"]) == 0
    assert "step 6 was skipped, because its loss or gradient is not finite" in capsys.readouterr().out
