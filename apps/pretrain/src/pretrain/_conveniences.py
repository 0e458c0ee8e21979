"""Conveniences, which cannot fail a run: pictures, samples, trackers."""

import contextlib
import logging
from collections.abc import Iterator

_logger = logging.getLogger("pretrain")


@contextlib.contextmanager
def convenience(what: str) -> Iterator[None]:
    """Run a block that must not fail the run: what it raises is logged as a warning, with the reason.

    Args:
        what: what is lost if the block fails, in a few words.
    """
    try:
        yield
    # Such a block calls matplotlib, tensorboardX, tokenizers and samplers, which raise what they please. Days of
    # training are done by then, and are worth more than any of it: this is the one place where all of it is caught.
    except Exception as error:
        _logger.warning("the run goes on without %s: %s: %s", what, type(error).__name__, error)
