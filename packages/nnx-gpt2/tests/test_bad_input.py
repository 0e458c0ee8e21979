"""Input of a wrong type or shape, in a process without beartype, which would be the first to reject it."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import dataclasses, json, jax, numpy as np, tempfile
from fractions import Fraction
from flax import nnx
from nnx_gpt2 import *
config = GPT2Config(vocab_size=65, seq_len=16, num_layers=1, num_heads=1, embed_dim=8)
wide = dataclasses.replace(config, embed_dim=16)
model = GPT2(config, rngs=nnx.Rngs(0))
rule = create_optimizer(OptimizerConfig(), 10)
state = create_train_state(config, rule, jax.random.key(0))
ids = np.zeros((8, 17), np.uint16)
step, evaluate = make_train_step(config, rule), make_eval_step(config)
key, keys = jax.random.key(0), jax.random.split(jax.random.key(0))
q, settings = np.ones((1, 3, 1, 8)), OptimizerConfig()
foreign = jax.sharding.Mesh(jax.devices(), ("x",))
question = Question(context="a", choices=("b",), answer=0)
swapped, masked, schedule = ids.astype(">u2"), np.ma.array(ids, mask=True), learning_rate_schedule(settings, 10)
folder = tempfile.TemporaryDirectory()
wsd = dict(schedule="wsd", decay_steps=200)
scalar, array = np.array(3), np.array([1, 2])
class BadPath:
    def __fspath__(self):
        return 5
    def __repr__(self):
        return "BadPath()"
class BadText:
    def __repr__(self):
        raise RuntimeError("no text")
deep = []
for _ in range(100_000):
    deep = [deep]
def compare(found, wanted):
    if not np.array_equal(found, wanted):
        raise ValueError(f"{found} is not {wanted}")
messages = {}
for code in json.loads(input()):
    try:
        eval(code)
        messages[code] = "accepted"
    except Exception as error:
        messages[code] = str(error) if type(error) is ValueError else repr(error)
print(json.dumps(messages))
"""

