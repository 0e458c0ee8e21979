"""`eval --tasks`: the scores of lm-eval are those of a direct computation with all logits of the model."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own_tasks import documents, write_tasks
from rich.console import Console

from nnx_gpt2 import GPT2, GPT2Config
from owt_data import load_tokenizer
from pretrain import PRESETS, load_trained, main
from pretrain._commands.train import checked_tasks
from pretrain._errors import UsageError
from pretrain._judge.published import published_figures
from pretrain._judge.row_batches import Row
from pretrain._judge.scorer import Scorer
from pretrain._judge.task_table import show_scores
from pretrain._judge.tasks import MetricScore, TaskScores, _scores

END = 256
SEVERAL = """
import json, sys
import jax
from pretrain import load_trained
from pretrain._judge.row_batches import Row
from pretrain._judge.scorer import Scorer

scorer = Scorer(load_trained(sys.argv[1]).model, batch_size=1)
rows = [Row(*row) for row in json.loads(sys.argv[2])]
texts = scorer.continue_texts(
    [row.tokens[:9] for row in rows], 6, has_ended=lambda text: False, rows_at_once=2, temperature=0, vocab_size=257
)
print(json.dumps([jax.device_count(), scorer.scores(rows), texts]))
"""
CONFIG = GPT2Config(vocab_size=300, seq_len=32, num_layers=1, num_heads=2, embed_dim=16)


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that some tokens are likelier than others."""
    model = GPT2(CONFIG, rngs=nnx.Rngs(0))
    model.wte.embedding[...] = 15 * model.wte.embedding[...]
    return model


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "exported"
    model.save_pretrained(folder, end_of_text=END)
    return folder


@pytest.fixture(scope="module")
def log_probs(model):
    """Returns the log-probability of each token after the first, in a context of its own, and the likeliest tokens."""
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)))

    def compute(tokens):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens) - 1] = tokens[:-1]
        found = np.asarray(forward(jnp.asarray(padded)), np.float64)[0, : len(tokens) - 1]
        return found[np.arange(len(found)), tokens[1:]], found.argmax(-1)

    return compute


def test_a_row_is_scored_as_if_it_were_alone(model, log_probs):
    rng = np.random.default_rng(2)
    rows = [Row(rng.integers(0, 300, rng.integers(2, 34)).tolist(), 1) for _ in range(30)]
    rows = [Row(row.tokens, int(rng.integers(0, len(row.tokens)))) for row in rows]
    likeliest = [0]
    while len(likeliest) < 9:
        likeliest.append(int(log_probs([*likeliest, 0])[1][-1]))
    rows += [Row([*rows[0].tokens[:-1], token], 1) for token in (7, 8, 9)]  # which share a row
    rows.append(Row(likeliest, 8))
    done = []
    scores = Scorer(model, batch_size=3).scores(rows, done.append)
    assert sum(done) == len(rows)
    for row, score in zip(rows, scores, strict=True):
        found, best = log_probs(row.tokens)
        scored = range(len(found) - row.num_scored, len(found))
        assert score.log_likelihood == pytest.approx(found[scored].sum(), abs=1e-4)
        assert score.is_greedy == all(best[i] == row.tokens[i + 1] for i in scored)
    assert (scores[-1].is_greedy, sum(score.is_greedy for score in scores) < len(rows)) == (True, True)


def test_texts_are_the_likeliest_continuations_and_end_at_a_stop(model, log_probs):
    prompts = [[1, 2, 3], [4], [*range(20)]]

    def continued(has_ended):
        return Scorer(model, batch_size=3).continue_texts(
            prompts, 12, has_ended=has_ended, rows_at_once=2, temperature=0, vocab_size=257
        )

    whole = continued(lambda tokens: False)
    for prompt, text in zip(prompts, whole, strict=True):
        assert len(text) == 12
        for i in range(12):
            tokens = [*prompt, *text[:i]]
            assert text[i] < 257
            log = log_probs([*tokens, text[i]])[0][-1]
            assert all(log >= log_probs([*tokens, other])[0][-1] - 1e-5 for other in (0, 100, 256))
    short = continued(lambda tokens: len(tokens) >= 1)
    assert all(text[: len(part)] == part for text, part in zip(whole, short, strict=True))


