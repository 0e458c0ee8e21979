"""Input of a wrong type or shape, in a process without beartype, which would be the first to reject it."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, jax, numpy as np
from flax import nnx
from nnx_gpt2 import *
config = GPT2Config(vocab_size=65, seq_len=16, num_layers=1, num_heads=1, embed_dim=8)
model = GPT2(config, rngs=nnx.Rngs(0))
rule = create_optimizer(OptimizerConfig(), 10)
state = create_train_state(config, rule, jax.random.key(0))
ids = np.zeros((8, 17), np.uint16)
step, evaluate = make_train_step(config, rule), make_eval_step(config)
messages = {}
for code in json.loads(input()):
    try:
        eval(code)
        messages[code] = "accepted"
    except ValueError as error:
        messages[code] = str(error)
print(json.dumps(messages))
"""

BATCH = "be integers of shape [batch, positions], got"
PAIR = "have at least 2 tokens, an input and a target, got 1."
SIZE = "must be a whole number from 1 to 1048576, got"
HUGE = 10**20
EMPTY = "must have at least 1 row and 1 position, got int32"
END = "end_of_text must be None or an id in [0, 65), got"
CASES = {
    "generate(model, [1, 2], 3, temperature=0.0)": f"each prompt's token ids must {BATCH} int64[1].",
    "generate(model, [[1.5]], 3, temperature=0.0)": f"each prompt's token ids must {BATCH} float64[1, 1].",
    "generate(model, ['ab'], 3, temperature=0.0)": f"each prompt's token ids must {BATCH} <U2[1].",
    "model(np.zeros(3, np.int32))": f"token ids must {BATCH} int32[3].",
    "model(np.zeros((1, 3)))": f"token ids must {BATCH} float64[1, 3].",
    "step(state, ids.astype(np.float32), jax.random.key(0))": f"windows must {BATCH} float32[8, 17].",
    "step(state, ids[0], jax.random.key(0))": f"windows must {BATCH} uint16[17].",
    "evaluate(split_params(model), ids.astype(np.float32))": f"windows must {BATCH} float32[8, 17].",
    "evaluate(split_params(model), ids[0])": f"windows must {BATCH} uint16[17].",
    "step(state, ids[:, :1], jax.random.key(0))": f"windows must {PAIR}",
    "evaluate(split_params(model), ids[:, :1])": f"windows must {PAIR}",
    "evaluate_tokens(model, np.linspace(0, 60, 40))": f"token ids must {BATCH} float64[3, 17].",
    "evaluate_tokens(model, ids)": f"token ids must {BATCH} uint16[1, 8, 17].",
    "GPT2Config(num_layers=2.5)": f"model.num_layers {SIZE} 2.5.",
    "GPT2Config(num_layers=None)": f"model.num_layers {SIZE} None.",
    "GPT2Config(mlp_dim='x')": f"model.mlp_dim {SIZE} 'x'.",
    "GPT2Config(norm_epsilon=None)": "model.norm_epsilon must be between 0 and 1, got None.",
    "GPT2Config(dtype='float16')": "model.dtype must be bfloat16, float32 or float64, got 'float16'.",
    "GPT2Config(attention='flash')": "model.attention must be auto, xla, cudnn or splash, got 'flash'.",
    "GPT2Config(remat='all')": "model.remat must be none, dots or full, got 'all'.",
    "OptimizerConfig(name='sgd')": "optimizer.name must be adamw or muon, got 'sgd'.",
    "OptimizerConfig(schedule='step')": "optimizer.schedule must be cosine, wsd or constant, got 'step'.",
    "Question(context=None, choices=('a',), answer=0)": "context and choices must be strings, got (None, ('a',)).",
    "Question(context='a', choices=None, answer=0)": "context and choices must be strings, got ('a', None).",
    "Question(context='a', choices=('a',), answer='b')": "answer must be the index of one of 1 choices, got 'b'.",
    "model(np.zeros((0, 3), np.int32))": f"token ids {EMPTY}[0, 3].",
    "model(np.zeros((3, 0), np.int32))": f"token ids {EMPTY}[3, 0].",
    "mean_loss(model, np.zeros((0, 3), np.int32))": f"windows {EMPTY}[0, 3].",
    "mean_loss(model, np.zeros((3, 1), np.int32))": f"windows must {PAIR}",
    "token_losses(model, np.zeros((3, 0), np.int32))": f"windows {EMPTY}[3, 0].",
    "step(state, np.zeros((0, 3), np.int32), jax.random.key(0))": f"windows {EMPTY}[0, 3].",
    "evaluate(split_params(model), np.zeros((3, 0), np.int32))": f"windows {EMPTY}[3, 0].",
    "causal_attention(*np.zeros((3, 2, 0, 1, 8)))": "queries, keys and values must have at least 1 position, got 0.",
    f"generate(model, [[1]], {HUGE}, temperature=0.0)": f"max_new_tokens must be 0 to 2147483647, got {HUGE}.",
    "generate(model, [[1]], 2.5, temperature=0.0)": "max_new_tokens must be 0 to 2147483647, got 2.5.",
    "generate(model, [[1]], '3', temperature=0.0)": "max_new_tokens must be 0 to 2147483647, got '3'.",
    f"generate(model, [[1]], 2, temperature=0.0, end_of_text={HUGE})": f"{END} {HUGE}.",
    "generate(model, [[1]], 2, temperature=1e39)": "temperature must be finite and not negative, got 1e+39.",
    f"make_train_step(config, rule, end_of_text={HUGE})": f"{END} {HUGE}.",
    "make_eval_step(config, end_of_text=65)": f"{END} 65.",
    f"estimate_memory(config, global_batch_size={HUGE})": f"global_batch_size must be 1 to 2147483647, got {HUGE}.",
    "estimate_memory(config, global_batch_size=0)": "global_batch_size must be 1 to 2147483647, got 0.",
    f"model.save_pretrained('x', end_of_text={HUGE})": f"end_of_text must be None or a token id, got {HUGE}.",
    f"GPT2Config(vocab_size={HUGE})": f"model.vocab_size must be a whole number from 1 to 2147483647, got {HUGE}.",
    "GPT2Config(num_layers=np.inf)": f"model.num_layers {SIZE} inf.",
    f"GPT2Config(norm_epsilon={HUGE})": f"model.norm_epsilon must be between 0 and 1, got {HUGE}.",
    "GPT2Config(num_layers=True)": f"model.num_layers {SIZE} True.",
    "GPT2Config(num_layers=10**5000)": f"model.num_layers {SIZE} a number of more than 4,300 digits.",
    "GPT2Config(dropout_rate='a')": "model.dropout_rate must be in [0, 1), got 'a'.",
    "OptimizerConfig(learning_rate='x')": "optimizer.learning_rate must be positive and finite, got 'x'.",
    "OptimizerConfig(clip_norm=10**39)": f"optimizer.clip_norm must be finite and not negative, got {10**39}.",
    "OptimizerConfig(warmup_steps=1.5)": "optimizer.warmup_steps must be a whole number from 0 to 2147483647, got 1.5.",
    f"create_optimizer(OptimizerConfig(), {HUGE})": f"max_steps must be at least 1 and at most 2147483647, got {HUGE}.",
}


@pytest.fixture(scope="module")
def messages():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        input=json.dumps(list(CASES)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("code", CASES)
def test_input_of_a_wrong_type_or_shape_is_rejected(messages, code):
    assert messages[code] == CASES[code]
