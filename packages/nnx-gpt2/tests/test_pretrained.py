"""Weights in Hugging Face's layout: against transformers' own figures, and there and back."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from nnx_gpt2 import GPT2, GPT2Config, generate, mean_loss, split_params

FOLDER = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"

# No width is a multiple of another model's, the vocabulary none of 128, and the feed-forward layer is not 4x.
ODD = GPT2Config(vocab_size=203, seq_len=64, num_layers=3, num_heads=5, embed_dim=40, mlp_dim=72, norm_epsilon=1e-6)


@pytest.fixture(scope="module")
def expected():
    return np.load(FOLDER / "expected.npz")


@pytest.fixture(scope="module", params=[False, True], ids=["list", "scan"])
def published(request):
    return GPT2.from_pretrained(FOLDER, scan_layers=request.param)


@pytest.fixture
def copy(tmp_path):
    """A copy of the published model, to spoil."""
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
    published.save_pretrained(tmp_path, end_of_text=50256)
    saved, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDER))
    shared = saved.keys() & original.keys() - {"embd_pdrop", "attn_pdrop", "resid_pdrop"}
    assert {name: saved[name] for name in shared} == {name: original[name] for name in shared}
    assert {"model_type", "vocab_size", "n_positions", "n_layer", "n_head", "n_embd"} <= shared


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
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("scan_layers", "param_dtype"), [(False, "float32"), (True, "bfloat16")])
def test_any_shape_comes_back(tmp_path, scan_layers, param_dtype):
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
    model.save_pretrained(tmp_path, max_shard_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(a.nbytes for n in names for a in load_file(tmp_path / n).values())
    for name in names:  # the format's tensors begin at a multiple of 8
        assert int.from_bytes((tmp_path / name).read_bytes()[:8], "little") % 8 == 0
    assert_same_params(GPT2.from_pretrained(tmp_path), model)
    model.save_pretrained(tmp_path)  # whole again: nothing of the split model stays behind
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_files_as_openai_published_them_are_read(copy):
    """Names without a prefix, the causal mask as a buffer of each layer, and the head beside its embedding."""

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


def whole(tensors):
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
        (add, "h.0.attn.q_norm.weight does not belong to it"),
        (reshape, "h.0.attn.c_attn.weight is [144, 48], not [48, 144]"),
        (whole, "ln_f.bias holds I32, not floating-point numbers"),
        (untie, "expected lm_head.weight to be wte.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, change, message):
    change_tensors(copy, change)
    with pytest.raises(ValueError, match=re.escape(message)):
        GPT2.from_pretrained(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "relu"}, "expected activation_function 'gelu_new' or 'gelu_pytorch_tanh'"),
        ({"model_type": "llama"}, "expected model_type 'gpt2'"),
        ({"tie_word_embeddings": False}, "expected tie_word_embeddings True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "expected scale_attn_by_inverse_layer_idx False"),
        ({"add_cross_attention": True}, "expected add_cross_attention False"),
        ({"n_inner": "x"}, "model.mlp_dim must be at least 1, got 'x'"),
        ({"layer_norm_epsilon": None}, "model.norm_epsilon must be between 0 and 1, got None"),
        ({"n_layer": None}, "expected a whole number as n_layer"),
        ({"n_head": 5}, "model.embed_dim must be a multiple of model.num_heads, got 48 and 5"),
        ({"n_positions": 64}, "wpe.weight is [32, 48], not [64, 48]"),
    ],
)
def test_configs_that_are_not_gpt2s_are_refused(copy, fields, message):
    change_config(copy, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        GPT2.from_pretrained(copy)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "expected a config.json in"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json must be an object in JSON, got b'{'"),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            r"config\.json must be an object in JSON, got b'\[\]'",
        ),
        (
            lambda folder: (folder / "config.json").write_bytes(b"\xff"),
            r"config\.json must be an object in JSON, got b'",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "expected a weight_map from"),
        (lambda folder: (folder / "model.safetensors").unlink(), "expected model.safetensors in"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "expected safetensors in"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((FOLDER / "model.safetensors").read_bytes()[:-9]),
            "expected safetensors in",
        ),
    ],
)
def test_damaged_folders_are_refused(copy, spoil, message):
    spoil(copy)
    with pytest.raises(ValueError, match=message):
        GPT2.from_pretrained(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 6}, "expected fields that do not change the weights, got num_heads: leave it out"),
        ({"param_dtype": "float64"}, "expected jax_enable_x64 to be on for float64, and it is off"),
    ],
)
def test_fields_that_would_make_another_model_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GPT2.from_pretrained(FOLDER, **fields)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with a config\.json, got .*absent, which is none"):
        GPT2.from_pretrained(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        GPT2(ODD, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        GPT2(ODD, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "file" / "model")
    with pytest.raises(ValueError, match="expected at least 1 as max_shard_bytes, got 0"):
        GPT2(ODD, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "model", max_shard_bytes=0)


def test_a_name_of_the_hub_without_its_extra_says_what_to_install():
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from nnx_gpt2 import GPT2\n"
        "try: GPT2.from_pretrained('gpt2')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "to download it from the hub, install nnx-gpt2[hub]" in done.stdout


@pytest.mark.slow
def test_loading_and_saving_hold_one_tensor_beside_the_model(tmp_path):
    """In a process of its own, whose peak memory is then that of the model and little more."""
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
    # The pages of the mapped file count towards a process's peak beside the model itself.
    assert int(done.stdout) < 2 * model_bytes + 2 * largest_bytes
