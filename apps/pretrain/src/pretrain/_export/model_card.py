"""The card of a model: what it was trained on, how far, with which losses, and how to repeat it."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from nnx_gpt2 import num_params
from owt_data import TokenizerName
from pretrain._config import PretrainConfig
from pretrain._formats import option
from pretrain._presets import PRESETS
from pretrain._run.checkpoint_digests import DIGESTS, description_digests, roots
from pretrain._run.differences import changes_result, option_values
from pretrain._run.history import RunHistory
from pretrain._run.metrics import last_values, of_trained

CONFIG = "run.json"
"""The file with the configuration of the run, for `pretrain --config`."""

# The places of a run on its machine.
_PLACES = ("name", "storage_path")
_TOKENIZER = "tokenizer.json"


def repeated_config(config: PretrainConfig) -> str:
    """Return the text of the file `CONFIG`: every option but the places of the run, as JSON.

    A tokenizer of a file is that of the exported folder.
    """
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in _PLACES}
    options["prepare"]["tokenizer"] = _tokenizer(config.prepare.tokenizer)
    return json.dumps(options, indent=2) + "\n"


def render_card(history: RunHistory, *, step: int, is_average: bool, dtype: str, metadata: Mapping[str, Any]) -> str:
    """Return the card as Markdown, with the header that the hub reads.

    Args:
        history: the run.
        step: step of the checkpoint.
        is_average: whether the weights are the moving average of those of the steps.
        dtype: type of the weights in the files.
        metadata: metadata of the checkpoint.
    """
    description = history.description
    records = [*of_trained([record for record in history.records if record["step"] <= step])]
    validations = [record for record in records if "val_loss" in record]
    environment = Environment(
        loader=PackageLoader("pretrain._export", "templates"), undefined=StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("model_card.md.jinja").render(
        name=_text(history.folder.name),
        config=description.config,
        data=_text(description.config.data),
        tokenizer=_tokenizer(description.data.tokenizer),
        origin=None if description.origin is None else _text(str(description.origin)),
        hardware=description.hardware,
        num_params=num_params(description.config.model),
        step=step,
        is_average=is_average,
        dtype=dtype,
        values=last_values(records),
        last_validation=validations[-1] if validations else None,
        best_validation=min(validations, key=lambda record: record["val_loss"], default=None),
        options=_changed_options(description.config),
        digests=description_digests(description) | (roots(metadata) if DIGESTS in metadata else {}),
        versions=description.versions,
        commit=description.commit,
        command=shlex.join(["pretrain", "--config", CONFIG, "--name", f"{history.folder.name}-again"]),
        config_file=CONFIG,
    )


def _changed_options(config: PretrainConfig) -> dict[str, str]:
    """Return the options that change the result and are not those of the preset, as texts."""
    before = option_values(PRESETS[config.preset]())
    return {
        name: _tokenizer(value) if name == "prepare.tokenizer" else _text(option(name, value))
        for name, value in option_values(config).items()
        if changes_result(name) and value != before[name]
    }


def _tokenizer(name: str) -> str:
    """Return the name of a tokenizer in the exported folder."""
    return name if name in get_args(TokenizerName) else _TOKENIZER


def _text(text: str) -> str:
    """Return a text for a code span: in one line, without the character that ends the span."""
    return " ".join(text.replace("`", "'").split()) or " "
