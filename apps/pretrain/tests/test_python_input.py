"""Wrong values from Python. A child process takes them: in the tests, beartype would reject them first."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import dataclasses, io, json, sys
from pathlib import Path
from nnx_gpt2 import OptimizerConfig
from pretrain import PRESETS, MeshConfig, ModelConfig, PrepareConfig, PretrainConfig, TrainConfig, load_trained, main
from pretrain import train

quickstart = PRESETS["quickstart"]()
Path("run/.lock").mkdir(parents=True)
deep = []
for _ in range(100_000):
    deep = [deep]

class Broken:
    def __repr__(self):
        raise LookupError

class BadPath:
    def __fspath__(self):
        return 5
    def __repr__(self):
        return "BadPath()"

CALLS = {
    "hardware deep": lambda: dataclasses.replace(quickstart, hardware=deep),
    "hardware broken": lambda: dataclasses.replace(quickstart, hardware=Broken()),
    "load_trained(deep)": lambda: load_trained(deep),
    "main([deep])": lambda: main([deep]),
    "main([Broken])": lambda: main([Broken()]),
    "seed large": lambda: dataclasses.replace(quickstart, seed=10**5000),
    "seed negative": lambda: dataclasses.replace(quickstart, seed=-10**5000),
    "preset large": lambda: dataclasses.replace(quickstart, preset=10**5000),
    "TrainConfig.max_steps": lambda: TrainConfig(max_steps=10**5000),
    "profile empty": lambda: dataclasses.replace(quickstart, profile=""),
    "train(None)": lambda: train(None),
    "train('quickstart')": lambda: train("quickstart"),
    "train(PRESETS)": lambda: train(PRESETS["quickstart"]),
    "console": lambda: train(quickstart, console="stdout"),
    "storage device": lambda: train(dataclasses.replace(quickstart, storage_path="/dev/null")),
    "lock folder": lambda: train(dataclasses.replace(quickstart, storage_path=".", name="run")),
    "long data": lambda: train(dataclasses.replace(quickstart, data="x" * 6000)),
    "load_trained(None)": lambda: load_trained(None),
    "load_trained(bytes)": lambda: load_trained(b"runs"),
    "load_trained(path)": lambda: load_trained(BadPath()),
    "load_trained(long)": lambda: load_trained("n" * 6000),
    "main(5)": lambda: main(5),
    "main([5])": lambda: main([5]),
    "main('runs')": lambda: main("runs"),
    "PrepareConfig.text_column": lambda: PrepareConfig(text_column="\\ud800"),
    "MeshConfig": lambda: MeshConfig(fsdp=None),
    "ModelConfig": lambda: ModelConfig(attention="x"),
    "PrepareConfig": lambda: PrepareConfig(split_seed="1"),
    "PrepareConfig.tokenizer": lambda: PrepareConfig(tokenizer="gpt3"),
    "TrainConfig": lambda: TrainConfig(max_steps=1.5),
    "TrainConfig.bool": lambda: TrainConfig(log_every=True),
    "TrainConfig.order": lambda: TrainConfig(order="x"),
    "TrainConfig.max_epochs": lambda: TrainConfig(max_epochs=10**400),
    "optimizer": lambda: dataclasses.replace(quickstart, optimizer=OptimizerConfig(warmup_steps=1.5)),
    **{
        name: lambda name=name, value=value: dataclasses.replace(quickstart, **{name: value})
        for name, value in {
            "hardware": 5, "seed": "1", "data_mode": "x", "trackers": ("bogus",), "preset": "bogus", "mesh": None,
            "model": {}, "data": Path("book.txt"), "storage_path": Path("runs"), "name": "n" * 300,
            "prompts": "a",
            "dashboard": "yes", "peak_tflops": "1", "profile": 5,
        }.items()
    },
}
found = {}
for name, call in CALLS.items():
    stderr = sys.stderr = io.StringIO()
    try:
        code = call()
        found[name] = f"code {code}: {stderr.getvalue()}" if name.startswith("main") else "accepted"
    except ValueError as error:
        found[name] = str(error)
    except Exception as error:
        found[name] = repr(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The message of each call."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path_factory.mktemp("place"), env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("train(None)", "config must be a PretrainConfig, got None. Start from PRESETS['quickstart']()."),
        ("train('quickstart')", "config must be a PretrainConfig, got 'quickstart'. Start from"),
        ("train(PRESETS)", "config must be a PretrainConfig, got <function quickstart at"),
        ("console", "console must be a rich.console.Console or None, got 'stdout'. Leave it out."),
        ("storage device", "/dev/null/quickstart-builtin must be accessible, got Not a directory. Check it, or give"),
        ("lock folder", "run/.lock must be accessible, got Is a directory. Check it, or give another path."),
        ("long data", "must be readable, got File name too long. Correct that"),
        ("load_trained(None)", "run must be a text or a path, got None. Give the run's folder, URI or name."),
        ("load_trained(bytes)", "run must be a text or a path, got b'runs'. Give the run's folder, URI or name."),
        ("load_trained(path)", "run must be a text or a path, got BadPath(). Give"),
        ("load_trained(long)", "must be accessible, got File name too long."),
        ("main(5)", "code 2: error: args must be a list of texts, got 5. Write it as in ['sample', 'first']."),
        ("main([5])", "code 2: error: args must be a list of texts, got [5]. Write it as in ['sample', 'first']."),
        (
            "main('runs')",
            "code 2: error: args must be a list of texts, got 'runs'. Write it as in ['sample', 'first'].",
        ),
        ("hardware deep", "hardware must be a text, got [[[[[[[...]]]]]]]."),
        ("hardware broken", "hardware must be a text, got <Broken instance at 0x"),
        ("load_trained(deep)", "run must be a text or a path, got [[[[[[[...]]]]]]]. Give the run's folder, URI or"),
        ("main([deep])", "code 2: error: args must be a list of texts, got [[[[[[[...]]]]]]]. Write it as"),
        ("main([Broken])", "code 2: error: args must be a list of texts, got [<Broken instance at 0x"),
        ("seed large", "seed must be an integer of at most 9007199254740991, got a very large int."),
        ("seed negative", "seed must be an integer of at most 9007199254740991, got a very large int."),
        ("preset large", "gpt2-large or gpt2-xl, got a very large int."),
        ("TrainConfig.max_steps", "train.max_steps must be an integer of at most 9007199254740991, got a very large "),
        ("profile empty", "profile must be FIRST:END with 1 <= FIRST < END, such as 100:105, got ''."),
        ("PrepareConfig.text_column", "prepare.text_column must be a text in UTF-8, got '\\ud800'."),
        ("MeshConfig", "mesh.fsdp must be an integer, got None."),
        ("ModelConfig", "model.attention must be auto, xla, cudnn or splash, got 'x'."),
        ("PrepareConfig", "prepare.split_seed must be an integer, got '1'."),
        ("PrepareConfig.tokenizer", "or the path of a tokenizer.json, got gpt3."),
        ("TrainConfig", "train.max_steps must be an integer, got 1.5."),
        ("TrainConfig.bool", "train.log_every must be an integer, got True."),
        ("TrainConfig.order", "train.order must be shuffle, random, sequential or sequential-first or none, got 'x'."),
        ("TrainConfig.max_epochs", "train.max_epochs must be a number of at most 9007199254740991 or none, got 1000"),
        ("optimizer", "warmup_steps must be"),
        ("hardware", "hardware must be a text, got 5."),
        ("seed", "seed must be an integer, got '1'."),
        ("data_mode", "data_mode must be prepared or stream, got 'x'."),
        ("trackers", "trackers must be a tuple of any of tensorboard, wandb or trackio, or no value, got ('bogus',)."),
        (
            "preset",
            "preset must be quickstart, baby, tutorial, wikitext, finetune, fineweb, speedrun, gpt2, gpt2-medium, "
            "gpt2-large or gpt2-xl, ",
        ),
        ("mesh", "mesh must be a MeshConfig, got None."),
        ("model", "model must be a ModelConfig, got {}."),
        ("data", "data must be a text, got PosixPath('book.txt')."),
        ("storage_path", "storage_path must be a text, got PosixPath('runs')."),
        ("name", "name must have at most 255 bytes, got 'nnnn"),
        ("prompts", "prompts must be a tuple of texts, got 'a'."),
        ("dashboard", "dashboard must be true or false, got 'yes'."),
        ("peak_tflops", "peak_tflops must be a number or none, got '1'."),
        ("profile", "profile must be a text or none, got 5."),
    ],
)
def test_a_wrong_value_is_named(call, message, found):
    assert message in found[call]
    assert len(found[call]) < 1000
