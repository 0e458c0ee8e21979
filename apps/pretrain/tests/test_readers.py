"""Exports in other programs: transformers, and the command of a card, which trains the model again."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_gpt2 import GPT2, generate
from owt_data import load_tokenizer

# The programs that read an export. They must not see the settings of a hub.
pytestmark = pytest.mark.slow

TRAIN = """
--preset baby --data book.txt --hardware local --name first --quiet --train.max-steps 12 --train.checkpoint-every 6
--train.eval-every 6 --train.sample-tokens 0 --model.num-layers 2 --model.embed-dim 32 --model.num-heads 2
"""
TEXTS = ["ROMEO: I do", "What's  this?\n\n", "é日 x"]

# What transformers makes of an export. A process of its own: torch and jax have other threads.
READ = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
folder, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
write = pipeline("text-generation", model=folder)
found = []
for text in texts:
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**encoded).logits[0].float().tolist()
    written = model.generate(**encoded, do_sample=False, max_new_tokens=20)[0]
    found.append({
        "ids": encoded.input_ids[0].tolist(), "logits": logits, "text": tokenizer.decode(written),
        "pipeline": write(text, do_sample=False, max_new_tokens=20)[0]["generated_text"],
    })
model.save_pretrained(sys.argv[3], max_shard_size="20KB")
print(json.dumps({"texts": found, "free": write("A")[0]["generated_text"]}))
"""


def run(command, place, **changes):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"} | changes
    return subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def pretrain(line, place):
    return run([sys.executable, "-m", "pretrain", *shlex.split(line)], place)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, `first`, and its export, `out`."""
    place = tmp_path_factory.mktemp("place")
    lines = (f"{number} green bottles, hanging on the wall; and if one should fall?" for number in range(300))
    (place / "book.txt").write_text("\n".join(lines))
    pretrain(TRAIN, place)
    pretrain("export first out", place)
    return place


def test_transformers_reads_an_export(place):
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, check=False).returncode:
        pytest.skip("needs torch and transformers, here or in the interpreter TRANSFORMERS_PYTHON")
    found = json.loads(run([python, "-c", READ, "out", json.dumps(TEXTS), "theirs"], place).splitlines()[-1])
    model, tokenizer = GPT2.from_pretrained(place / "out"), load_tokenizer("bytes")
    for text, read in zip(TEXTS, found["texts"], strict=True):
        ids = tokenizer.encode_ordinary(text)
        assert read["ids"] == ids
        np.testing.assert_allclose(read["logits"], model(jnp.array([ids]))[0], atol=1e-5)
        (written,) = generate(model, [ids], 20, temperature=0.0)
        expected = tokenizer.decode(np.asarray(written)[-20:].tolist())
        assert read["text"] == read["pipeline"] == text + expected
    assert len(found["free"]) > 1
    # Their own files, in shards: the same model.
    assert len(list((place / "theirs").glob("model-*.safetensors"))) > 1
    ids = jnp.array([tokenizer.encode_ordinary(TEXTS[0])])
    np.testing.assert_array_equal(GPT2.from_pretrained(place / "theirs")(ids), model(ids))


def test_the_command_of_the_card_repeats_the_run_to_the_bit(place):
    card = (place / "out" / "README.md").read_text()
    (command,) = re.findall("^pretrain .*", card, re.MULTILINE)
    (place / "run.json").write_bytes((place / "out" / "run.json").read_bytes())
    pretrain(command.removeprefix("pretrain "), place)
    results = [json.loads(Path(place, "runs", name, "result.json").read_text()) for name in ("first", "first-again")]
    assert results[0]["digests"] == results[1]["digests"]
    assert len(results[0]["digests"]) == 4
    for item, digest in results[1]["digests"].items():
        assert f"\n| {item} | `{digest}` |\n" in card
