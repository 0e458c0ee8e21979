"""The command `export`: a trained model in Hugging Face's format, with its tokenizer and a card."""

from dataclasses import dataclass
from pathlib import Path

from nnx_gpt2 import SavedDType
from owt_data import tokenizer_files
from pretrain._commands.load import TrainedModel, WeightsKind, load_trained
from pretrain._errors import UsageError
from pretrain._export.hub_upload import check_repository, upload
from pretrain._export.model_card import CONFIG, render_card, repeated_config
from pretrain._export.new_folder import check_new, new_folder
from pretrain._run.history import read_history
from ray_jax_launch import as_storage_path, checkpoint_metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The result of `export`."""

    step: int | None
    """Step of the checkpoint; None for an exported folder and for published weights."""

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
    """Write a model in Hugging Face's format: weights, configs, tokenizer. That of a run gets a card and its options.

    The folder gets its name when it is complete.

    Args:
        run: the model, as for `load_trained`.
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
    model, tokenizer = trained.model, trained.tokenizer
    texts = tokenizer_files(trained.tokenizer_name or tokenizer.name, max_tokens=model.config.seq_len) | _texts_of_run(
        trained, dtype
    )
    with new_folder(folder) as partial:
        model.save_pretrained(partial, end_of_text=tokenizer.eot_token, dtype=dtype, max_shard_bytes=max_shard_bytes)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
    url = None if push_to is None else upload(folder, push_to, message=_message(trained))
    return Export(step=trained.step, commit_url=url)


def _texts_of_run(trained: TrainedModel, dtype: SavedDType | None) -> dict[str, str]:
    """Return the card and the options of the run of a model, by the names of their files; nothing without a run."""
    if trained.run is None or trained.step is None:
        return {}
    card = render_card(
        read_history(trained.folder, trained.description),
        step=trained.step,
        is_average=trained.is_average,
        dtype=dtype or trained.config.model.param_dtype,
        metadata=checkpoint_metadata(trained.folder.checkpoints, trained.step),
    )
    return {"README.md": card, CONFIG: repeated_config(trained.config)}


def _message(trained: TrainedModel) -> str:
    """Return the message of the commit of an upload."""
    return trained.name if trained.run is None else f"{trained.folder.name}, step {trained.step}"
