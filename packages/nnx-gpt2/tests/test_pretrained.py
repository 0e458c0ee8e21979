"""Hugging Face's files: against the results of transformers, and in a round trip."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from nnx_gpt2 import GPT2, GPT2Config, generate, mean_loss, num_params, pretrained_config, split_params
from nnx_gpt2._errors import one_line

FOLDER = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"

# Unusual sizes: the vocabulary is not a multiple of 128, and the feed-forward layer is not four times as wide.
ODD = GPT2Config(vocab_size=203, seq_len=64, num_layers=3, num_heads=5, embed_dim=40, mlp_dim=72, norm_epsilon=1e-6)


@pytest.fixture(scope="module")
def expected():
    return np.load(FOLDER / "expected.npz")


@pytest.fixture(scope="module", params=[False, True], ids=["list", "scan"])
def published(request):
    return GPT2.from_pretrained(FOLDER, scan_layers=request.param)


@pytest.fixture
def copy(tmp_path):
    """A copy of the published model that a test can damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FOLDER / name, folder / name)
    return folder


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same_params(one, other):
    jax.tree.map(np.testing.assert_array_equal, split_params(one), split_params(other))


def test_logits_are_those_of_transformers(published, expected):
    np.testing.assert_allclose(published(jnp.asarray(expected["input_ids"])), expected["logits"], atol=1e-4)


def test_loss_is_that_of_transformers(published, expected):
    loss = mean_loss(published, jnp.asarray(expected["input_ids"]))
    assert float(loss) == pytest.approx(float(expected["loss"]), abs=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_are_those_of_transformers(published, expected, use_cache):
    tokens = generate(published, expected["prompt"], 24, temperature=0.0, use_cache=use_cache)
    np.testing.assert_array_equal(tokens, expected["greedy"])


def test_saved_tensors_are_those_of_the_original_bit_by_bit(published, tmp_path):
    published.save_pretrained(tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(FOLDER / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
        assert ours[name].tobytes() == theirs[name].tobytes()


def test_the_saved_config_agrees_with_the_original(published, tmp_path):
    published.save_pretrained(tmp_path, end_of_text=299)
    saved, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDER))
    assert (saved["bos_token_id"], saved["eos_token_id"]) == (299, 299)
    chosen = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id"}
    shared = saved.keys() & original.keys() - chosen
    assert {name: saved[name] for name in shared} == {name: original[name] for name in shared}
    assert {"model_type", "vocab_size", "n_positions", "n_layer", "n_head", "n_embd"} <= shared


def test_a_second_save_replaces_each_file_at_once(published, tmp_path):
    """A reader has the old file or the new one, never a part of one."""
    files = []
    for _ in range(2):
        published.save_pretrained(tmp_path, end_of_text=299)
        files.append({path.name: path.stat().st_ino for path in tmp_path.iterdir()})
    before, after = files
    assert before.keys() == after.keys() == {"config.json", "generation_config.json", "model.safetensors"}
    assert all(before[name] != after[name] for name in before)


def test_the_saved_config_describes_the_model(tmp_path):
    model = GPT2(dataclasses.replace(ODD, dropout_rate=0.25, param_dtype="bfloat16"), rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path, end_of_text=7)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "vocab_size": 203, "n_positions": 64, "n_ctx": 64, "n_layer": 3, "n_head": 5, "n_embd": 40, "n_inner": 72,
        "layer_norm_epsilon": 1e-6, "initializer_range": 0.02,
        "embd_pdrop": 0.25, "attn_pdrop": 0.25, "resid_pdrop": 0.25,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True,
        "bos_token_id": 7, "eos_token_id": 7, "dtype": "bfloat16", "torch_dtype": "bfloat16",
    }  # fmt: skip
    loaded = GPT2.from_pretrained(tmp_path, dropout_rate=0.25, param_dtype="bfloat16").config
    assert loaded == model.config


@pytest.mark.parametrize(("size", "given", "expected"), [(50257, None, 50256), (50256, None, None), (50257, 0, 0)])
def test_gpt2s_vocabulary_ends_documents_by_its_last_id(tmp_path, size, given, expected):
    config = GPT2Config(vocab_size=size, seq_len=2, num_layers=1, num_heads=1, embed_dim=2)
    GPT2(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path, end_of_text=given)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["bos_token_id"], saved["eos_token_id"]) == (expected, expected)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {
        "max_length": 2,
        **({} if expected is None else dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), expected)),
    }


