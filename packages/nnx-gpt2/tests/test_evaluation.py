import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnx_gpt2 import (
    GPT2,
    Question,
    abstract_train_state,
    evaluate_choices,
    evaluate_tokens,
    make_eval_step,
    make_mesh,
    merge,
    read_questions,
    split_params,
    tree_shardings,
)
from nnx_gpt2._errors import shown


@pytest.fixture
def model(tiny):
    return GPT2(tiny, rngs=nnx.Rngs(0))


def encode(text):
    """Encode letters as 1 to 26, and other characters as 0."""
    return [ord(letter) - 96 if letter.isalpha() else 0 for letter in text.lower()]


# The context is 16: windows without overlap; a stride that is not a divisor; the most context for each token;
# one window, full or short.
@pytest.mark.parametrize(("num_tokens", "stride"), [(97, None), (97, 7), (40, 1), (17, 16), (9, 1), (2, 4)])
def test_every_token_is_predicted_once_from_the_context_in_its_window(model, num_tokens, stride):
    tokens = np.random.default_rng(0).integers(0, 65, num_tokens).astype(np.uint16)
    found = evaluate_tokens(model, tokens, stride=stride, batch_size=4)
    step, length, losses = stride or 16, min(16, num_tokens - 1), []
    losses_of = make_eval_step(model.config)
    start = 0
    while len(losses) < num_tokens - 1:
        start = min(start, num_tokens - 1 - length)
        row = losses_of(split_params(model), tokens[None, start : start + length + 1])[0]
        losses += np.asarray(row)[len(losses) - start :].tolist()
        start += step
    assert found.num_tokens == num_tokens - 1
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


