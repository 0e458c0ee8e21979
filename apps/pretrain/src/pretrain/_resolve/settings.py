"""The settings of a run that follow from others, from the data, or from the first start of the run."""

import dataclasses
import math
from fractions import Fraction
from typing import Any, NamedTuple

from owt_data import STREAM_ORDERS, OrderKind
from pretrain._config import MAX_STEPS, PretrainConfig, with_vocab_size
from pretrain._errors import UsageError
from pretrain._resolve.length import has_same_length


class DataFacts(NamedTuple):
    """The facts about the tokens of a run that settings follow from."""

    tokenizer: str
    """Name of the tokenizer."""

    vocab_size: int
    """Number of its ids."""

    num_windows: int
    """Windows of an epoch; 0 if unknown."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that `prepare` writes."""
        return 2 if self.vocab_size <= 1 << 16 else 4


def resolve_order(config: PretrainConfig) -> PretrainConfig:
    """Return the configuration with its window order. That of a stream can be read while the text is tokenized.

    Raises:
        UsageError: the order or the length of a run needs the number of all tokens, which a stream does not know.
    """
    is_stream = config.data_mode == "stream"
    order = config.train.order
    epochs = config.train.max_epochs
    if is_stream and epochs is not None:
        raise UsageError(
            "train.max_epochs must be absent with data_mode stream, which does not know the number of tokens before "
            f"its end, got {epochs}. Give --train.max-epochs none and --train.max-steps or --train.max-tokens."
        )
    if is_stream and order is not None and order not in STREAM_ORDERS:
        raise UsageError(
            f"train.order must be {' or '.join(STREAM_ORDERS)} with data_mode stream, got {order}. Give --train.order "
            "none, or leave out --data-mode."
        )
    default: OrderKind = "sequential-first" if is_stream else "shuffle"
    return _with_train(config, order=order or default)


def resolve_as_before(config: PretrainConfig, stored: PretrainConfig) -> PretrainConfig:
    """Return the configuration with the values that followed from the data and the devices of the first start.

    Args:
        config: the configuration.
        stored: that of the run to continue.
    """
    train = config.train
    if config.model.vocab_size is None and stored.model.vocab_size is not None:
        config = with_vocab_size(config, stored.model.vocab_size)
    if has_same_length(config, stored):
        config = _with_train(config, max_steps=stored.train.max_steps)
    # With another batch, which is an error, the number of microbatches may not divide it.
    if train.micro_batch_size is not None and train.global_batch_size == stored.train.global_batch_size:
        config = _with_train(config, grad_accum_steps=stored.train.grad_accum_steps)
    if train.micro_batch_size == "auto":
        config = _with_train(config, micro_batch_size=stored.train.micro_batch_size)
    return config


def resolve_from_data(config: PretrainConfig, facts: DataFacts) -> PretrainConfig:
    """Return the configuration with the vocabulary and the number of steps that follow from the data.

    Raises:
        UsageError: the vocabulary is too small, or the number of steps is too large, or too small for the schedule.
    """
    vocab_size, num_ids = config.model.vocab_size, facts.vocab_size
    if vocab_size is None:
        config = with_vocab_size(config, num_ids)
    elif vocab_size < num_ids:
        raise UsageError(
            f"--model.vocab-size must be at least {num_ids}, the vocabulary of the tokenizer {facts.tokenizer}, got "
            f"{vocab_size}. Leave it out to take the tokenizer's."
        )
    max_steps = _num_steps(config, facts.num_windows)
    _check_decay(config, max_steps)
    return _with_train(config, max_steps=max_steps)


def check_schedule(config: PretrainConfig) -> None:
    """Check the number of steps, if it is known without the data, and that the schedule fits into them.

    Raises:
        UsageError: they are too many, or too few for the schedule.
    """
    if config.train.max_epochs is None:
        _check_decay(config, _num_steps(config, num_windows=0))


def _check_decay(config: PretrainConfig, max_steps: int) -> None:
    if config.optimizer.schedule == "wsd":
        try:
            config.optimizer.wsd_decay_steps(max_steps)
        except ValueError as error:
            raise UsageError(f"optimizer.{error}") from None


def _num_steps(config: PretrainConfig, num_windows: int) -> int:
    """Return the number of steps that `max_epochs` and `max_tokens` give, or else `max_steps`."""
    train, found = config.train, list[int]()
    if train.max_epochs is not None:
        # 2.01 epochs of 1,000 windows are 2,010 windows; in floating point, they are fewer.
        exact = Fraction(str(train.max_epochs)) * num_windows / train.global_batch_size
        found.append(min(max(1, math.floor(exact)), MAX_STEPS + 1))
    if train.max_tokens is not None:
        found.append(-(-train.max_tokens // (train.global_batch_size * config.model.seq_len)))
    steps = min(found, default=train.max_steps)
    if steps > MAX_STEPS:
        raise UsageError(
            f"train.max_epochs and train.max_tokens must give at most {MAX_STEPS} steps, got {train.max_epochs} epochs "
            f"and {train.max_tokens} tokens. Lower one of the two."
        )
    return steps


def _with_train(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))