@pytest.mark.parametrize(
    "changes",
    [{}, {"seq_len": 5, "scan_layers": True, "dropout_rate": 0.1}, {"dtype": "bfloat16", "param_dtype": "bfloat16"}],
    ids=str,
)
def test_the_config_without_the_weights_is_that_of_the_loaded_model(copy, changes):
    expected = GPT2.from_pretrained(copy, **changes).config
    (copy / "model.safetensors").unlink()
    assert pretrained_config(copy, **changes) == expected
    assert expected.vocab_size == 300


def test_the_config_of_something_else_has_no_sizes(copy):
    change_config(copy, model_type="llama")
    with pytest.raises(ValueError, match=r"config.json must be 'gpt2', got 'llama'\. Only GPT-2 can be loaded\."):
        pretrained_config(copy)


def test_fields_that_a_config_lacks_are_the_callers_or_gpt2s(copy):
    sizes = {"vocab_size": 300, "n_positions": 32, "n_layer": 2, "n_head": 3, "n_embd": 48}
    (copy / "config.json").write_text(json.dumps({**sizes, "activation_function": "gelu_pytorch_tanh"}))
    changes: dict[str, Any] = {"dtype": "bfloat16", "attention": "xla", "remat": "full", "loss_chunk_tokens": 7}
    assert GPT2.from_pretrained(copy, **changes).config == GPT2Config(
        vocab_size=300, seq_len=32, num_layers=2, num_heads=3, embed_dim=48, norm_epsilon=1e-5, **changes
    )


def test_weights_of_other_floating_point_types_are_converted(copy):
    halves, doubles = (load_file(FOLDER / "model.safetensors")[f"transformer.{name}.weight"] for name in ("wte", "wpe"))
    halves, doubles = halves.astype(np.float16), doubles.astype(np.float64)
    change_tensors(
        copy, lambda tensors: tensors.update({"transformer.wte.weight": halves, "transformer.wpe.weight": doubles})
    )
    params = split_params(GPT2.from_pretrained(copy))
    assert (params["wte"]["embedding"].dtype, params["wpe"]["embedding"].dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(params["wte"]["embedding"][:300], halves)
    np.testing.assert_array_equal(params["wpe"]["embedding"], doubles)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_written_in_another_type(tmp_path, dtype):
    """In several files, too: a file holds as many bytes of any type."""
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path, dtype=dtype, max_shard_bytes=21_360)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 6
    with safe_open(files[0], framework="numpy") as file:
        codes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no dict
    assert codes == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * num_params(ODD)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["dtype"] == saved["torch_dtype"] == dtype
    rounded = jax.tree.map(lambda array: array.astype(dtype).astype("float32"), split_params(model))
    jax.tree.map(np.testing.assert_array_equal, split_params(GPT2.from_pretrained(tmp_path)), rounded)


def test_a_weight_that_float16_cannot_hold_is_rejected(tmp_path):
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    model.wpe.embedding[...] = model.wpe.embedding[...].at[3, 3].set(-65_521.0)
    with pytest.raises(ValueError, match=r"weights must be at most 65504 for float16, got .*65521.*Choose bfloat16\."):
        model.save_pretrained(tmp_path, dtype="float16")
    assert list(tmp_path.iterdir()) == []
    model.wpe.embedding[...] = model.wpe.embedding[...].at[3, 3].set(65_504.0)
    model.save_pretrained(tmp_path, dtype="float16")
    assert GPT2.from_pretrained(tmp_path).wpe.embedding[3, 3] == 65_504


@pytest.mark.fault
def test_a_save_that_fails_leaves_the_model_that_was_there(tmp_path, record_property):
    record_property("fault", "a parameter that cannot be read in the middle of an export")
    record_property("lost", "nothing: the former export is as it was")
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.wpe.embedding[...] += 1
    model.h[2].ln_2.scale[...].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        model.save_pretrained(tmp_path, end_of_text=7)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(RuntimeError, match="deleted"):
        model.save_pretrained(tmp_path, max_shard_bytes=42_720)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.fault
def test_a_save_in_one_file_that_fails_leaves_the_files_of_a_split_model(tmp_path, record_property):
    record_property("fault", "a parameter that cannot be read in the middle of an export in one file")
    record_property("lost", "nothing: the former export in several files is as it was")
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path, max_shard_bytes=42_720)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.h[2].ln_2.scale[...].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("scan_layers", "param_dtype"), [(False, "float32"), (True, "bfloat16")])
def test_any_shape_survives_a_round_trip(tmp_path, scan_layers, param_dtype):
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "a")
    loaded = GPT2.from_pretrained(tmp_path / "a", scan_layers=scan_layers, param_dtype=param_dtype)
    assert loaded.config.mlp_dim == 72
    assert loaded.wte.embedding.dtype == param_dtype
    loaded.save_pretrained(tmp_path / "b")
    again = GPT2.from_pretrained(tmp_path / "b", scan_layers=scan_layers, param_dtype=param_dtype)
    assert_same_params(again, loaded)
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, 203)
    tolerance = 1e-6 if param_dtype == "float32" else 0.05
    np.testing.assert_allclose(again(tokens), model(tokens), atol=tolerance)


