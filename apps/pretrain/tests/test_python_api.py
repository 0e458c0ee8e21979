"""`train` and `load_trained` in a script without a file, like a notebook cell: Python reads it from standard input."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain import PRESETS, train
from ray_jax_launch import LaunchError

README = Path(__file__).parent.parent / "README.md"

SCRIPT = """
import dataclasses, io, json, os
from pathlib import Path

from rich.console import Console

from pretrain import PRESETS, load_trained, train
from ray_jax_launch import Checkpoints, TrainingFailed

synced, is_on_disk = {}, {}
sync, save = os.fsync, Checkpoints.save

def note_sync(file):
    synced[os.fstat(file).st_ino] = os.fstat(file).st_size
    sync(file)

def note_save(checkpoints, step, *args, **options):
    log = Path("runs", "quickstart-data", "metrics.jsonl").stat()
    is_on_disk[step] = synced.get(log.st_ino) == log.st_size
    save(checkpoints, step, *args, **options)

os.fsync, Checkpoints.save = note_sync, note_save
quickstart = PRESETS["quickstart"]()
config = dataclasses.replace(
    quickstart,
    name="quickstart-data",
    data="train=book.txt,val=end.txt",
    hardware="local",
    prompts=("a", "of"),
    trackers=(),
    model=dataclasses.replace(quickstart.model, num_layers=1, num_heads=2, embed_dim=16),
    train=dataclasses.replace(
        quickstart.train,
        max_epochs=1.5,
        log_every=3,
        eval_every=10,
        eval_tokens=64,
        sample_tokens=4,
        checkpoint_every=5,
        checkpoints_to_keep=3,
    ),
)
result = train(config)
os.fsync, Checkpoints.save = sync, save
lines = Console(file=io.StringIO(), width=200)
again = train(config, console=lines)
trained = load_trained(result.folder)
too_fast = dataclasses.replace(
    config,
    name="diverged",
    train=dataclasses.replace(config.train, max_epochs=None, max_tokens=120 * 1024, log_every=60, eval_every=60),
    optimizer=dataclasses.replace(config.optimizer, learning_rate=1e30, min_learning_rate=0.0, clip_norm=0.0),
)
diverged = train(too_fast)
print(json.dumps({
    "metrics": result.metrics,
    "history": result.history,
    "is_on_disk": is_on_disk,
    "checkpoint": [result.checkpoint.step, result.checkpoint.path],
    "is_folder": Path(result.checkpoint.path).is_dir(),
    "folder": str(result.folder),
    "error": result.error,
    "sample": len(result.sample),
    "again": [again.metrics == result.metrics, again.checkpoint.step, again.sample == result.sample],
    "printed": lines.file.getvalue(),
    "step": trained.step,
    "tokenizer": trained.tokenizer.name,
    "name": trained.config.preset,
    "diverged": [isinstance(diverged.error, TrainingFailed), diverged.error.details],
    "left": [diverged.checkpoint.step, diverged.sample],
}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    (place / "book.txt").write_text("A short book, of some words. " * 600)
    (place / "end.txt").write_text("The end of a short book, of some words. " * 60)
    return place


def printed(code, place):
    """Run code in a folder, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        cwd=place,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(place / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def found(place):
    """Run the script, and return what it prints: one line, since `train` without a console prints nothing."""
    (line,) = printed(SCRIPT, place)
    return json.loads(line)


@pytest.mark.slow
def test_the_code_of_the_readme_shows_its_progress_and_ends(place):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    lines = printed(code, place)
    assert any(line.startswith("done in") for line in lines)
    assert lines[-1] == "20 2357 bytes 4"


def test_the_result_has_the_metrics_and_the_checkpoint(found, place):
    """17 401 tokens are 271 windows of 64; 1.5 epochs are 25 steps of 16 windows."""
    metrics = found["metrics"]
    assert (metrics["step"], metrics["epoch"], metrics["tokens"]) == (25, 1.476, 25 * 1024)
    assert metrics["val_loss"] < 5.6
    assert found["folder"] == str(place / "runs" / "quickstart-data")
    assert found["checkpoint"] == [25, str(place / "runs" / "quickstart-data" / "checkpoints" / "25")]
    assert found["is_folder"]
    assert found["error"] is None
    assert found["sample"] > 100


def test_the_history_has_the_records_of_the_run(found, place):
    assert found["history"] == [
        json.loads(line) for line in (place / "runs" / "quickstart-data" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in found["history"] if "val_loss" in record] == [0, 10, 20, 25]


def test_the_log_is_on_disk_before_each_checkpoint(found):
    """Records before a checkpoint are not written again, and a power cut loses what is not synced."""
    assert found["is_on_disk"] == {"5": True, "10": True, "15": True, "20": True, "25": True}


def test_the_same_configuration_finds_the_finished_run(found):
    assert found["again"] == [True, 25, True]
    assert "is finished; choose another --name for a new one\nsteps" in found["printed"]


def test_a_trained_model_has_its_tokenizer_and_its_configuration(found):
    assert (found["step"], found["tokenizer"], found["name"]) == (25, "bytes", "quickstart")


def test_a_failure_is_part_of_the_result(found):
    is_failure, details = found["diverged"]
    assert is_failure
    assert "the loss or the gradient of" in details
    step, sample = found["left"]
    assert (step % 5, sample) == (0, "")


def test_the_files_of_a_run_have_its_length(found, place):
    run = place / "runs" / "quickstart-data"
    config = json.loads((run / "config.json").read_text())["config"]
    assert (config["train"]["max_steps"], config["train"]["max_epochs"]) == (25, 1.5)
    result = json.loads((run / "result.json").read_text())
    assert (result["num_params"], result["tokens"], result["epochs"]) == (8448, 25 * 1024, 1.476)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [step for step in range(26) if step % 3 == 0 or step % 5 == 0]
    assert [record["tokens"] for record in records] == [1024 * record["step"] for record in records]
    assert [record["epoch"] for record in records] == [round(record["step"] * 16 / 271, 4) for record in records]


def test_each_option_of_the_intervals_and_the_samples_has_its_effect(found, place):
    run = place / "runs" / "quickstart-data"
    assert not (run / "tensorboard").exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["15", "20", "25"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "val_loss" in record] == [0, 10, 20, 25]
    assert records[-1]["val_loss"] != records[-1]["full_val_loss"]  # of the first window, and of all
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (step, prompt) for step in (0, 10, 20, 25) for prompt in ("a", "of")
    ]
    assert max(len(sample["text"]) for sample in samples) <= len("of") + 4


def test_nine_workers_need_two_cpus_for_ray_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Some words. " * 1000)
    monkeypatch.setattr("ray_jax_launch.connect", lambda hardware, dashboard: None)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 10.0}}])
    config = PRESETS["quickstart"]()
    steps = dataclasses.replace(config.train, global_batch_size=18)
    with pytest.raises(
        LaunchError, match=r"must have 11 CPUs, 9 for the workers of cpu:9 and 2 for the tasks of Ray Data, got 10"
    ):
        train(dataclasses.replace(config, data="book.txt", hardware="cpu:9", train=steps))