BATCH = "be integers of shape [batch, positions], got"
PAIR = "have at least 2 tokens, an input and a target, got 1."
SIZE, LAYERS = (f"must be a whole number from 1 to {most}, got" for most in (1048576, 10000))
HUGE = 10**20
EMPTY = "must have at least 1 row and 1 position, got int32"
KEY = "key must be one random key, got"
CONFIG = "config must be of type GPT2Config, got"
OPTIMIZER = "config must be of type OptimizerConfig, got"
RULES = "optimizer must be of type OptimizerConfig, got"
RULE = "optimizer must be of type GradientTransformation, got"
MODEL = "model must be of type GPT2, got"
MAKE = "Make it by create_optimizer."
MESH = "mesh must be a mesh with the axes data, fsdp and tensor, got"
MAKE_MESH = "Make it by make_mesh."
HEADS = (
    "queries, keys and values must be floating-point numbers of one shape [batch, positions, heads, head width], got"
)
PARAMS = "params must be a dictionary with the layers of a GPT-2 in h, got"
SOURCE = "Pass those of split_params, or state.params of a TrainState."
DEVICES = "devices must be None, or at least 1 device of jax, each once, got"
WHOLE = "must be a whole number of at least 1, got"
FIELD = (
    "a changed field must be one of dropout_rate, dtype, param_dtype, residual_dtype, grad_dtype, attention, remat,"
    " scan_layers, loss_chunk_tokens, seq_len"
)
ABSENT = (
    "devices must be tpu:TYPE:TOPOLOGY (v5e, v5p, v6e, v7x) or gpu:HOSTSxGPUS:TYPE (t4, l4, a100, h100, h200, b200), "
    "got"
)
MOST = "3.4028234663852886e+38"  # the largest number in float32
END = "end_of_text must be None or an id in [0, 65), got"
IDS = "encode must return a list of token ids, got"
WIDTH = "must have a head width of at least 1, got"
FUNCTION = "must be of type collections.abc.Callable | None, got"
STEP = "step must be an array of numbers, or a number of at most 2147483647, got"
PATH = "path must be a name that a file can have, got"
CASES = {
    "put_batch(np.full((8, 17), 2**40), make_mesh())":
        f"rows must lie in [0, 2147483648), got {2**40} to {2**40}.",
    "model(masked[:, 1:])": f"token ids must {BATCH} masked uint16[8, 16].",
    "put_batch(masked, make_mesh())": f"rows must {BATCH} masked uint16[8, 17].",
    "step(dataclasses.replace(state, opt_state=None), ids, key)":
        "state.opt_state must be a state of this step's optimizer, got None. Make the state by create_train_state.",
    "schedule(None)": f"{STEP} None.",
    "schedule('a')": f"{STEP} 'a'.",
    "schedule(10**400)": f"{STEP} 1{'0' * 56}...{'0' * 20}.",
    "generate(model, [[1, [2]]], 3, temperature=0.0)":
        "each prompt must be a list of token ids, got an object of type list.",
    "evaluate_choices(model, [question], lambda text: [65])": "token ids must lie in [0, 65), got 0 to 65.",
    "evaluate_choices(model, [question], lambda text: [10**30])": f"{IDS} [{10**30}].",
    "param_spec('wte.embedding', 10**400)":
        f"num_dims must be a whole number from 0 to 64, got 1{'0' * 56}...{'0' * 20}.",
    "model.embed(ids[:1, :5], np.arange(7)[None])":
        "positions must have the shape [1, 5] of the tokens, or sizes of 1, got (1, 7).",
    "model.save_pretrained(chr(0))": f"{PATH} '\\x00'.",
    "model.save_pretrained(chr(0xd800))": f"{PATH} '\\ud800'.",
    "list(read_questions('nowhere' + chr(0)))": f"{PATH} 'nowhere\\x00'.",
    "list(read_questions('.'))": "path must be a file, got the folder '.'.",
    "list(read_questions('/dev/zero'))": "path must be a file or a pipe, got the device '/dev/zero'.",
    "absent_devices('gpu:8:h1000')": f"{ABSENT} 'gpu:8:h1000'.",
    "absent_devices('tpu:v6e:4xx4')": f"{ABSENT} 'tpu:v6e:4xx4'.",
    "device_facts('gpu:8:h1000')": f"{ABSENT} 'gpu:8:h1000'.",
    "device_facts(None)": "name must be of type str, got None.",
    "absent_devices(8)": "name must be of type str, got 8.",
    "GPT2Config(residual_dtype='float16')": (
        "residual_dtype must be None, or a type of at least the precision of dtype, got 'float16'."
    ),
    "GPT2Config(dtype=[], residual_dtype='float32')": "dtype must be bfloat16, float32 or float64, got [].",
    "GPT2Config(grad_dtype='float64')": "grad_dtype must be float32 or bfloat16, got 'float64'.",
    "GPT2Config(num_layers=10001)": f"num_layers {LAYERS} 10001.",
    "list(read_questions(''))": "path must be a file, got the folder '.'.",
    "list(read_questions('x' + chr(10) * 5000))": PATH + " 'x" + r"\n" * 27 + r"\...n" + r"\n" * 9 + "'.",
    "GPT2Config(num_layers=BadText())": f"num_layers {LAYERS} one BadText, which has no text.",
    "GPT2Config(num_layers=deep)": f"num_layers {LAYERS} a very large list.",
    "GPT2Config(num_layers=(10**5000,))": f"num_layers {LAYERS} a very large tuple.",
    "generate(model, [1, 2], 3, temperature=0.0)": f"each prompt's token ids must {BATCH} int64[1].",
    "generate(model, [[1.5]], 3, temperature=0.0)": f"each prompt's token ids must {BATCH} float64[1, 1].",
    "generate(model, ['ab'], 3, temperature=0.0)": f"each prompt's token ids must {BATCH} <U2[1].",
    "generate(model, 5, 3, temperature=0.0)": "prompts must be of type Iterable, got 5.",
    "generate(model, scalar, 3, temperature=0.0)": "prompts must be of type Iterable, got int64[].",
    "evaluate_tokens(model, scalar)": "tokens must be an array of token ids, got int64[].",
    "evaluate_choices(model, scalar, list)": "questions must be of type Iterable, got int64[].",
    "evaluate_choices(model, [question], lambda text: scalar)": f"{IDS} array(3).",
    "make_mesh(devices=scalar)": f"{DEVICES} int64[]. Pass some of jax.devices().",
    "tree_shardings(True, make_mesh())": "a leaf of the tree must be an array, got True.",
    "GPT2Config(dtype=array)": "dtype must be bfloat16, float32 or float64, got array([1, 2]).",
    "GPT2Config(param_dtype=array)": "param_dtype must be bfloat16, float32 or float64, got array([1, 2]).",
    "GPT2Config(attention=array)": "attention must be auto, xla, cudnn or splash, got array([1, 2]).",
    "GPT2Config(remat=array)": "remat must be none, dots or full, got array([1, 2]).",
    "OptimizerConfig(name=array)": "name must be adamw or muon, got array([1, 2]).",
    "OptimizerConfig(muon_scaling=array)": "muon_scaling must be rms or spectral, got array([1, 2]).",
    "OptimizerConfig(schedule=array)": "schedule must be cosine, wsd or constant, got array([1, 2]).",
    "causal_attention(q, q, q, backend=array)":
        "attention backend must be auto, xla, cudnn or splash, got array([1, 2]).",
    "peak_flops_per_s([])": "device_kind must be of type str, got an object of type list.",
    "peak_flops_per_s(None)": "device_kind must be of type str, got None.",
    "flops_per_token(config, attention='no')": "attention must be of type bool, got 'no'.",
    "list(read_questions(BadPath()))": f"{PATH} BadPath().",
    "model.save_pretrained(BadPath())": f"{PATH} BadPath().",
    "GPT2.from_pretrained(BadPath())": "path or name must be a name that a file can have, got BadPath().",
    "GPT2.from_pretrained('x', revision=5)": "revision must be of type str | None, got 5.",
    "GPT2Config(embed_dim=770)":
        "embed_dim must be a multiple of num_heads, got 770 and 12. Choose 768 or 780, or another number of"
        " heads.",
    "GPT2Config(embed_dim=5)":
        "embed_dim must be a multiple of num_heads, got 5 and 12. Choose 12, or another number of heads.",
    "OptimizerConfig(learning_rate=1e-5, min_learning_rate=6e-5)":
        "min_learning_rate must lie between 0 and learning_rate (1e-05), got 6e-05. Lower it too,"
        " or raise the peak.",
    "OptimizerConfig(min_learning_rate=-1)":
        "min_learning_rate must lie between 0 and learning_rate (0.0006), got -1.",
    "OptimizerConfig(min_learning_rate='x')":
        "min_learning_rate must lie between 0 and learning_rate (0.0006), got 'x'.",
    "OptimizerConfig(min_learning_rate_ratio=1.01)": "min_learning_rate_ratio must be in [0, 1], got 1.01.",
    "OptimizerConfig(min_learning_rate_ratio=None)": "min_learning_rate_ratio must be in [0, 1], got None.",
    "OptimizerConfig(average_decay=1)": "average_decay must be in [0, 1), got 1.",
    "OptimizerConfig(average_decay=-0.1)": "average_decay must be in [0, 1), got -0.1.",
    "OptimizerConfig(average_decay=None)": "average_decay must be in [0, 1), got None.",
    "averaged_params(state.opt_state)":
        "opt_state must have an average of the parameters, got an object of type tuple. Set average_decay in the"
        " OptimizerConfig of the run.",
    "averaged_params(None)":
        "opt_state must have an average of the parameters, got None. Set average_decay in the OptimizerConfig of the"
        " run.",
    "evaluate_tokens(model, ids[0], progress=5)": f"progress {FUNCTION} 5.",
    "list(read_questions(None))": "path must be of type str | os.PathLike, got None.",
    "evaluate_choices(model, None, list)": "questions must be of type Iterable, got None.",
    "evaluate_choices(model, [question], None)": "encode must be of type Callable, got None.",
    "evaluate_choices(model, [question], lambda text: None)": f"{IDS} None.",
    "evaluate_choices(model, [question], lambda text: 'x')": f"{IDS} 'x'.",
    "evaluate_choices(model, [question], lambda text: [1.5])": f"{IDS} [1.5].",
    "tree_shardings({'a': 5}, make_mesh())": "leaf a of the tree must be an array, got 5.",
    "causal_attention(*[np.ones((1, 3, 1, 0))] * 3)": f"queries, keys and values {WIDTH} 0.",
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
    "GPT2Config(num_layers=2.5)": f"num_layers {LAYERS} 2.5.",
    "GPT2Config(num_layers=None)": f"num_layers {LAYERS} None.",
    "GPT2Config(mlp_dim='x')": f"mlp_dim {SIZE} 'x'.",
    "GPT2Config(norm_epsilon=None)": "norm_epsilon must be between 0 and 1, got None.",
    "GPT2Config(dtype='float16')": "dtype must be bfloat16, float32 or float64, got 'float16'.",
    "GPT2Config(attention='flash')": "attention must be auto, xla, cudnn or splash, got 'flash'.",
    "GPT2Config(remat='all')": "remat must be none, dots or full, got 'all'.",
    "OptimizerConfig(name='sgd')": "name must be adamw or muon, got 'sgd'.",
    "OptimizerConfig(muon_scaling='adam')": "muon_scaling must be rms or spectral, got 'adam'.",
    "OptimizerConfig(muon_learning_rate=0)": f"muon_learning_rate must be above 0 and at most {MOST}, got 0.",
    "OptimizerConfig(muon_momentum=1.0)": "muon_momentum must be in [0, 1), got 1.0.",
    "OptimizerConfig(muon_momentum_warmup_steps=0.5)":
        "muon_momentum_warmup_steps must be a whole number from 0 to 2147483647, got 0.5.",
    "OptimizerConfig(muon_weight_decay=-1)": f"muon_weight_decay must be between 0 and {MOST}, got -1.",
    "OptimizerConfig(schedule='step')": "schedule must be cosine, wsd or constant, got 'step'.",
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
    "generate(model, [[1]], 2, temperature=1e39)": f"temperature must be between 0 and {MOST}, got 1e+39.",
    f"make_train_step(config, rule, end_of_text={HUGE})": f"{END} {HUGE}.",
    "make_eval_step(config, end_of_text=65)": f"{END} 65.",
    "gradient_shares(config, state.params, ids, end_of_text=65)": f"{END} 65.",
    f"estimate_memory(config, global_batch_size={HUGE})": f"global_batch_size must be 1 to 2147483647, got {HUGE}.",
    "estimate_memory(config, global_batch_size=0)": "global_batch_size must be 1 to 2147483647, got 0.",
    f"model.save_pretrained('x', end_of_text={HUGE})": f"{END} {HUGE}.",
    f"GPT2Config(vocab_size={HUGE})": f"vocab_size must be a whole number from 1 to 2147483647, got {HUGE}.",
    "GPT2Config(num_layers=np.inf)": f"num_layers {LAYERS} inf.",
    f"GPT2Config(norm_epsilon={HUGE})": f"norm_epsilon must be between 0 and 1, got {HUGE}.",
    "GPT2Config(num_layers=True)": f"num_layers {LAYERS} True.",
    "GPT2Config(num_layers=10**5000)": f"num_layers {LAYERS} a number of more than 4,300 digits.",
    "GPT2Config(dropout_rate='a')": "dropout_rate must be in [0, 1), got 'a'.",
    "OptimizerConfig(learning_rate='x')": f"learning_rate must be above 0 and at most {MOST}, got 'x'.",
    "OptimizerConfig(clip_norm=10**39)": f"clip_norm must be between 0 and {MOST}, got {10**39}.",
    "OptimizerConfig(warmup_steps=1.5)": "warmup_steps must be a whole number from 0 to 2147483647, got 1.5.",
    f"create_optimizer(OptimizerConfig(), {HUGE})": f"max_steps must be at least 1 and at most 2147483647, got {HUGE}.",
    "causal_attention(q, q, q, segment_ids_BT=np.ones((5, 5), int))":
        "segment ids must be integers of shape [1, 3], got int64[5, 5].",
    "causal_attention(q, q, q, segment_ids_BT='a')": "segment ids must be integers of shape [1, 3], got 'a'.",
    "causal_attention(*[np.ones((1, 3, 1, 8), int)] * 3)": f"{HEADS} {', '.join(['int64[1, 3, 1, 8]'] * 3)}.",
    "causal_attention(q[0], q[0], q[0])": f"{HEADS} {', '.join(['float64[3, 1, 8]'] * 3)}.",
    "causal_attention(q, q[:, :1], q)": f"{HEADS} float64[1, 3, 1, 8], float64[1, 1, 1, 8], float64[1, 3, 1, 8].",
    "causal_attention(None, q, q)": f"{HEADS} None, float64[1, 3, 1, 8], float64[1, 3, 1, 8].",
    "causal_attention(q, q, q, backend='x')": "attention backend must be auto, xla, cudnn or splash, got 'x'.",
    "causal_attention(q, q, q, dropout_rate=2, dropout_key=key)": "dropout_rate must be in [0, 1), got 2.",
    "causal_attention(q, q, q, dropout_rate=0.5, dropout_key=5)": f"dropout_{KEY} 5. Pass jax.random.key(seed).",
    "model(ids[:1, :3], segment_ids=np.ones((1, 9), int))":
        "segment ids must be integers of shape [1, 3], got int64[1, 9].",
    "mean_loss(model, ids, segment_ids=np.ones((1, 1), int))":
        "segment ids must be integers of shape [8, 16], got int64[1, 1].",
    "token_losses(model, ids, segment_ids=np.ones((8, 17), int))":
        "segment ids must be integers of shape [8, 16], got int64[8, 17].",
    "model.embed(ids, np.full((1, 17), 99))": "positions must lie in [0, 16), got 99 to 99.",
    "model.embed(np.full((1, 3), 300), np.arange(3)[None])": "token ids must lie in [0, 65), got 300 to 300.",
    "document_ids(ids, 'a')": "end_of_text must be an id in [0, 2147483647], got 'a'.",
    "document_ids(ids, -1)": "end_of_text must be an id in [0, 2147483647], got -1.",
    f"document_ids(ids, {HUGE})": f"end_of_text must be an id in [0, 2147483647], got {HUGE}.",
    "document_ids(ids.astype(float), 1)": f"tokens must {BATCH} float64[8, 17].",
    "document_ids(ids[0], 1)": f"tokens must {BATCH} uint16[17].",
    "merge(wide, state.params)":
        "params.h.0.attn.c_attn.bias must be (3, 16), as in the config, got (3, 8).",
    "merge(config, {**state.params, 'ln_f': {}})":
        "params.ln_f.bias must be (8,), as in the config, got no such parameter.",
    "merge(config, None)": f"{PARAMS} None. {SOURCE}",
    "merge(config, state)": f"{PARAMS} an object of type TrainState. {SOURCE}",
    "merge(None, state.params)": f"{CONFIG} None.",
    "split_params(None)": f"{MODEL} None. Call merge with a config and parameters to make a model.",
    "split_params(state)":
        f"{MODEL} an object of type TrainState. Call merge with a config and parameters to make a model.",
    "stack_layers({})": f"{PARAMS} an object of type dict. {SOURCE}",
    "stack_layers({'h': {'0': {}}})": f"{PARAMS} an object of type dict. {SOURCE}",
    "unstack_layers(None)": f"{PARAMS} None. {SOURCE}",
    "create_optimizer(None, 5)": f"{OPTIMIZER} None.",
    "learning_rate_schedule('x', 5)": f"{OPTIMIZER} 'x'.",
    "settings.num_steps_before_decay(0)": "max_steps must be at least 1 and at most 2147483647, got 0.",
    "settings.num_steps_before_decay(2.5)": "max_steps must be at least 1 and at most 2147483647, got 2.5.",
    "OptimizerConfig(**wsd).num_steps_before_decay(100)":
        "warmup_steps and decay_steps must fit into the 100 steps of the run, got 0 and 200. Lower one of the two, or"
        " raise the number of steps.",
    "learning_rate_schedule(settings, None)": "max_steps must be at least 1 and at most 2147483647, got None.",
    "create_train_state(None, rule, key)": f"{CONFIG} None.",
    "create_train_state(rule, config, key)": f"{CONFIG} an object of type GradientTransformationExtraArgs.",
    "create_train_state(config, settings, key)": f"{RULE} an object of type OptimizerConfig. {MAKE}",
    "create_train_state(config, rule, key, 'mesh')": f"{MESH} 'mesh'. {MAKE_MESH}",
    "create_train_state(config, rule, key, params=5)": f"{PARAMS} 5. {SOURCE}",
    "create_train_state(config, rule, key, params=model)": f"{PARAMS} an object of type GPT2. {SOURCE}",
    "create_train_state(config, rule, key, params=unstack_layers(stack_layers(state.params)))": "accepted",
    "create_train_state(config, rule, key, params=stack_layers(state.params))":
        "layers must be separate, got stacked layers. Call unstack_layers.",
    "create_train_state(dataclasses.replace(config, num_layers=2), rule, key, params=state.params)":
        "params must have 2 layers, as the config, got 1.",
    "create_train_state(wide, rule, key, params=state.params)":
        "params.h.0.attn.c_attn.bias must be (3, 16), as in the config, got (3, 8).",
    "create_train_state(dataclasses.replace(config, seq_len=17), rule, key, params=state.params)":
        "params.wpe.embedding must be (17, 8), as in the config, got (16, 8).",
    "create_train_state(dataclasses.replace(config, seq_len=9), rule, key, params={**state.params, 'wpe': {}})":
        "params.wpe.embedding must be (9, 8), as in the config, got no such parameter.",
    "create_train_state(dataclasses.replace(wide, seq_len=9), rule, key,"
    " params={**create_train_state(wide, rule, key).params, 'wpe': state.params['wpe']})":
        "params.wpe.embedding must be (16, 16), as in the config, got (16, 8).",
    "create_train_state(config, rule, key, params={**state.params, 'ln_f': {'bias': 'x', 'scale': 2.5}})":
        "params.ln_f.bias must be an array of floating-point numbers, got 'x'.",
    "create_train_state(config, rule, key, params={**state.params, 'wpe': {'embedding': np.ones((16, 8), int)}})":
        "params.wpe.embedding must be an array of floating-point numbers, got int64[16, 8].",
    "create_train_state(config, rule, key, params=abstract_train_state(config, rule).params)":
        "params.h.0.attn.c_attn.bias must be an array of floating-point numbers, got float32[3, 8].",
    "abstract_train_state(config, 'x')": f"{RULE} 'x'. {MAKE}",
    "make_train_step(None, rule)": f"{CONFIG} None.",
    "make_train_step(config, settings)": f"{RULE} an object of type OptimizerConfig. {MAKE}",
    "make_train_step(config, rule, [1])": f"{MESH} an object of type list. {MAKE_MESH}",
    "make_eval_step({})": f"{CONFIG} an object of type dict.",
    "gradient_shares({}, state.params, ids)": f"{CONFIG} an object of type dict.",
    "gradient_shares(config, state.params, ids, mesh=foreign)": f"{MESH} the axes ('x',). {MAKE_MESH}",
    "make_eval_step(config, foreign)": f"{MESH} the axes ('x',). {MAKE_MESH}",
    "evaluate(None, ids)": f"{PARAMS} None. {SOURCE}",
    "step(None, ids, key)": "state must be of type TrainState, got None.",
    "num_params('gpt2')": f"{CONFIG} 'gpt2'.",
    "flops_per_token(None)": f"{CONFIG} None.",
    "generate(None, [[1]], 5, key=key)": f"{MODEL} None.",
    "evaluate_tokens(None, ids)": f"{MODEL} None.",
    "evaluate_tokens(model, None)": "tokens must be an array of token ids, got None.",
    "mean_loss(None, ids)": f"{MODEL} None.",
    "token_losses('m', ids)": f"{MODEL} 'm'.",
    "estimate_memory(None, global_batch_size=2)": f"{CONFIG} None.",
    "estimate_memory(config, global_batch_size=2, optimizer='adamw')": f"{RULES} 'adamw'.",
    "estimate_memory(config, global_batch_size=2, mesh=5)": f"{MESH} 5. {MAKE_MESH}",
    "estimate_memory(config, global_batch_size=2, mesh=5, num_shards=2)": f"{MESH} 5. {MAKE_MESH}",
    "estimate_memory(None, global_batch_size=2, num_shards=2)": f"{CONFIG} None.",
    "TreeTrainStep(None, rule, make_mesh(), num_shards=2)": f"{CONFIG} None.",
    "TreeTrainStep(config, settings, make_mesh(), num_shards=2)": f"{RULE} an object of type OptimizerConfig. {MAKE}",
    "TreeTrainStep(config, rule, None, num_shards=2)": f"{MESH} None. {MAKE_MESH}",
    "TreeTrainStep(config, rule, make_mesh(), num_shards='2')": "num_shards must be a power of two, got '2'.",
    "TreeTrainStep(config, rule, make_mesh(), num_shards=8, grad_accum_steps=0)":
        "grad_accum_steps must be at least 1, got 0.",
    "make_tree_eval_step({}, make_mesh(), num_shards=2)": f"{CONFIG} an object of type dict.",
    "make_tree_eval_step(config, 5, num_shards=2)": f"{MESH} 5. {MAKE_MESH}",
    "make_tree_eval_step(config, make_mesh(), num_shards=8)(state.params, None)": f"windows must {BATCH} None.",
    "put_batch(ids, None)": f"{MESH} None. {MAKE_MESH}",
    "put_batch(None, make_mesh())": f"rows must {BATCH} None.",
    "replicated('x')": f"{MESH} 'x'. {MAKE_MESH}",
    "tree_shardings(state.params, None)": f"{MESH} None. {MAKE_MESH}",
    "param_spec(None, 2)": "name must be of type str, got None.",
    "param_spec('wte.embedding', '2')": "num_dims must be a whole number from 0 to 64, got '2'.",
    "GPT2(None, rngs=None)": f"{CONFIG} None.",
    "GPT2(config, rngs=5)": "rngs must be of type Rngs, got 5.",
    "model([[1, 2, 3]])": f"token ids must {BATCH} an object of type list.",
    "model(None)": f"token ids must {BATCH} None.",
    "model('abc')": f"token ids must {BATCH} 'abc'.",
    "step(state, [[1, 2], [3]], key)": f"windows must {BATCH} an object of type list.",
    "config.check_axes(fsdp=0, tensor=1)":
        "mesh axis fsdp must divide embed_dim (8), got 0. Choose another size.",
    "config.check_axes(fsdp=1, tensor=None)":
        "mesh axis tensor must divide num_heads (1), got None. Choose another size.",
    "model.block(5)": "the index of a layer must be 0 to 0, got 5.",
    "GPT2(dataclasses.replace(config, scan_layers=True), rngs=nnx.Rngs(0)).block(5)":
        "the index of a layer must be 0 to 0, got 5.",
    "GPT2Config(scan_layers='no')": "scan_layers must be True or False, got 'no'.",
    "make_mesh(devices=5)": f"{DEVICES} 5. Pass some of jax.devices().",
    "make_mesh(devices='cpu')": f"{DEVICES} 'cpu'. Pass some of jax.devices().",
    "make_mesh(devices=jax.devices() * 2)": f"{DEVICES} an object of type list. Pass some of jax.devices().",
    "check_mesh(fsdp=1, tensor=1, num_devices='8', devices_per_process=1)": f"num_devices {WHOLE} '8'.",
    "check_mesh(fsdp=1, tensor=1, num_devices=8, devices_per_process=0)": f"devices_per_process {WHOLE} 0.",
    "check_mesh(fsdp=1, tensor=1, num_devices=8, devices_per_process=4, devices_per_slice='a')":
        f"devices_per_slice {WHOLE} 'a'.",
    "generate(model, [[1]], 5, key=5)": f"{KEY} 5. Pass jax.random.key(seed).",
    "generate(model, [[1]], 5, key='a')": f"{KEY} 'a'. Pass jax.random.key(seed).",
    "generate(model, [[1]], 5, key=keys)": f"{KEY} key<fry>[2]. Pass jax.random.key(seed).",
    "generate(model, [[1]], 5, key=key, use_cache='no')": "use_cache must be of type bool, got 'no'.",
    "generate(model, [[1]], 5, key=key, on_tokens=5)": "on_tokens must be a function, or None, got 5.",
    "step(state, ids, None)": f"{KEY} None. Pass jax.random.key(seed).",
    "step(state, ids, 5)": f"{KEY} int32[]. Pass jax.random.key(seed).",
    "create_train_state(config, rule, 5)": f"{KEY} 5. Pass jax.random.key(seed).",
    "mean_loss(model, ids, dropout_key='a')": f"dropout_{KEY} 'a'. Pass jax.random.key(seed).",
    "GPT2.from_pretrained('x', num_layers=2)": f"{FIELD}, got num_layers.",
    "GPT2.from_pretrained('x', bogus=5)": f"{FIELD}, got bogus.",
    "GPT2.from_pretrained('x', dtype='x')": "dtype must be bfloat16, float32 or float64, got 'x'.",
    "GPT2.from_pretrained('x', seq_len=0)": f"seq_len {SIZE} 0.",
    "pretrained_config('x', bogus=5)": f"{FIELD}, got bogus.",
    "pretrained_config(5)": "path or name must be of type str | os.PathLike, got 5.",
    "pretrained_config('x', revision=5)": "revision must be of type str | None, got 5.",
    "GPT2.from_pretrained(5)": "path or name must be of type str | os.PathLike, got 5.",
    "model.save_pretrained('x', dtype='int8')": (
        "dtype must be one of bfloat16, float16, float32, float64, got 'int8'."
    ),
    "model.save_pretrained('x', max_shard_bytes='5')": f"max_shard_bytes {WHOLE} '5'.",
    "model.save_pretrained('x', max_shard_bytes=0)": f"max_shard_bytes {WHOLE} 0.",
    "model.save_pretrained('x', max_shard_bytes=np.nan)": f"max_shard_bytes {WHOLE} nan.",
    "model.save_pretrained('x', end_of_text=65)": f"{END} 65.",
    "model.save_pretrained(None)": "path must be of type str | os.PathLike, got None.",
}  # fmt: skip


