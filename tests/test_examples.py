"""The examples run, in a fresh interpreter and an empty folder, on CPUs."""

import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest
from support import ROOT

from owt_data import PrepareOptions, prepare

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
# A model that trains in a second, on bytes: the tokenizer gpt2 needs files from the network.
MODEL = json.dumps({"num_layers": 2, "num_heads": 2, "embed_dim": 32})
TITLE = " = Title {} = \n"


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory):
    """Run an example with these arguments, and return its output. All examples of this module share one folder."""
    folder = tmp_path_factory.mktemp("examples")

    def run_example(name, *arguments):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
            cwd=folder, env=environment | {"HOME": str(folder)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_example


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    """Two files with the rows of wikitext: titles, blank lines, paragraphs."""
    folder = tmp_path_factory.mktemp("wikitext")
    for name, num_articles in (("train", 40), ("validation", 20)):
        articles = [
            f"{TITLE.format(i)} \n A paragraph of article {i} . " + "word " * 100 + "\n" for i in range(num_articles)
        ]
        (folder / f"{name}.txt").write_text("".join(articles))
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short(script):
    assert len(script.read_text().splitlines()) < 80


def test_the_readme_lists_every_example():
    text = (EXAMPLES / "README.md").read_text()
    assert [script.name for script in SCRIPTS if f"]({script.name})" not in text] == []


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(environment, tmp_path):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    assert sum(cell["cell_type"] == "code" for cell in cells) == 7
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "The model of B is better by" in done.stdout
    assert (tmp_path / "notebook-runs" / "report.html").exists()


def test_a_jaxtrainer_script_changes_in_one_line():
    before, after = ((EXAMPLES / f"jaxtrainer_{name}.py").read_text().splitlines() for name in ("before", "after"))
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert changed == [("from ray.train.v2.jax import JaxTrainer", "from ray_jax_launch import JaxTrainer")]


def test_a_jaxtrainer_script_runs_on_two_joined_cpu_workers(run):
    report, params = run("jaxtrainer_after.py").splitlines()
    assert "'epoch': 100" in report
    assert "'processes': 2" in report
    assert report.endswith("None")  # Result.error
    assert params == "{'b': [1.0], 'w': [[2.0]]}"


def test_the_model_trains_without_ray_and_without_data_packages(run):
    printed = run("model_alone.py", "--steps", 60)
    assert float(printed.split("validation loss ")[1].split(",")[0]) < 3.0  # ln 256 is 5.5


@pytest.mark.slow
def test_the_ray_tutorial_trains(run, corpus):
    arguments = ("--source", corpus, "--tokenizer", "bytes", "--hardware", "local")
    model = json.dumps(json.loads(MODEL) | {"seq_len": 256})
    printed = run("ray_tutorial.py", *arguments, "--model", model, "--max-steps", 10)
    assert "'step': 10" in printed
    assert "'val_loss'" in printed
    assert f"runs{os.sep}ray-tutorial" in printed


@pytest.mark.slow
def test_the_wikitext_tutorial_trains_in_epochs(run, wikitext):
    files = ("--train", wikitext / "train.txt", "--validation", wikitext / "validation.txt")
    arguments = ("--tokenizer", "bytes", "--hardware", "local", "--epochs", 2, "--batch-size", 4, "--model", MODEL)
    printed = run("wikitext_tutorial.py", *files, *arguments)
    assert "'epoch': 2" in printed
    assert "'tokens_per_s'" in printed


@pytest.fixture(scope="module")
def own_text(run, tmp_path_factory):
    """Output of the example on a folder of texts. Its run is runs/own-text."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"Text {number}. " + "The cat sat on the mat. " * 100)
    return run("own_text.py", folder, "--max-steps", 40)


@pytest.mark.slow
def test_own_text_is_prepared_and_trained(own_text):
    assert "'train.bin': '" in own_text
    assert float(own_text.split("validation loss ")[1].split(",")[0]) < 4.0


@pytest.mark.slow
def test_a_trained_model_is_loaded_and_exported(own_text, run):
    printed = run("load_trained.py", "runs/own-text", "--max-new-tokens", 20, "--export", "exported")
    assert printed.startswith("step 40 of 40, 4 layers\nThe ")


@pytest.fixture
def start_torch(environment, tmp_path):
    """Starts the PyTorch loop in some processes. Returns them."""

    def start(world_size, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        joined = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(EXAMPLES / "torch_loop.py"), "tokens", "--save-every", "4", *arguments]
        return [
            subprocess.Popen(
                command, env=environment | joined | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip

    return start


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch, which no package here needs")
def test_a_torch_loop_has_the_same_batches_after_kills_and_in_any_number_of_processes(start_torch, corpus, tmp_path):
    prepare(str(corpus), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"), num_processes=1)

    def steps(out):
        return {int(words[1]): (float(words[3]), words[5]) for words in map(str.split, out.splitlines())}

    def finished(processes):
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
        return steps(outputs[0][0])

    # Two processes, of which both are killed between two checkpoints, or at one.
    killed = start_torch(2, "--steps", "1000000")
    stdout = killed[0].stdout
    assert stdout is not None
    found = {}
    while max(found, default=0) < 10:
        found |= steps(stdout.readline())
    for process in killed:
        process.kill()
    found |= steps(killed[0].communicate()[0].rpartition("\n")[0])
    killed[1].communicate()
    last = max(found)
    # More of them go on from the checkpoint, and then one.
    for world_size, num_steps in ((3, last + 7), (1, last + 10)):
        further = finished(start_torch(world_size, "--steps", str(num_steps)))
        assert last - 4 <= min(further) <= last + 8
        assert max(further) == num_steps
        found |= further
    expected = finished(start_torch(1, "--steps", str(last + 10), "--checkpoint", "alone.pt"))
    assert [*expected] == [*range(1, last + 11)]
    assert {step: found[step][1] for step in expected} == {step: windows for step, (_, windows) in expected.items()}
    assert [found[step][0] for step in expected] == pytest.approx([loss for loss, _ in expected.values()], abs=2e-3)


def test_a_sweep_in_a_notebook_shows_a_table(run, tmp_path):
    (tmp_path / "book.txt").write_text("The cat sat on the mat. " * 1000)
    printed = [run("sweep.py", tmp_path / "book.txt") for _ in range(2)]
    lines = printed[0].splitlines()
    assert [line.split("\t")[0] for line in lines[:-1]] == ["step", "10", "20", "30", "40"]
    assert lines[-1].startswith("best: rate 0.01, validation loss ")
    assert lines[-1].endswith("in quickstart-book-lr0.01-layers2-heads2-width32")
    assert printed[0] == printed[1]
