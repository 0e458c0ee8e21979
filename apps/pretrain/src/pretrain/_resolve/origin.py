"""The checkpoint, or the published weights, that a run starts from, and the settings that follow from it."""

import dataclasses
from pathlib import Path
from typing import Any

from nnx_gpt2 import GPT2Config, pretrained_config
from pretrain._config import ModelConfig, PretrainConfig
from pretrain._errors import UsageError, short
from pretrain._run.description import Origin, read_description
from pretrain._run.find import FoundCheckpoint, find_checkpoint, find_run_of, find_unless_published
from pretrain._run.folder import locate
from pretrain._run.published_tokenizer import published_tokenizer
from ray_jax_launch import StoragePath

# The fields that decide the names and shapes of the parameters.
_SHAPE = ("vocab_size", "num_layers", "num_heads", "embed_dim", "mlp_dim", "scan_layers")
# The settings that the state of the optimizer, or the count of tokens, depends on.
_OF_STATE = (
    *(("model", field) for field in (*_SHAPE, "seq_len", "param_dtype")),
    ("train", "global_batch_size"),
    ("optimizer", "name"),
)


def settings_of(name: str, started: StoragePath | None) -> PretrainConfig:
    """Return the settings of the run of a checkpoint, for a run that starts from all that the checkpoint holds.

    Args:
        name: see `find_checkpoint`.
        started: the folder or URI of the run that starts from it. If that has begun, the other run may be deleted.

    Raises:
        UsageError: neither run exists.
    """
    try:
        parent = find_run_of(name)[1].config
    except UsageError:
        found = None if started is None else read_description(locate(started))
        if found is None or found.config.from_checkpoint != name:
            raise
        parent = found.config
    return dataclasses.replace(
        parent, from_checkpoint=name, name=None, anneal=None, init_from=None, extend=False, profile=None
    )


def with_weights_of(config: PretrainConfig, name: str) -> PretrainConfig:
    """Return the configuration with the model, and if it is known the tokenizer, that weights are made for.

    Args:
        config: the configuration.
        name: a checkpoint as for `find_checkpoint`, or published weights.

    Raises:
        UsageError: there are no such weights, or they cannot be read or downloaded.
    """
    if (found := _find_run_of(name)) is not None:
        model: GPT2Config | ModelConfig = found.description.config.model
        tokenizer = found.description.data.tokenizer
    else:
        model = _published_model(name)
        tokenizer = published_tokenizer(name, model.vocab_size) or config.prepare.tokenizer
    sizes = {field: getattr(model, field) for field in (*_SHAPE, "seq_len", "norm_epsilon")}
    return dataclasses.replace(
        config,
        init_from=name,
        model=dataclasses.replace(config.model, **sizes),
        prepare=dataclasses.replace(config.prepare, tokenizer=tokenizer),
    )


def find_origin(config: PretrainConfig) -> Origin | None:
    """Return the origin of a new run, checked; None for a run from random weights.

    Raises:
        UsageError: it does not exist, cannot be read or downloaded, or does not fit the settings.
    """
    if config.from_checkpoint is not None:
        parent = find_checkpoint(config.from_checkpoint)
        _check_fork(config, parent)
        return _of_run(parent, weights_only=False)
    if config.init_from is None:
        return None
    if (found := _find_run_of(config.init_from)) is not None:
        _check_weights(config, found.description.config.model, config.init_from)
        return _of_run(found, weights_only=True)
    model = _published_model(config.init_from)
    _check_weights(config, model, config.init_from)
    is_folder = Path(config.init_from).is_dir()
    place = str(Path(config.init_from).absolute()) if is_folder else config.init_from
    tokenizer = published_tokenizer(config.init_from, model.vocab_size)
    return Origin(place=place, step=None, tokenizer=tokenizer, weights_only=True)


def check_steps(config: PretrainConfig, start_step: int) -> None:
    """Check that a run which starts at a step has steps.

    Raises:
        UsageError: it has none.
    """
    if config.train.max_steps <= start_step:
        raise UsageError(
            f"train.max_steps must be above {start_step}, the step that the run starts at, got "
            f"{config.train.max_steps}."
        )


def resolve_anneal(config: PretrainConfig, origin: Origin | None) -> PretrainConfig:
    """Return the configuration with the schedule that `anneal` asks for."""
    if config.anneal is None:
        return config
    assert origin is not None, "checked by the configuration"
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, schedule="wsd", decay_steps=config.anneal),
        train=dataclasses.replace(
            config.train, max_steps=origin.start_step + config.anneal, max_epochs=None, max_tokens=None
        ),
    )


def _of_run(found: FoundCheckpoint, *, weights_only: bool) -> Origin:
    return Origin(
        place=str(found.folder),
        step=found.step,
        tokenizer=found.description.data.tokenizer,
        weights_only=weights_only,
    )


def _find_run_of(name: str) -> FoundCheckpoint | None:
    """Return the checkpoint of a run; None for a folder of published weights, or a name on the hub."""
    return find_unless_published(name, find_checkpoint)


def _published_model(name: str) -> GPT2Config:
    """Return the model of published weights.

    Raises:
        UsageError: they are not here, and cannot be downloaded, or are no weights of a GPT-2.
    """
    try:
        return pretrained_config(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_fork(config: PretrainConfig, parent: FoundCheckpoint) -> None:
    """Check that a run can go on from all that a checkpoint holds.

    Raises:
        UsageError: a setting differs that the state of the optimizer, or the count of tokens, depends on.
    """
    before = parent.description.config
    if (config.train.max_epochs, config.train.max_tokens, config.anneal) == (None, None, None):
        check_steps(config, parent.step)  # before text is prepared
    name = short(str(config.from_checkpoint))
    for section, field in _OF_STATE:
        found, needed = (getattr(getattr(of, section), field) for of in (config, before))
        if found != needed and not _is_open(field, found):
            raise UsageError(
                f"{section}.{field} must be {needed}, as in {name}, got {found}. Leave it out, or take the weights "
                "alone by --init-from."
            )
    for option in ("clip_norm", "average_decay"):
        found, needed = getattr(config.optimizer, option, 0), getattr(before.optimizer, option, 0)
        if (found == 0) != (needed == 0):
            constraint = "be 0" if needed == 0 else "be above 0"
            raise UsageError(f"optimizer.{option} must {constraint}, as in {name}, got {found}.")
    last_at_peak = before.optimizer.num_steps_before_decay(before.train.max_steps)
    if config.anneal is not None and parent.step > last_at_peak:
        raise UsageError(
            f"{name} must be a checkpoint before the learning rate of its run falls, at most step "
            f"{last_at_peak}, got {parent.step}. Give an earlier RUN@STEP."
        )


def _is_open(field: str, value: Any) -> bool:
    """Return whether a setting is not known before the data is: a vocabulary of None takes the tokenizer's."""
    return field == "vocab_size" and value is None


def _check_weights(config: PretrainConfig, weights: GPT2Config, name: str) -> None:
    """Check that the model of a run can take weights.

    Raises:
        UsageError: a size differs, or the windows are longer.
    """
    for field in _SHAPE:
        found, needed = getattr(config.model, field), getattr(weights, field)
        if found != needed and not _is_open(field, found):
            raise UsageError(f"model.{field} must be {needed}, as in {short(name)}, got {found}. Leave it out.")
    if config.model.seq_len > weights.seq_len:
        raise UsageError(
            f"model.seq_len must be at most {weights.seq_len}, that of {short(name)}, got {config.model.seq_len}."
        )
