"""The command `export`: a trained model in Hugging Face's format, with its tokenizer and a card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nnx_gpt2 import SavedDType
from owt_data import tokenizer_files
from pretrain._commands.load import WeightsKind, load_trained
from pretrain._errors import UsageError
from pretrain._export.hub_upload import check_repository, upload
from pretrain._export.model_card import CONFIG, ExportedModel, render_card, repeated_config
from pretrain._export.new_folder import check_new, new_folder
from pretrain._run.history import read_history
from ray_jax_launch import as_storage_path, checkpoint_metadata

ExportDType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The result of `export`."""

    step: int
    """Step of the checkpoint."""

    commit_url: str | None
    """Address of the commit on the hub; None without an upload."""


def export(
    run: str,
    out: str,
    *,
    weights: WeightsKind | None = None,
    dtype: SavedDType | None = None,
    push_to: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Export:
    """Write a model of a run in Hugging Face's format: weights, configs, tokenizer, card, and the run's configuration.

    The folder gets its name when it is complete.

    Args:
        run: the run's folder, URI or name, for its newest checkpoint; or `RUN@STEP`, or `RUN@best`.
        out: a new or empty folder. With `push_to`, it may have the same export already, with a changed card.
        weights: see `load_trained`.
        dtype: type of the weights in the files; None is that of the run's parameters.
        push_to: OWNER/NAME of a repository on the hub, to upload the folder to; None uploads nothing.
        max_shard_bytes: see `GPT2.save_pretrained`.

    Raises:
        UsageError: the run does not exist or has no checkpoint, `out` cannot be used, another command exports to it,
            or the upload failed.
        DataError: the files of the tokenizer are missing.
        OSError: `out` cannot be written.
    """
    if not out:
        raise UsageError("out must be a new or empty folder, got an empty text. Give a name.")
    folder = as_storage_path(out)
    if not isinstance(folder, Path):
        raise UsageError(f"out must be a folder, got {out}. Export to a folder, and copy the files.")
    check_new(folder, may_be_complete=push_to is not None)
    if push_to is not None:
        check_repository(push_to)
    trained = load_trained(run, weights=weights)
    model, config = trained.model, trained.config
    texts = tokenizer_files(trained.description.data.tokenizer, max_tokens=config.model.seq_len)
    exported = ExportedModel(
        step=trained.step,
        is_average=trained.is_average,
        dtype=dtype or config.model.param_dtype,
        metadata=checkpoint_metadata(trained.folder.checkpoints, trained.step),
    )
    texts["README.md"] = render_card(read_history(trained.folder, trained.description), exported)
    texts[CONFIG] = repeated_config(config)
    end_of_text = trained.tokenizer.eot_token
    with new_folder(folder) as partial:
        model.save_pretrained(partial, end_of_text=end_of_text, dtype=dtype, max_shard_bytes=max_shard_bytes)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
    url = None if push_to is None else upload(folder, push_to, message=f"{trained.folder.name}, step {trained.step}")
    return Export(step=trained.step, commit_url=url)