# Numbers and arrays that jax or the arithmetic of numpy cannot take as they are.
CONVERTED = [
    "compare(model(swapped[:, :16]), model(ids[:, :16]))",
    "compare(put_batch(swapped, make_mesh()), ids)",
    "compare(model.embed(ids[:1, :5], np.arange(5, dtype='>i4')[None]), model.embed(ids[:1, :5], np.arange(5)[None]))",
    "compare(evaluate_tokens(model, np.ones(500, int), stride=np.int8(5), batch_size=np.int8(3)).num_tokens, 499)",
    "check_mesh(fsdp=np.int8(16), tensor=np.int8(16), num_devices=256, devices_per_process=256)",
    "config.check_axes(fsdp=np.int8(1), tensor=np.int8(1))",
    "compare(learning_rate_schedule(OptimizerConfig(warmup_steps=np.uint8(200), **wsd), 1000)(700),"
    " learning_rate_schedule(OptimizerConfig(warmup_steps=200, **wsd), 1000)(700))",
    "model.block(np.int8(0))",
    "compare(generate(model, [[1]], np.int8(100), temperature=0, top_k=np.int8(3), vocab_size=np.uint8(65)),"
    " generate(model, [[1]], 100, temperature=0))",
    "model.save_pretrained(folder.name, end_of_text=np.int64(5))",
    "make_train_step(config, rule, grad_accum_steps=np.int8(64))(state, np.zeros((128, 17), int), key)",
    "TreeTrainStep(config, rule, make_mesh(), num_shards=np.int8(8), grad_accum_steps=np.int8(16))"
    "(state, np.zeros((128, 17), int), key)",
    "compare(GPT2Config(norm_epsilon=Fraction(1, 10)).norm_epsilon.hex(), (0.1).hex())",
    "compare(OptimizerConfig(learning_rate=Fraction(1, 4)).learning_rate.hex(), (0.25).hex())",
    "compare(causal_attention(q, q, q, dropout_rate=Fraction(1, 2), dropout_key=key),"
    " causal_attention(q, q, q, dropout_rate=0.5, dropout_key=key))",
]


@pytest.fixture(scope="module")
def messages():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        input=json.dumps([*CASES, *CONVERTED]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("code", CASES)
def test_input_of_a_wrong_type_or_shape_is_rejected(messages, code):
    assert messages[code] == CASES[code]


@pytest.mark.parametrize("code", CONVERTED)
def test_numbers_and_ids_of_other_types_count_as_plain_ones(messages, code):
    assert messages[code] == "accepted"