def test_several_devices_give_the_scores_and_the_texts_of_one(exported):
    rng = np.random.default_rng(3)
    rows = [(rng.integers(0, 300, length).tolist(), length // 2) for length in (2, 33, 9, 17, 17, 26, 5)]
    found = []
    for num_devices in (1, 3):
        command = [sys.executable, "-c", SEVERAL, str(exported), json.dumps(rows)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (one, scores, texts), (three, scores_of_three, texts_of_three) = found
    assert (one, three, texts) == (1, 3, texts_of_three)
    np.testing.assert_allclose(scores_of_three, scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_texts", "length", "at_once"),
    [(1, 5, 1), (128, 20, 128), (129, 20, 65), (300, 32, 100), (33, 500, 33)],
)
def test_batches_of_texts_have_equal_sizes(model, num_texts, length, at_once):
    assert Scorer(model, batch_size=2).texts_at_once(num_texts, length) == at_once


def test_long_texts_are_drawn_in_smaller_batches():
    config = dataclasses.replace(CONFIG, seq_len=1024)
    scorer = Scorer(GPT2(config, rngs=nnx.Rngs(0)), batch_size=2)
    assert [scorer.texts_at_once(1024, length) for length in (100, 256, 1000, 5000)] == [128, 64, 16, 16]


def encoded(text):
    return [*text.encode()]


def test_scores_on_own_tasks_are_those_of_a_direct_computation(exported, model, log_probs, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    rows = documents(14)
    scorer = Scorer(model, batch_size=4)
    for row in rows[:5]:  # the text that the model writes, up to the stop
        (text,) = scorer.continue_texts(
            [encoded(row["question"])[-20:]], 12, has_ended=lambda tokens: False, rows_at_once=1, temperature=0,
            vocab_size=257, end_of_text=END,
        )  # fmt: skip
        row["written"] = load_tokenizer("bytes").decode(text, errors="replace").split("e")[0].split("<|end")[0]
    write_tasks(tmp_path / "own", rows)
    assert main(["eval", str(exported), "--tasks", f"{tmp_path / 'own'}:13", "--batch-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = {task["task"]: {one["metric"]: one for one in task["metrics"]} for task in found["tasks"]}
    assert (found["step"], {task["num_documents"] for task in found["tasks"]}) == (None, {13})

    right = {"acc": 0, "acc_norm": 0}
    nats = num_bytes = 0.0
    for row in rows[:13]:
        sums = []
        for choice in row["choices"]:
            tokens = encoded(f"{row['question']} {choice}")[-33:]
            count = min(len(choice) + 1, 32)
            sums.append(log_probs(tokens)[0][-count:].sum())
        lengths = [len(choice) for choice in row["choices"]]
        right["acc"] += int(np.argmax(sums)) == row["answer"]
        right["acc_norm"] += int(np.argmax(np.array(sums) / lengths)) == row["answer"]
        tokens = encoded(row["text"])
        for first in range(0, len(tokens), 32):  # the last window has the 32 tokens before its end
            end = min(first + 32, len(tokens))
            window = [END, *tokens][max(0, end - 32) : end + 1]
            nats -= log_probs(window)[0][-(end - first) :].sum()
        num_bytes += len(tokens)
    for metric, count in right.items():
        assert scores["own_choice"][metric]["value"] == pytest.approx(count / 13)
        share = count / 13
        assert scores["own_choice"][metric]["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 12))
    assert scores["own_text"]["bits_per_byte"]["value"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-5)
    assert scores["own_writing"]["exact_match"]["value"] >= 5 / 13

    assert main(["eval", str(exported), "--tasks", str(tmp_path / "own" / "own_choice.yaml"), "--limit", "3"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["task", "metric", "documents", "shots", "score", "±", "error"]
    assert first.split()[:4] == ["own_choice", "acc", "3", "0"]
    assert second.split()[0] == "acc_norm"

    (tmp_path / "own" / "documents.jsonl").unlink()
    assert main(["eval", str(exported), "--tasks", str(tmp_path / "own" / "own_choice.yaml")]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("error: --tasks must name tasks whose files and data can be read, got ")


@dataclasses.dataclass
class Request:
    """A request of lm-eval, where the extra is not installed."""

    request_type: str
    doc: dict[str, Any]
    args: tuple[Any, ...]
    idx: int


@pytest.fixture(scope="module")
def language_model(model):
    """The model as lm-eval asks it. Without the extra, its base has nothing, and no text is scored in windows."""
    name = "pretrain._judge.language_model"
    if importlib.util.find_spec("lm_eval") is not None:
        module, request = importlib.import_module(name), importlib.import_module("lm_eval.api.instance").Instance
    else:
        parts: dict[str, Any] = {
            "lm_eval": ModuleType("lm_eval"),
            "lm_eval.api": ModuleType("lm_eval.api"),
            "lm_eval.api.instance": SimpleNamespace(Instance=Request),
            "lm_eval.api.model": SimpleNamespace(TemplateLM=type("TemplateLM", (), {})),
            "lm_eval.utils": SimpleNamespace(get_rolling_token_windows=None, make_disjoint_window=None),
        }
        sys.modules.pop(name, None)  # an import that failed may have left it
        with pytest.MonkeyPatch.context() as patch:
            for part, content in parts.items():
                patch.setitem(sys.modules, part, content)
            module, request = importlib.import_module(name), Request
        del sys.modules[name]
    return module.LanguageModel(model, load_tokenizer("bytes"), batch_size=2, console=Console(quiet=True)), request


def test_each_option_of_a_task_changes_the_text_that_is_written(language_model):
    language_model, instance = language_model

    def write(**options):
        requests = [instance("generate_until", {}, ("A cat", {"max_gen_toks": 16, **options}), 0)]
        return language_model.generate_until(requests)[0]

    drawing = {"do_sample": True, "temperature": 3.0}
    greedy, drawn = write(), write(**drawing)
    assert greedy != drawn
    for options in ({"top_p": 1e-6}, {"top_k": 1}, {"do_sample": False}, {"temperature": 0.0}):
        assert write(**drawing | options) == greedy
    assert len(write(max_gen_toks=4)) <= 4 < len(greedy)
    _, early, late, *_ = dict.fromkeys(drawn)
    for stops in ([early, late], [late, early], early):  # the first one in the text counts
        assert write(**drawing, until=stops) == drawn[: drawn.index(early)]
    assert write(**drawing, until=late) == drawn[: drawn.index(late)]
    # Requests of other options are answered apart, and each has its own answer.
    requests = [instance("generate_until", {}, ("A cat", {"max_gen_toks": number}), 0) for number in (16, 4, 16)]
    assert language_model.generate_until(requests) == [greedy, write(max_gen_toks=4), greedy]


@pytest.mark.parametrize(
    ("given", "num_seen", "max_new_tokens"),
    [
        ({"max_gen_toks": 12}, 20, 12),
        ({"max_gen_toks": None, "max_tokens": "31", "max_completion_tokens": 5}, 1, 31),
        ({"max_new_tokens": 32}, 16, 32),  # an answer as long as the context: half of the context is seen
        ({}, 16, 256),
    ],
)
def test_a_context_loses_its_beginning_to_leave_room_for_the_answer(
    given, num_seen, max_new_tokens, language_model, monkeypatch
):
    language_model, instance = language_model
    asked = []

    def continue_texts(prompts, number, **options):
        asked.append((prompts, number))
        return [[97, END, 98]] * len(prompts)

    monkeypatch.setattr(language_model._scorer, "continue_texts", continue_texts)
    text = "".join(map(chr, range(65, 105)))
    requests = [instance("generate_until", {}, (context, given), 0) for context in (text, "ab", "")]
    assert language_model.generate_until(requests) == ["a"] * 3
    assert asked == [([encoded(text)[-num_seen:], encoded("ab")[-num_seen:], [END]], max_new_tokens)]


def test_the_text_of_an_end_of_text_is_its_token(language_model):
    language_model, _ = language_model
    assert language_model.tok_encode("ab<|endoftext|><|endoftext|>c") == [97, 98, END, END, 99]
    assert (language_model.tok_encode(""), language_model.eot_token_id) == ([], END)


@pytest.mark.parametrize("continuation", [" the end", "", " and the whole of an answer longer than the context"])
@pytest.mark.parametrize("context", ["", "a", "a question that is longer than the context of the model"])
def test_a_request_loses_its_beginning_and_no_more(language_model, log_probs, context, continuation):
    language_model, _ = language_model
    before, after = encoded(context) or [END], encoded(continuation)
    ((found, _),) = language_model._loglikelihood_tokens([(("", ""), before, after)])
    seen = [*before, *after][-33:]
    expected = log_probs(seen)[0][-min(len(continuation), 32) :] if continuation else np.zeros(1)
    assert found == pytest.approx(expected.sum(), abs=1e-4)


def test_a_metric_has_the_error_of_its_filter():
    values = {
        "alias": "own", "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.125, "exact_match,loose": 0.75,
        "exact_match_stderr,loose": 0.25, "acc,none": 0.25, "acc_stderr,none": 0.0625,
        "f1,none": 1, "f1_stderr,none": "N/A",
    }  # fmt: skip
    results = {"n-samples": {"own": {"original": 9, "effective": 4}}, "versions": {"own": 1.0}, "n-shot": {"own": 2}}
    found = _scores("own", values, results, published_figures)
    assert [(one.metric, one.value, one.stderr) for one in found.metrics] == [
        ("exact_match,strict", 0.5, 0.125), ("exact_match,loose", 0.75, 0.25), ("acc", 0.25, 0.0625), ("f1", 1.0, None),
    ]  # fmt: skip
    assert (found.num_documents, found.num_examples, found.version) == (4, 2, "1.0")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tasks piqa:0", "--tasks must be names such as piqa or hellaswag:500, with at least 1, got piqa:0."),
        ("--tasks ,", "--tasks must be names such as piqa or hellaswag:500, with at least 1, got ,."),
        (
            "--tasks piqa --data a.txt",
            "--tasks must be given without --data, --split and --text-column: a task has its",
        ),
        ("--tasks piqa --limit 0", "--limit must be from 1 to 2147483647, got 0."),
        ("--limit 3", "--limit must be given with --tasks, got 3 alone. Leave it out."),
        ("--tasks piqa --batch-size 0", "--batch-size must be from 1 to 2147483647, got 0."),
        ("", "--data must be given for "),
    ],
)
def test_wrong_options_are_rejected_with_one_sentence(exported, words, sentence, capsys):
    assert main(["eval", str(exported), *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_without_the_extra_the_command_that_installs_it_is_named(exported, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(exported), "--tasks", "piqa"]) == 2
    assert "Install it with the extra eval, as in `uv run --extra eval apps/pretrain" in capsys.readouterr().err


def test_an_exported_folder_is_a_model_in_every_command(exported, model, tmp_path, capsys):
    trained = load_trained(exported)
    assert (trained.step, trained.run, trained.tokenizer.name) == (None, None, "bytes")
    tokens = jnp.arange(20)[None]
    np.testing.assert_allclose(trained.model(tokens), model(tokens), atol=1e-5)
    with pytest.raises(UsageError, match="exported must be a run, got weights, which have no configuration"):
        trained.config.train.max_steps  # noqa: B018 - it raises
    text = tmp_path / "text.txt"
    text.write_text("some words of a text " * 9)
    assert main(["eval", str(exported), "--data", str(text)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["num_tokens"]) == (None, 189)
    assert found["val_perplexity"] == pytest.approx(math.exp(found["val_loss"]), rel=1e-4)
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"] / math.log(2), rel=0.02)
    assert main(["sample", str(exported), "--prompt", "ab", "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    assert main(["export", str(exported), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_the_tasks_of_a_run_are_checked_before_it_starts(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    config = PRESETS["quickstart"]().with_options({"train.eval_tasks": ["piqa:3", "own/a.yaml"]})
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match="tasks must have lm-eval, which is not installed"):
        checked_tasks(config)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    with pytest.raises(
        UsageError, match=r"eval_tasks must name tasks, or YAML files and folders that exist, got own/a\.yaml"
    ):
        checked_tasks(config)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.yaml").touch()
    with pytest.raises(
        UsageError, match=r"eval_tasks must name tasks whose files .* got own/a.yaml.*Correct the file;"
    ):
        checked_tasks(config)
    write_tasks(tmp_path / "own", documents(2))
    (tmp_path / "own" / "own_choice.yaml").rename(tmp_path / "own" / "a.yaml")
    assert checked_tasks(config).train.eval_tasks == ("piqa:3", str(tmp_path / "own" / "a.yaml"))
    (tmp_path / "own" / "documents.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"^train\.eval_tasks must name tasks whose .*documents\.jsonl.*Correct the"):
        checked_tasks(config)
    # A hub that does not answer now may answer when the scores are wanted.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = (tmp_path / "own" / "a.yaml").read_text()
    text = re.sub("^dataset_kwargs:\n(  .*\n)+", "", text, flags=re.MULTILINE)
    (tmp_path / "own" / "a.yaml").write_text(text.replace("dataset_path: json", "dataset_path: no/such"))
    assert len(checked_tasks(config).train.eval_tasks) == 2
    assert re.match(r"train\.eval_tasks could not be checked: .*no/such.* on the Hub", caplog.messages[-1])
    with pytest.raises(UsageError, match=r"^train\.eval_tasks must name tasks of lm-eval.*, got pika\. Did you mean"):
        checked_tasks(config.with_options({"train.eval_tasks": ["pika"]}))
    with pytest.raises(UsageError, match=r"^train\.eval_tasks must be names such as piqa"):
        config.with_options({"train.eval_tasks": ["piqa:0"]})
    with pytest.raises(
        UsageError, match=r"eval_tasks_every must be a multiple of train.checkpoint_every, 250, got 300"
    ):
        config.with_options({"train.eval_tasks_every": 300})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("doc_to_text: [", "while parsing a flow"),
        ("doc_to_text: '{{question'", "unexpected end of template, expected 'end of print statement'"),
        ("doc_to_text: '{{question.none.none}}'", "'str object' has no attribute 'none'"),
    ],
)
def test_wrong_yaml_and_templates_are_one_sentence(exported, tmp_path, capsys, wrong, reason):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    write_tasks(tmp_path, documents(2))
    file = tmp_path / "own_choice.yaml"
    file.write_text(re.sub("^doc_to_text.*$", lambda match: wrong, file.read_text(), flags=re.MULTILINE))
    assert main(["eval", str(exported), "--tasks", str(file)]) == 2
    error = capsys.readouterr().err
    assert "error: --tasks must name tasks with valid YAML and templates, got" in error
    assert reason in error


def test_an_unknown_metric_is_named_and_the_figures_of_a_name_are_not_those_of_a_file(
    exported, tmp_path, capsys, caplog
):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    write_tasks(tmp_path, documents(3))
    file = tmp_path / "own_choice.yaml"
    text = file.read_text().replace("task: own_choice", "task: hellaswag")
    file.write_text(f"{text}  - metric: acc_unknown\n    aggregation: mean\n    higher_is_better: true\n")
    assert main(["eval", str(exported), "--tasks", str(file), "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert {score["metric"]: score["published"] for score in task["metrics"]} == {"acc": [], "acc_norm": []}
    assert caplog.messages[-1] == "lm-eval has no score of the metric acc_unknown for the task hellaswag"


def test_the_figures_of_gpt2_stand_beside_the_scores_with_their_sources(capsys):
    figures = published_figures("hellaswag", "acc_norm")
    scores = MetricScore(metric="acc_norm", value=0.25, stderr=0.0125, published=figures)
    task = TaskScores(task="hellaswag", num_documents=1_000, num_examples=0, version="1", metrics=[scores])
    show_scores([task], console=Console(width=60))
    header, row, source = capsys.readouterr().out.splitlines()
    assert header.endswith("± error  GPT-2 124M  GPT-2 1.5B")
    assert row.split() == ["hellaswag", "acc_norm", "1,000", "0", "0.2500", "0.0125", "0.3114", "0.5089"]
    assert source == "GPT-2 on hellaswag: github.com/karpathy/build-nanogpt, hellaswag.py"


def test_a_score_without_an_error_a_group_of_tasks_and_a_large_score_have_their_own_texts(capsys):
    values = {"word_perplexity": 1234.567, "byte_perplexity": 99.99, "acc": -100.0}
    metrics = [MetricScore(metric=name, value=value, stderr=None, published=()) for name, value in values.items()]
    scores = [
        TaskScores(task="own", num_documents=None, num_examples=None, version=None, metrics=metrics),
        TaskScores(task="more", num_documents=7, num_examples=2, version=None, metrics=metrics[1:2]),
    ]
    show_scores(scores, console=Console(width=60))
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["task", "metric", "documents", "shots", "score", "±", "error"]
    assert [row.split() for row in rows] == [
        ["own", "word_perplexity", "1,234.57"], ["byte_perplexity", "99.9900"], ["acc", "-100.00"],
        ["more", "byte_perplexity", "7", "2", "99.9900"],
    ]  # fmt: skip


def test_the_tokenizer_of_other_weights_is_not_guessed(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "other", end_of_text=7)
    assert main(["sample", str(tmp_path / "other")]) == 2
    assert "must be gpt2 or bytes, with the end of text 50256 or 256, got another" in capsys.readouterr().err


def test_a_published_name_that_cannot_be_downloaded_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2-medium", "owner/name"):
        assert main(["sample", name]) == 2
        state = f"the files of {name} are not in the cache of the hub, and the hub cannot be reached."
        remedy = "Connect to the network for the first use, and unset HF_HUB_OFFLINE."
        assert capsys.readouterr().err == f"error: {state} {remedy}\n"
