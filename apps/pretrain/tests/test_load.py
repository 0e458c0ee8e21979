"""Commands on a trained model: one of random weights, saved as a run saves it, without Ray."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_gpt2 import create_optimizer, create_train_state, generate, make_eval_step, make_mesh, num_params
from owt_data import PrepareOptions, load_tokenizer, open_tokens, prepare
from pretrain import PRESETS, main
from pretrain._best_effort import best_effort
from pretrain._commands.evaluate import evaluate
from pretrain._commands.load import load_trained
from pretrain._commands.sample import sample
from pretrain._data import load_tokens
from pretrain._errors import UsageError
from pretrain._run.description import RUN, describe, describe_data
from pretrain._run.files import write_json
from pretrain._run.find import find_checkpoint, find_unless_published
from pretrain._run.folder import RunFolder
from pretrain._training import sampling
from pretrain._training.sampling import Sampler
from ray_jax_launch import Checkpoints

MODEL = dataclasses.replace(
    PRESETS["quickstart"]().model,
    vocab_size=384,  # the tokenizer has 257
    seq_len=32,
    num_layers=1,
    num_heads=2,
    embed_dim=16,
)


@pytest.fixture(scope="module")
def params():
    """Random parameters of the model of all runs."""
    optimizer = create_optimizer(PRESETS["quickstart"]().optimizer, 10)
    return create_train_state(MODEL, optimizer, jax.random.key(0)).params


@pytest.fixture
def make_run(tmp_path, params):
    """Saves a run of step 1 and returns its folder, its configuration, its parameters and its tokens."""

    def make(*, mask_documents=False):
        config = PRESETS["quickstart"]()
        lines = tmp_path / "lines.jsonl"
        lines.write_text("".join(f'{{"text": "document {i} of many, of some words"}}\n' for i in range(400)))
        train = dataclasses.replace(config.train, mask_documents=mask_documents)
        prepare = dataclasses.replace(config.prepare, val_fraction=0.1)
        config = dataclasses.replace(config, data=str(lines), model=MODEL, train=train, prepare=prepare)
        tokens = load_tokens(config, Console(quiet=True))
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir()
        description = describe(config, describe_data(tokens), "cpu:1").to_json()
        write_json(folder.config, description)
        with Checkpoints(folder.checkpoints) as checkpoints:
            checkpoints.save(1, {"params": params}, metadata={RUN: description})
        return folder, config, params, tokens

    return make


@pytest.mark.parametrize("mask_documents", [False, True])
def test_a_model_is_evaluated_as_it_was_trained(make_run, mask_documents):
    folder, config, params, tokens = make_run(mask_documents=mask_documents)
    count = tokens.val.num_windows(32)
    rest = tokens.val.read(len(tokens.val) - 33)  # the last window, which overlaps the one before
    num_rest = len(tokens.val) - 1 - 32 * count
    assert 0 < num_rest < 32
    windows = tokens.val.windows(np.arange(count), seq_len=32, order="sequential", seed=0)
    end_of_text = load_tokenizer("bytes").eot_token
    assert (windows[:, :-1] == end_of_text).any()

    def loss(end):
        step = make_eval_step(config.model, end_of_text=end)
        losses = [np.asarray(step(params, windows)).ravel(), np.asarray(step(params, rest[None]))[0, -num_rest:]]
        return float(np.concatenate(losses).mean(dtype=np.float64))

    apart, together = loss(end_of_text), loss(None)
    assert abs(apart - together) > 1e-4
    prepare(config.data, folder.path.parent / "tokens", PrepareOptions(tokenizer="bytes", val_fraction=0.1))
    for data in (None, str(folder.path.parent / "tokens")):
        found = evaluate(str(folder.path), data=data, batch_size=7, console=Console(quiet=True))
        assert found.val_loss == pytest.approx(apart if mask_documents else together, abs=1e-5)


@pytest.mark.fault
def test_a_vocabulary_that_is_padded_can_be_sampled(make_run, record_property):
    record_property("fault", "a vocabulary that is larger than the tokenizer's")
    record_property("lost", "nothing")
    folder, config, params, _ = make_run()
    text = Sampler(config, load_tokenizer("bytes"), make_mesh()).text(params)
    assert len(text) > 50
    (again,) = sample(
        str(folder.path), prompt=config.prompts[0], max_new_tokens=400, temperature=0.8, top_k=40, top_p=None,
        seed=config.seed, num_samples=1,
    )  # fmt: skip
    assert text == again


def test_a_prompt_that_is_longer_than_the_context_is_continued_at_its_end(make_run):
    folder, config, _, _ = make_run()
    prompt = "0123456789" * 5
    assert config.model.seq_len < len(prompt)
    options: dict[str, Any] = {"temperature": 0, "top_k": None, "top_p": None, "seed": 0, "num_samples": 1}
    (text,) = sample(str(folder.path), prompt=prompt, max_new_tokens=4, **options)
    (end,) = sample(str(folder.path), prompt=prompt[-config.model.seq_len :], max_new_tokens=4, **options)
    assert text == prompt[: -config.model.seq_len] + end


def test_an_empty_prompt_starts_a_document(make_run):
    """The model sees the end of the text before, which is no part of the sample."""
    folder, _, _, _ = make_run()
    tokenizer = load_tokenizer("bytes")
    options: dict[str, Any] = {"temperature": 0, "top_k": None, "top_p": None, "seed": 0, "num_samples": 2}
    texts = [*sample(str(folder.path), prompt="", max_new_tokens=40, **options)]  # more than the context
    ids = generate(
        load_trained(folder.path).model, [[tokenizer.eot_token]], 40, temperature=0, vocab_size=tokenizer.n_vocab
    )
    assert texts == [tokenizer.decode(ids[0][1:], errors="replace")] * 2
    assert [*sample(str(folder.path), prompt="", max_new_tokens=0, **options)] == ["", ""]


def test_compiled_programs_are_kept(make_run):
    folder, _, _, _ = make_run()
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    jax.config.update(name, None)
    try:
        load_trained(folder.path)
        assert Path(jax.config.values[name]).is_relative_to(os.environ["XDG_CACHE_HOME"])
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(
    "lines",
    [b"first\n\nlast", *(pytest.param(lines, marks=pytest.mark.slow) for lines in (b"", b"a\n", b"\xff\xe4 b\n"))],
)
def test_each_line_of_the_input_is_a_prompt(make_run, lines):
    folder, _, _, _ = make_run()
    words = ["--interactive", "--num-samples", "2", "--max-new-tokens", "0", "--prompt", "unused"]
    # Ray would be a second of the start.
    code = "import sys; from pretrain import main; sys.exit(main(sys.argv[1:]) or 'ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "sample", str(folder.path), *words], input=lines, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    texts = done.stdout.decode().split("\n" + "\u2500" * 80 + "\n") if lines else []
    prompts = lines.decode(errors="replace").removesuffix("\n").split("\n") if lines else []
    assert [text.removesuffix("\n") for text in texts] == [prompt for prompt in prompts for _ in range(2)]


def test_the_pieces_of_a_text_have_no_half_characters(make_run, monkeypatch):
    """The model draws random bytes, one per piece: many are parts of a character, or of none."""
    folder, _, _, _ = make_run()
    monkeypatch.setattr("nnx_gpt2._generate._Pace.adapt", lambda pace, elapsed_s: None)
    options: dict[str, Any] = {"max_new_tokens": 300, "temperature": 1, "top_k": None, "top_p": None, "seed": 0}
    for prompt in ("", "ü€😀" * 20):
        pieces: list[str] = []
        shown = []
        for text in sample(str(folder.path), prompt=prompt, num_samples=2, write=pieces.append, **options):
            shown.append(("".join(pieces), text))
            pieces.clear()
        assert all(piece == text for piece, text in shown)
        assert [text for _, text in shown] == [*sample(str(folder.path), prompt=prompt, num_samples=2, **options)]
        assert any("\x7f" < character < "\ufffd" for character in shown[0][1].removeprefix(prompt))


@pytest.mark.parametrize("is_interactive", [True, False])
def test_a_text_appears_while_it_is_drawn(make_run, is_interactive):
    folder, _, _, _ = make_run()
    words = ["--interactive"] if is_interactive else ["--prompt", "first"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pretrain", "sample", str(folder.path), *words, "--max-new-tokens", "1000000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    with process:
        process.stdin.write(b"first\n")
        process.stdin.flush()
        text = process.stdout.read(len("first") + 20)
        assert (text[:5], process.poll()) == (b"first", None)
        process.stdout.close()
        assert process.wait() == 141  # the next piece finds that nobody reads


def test_each_option_of_a_sample_has_its_effect(make_run):
    folder, _, _, _ = make_run()

    def text(**changes):
        options = {"max_new_tokens": 10, "temperature": 1, "top_k": None, "top_p": None, "seed": 0} | changes
        (found,) = sample(str(folder.path), prompt="a", num_samples=1, **options)
        return found

    most_likely = text(temperature=0)
    assert len({text(), text(seed=1), most_likely}) == 3
    assert text(top_k=1) == text(top_p=1e-6) == most_likely


def test_no_two_of_many_samples_are_equal(make_run):
    folder, _, _, _ = make_run()
    texts = [
        *sample(
            str(folder.path), prompt="a", max_new_tokens=20, temperature=1, top_k=None, top_p=None, seed=0,
            num_samples=70,
        )
    ]  # fmt: skip
    assert len(texts) == len(set(texts)) == 70


def test_tokens_that_changed_are_not_evaluated(make_run):
    folder, _, _, tokens = make_run()
    prepared = Path(tokens.names)
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["files"]["val.bin"]["sha256"] = "0" * 64
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="must hold the tokens of the run, got others"):
        evaluate(str(folder.path), data=None, batch_size=7, console=Console(quiet=True))


def test_tokens_of_another_tokenizer_are_not_evaluated(make_run, tmp_path):
    folder, _, _, tokens = make_run()
    prepared = shutil.copytree(tokens.names, tmp_path / "prepared")
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": "gpt2"}))
    with pytest.raises(UsageError, match="must be tokens of the run's tokenizer, bytes, got tokens of gpt2"):
        evaluate(str(folder.path), data=str(prepared), batch_size=7, console=Console(quiet=True))


@pytest.mark.fault
def test_a_sample_that_fails_costs_the_sample_alone(make_run, caplog, record_property):
    record_property("fault", "the model cannot be sampled at a validation, or at the end of a run")
    record_property("lost", "the samples")
    _, config, params, _ = make_run()
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2))  # the parameters have 1
    sampler = Sampler(other, load_tokenizer("bytes"), make_mesh())
    assert (sampler.samples(params, 5), sampler.text(params)) == ([], "")
    assert len(caplog.messages) == 2
    assert all(warning.startswith("the run goes on without a sample: ") for warning in caplog.messages)


def test_a_run_without_its_tokenizer_has_no_samples(make_run):
    _, config, params, _ = make_run()
    sampler = Sampler(config, None, make_mesh())
    assert (sampler.samples(params, 5), sampler.text(params)) == ([], "")


@pytest.mark.parametrize(
    ("fsdp", "share", "num_samples"), [(2, 0.11, 0), (2, 0.09, 2), (1, 0.11, 2)], ids=["large", "small", "one device"]
)
def test_parameters_that_are_sharded_are_sampled_at_a_validation_if_a_copy_is_small(
    fsdp, share, num_samples, make_run, monkeypatch
):
    """At the end of the run, nothing else needs the memory."""
    _, config, params, _ = make_run()
    copy_bytes = num_params(config.model) * 4
    monkeypatch.setattr(sampling, "device_memory_bytes", lambda: int(copy_bytes / share))
    monkeypatch.setattr(sampling, "_END_TOKENS", 5)
    mesh, train = (
        dataclasses.replace(config.mesh, fsdp=fsdp),
        dataclasses.replace(config.train, sample_tokens=3),
    )
    config = dataclasses.replace(config, mesh=mesh, train=train)
    sampler = Sampler(config, load_tokenizer("bytes"), make_mesh())
    assert len(sampler.samples(params, 5)) == num_samples
    assert sampler.text(params).startswith("def ")


def test_a_run_without_samples_has_no_text_at_its_end(make_run):
    _, config, params, _ = make_run()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, sample_tokens=0))
    sampler = Sampler(config, load_tokenizer("bytes"), make_mesh())
    assert (sampler.samples(params, 5), sampler.text(params)) == ([], "")


def test_samples_are_the_same_for_the_same_parameters(make_run):
    _, config, params, _ = make_run()
    first, again = (Sampler(config, load_tokenizer("bytes"), make_mesh()).samples(params, 5) for _ in range(2))
    assert first == again
    assert [(sample.step, sample.prompt) for sample in first] == [(5, "def "), (5, "import ")]
    assert all(sample.text.startswith(sample.prompt) for sample in first)
    assert first[0].text.removeprefix("def ") != first[1].text.removeprefix("import ")


def test_a_sentence_is_shown_without_the_name_of_its_class(caplog):
    for error in (UsageError("prompts must be texts."), KeyError("a")):
        with best_effort("the sample"):
            raise error
    assert caplog.messages == [
        "the run goes on without the sample: prompts must be texts.",
        "the run goes on without the sample: KeyError: 'a'",
    ]


def test_an_interrupt_is_no_fault_of_a_convenience():
    with pytest.raises(KeyboardInterrupt), best_effort("the sample"):
        raise KeyboardInterrupt


def test_an_evaluation_counts_the_tokens_and_the_bytes_that_it_predicts(make_run, tmp_path, capsys):
    """A token of the tokenizer `bytes` is a byte, but for the ends of the documents."""
    folder, _, _, tokens = make_run()
    (tmp_path / "other.txt").write_text("other words " * 99)
    prepare(str(tmp_path / "other.txt"), tmp_path / "other", PrepareOptions(tokenizer="bytes", val_fraction=0.3))
    other = open_tokens(str(tmp_path / "other"), tokenizer="bytes")
    losses = []
    evaluated: list[tuple[tuple[str, ...], Any]] = [((), tokens.val), (("--data", str(tmp_path / "other")), other.val)]
    for data, val in evaluated:
        assert main(["eval", str(folder.path), "--batch-size", "3", *data]) == 0
        found = json.loads(capsys.readouterr().out)
        predicted = val.read(0)[1:]
        num_bytes = int((predicted != load_tokenizer("bytes").eot_token).sum())
        bits = found["val_loss"] * len(predicted) / (math.log(2) * num_bytes)
        assert (found["step"], found["num_tokens"]) == (1, len(predicted))
        assert found["val_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        losses.append(found["val_loss"])
    assert losses[0] != losses[1]


def test_samples_are_printed_as_they_are_and_apart(make_run, capsys):
    folder, _, _, _ = make_run()
    words = ["--prompt", "a [b]", "--num-samples", "3", "--max-new-tokens", "1", "--temperature", "0"]
    assert main(["sample", str(folder.path), *words]) == 0
    texts = capsys.readouterr().out.split("\n" + "\u2500" * 80 + "\n")
    assert len(texts) == 3
    assert {text.removesuffix("\n")[:5] for text in texts} == {"a [b]"}


def test_a_reader_leaves_a_damaged_checkpoint_and_a_save_that_goes_on_alone(make_run):
    """Another command may train the run at the same time."""
    folder, _, _, _ = make_run()
    newest = shutil.copytree(folder.checkpoints / "1", folder.checkpoints / "2")
    damaged = next(path for path in newest.rglob("params/**/d/*") if path.is_file())
    damaged.write_text("damaged")
    (folder.checkpoints / ".3.partial").mkdir()
    before = sorted(folder.path.rglob("*"))
    trained = load_trained(folder.path)
    assert (trained.step, trained.config.model.embed_dim, trained.folder.path) == (1, 16, folder.path)
    assert sorted(folder.path.rglob("*")) == before
    assert damaged.read_text() == "damaged"


def test_a_run_comes_before_a_folder_of_weights_of_the_same_name(make_run, tmp_path, monkeypatch):
    folder = make_run()[0].path
    (tmp_path / "runs").mkdir()
    folder.rename(tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    Path("one").mkdir()
    Path("one/config.json").write_text('{"model_type": "gpt2"}')
    found = find_unless_published("one", find_checkpoint)
    assert found is not None
    assert (found.folder.path, found.step) == (tmp_path / "runs" / "one", 1)
    assert find_unless_published("./one", find_checkpoint) is None
