"""The number of steps of a run that continues: the same, or another one if the past learning rates stay the same."""

from pretrain._config import PretrainConfig
from pretrain._errors import UsageError


def lengths_of(config: PretrainConfig) -> tuple[int, float | None, int | None]:
    """Return the values of the options of the length of a run."""
    train = config.train
    return train.max_steps, train.max_epochs, train.max_tokens


def has_same_length(config: PretrainConfig, stored: PretrainConfig) -> bool:
    """Return whether a configuration has the length of the run that it continues."""
    steps, *replacements = lengths_of(config)
    stored_steps, *stored_replacements = lengths_of(stored)
    return replacements == stored_replacements and (replacements != [None, None] or steps == stored_steps)


def check_length(config: PretrainConfig, stored: PretrainConfig, num_steps_done: int) -> None:
    """Check that a run can continue to another number of steps.

    Args:
        config: the configuration, with its number of steps.
        stored: that of the run's last start.
        num_steps_done: the step of the newest checkpoint.

    Raises:
        UsageError: the run has more steps already, or its past learning rates depend on the number of steps.
    """
    before, now = stored.train.max_steps, config.train.max_steps
    if now == before:
        return
    if now < num_steps_done:
        raise UsageError(
            f"train.max_steps must be at least {num_steps_done}, the step of the newest checkpoint, got {now}. Give "
            "another --name for a shorter run."
        )
    same_rates = min(of.optimizer.num_steps_before_decay(of.train.max_steps) for of in (stored, config))
    if num_steps_done > same_rates and not config.extend:
        schedule = config.optimizer.schedule
        cause = {
            "cosine": "the learning rate of the cosine schedule depends on this number",
            "wsd": f"the learning rate falls from step {same_rates:,} on",
        }[schedule]
        raise UsageError(
            f"train.max_steps must be {before}, its value at the start of the run, got {now}: {cause}, and the run is "
            f"at step {num_steps_done:,}. Give --extend to continue at the rate of the new length. A run of the "
            "schedule constant continues without a change of its rate, and so does one of wsd before its decay: fork "
            "it there by --from RUN@STEP and another --name."
        )
