"""Arguments of a wrong type or shape, in a process without beartype, which would be first to refuse them."""

import os
import subprocess
import sys

CODE = """
import jax, numpy as np
from flax import nnx
from nnx_gpt2 import *
config = GPT2Config(vocab_size=65, seq_len=16, num_layers=1, num_heads=1, embed_dim=8)
model = GPT2(config, rngs=nnx.Rngs(0))
rule = create_optimizer(OptimizerConfig(), 10)
state = create_train_state(config, rule, jax.random.key(0))
ids = np.zeros((8, 17), np.uint16)

def step(windows, **options):
    make_train_step(config, rule, **options)(state, windows, jax.random.key(0))

for call in (
    lambda: generate(model, [1, 2], 3, temperature=0.0),
    lambda: generate(model, [[1.5]], 3, temperature=0.0),
    lambda: generate(model, ['ab'], 3, temperature=0.0),
    lambda: generate(model, [[1]], 2.5, temperature=0.0),
    lambda: model(np.zeros(3, np.int32)),
    lambda: model(np.zeros((1, 3))),
    lambda: step(ids.astype(np.float32)),
    lambda: step(ids[0]),
    lambda: step(ids, grad_accum_steps=3),
    lambda: step(ids, grad_accum_steps=0),
    lambda: GPT2Config(num_layers=2.5),
    lambda: generate(model, [[1]], 3, key=jax.random.key(0), top_k=2.5),
    lambda: step(ids[:0]),
    lambda: make_eval_step(config)(split_params(model), ids.astype(np.float32)),
    lambda: make_eval_step(config)(split_params(model), ids[0]),
    lambda: evaluate_tokens(model, np.linspace(0, 60, 40)),
    lambda: evaluate_tokens(model, ids),
    lambda: evaluate_tokens(model, ids[0], stride=2.5),
    lambda: Question(context=None, choices=('a', 'b'), answer=0),
    lambda: Question(context='a', choices=(), answer=0),
    lambda: Question(context='a', choices=('a', 'b'), answer=-1),
):
    try:
        call()
        print('accepted')
    except ValueError as error:
        print(error)
"""

EXPECTED = [
    "expected each prompt to be a sequence of whole numbers, token ids, got 1: for one prompt pass a list",
    "expected each prompt to be a sequence of whole numbers, token ids, got [1.5]: for one prompt pass a list",
    "expected each prompt to be a sequence of whole numbers, token ids, got ab: for one prompt pass a list",
    "max_new_tokens must be a whole number, not negative, got 2.5.",
    "expected token ids, whole numbers of shape [batch, positions], got int32[3]",
    "expected token ids, whole numbers of shape [batch, positions], got float64[1, 3]",
    "expected windows of token ids, whole numbers of shape [batch, 17], got float32[8, 17]",
    "expected windows of token ids, whole numbers of shape [batch, 17], got uint16[17]",
    "expected a batch that 1 devices, the data and fsdp axes, divide in 3 parts each, got 8 windows",
    "expected a whole number of at least 1 as grad_accum_steps, got 0",
    "model.num_layers must be at least 1, got 2.5",
    "top_k must be a whole number of at least 1, or None, got 2.5.",
    "expected a batch that 1 devices, the data and fsdp axes, divide in 1 parts each, got 0 windows",
    "expected windows of token ids, whole numbers of shape [batch, 17], got float32[8, 17]",
    "expected windows of token ids, whole numbers of shape [batch, 17], got uint16[17]",
    "expected token ids, whole numbers of shape [batch, positions], got float64[3, 17]",
    "expected token ids, whole numbers of shape [batch, positions], got uint16[1, 8, 17]",
    "stride must be a whole number of 1 to 16, the model's context, and batch_size one of at least 1, got 2.5 and 8.",
    "a question's context and choices must be texts, got None and ('a', 'b').",
    "answer must be the index of one of the 0 choices, got 0.",
    "answer must be the index of one of the 2 choices, got -1.",
]


def test_each_is_refused_in_a_sentence():
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert len(said) == len(EXPECTED), done.stderr
    for line, expected in zip(said, EXPECTED, strict=True):
        assert line.startswith(expected)