MESHES = {"data=8": {}, "fsdp=8": {"fsdp": 8}, "data=2,fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2}}


@pytest.fixture(params=MESHES)
def spread(model, request):
    """The model with its parameters on the eight devices of a mesh."""
    params = split_params(model)
    return merge(model.config, jax.device_put(params, tree_shardings(params, make_mesh(**MESHES[request.param]))))


FOREIGN = {"one axis": {"rows": 8}, "two devices": {"rows": 2}, "tensor alone": {"model": 2, "tensor": 4}}


@pytest.fixture(params=FOREIGN)
def foreign(model, request):
    """The model on a mesh that `make_mesh` did not make."""
    shape = tuple(FOREIGN[request.param].values())
    mesh = jax.make_mesh(
        shape,
        tuple(FOREIGN[request.param]),
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
        devices=jax.devices()[: math.prod(shape)],
    )
    return merge(model.config, jax.device_put(split_params(model), NamedSharding(mesh, PartitionSpec())))


def test_a_model_on_a_mesh_of_other_axes_has_the_loss_that_it_has_on_one_device(model, foreign, monkeypatch):
    meshes = []

    def note_mesh(config, mesh, **options):
        meshes.append(mesh)
        return make_eval_step(config, mesh, **options)

    tokens = np.random.default_rng(0).integers(0, 65, 97).astype(np.uint16)
    expected = evaluate_tokens(model, tokens, stride=5)
    monkeypatch.setattr("nnx_gpt2._evaluation.make_eval_step", note_mesh)
    assert evaluate_tokens(foreign, tokens, stride=5).loss == pytest.approx(expected.loss, rel=1e-5)
    devices = jax.tree.leaves(split_params(foreign))[0].sharding.mesh.devices
    assert [dict(mesh.shape) for mesh in meshes] == [{"data": devices.size, "fsdp": 1, "tensor": 1}]
    assert [*meshes[0].devices.flat] == [*devices.flat]


@pytest.mark.parametrize("num_tokens", [97, 9])
def test_a_model_on_several_devices_has_the_loss_that_it_has_on_one(model, spread, num_tokens):
    tokens = np.random.default_rng(0).integers(0, 65, num_tokens).astype(np.uint16)
    expected = evaluate_tokens(model, tokens, stride=5, end_of_text=64)
    found = evaluate_tokens(spread, tokens, stride=5, end_of_text=64)
    assert (found.num_tokens, found.loss) == (expected.num_tokens, pytest.approx(expected.loss, rel=1e-5))


def test_an_evaluation_runs_over_the_mesh_of_the_parameters(spread, monkeypatch):
    """The kernel of a TPU computes on several devices in a step over a mesh alone."""
    meshes = []

    def note_mesh(config, mesh, **options):
        meshes.append(mesh)
        return make_eval_step(config, mesh, **options)

    monkeypatch.setattr("nnx_gpt2._evaluation.make_eval_step", note_mesh)
    evaluate_tokens(spread, np.arange(17))
    evaluate_choices(spread, [Question(context="a", choices=("b", "c"), answer=0)], encode)
    assert meshes == [split_params(spread)["wte"]["embedding"].sharding.mesh] * 2


def test_a_model_on_several_devices_chooses_as_on_one(model, spread):
    questions = [Question(context="what is", choices=("this", "that one", "it"), answer=answer) for answer in range(3)]
    assert evaluate_choices(spread, questions, encode) == evaluate_choices(model, questions, encode)


def test_end_of_text_masks_documents(model):
    """The first document has the loss that it has alone."""
    tokens = np.random.default_rng(0).integers(0, 64, 17).astype(np.uint16)
    tokens[7] = 64
    apart = evaluate_tokens(model, tokens, end_of_text=64).loss
    assert apart != pytest.approx(evaluate_tokens(model, tokens).loss, abs=1e-4)
    losses = np.asarray(make_eval_step(model.config, end_of_text=64)(split_params(model), tokens[None]))[0]
    assert apart == pytest.approx(losses.mean(), rel=1e-5)
    alone = np.asarray(make_eval_step(model.config)(split_params(model), tokens[None, :9]))[0]
    np.testing.assert_allclose(losses[:8], alone, rtol=1e-5)


def test_progress_reaches_the_end(model, tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(200, dtype=np.uint16).__mod__(65).tofile(path)
    seen = []
    evaluate_tokens(model, np.memmap(path, np.uint16), batch_size=5, progress=lambda *counts: seen.append(counts))
    assert seen == [(5, 13), (10, 13), (13, 13)]


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1], {}, "tokens must be at least 2, got 1."),
        ([1, 65], {}, "token ids must lie in [0, 65), got 1 to 65."),
        ([1, 2], {"stride": 17}, "stride must be 1 to 16, the model's context"),
        ([1, 2], {"stride": 0}, "stride must be 1 to 16, the model's context"),
        ([1, 2], {"batch_size": 0}, "batch_size must be at least 1, got 0."),
    ],
)
def test_bad_arguments_are_rejected(model, tokens, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate_tokens(model, np.array(tokens, np.uint16), **options)


def test_choices_are_scored_by_sum_and_by_mean(model):
    questions = [
        Question(context="the cat sat", choices=("on the mat", "up", "in a hat", "down there"), answer=1),
        Question(context="a very long context that does not fit", choices=("yes", "no no no"), answer=0),
        Question(context="dogs", choices=("bark", "meow"), answer=0),
        Question(context="a", choices=("b" * 15, "c"), answer=1),  # as long as the model's context, with the space
    ]
    right = right_norm = 0
    for question in questions:
        sums, means = [], []
        for choice in question.choices:
            tokens = (encode(question.context) + encode(" " + choice))[-17:]
            count = len(choice) + 1
            padded = jnp.asarray([tokens[:-1] + [0] * (17 - len(tokens))])
            log_probs = jax.nn.log_softmax(model(padded))[0]
            scores = [float(log_probs[i - 1, tokens[i]]) for i in range(len(tokens) - count, len(tokens))]
            sums.append(sum(scores))
            means.append(sum(scores) / count)
        right += int(np.argmax(sums)) == question.answer
        right_norm += int(np.argmax(means)) == question.answer
    seen = []
    found = evaluate_choices(model, questions, encode, progress=seen.append)
    assert (found.accuracy, found.accuracy_norm, found.num_questions) == (right / 4, right_norm / 4, 4)
    assert seen == [1, 2, 3, 4]


def test_one_program_serves_all_batches_and_another_one_questions_of_similar_length(tiny, compiled):
    model = GPT2(dataclasses.replace(tiny, seq_len=31, num_layers=1), rngs=nnx.Rngs(0))
    compiled.clear()
    for num_tokens in (65, 48):
        evaluate_tokens(model, np.arange(num_tokens), stride=3, batch_size=4)
    assert compiled.count("jit(eval_step)") == 1
    questions = [Question(context="a" * length, choices=("bc", "d"), answer=0) for length in (7, 10, 13)]
    for _ in range(2):
        evaluate_choices(model, questions, encode)
    assert compiled.count("jit(eval_step)") == 2


def test_the_choice_that_is_likeliest_by_its_own_tokens_wins(tiny):
    """40 questions whose answer is that choice. Half of the contexts are too long."""
    params = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape), abstract_train_state(tiny, optax.sgd(1.0)).params
    )
    model = merge(tiny, params)
    rng = np.random.default_rng(0)
    asked = [
        ["".join(rng.choice([*"abcdefgh"], length)) for length in (rng.integers(1, 28), 2, 2, 2, 3, 5)]
        for _ in range(40)
    ]
    rows = [(encode(context), encode(" " + choice)) for context, *choices in asked for choice in choices]
    tokens = [(context + choice)[-17:] for context, choice in rows]
    log_probs = jax.nn.log_softmax(jax.jit(model)(jnp.asarray([row[:-1] + [0] * (17 - len(row)) for row in tokens])))
    sums = [
        sum(float(log_probs[i, place - 1, row[place]]) for place in range(len(row) - len(choice), len(row)))
        for i, (row, (_, choice)) in enumerate(zip(tokens, rows, strict=True))
    ]
    by_sum = np.reshape(sums, (40, 5))
    for scores, name in ((by_sum, "accuracy"), (by_sum / [3, 3, 3, 4, 6], "accuracy_norm")):
        questions = [
            Question(context=context, choices=tuple(choices), answer=int(best))
            for (context, *choices), best in zip(asked, scores.argmax(axis=1), strict=True)
        ]
        assert getattr(evaluate_choices(model, questions, encode), name) == 1.0


