"""Work that cannot fail a run: pictures, samples, trackers, profiles."""

import contextlib
import logging
from collections.abc import Iterator

from pretrain._errors import rejection

_logger = logging.getLogger("pretrain")


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Run a block, and log an exception from it as a warning: the run goes on.

    Args:
        what: the result that is lost if the block fails.
    """
    try:
        yield
    # The block calls matplotlib, a tracker, the profiler, a tokenizer or a sampler, which may raise anything. Days of
    # training must not be lost for a picture. No other place catches every exception.
    except Exception as error:
        text = rejection(error) or str(error)
        reason = text if " " in text else f"{type(error).__name__}: {text}"  # a KeyError has the key alone
        _logger.warning("the run goes on without %s: %s", what, reason)
