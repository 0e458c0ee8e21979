"""Names: of a run whose options differ from those of its preset, and of an option in such a name and in a table.

The name of a run has its preset, the label of its data, and each option that changes the result and differs from the
preset. Equal command lines thus continue one run, and other options are another run. The length has no part in the
name, since a run may be extended. Data has the label alone: a run rejects other data of the same label. A run that
starts from a checkpoint has the name of the checkpoint, and the options that differ from those of the former run.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from pathlib import PurePosixPath
from typing import Any, get_type_hints

from pretrain._config import LENGTHS, PretrainConfig
from pretrain._data_names import label_of, parse_data
from pretrain._errors import short
from pretrain._field_types import field_type
from pretrain._presets import PRESETS
from pretrain._run.differences import differing_options
from pretrain._run.find import find_run_of

_SHORT = {
    "optimizer.learning_rate": "lr",
    "optimizer.min_learning_rate": "minlr",
    "optimizer.min_learning_rate_ratio": "minratio",
    "optimizer.muon_learning_rate": "muonlr",
    "optimizer.weight_decay": "wd",
    "optimizer.muon_weight_decay": "muonwd",
    "optimizer.warmup_steps": "warmup",
    "optimizer.decay_steps": "decay",
    "optimizer.clip_norm": "clip",
    "optimizer.name": "optimizer",
    "train.global_batch_size": "batch",
    "train.grad_accum_steps": "accum",
    "train.micro_batch_size": "microbatch",
    "train.max_steps": "steps",
    "train.max_epochs": "epochs",
    "train.max_tokens": "tokens",
    "model.num_layers": "layers",
    "model.num_heads": "heads",
    "model.embed_dim": "width",
    "model.mlp_dim": "mlp",
    "model.seq_len": "context",
    "model.dropout_rate": "dropout",
    "model.vocab_size": "vocab",
    "data_mode": "mode",
}
# Those of `_SHORT` come first, in its order, and the seed is the last one.
_PLACES = {name: place for place, name in enumerate(_SHORT)} | {"seed": len(_SHORT) + 1}
# The weights of `init_from` decide these.
_OF_WEIGHTS = tuple(
    f"model.{field}" for field in ("vocab_size", "num_layers", "num_heads", "embed_dim", "mlp_dim", "scan_layers")
)
_MOST_CHARACTERS = 80  # of all options, beside a preset and a label of 100 characters: a folder's name has 255
_DIGEST_CHARACTERS = 8


def run_name(config: PretrainConfig) -> str:
    """Return the name of a run: `name`, or by default one that says what differs from the preset.

    >>> from pretrain import PRESETS
    >>> run_name(PRESETS["baby"]().with_options({"data": "a/shakespeare.txt", "seed": 2, "train.max_steps": 100}))
    'baby-shakespeare-seed2'
    """
    if config.name is not None:
        return config.name
    if config.from_checkpoint is None:
        beginning = f"{config.preset}-{label_of(parse_data(config.data))}"
        base, left_out = PRESETS[config.preset](), ("data", *LENGTHS)
    else:
        run, _, checkpoint = PurePosixPath(config.from_checkpoint.partition("?")[0]).name.partition("@")
        beginning = "-".join(filter(None, (run, checkpoint, "fork")))
        former = find_run_of(config.from_checkpoint)[1].config
        base, left_out = dataclasses.replace(former, anneal=None, init_from=None), ("from_checkpoint", *LENGTHS)
    if config.init_from is not None:
        left_out = (*left_out, *_OF_WEIGHTS)
    changed = {name: values[1] for name, values in differing_options([base, config]).items() if name not in left_out}
    return "-".join([beginning, *_limited(changed)])


def short_name(option: str) -> str:
    """Return the name of an option for names of runs and heads of columns. No two options have the same.

    >>> short_name("optimizer.learning_rate"), short_name("train.mask_documents")
    ('lr', 'mask_documents')
    """
    return _SHORT.get(option, option.rpartition(".")[2])


def short_value(value: Any) -> str:
    """Return a value as people write it.

    >>> short_value(0.0003), short_value(0.25), short_value(2.0), short_value(None), short_value(True)
    ('3e-4', '0.25', '2', 'none', 'true')
    """
    match value:
        case bool():
            return str(value).lower()
        case float():
            exact = Decimal(repr(value))
            digits = "".join(map(str, exact.as_tuple().digits)).rstrip("0") or "0"
            scientific = f"{digits[:1]}{'.' if digits[1:] else ''}{digits[1:]}e{exact.adjusted()}"
            plain = f"{exact:f}".removesuffix(".0")
            return min(plain, scientific, key=len)
        case tuple() | list():
            return ",".join(map(short_value, value))
        case _:
            return "none" if value is None else str(value)


def typed_value(value: Any) -> str:
    """Return a value as one types it on the command line, in one line of at most 80 characters.

    >>> typed_value("local"), typed_value(None), typed_value(3e-4), typed_value(())
    ('local', 'none', '3e-4', "''")
    """
    return short(short_value(value))


def _limited(changed: Mapping[str, Any]) -> list[str]:
    """Return the parts of a name for options. A digest of all stands for the last ones if they are too many."""
    names = sorted(changed, key=lambda name: (_PLACES.get(name, len(_SHORT)), name))
    parts = [_part(name, changed[name]) for name in names]
    text = "-".join(parts)
    if len(text) <= _MOST_CHARACTERS:
        return parts
    while parts and len("-".join(parts)) > _MOST_CHARACTERS - _DIGEST_CHARACTERS - 1:
        parts.pop()
    return [*parts, _digest(text)]


def _part(name: str, value: Any) -> str:
    """Return the part of a name for an option. Parts of different values differ."""
    head = short_name(name)
    if isinstance(value, bool):
        return head if value else f"no_{head}"
    text = short_value(value)
    if isinstance(value, int | float) and not head[-1].isdigit():
        return f"{head}{text}"
    if isinstance(value, str) and not _has_choices(name) and re.search(r"[^a-z0-9_.]", text):
        # Such as a name with spaces. Some file systems do not tell upper from lower case.
        words = re.sub(r"[^a-z0-9]+", "_", text.lower())[:20].strip("_")
        text = f"{words}_{_digest(text)}"
    return f"{head}_{text}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


@cache
def _has_choices(option: str) -> bool:
    """Return whether the texts that an option may have are those of a list, such as `sequential-first`."""
    kind: Any = PretrainConfig
    for part in option.split("."):
        kind = get_type_hints(kind)[part]
    found = field_type(kind)
    return bool(found.choices or found.word)