def test_questions_are_read_from_json_lines(tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    row = {"ind": 3, "activity_label": "x", "ctx": "A man sits", "endings": ["down", "up"], "label": 1}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"label": "0"}) + "\n")
    assert list(read_questions(path)) == [
        Question(context="A man sits", choices=("down", "up"), answer=1),
        Question(context="A man sits", choices=("down", "up"), answer=0),
    ]


def test_a_line_that_is_not_utf_8_is_rejected(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b'{"ctx": "\xe9t\xe9", "endings": ["b"], "label": 0}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* must be an object with ctx"):
        list(read_questions(path))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"ctx": "a", "endings": ["b"]}',
        '{"ctx": "a", "endings": ["b"], "label": ""}',
        '{"ctx": "a", "endings": ["b"], "label": 1}',
        '{"ctx": null, "endings": ["b"], "label": 0}',
        '{"ctx": "a", "endings": [1], "label": 0}',
        '{"ctx": "a", "endings": ["b"], "label": 1e400}',
        '{"ctx": "a", "endings": "b", "label": 0, "x": %s}' % ("9" * 5000),
        "[" * 100_000,
        "\\xff",
    ],
)
def test_lines_that_are_not_questions_are_rejected(tmp_path, line):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"ctx": "a", "endings": ["b"], "label": 0}\n \n\n' + line + "\n")
    message = f"line 4 of {path} must be an object with ctx, a text, endings, texts, and label, the index of an "
    message += f"ending, got {shown(line)}. Correct the line, or delete it."
    with pytest.raises(ValueError, match=re.escape(message)):
        list(read_questions(path))


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "questions must be at least 1, got 0."),
        ([Question(context="", choices=("a",), answer=0)], "a question must have a context of at least 1 token"),
        (
            [Question(context="a", choices=("a" * 16,), answer=0)],
            "choices of 1 to 16 tokens, got 1 and 17 tokens in 'a'",
        ),
    ],
)
def test_questions_that_cannot_be_asked_are_rejected(model, questions, message):
    with pytest.raises(ValueError, match=message):
        evaluate_choices(model, questions, encode)