def test_large_models_are_split_over_files_with_an_index(tmp_path):
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path, max_shard_bytes=42_720)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    # The first file is exactly full.
    sizes = [sum(array.nbytes for array in load_file(tmp_path / name).values()) for name in names]
    assert max(sizes) == sizes[0] == 42_720
    assert len(names) == 6
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(a.nbytes for n in names for a in load_file(tmp_path / n).values())
    for name in names:  # tensors start at a multiple of 8
        assert int.from_bytes((tmp_path / name).read_bytes()[:8], "little") % 8 == 0
    assert_same_params(GPT2.from_pretrained(tmp_path), model)
    model.save_pretrained(tmp_path)  # removes the files of the split model
    expected = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    model.save_pretrained(tmp_path, max_shard_bytes=42_720)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names


def test_files_as_openai_published_them_are_read(copy):
    """Names have no prefix. Each layer has the causal mask as a buffer, and the head is stored, too."""

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for i in range(2):
            tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
            tensors[f"h.{i}.attn.masked_bias"] = np.array([-1e4], np.float32)
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    change_tensors(copy, change)
    assert_same_params(GPT2.from_pretrained(copy), GPT2.from_pretrained(FOLDER))


def drop(tensors):
    del tensors["transformer.h.1.mlp.c_fc.bias"]


def add(tensors):
    tensors["transformer.h.0.attn.q_norm.weight"] = np.ones(48, np.float32)


def reshape(tensors):
    tensors["transformer.h.0.attn.c_attn.weight"] = tensors["transformer.h.0.attn.c_attn.weight"].T.copy()


def make_whole_numbers(tensors):
    tensors["transformer.ln_f.bias"] = np.zeros(48, np.int32)


def untie(tensors):
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1


def repeat(tensors):
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repeat, "got wpe.weight twice"),
        (drop, "h.1.mlp.c_fc.bias is missing"),
        (add, "h.0.attn.q_norm.weight is unknown"),
        (reshape, "h.0.attn.c_attn.weight is [144, 48], not [48, 144]"),
        (make_whole_numbers, "ln_f.bias holds I32, not floating-point numbers"),
        (untie, "lm_head.weight is not wte.weight, to which GPT-2's head is tied"),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, change, message):
    change_tensors(copy, change)
    with pytest.raises(ValueError, match=re.escape(message)):
        GPT2.from_pretrained(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "relu"}, "config.json must be 'gelu_new' or 'gelu_pytorch_tanh', got 'relu'."),
        ({"activation_function": "gelu"}, "config.json must be 'gelu_new' or 'gelu_pytorch_tanh', got 'gelu'."),
        ({"model_type": "llama"}, "config.json must be 'gpt2', got 'llama'. Only GPT-2 can be loaded."),
        ({"tie_word_embeddings": False}, "config.json must be True, got False."),
        ({"scale_attn_weights": False}, "config.json must be True, got False."),
        ({"scale_attn_by_inverse_layer_idx": True}, "config.json must be False, got True."),
        ({"add_cross_attention": True}, "config.json must be False, got True."),
        (
            {"n_head": 5},
            "config.json must describe a GPT-2, got an error in it: embed_dim must be a multiple of",
        ),
        ({"n_positions": 64}, "wpe.weight is [32, 48], not [64, 48]"),
        ({"n_layer": 10**4}, "config.json, got 10000 layers in config.json, and 28 tensors."),
        ({"n_embd": 2**20, "n_head": 1}, "wte.weight is [300, 48], not [300, 1048576]"),
        ({"n_layer": 10**400}, "num_layers must be a whole number from 1 to 10000, got 1000"),
        ({"activation_function": "a\nb"}, "got 'a\\nb'."),
    ],
)
def test_configs_of_other_models_are_rejected(copy, fields, message):
    change_config(copy, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        GPT2.from_pretrained(copy)


JSON, SAFETENSORS = "must be a file with a JSON object, got an error", "must be a safetensors file, got an error"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, f"{JSON} ([Errno 2] No such file"),
        ("config.json", b"{", f"{JSON} (Expecting property name"),
        ("config.json", b"[1]", f"{JSON} (cannot convert"),
        ("config.json", b"\xff", f"{JSON} ('utf-8' codec can't decode"),
        ("config.json", b"[" * 100_000, f"{JSON} (maximum recursion depth exceeded"),
        ("config.json", b'{"n_layer": ' + b"9" * 5000 + b"}", f"{JSON} (Exceeds the limit"),
        ("model.safetensors.index.json", b'{"weight_map": ' * 100_000, f"{JSON} (maximum recursion depth exceeded"),
        ("model.safetensors.index.json", b"[1]", f"{JSON} (cannot convert"),
        ("model.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000, SAFETENSORS),
        ("model.safetensors", (2**64 - 1).to_bytes(8, "little") + b"{}", SAFETENSORS),
        ("model.safetensors.index.json", b"{}", "must have a weight_map from tensors to files in its folder"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"wte.weight": "../model.safetensors"}}',
            "must have a weight_map from tensors to files in its folder",
        ),
        ("model.safetensors", None, f"{SAFETENSORS} ([Errno 2] No such file"),
        ("model.safetensors", b"x" * 100, SAFETENSORS),
        ("model.safetensors", (FOLDER / "model.safetensors").read_bytes()[:-9], SAFETENSORS),
    ],
    ids=range(15),
)
def test_a_damaged_file_is_named(copy, name, content, message):
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{name} {message}")):
        GPT2.from_pretrained(copy)


