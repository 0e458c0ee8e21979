"""Reading and writing of parameter trees in Hugging Face's files, one tensor at a time.

Both layouts have linear weights `[in, out]` ("Conv1D"), a head tied to `wte`, and queries, keys and values in
`c_attn`. This package pads the vocabulary, has a `c_attn` of `[C, 3, C]`, and may stack the parameters over layers.

Shapes: C width.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from nnx_gpt2._errors import check_path, is_one_of, is_whole, one_line, plain, require, shown, value_error
from nnx_gpt2._model_config import GPT2Config, SavedDType
from nnx_gpt2._params import Params
from nnx_gpt2._pretrained_config import AGAIN, CONFIG_FILE, check_regular, read_object
from nnx_gpt2._token_ids import check_end_of_text

_PREFIX = "transformer."
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
MODEL_FILES = [CONFIG_FILE, "*.safetensors", _INDEX]

# Buffers, not parameters: old versions of transformers stored the causal mask of every layer.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
_HEAD = "lm_head.weight"

# The types that weights may have, and their names in safetensors.
_DTYPE_CODES: dict[SavedDType, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_MOST_FLOAT16 = 65_504


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A published tensor and its place in the parameter tree."""

    path: tuple[str, ...]
    """Keys of the tensor, without the keys of its layer."""

    layer: int | None
    """The layer of the tensor, or None."""

    shape: tuple[int, ...]
    """The published shape."""


def _published(config: GPT2Config) -> dict[str, _Tensor]:
    """Return the tensors of a model of this shape by published name, without the prefix."""
    width, inner = config.embed_dim, config.feed_forward_dim

    def layer(name: str, index: int | None, weight: str, *shape: int) -> dict[str, _Tensor]:
        full, path = name if index is None else f"h.{index}.{name}", tuple(name.split("."))
        return {
            f"{full}.weight": _Tensor((*path, weight), index, shape),
            f"{full}.bias": _Tensor((*path, "bias"), index, shape[-1:]),
        }

    tensors = {
        "wte.weight": _Tensor(("wte", "embedding"), None, (config.vocab_size, width)),
        "wpe.weight": _Tensor(("wpe", "embedding"), None, (config.seq_len, width)),
    }
    for i in range(config.num_layers):
        tensors |= layer("ln_1", i, "scale", width)
        tensors |= layer("attn.c_attn", i, "kernel", width, 3 * width)
        tensors |= layer("attn.c_proj", i, "kernel", width, width)
        tensors |= layer("ln_2", i, "scale", width)
        tensors |= layer("mlp.c_fc", i, "kernel", width, inner)
        tensors |= layer("mlp.c_proj", i, "kernel", inner, width)
    return tensors | layer("ln_f", None, "scale", width)


def read_params(folder: Path, saved: GPT2Config, config: GPT2Config, make_shapes: Callable[[], Any]) -> Params:
    """Read the parameters of a saved model into a tree.

    Args:
        folder: see `locate_pretrained`.
        saved: see `read_config`.
        config: see `with_changes`. With fewer positions, the tree has the first ones.
        make_shapes: returns the tree's shapes and types. It is called after the config has been compared with the
            files: those of a wrong config could be of any size.
    """
    has_type = jax.config.read("jax_enable_x64") or "float64" not in (config.dtype, config.param_dtype)
    require(has_type, "jax_enable_x64", "be on for float64", "off", "Turn it on, or choose float32.")
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        has_layers = config.num_layers <= len(tensors)
        found = f"{config.num_layers} layers in {CONFIG_FILE}, and {len(tensors)} tensors"
        require(has_layers, f"tensors in {folder}", f"be those of the GPT-2 in {CONFIG_FILE}", found, AGAIN)
        expected = _published(saved)
        _check_tensors(folder, tensors, expected)
        params = make_shapes()
        fill = jax.jit(lambda stacked, leaf, layer: stacked.at[layer].set(leaf), donate_argnums=0)
        for name, tensor in expected.items():
            parent, key = _locate(params, tensor, config)
            like = parent[key]
            shape = like.shape[1:] if config.scan_layers and tensor.layer is not None else like.shape
            leaf = jnp.asarray(_to_ours(tensors[name].read(), shape), like.dtype)
            if leaf.shape == like.shape:
                parent[key] = leaf
            else:
                stacked = jnp.zeros(like.shape, like.dtype) if isinstance(like, jax.ShapeDtypeStruct) else like
                parent[key] = fill(stacked, leaf, tensor.layer)
    return params