def test_a_pipe_or_a_device_is_rejected_before_it_is_opened(copy, tmp_path):
    names = ("config.json", "model.safetensors", "model.safetensors.index.json")
    cases = [(name, kind) for name in names for kind in ("pipe", "device")]
    folders = [str(shutil.copytree(copy, tmp_path / f"{name}-{kind}")) for name, kind in cases]
    for (name, kind), folder in zip(cases, folders, strict=True):
        path = Path(folder) / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    code = f"""
from nnx_gpt2 import GPT2
for folder in {folders}:
    try: GPT2.from_pretrained(folder)
    except ValueError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    for (name, _), message in zip(cases, done.stdout.splitlines(), strict=True):
        assert f"{name} must be a " in message
        assert "got an error (it is no regular file). Save or download the model again." in message


def test_a_long_value_with_line_breaks_is_one_short_line(copy):
    change_config(copy, activation_function="gelu\n" * 1000)
    with pytest.raises(
        ValueError, match=r"got 'gelu\\ngelu\\n.*\.\.\..*gelu\\n'\. Only GPT-2 can be loaded\."
    ) as caught:
        GPT2.from_pretrained(copy)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_a_path_that_is_a_file_cannot_be_loaded(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ValueError, match=re.escape(f"path or name must be a folder, got {one_line(path)}.")):
        GPT2.from_pretrained(path)


def test_a_field_that_describes_the_weights_cannot_be_changed():
    with pytest.raises(ValueError, match=r"a changed field must be one of dropout_rate, .*, got num_heads\."):
        GPT2.from_pretrained(FOLDER, num_heads=6)


def test_the_config_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {}}')
    model = GPT2(ODD, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"config.json must be that of a model, got another\. Give another folder\."):
        model.save_pretrained(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"config": {}}']


def test_float64_needs_jax_to_allow_it():
    with pytest.raises(ValueError, match=r"jax_enable_x64 must be on for float64, got off\. Turn it on, or choose"):
        GPT2.from_pretrained(FOLDER, param_dtype="float64")


def test_a_path_that_is_not_a_folder_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder, or NAME or OWNER/NAME on the hub, .*, got .*absent\.$"):
        GPT2.from_pretrained(tmp_path / "absent")


@pytest.mark.parametrize(("name", "error"), [("file", FileExistsError), ("file/model", NotADirectoryError)])
def test_a_path_that_cannot_be_a_folder_cannot_be_saved_to(tmp_path, name, error):
    (tmp_path / "file").touch()
    with pytest.raises(error):
        GPT2(ODD, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / name)


@pytest.mark.slow
def test_loading_and_saving_hold_one_tensor_beside_the_model(tmp_path):
    """Measure peak memory in a separate process: little more than the model."""
    config = GPT2Config(vocab_size=8192, seq_len=32, num_layers=10, num_heads=8, embed_dim=512)
    GPT2(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "a")
    code = f"""
import resource, jax
from nnx_gpt2 import GPT2
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
GPT2.from_pretrained({str(FOLDER)!r}).save_pretrained({str(tmp_path / "b")!r})
before = peak()
model = GPT2.from_pretrained({str(tmp_path / "a")!r})
model.save_pretrained({str(tmp_path / "c")!r})
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    model_bytes, largest_bytes = (tmp_path / "a/model.safetensors").stat().st_size, 8192 * 512 * 4
    assert model_bytes > 140_000_000
    # The peak memory of a process includes the pages of the mapped file.
    assert int(done.stdout) < 2 * model_bytes + 2 * largest_bytes