def write_pretrained(
    path: str | os.PathLike[str],
    config: GPT2Config,
    params: Params,
    *,
    end_of_text: int | None,
    dtype: SavedDType,
    max_shard_bytes: int,
) -> None:
    """Write parameters and the configs; see `GPT2.save_pretrained`."""
    check_end_of_text(end_of_text, config.vocab_size)
    require(is_one_of(dtype, get_args(SavedDType)), "dtype", f"be one of {', '.join(_DTYPE_CODES)}", shown(dtype))
    require(is_whole(max_shard_bytes, 1), "max_shard_bytes", "be a whole number of at least 1", shown(max_shard_bytes))
    folder = check_path("path", path)
    if (folder / CONFIG_FILE).exists():
        is_model = "model_type" in read_object(folder / CONFIG_FILE)
        require(is_model, str(folder / CONFIG_FILE), "be that of a model", "another", "Give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    itemsize = jnp.dtype(dtype).itemsize
    shards: list[dict[str, _Tensor]] = [{}]
    shard_bytes = total_bytes = 0
    for name, tensor in _published(config).items():
        num_bytes = int(np.prod(tensor.shape)) * itemsize
        if shards[-1] and shard_bytes + num_bytes > max_shard_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][_PREFIX + name] = tensor
        shard_bytes, total_bytes = shard_bytes + num_bytes, total_bytes + num_bytes

    def read(tensor: _Tensor) -> np.ndarray:
        parent, key = _locate(params, tensor, config)
        stacked = config.scan_layers and tensor.layer is not None
        array = np.asarray(parent[key][tensor.layer] if stacked else parent[key])
        return _as_dtype(_to_published(array, tensor.shape), dtype)

    def file_name(i: int) -> str:
        return _WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"

    for i, shard in enumerate(shards):
        _write_tensors(folder / file_name(i), shard, _DTYPE_CODES[dtype], itemsize, read)
    if len(shards) > 1:
        weight_map = {name: file_name(i) for i, shard in enumerate(shards) for name in shard}
        _write_json(folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    if end_of_text is None and config.vocab_size == GPT2Config().vocab_size:
        end_of_text = config.vocab_size - 1
    _write_json(folder / _GENERATION, _describe_generation(config, plain(end_of_text)))
    _write_json(folder / CONFIG_FILE, _describe(config, plain(end_of_text), dtype))
    # Remove files of an earlier model that would be read instead of these files, or with them.
    names = {file_name(i) for i in range(len(shards))} | ({_INDEX} if len(shards) > 1 else set())
    for stale in [*folder.glob("model*.safetensors"), folder / _INDEX]:
        if stale.name not in names:
            stale.unlink(missing_ok=True)


def _describe(config: GPT2Config, end_of_text: int | None, dtype: SavedDType) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_len,
        "n_ctx": config.seq_len,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.embed_dim,
        "n_inner": config.mlp_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": 0.02,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": config.dropout_rate,
        "resid_pdrop": config.dropout_rate,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _describe_generation(config: GPT2Config, end_of_text: int | None) -> dict[str, Any]:
    """Return the defaults of transformers' `generate`: texts end at the last position, or by an end of text."""
    ids = {} if end_of_text is None else dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
    return {**ids, "max_length": config.seq_len}


def _locate(params: Any, tensor: _Tensor, config: GPT2Config) -> tuple[Any, str]:
    node = params
    if tensor.layer is not None:
        node = params["h"] if config.scan_layers else params["h"][tensor.layer]
    for key in tensor.path[:-1]:
        node = node[key]
    return node, tensor.path[-1]


def _to_ours(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.size == np.prod(shape):
        return array.reshape(shape)
    rows = array[: shape[0]]  # the positions
    return np.pad(rows, ((0, shape[0] - len(rows)), (0, 0)))  # the vocabulary


def _to_published(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return array.reshape(shape) if array.size == np.prod(shape) else array[: shape[0]]


def _as_dtype(array: np.ndarray, dtype: SavedDType) -> np.ndarray:
    if dtype == "float16":
        largest = np.abs(array).max()
        require(not largest > _MOST_FLOAT16, "weights", "be at most 65504 for float16", largest, "Choose bfloat16.")
    return array.astype(jnp.dtype(dtype))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in an open file."""

    file: Any
    name: str

    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


def _open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, _Stored]:
    """Open the tensors of a folder by name without the prefix. Reads no data yet."""
    index = folder / _INDEX
    files = [folder / name for name in _indexed_files(index)] if index.exists() else [folder / _WEIGHTS]
    tensors = {}
    for path in files:
        try:
            check_regular(path)
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (OSError, ValueError, SafetensorError) as error:
            raise value_error(str(path), "be a safetensors file", f"an error ({error})", AGAIN) from error
        for name in file.keys():  # noqa: SIM118 - no dict
            ours = name.removeprefix(_PREFIX)
            require(ours not in tensors, f"each tensor in {folder}", "be stored once", f"{one_line(ours)} twice", AGAIN)
            tensors[ours] = _Stored(file, name)
    return {name: stored for name, stored in tensors.items() if not name.endswith(_BUFFERS)}


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(read_object(index)["weight_map"].values()))
        is_valid = all(name == Path(name).name for name in names)  # not a path to somewhere else
    except (KeyError, TypeError, AttributeError):
        names, is_valid = [], False
    require(is_valid, str(index), "have a weight_map from tensors to files in its folder", "another", AGAIN)
    return names


def _check_tensors(folder: Path, tensors: dict[str, _Stored], expected: dict[str, _Tensor]) -> None:
    head = tensors.pop(_HEAD, None)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{one_line(name)} is unknown" for name in tensors if name not in expected]
    for name in filter(tensors.__contains__, expected):
        if (shape := tensors[name].shape()) != expected[name].shape:
            problems.append(f"{name} is {list(shape)}, not {list(expected[name].shape)}")
        if (dtype := tensors[name].dtype()) not in _DTYPE_CODES.values():
            problems.append(f"{name} holds {dtype}, not floating-point numbers")
    if not problems and head is not None and not np.array_equal(head.read(), tensors["wte.weight"].read()):
        problems = [f"{_HEAD} is not wte.weight, to which GPT-2's head is tied"]
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    found = "; ".join(problems[:5]) + more
    require(not problems, f"tensors in {folder}", f"be those of the GPT-2 in {CONFIG_FILE}", found, AGAIN)


def _write_tensors(
    path: Path, tensors: dict[str, _Tensor], code: str, itemsize: int, read: Callable[[_Tensor], np.ndarray]
) -> None:
    """Write a safetensors file one tensor at a time. The library's writer needs all tensors in memory.

    The format is the length of the header in 8 bytes, a JSON header, and the bytes of the tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + int(np.prod(tensor.shape)) * itemsize
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with _replacing(path) as partial, partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(read(tensor)).view(np.uint8).data)


def _write_json(path: Path, value: Any) -> None:
    with _replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
