"""The verification of a run's token files by their SHA-256, before the training or in the background of it."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console

from owt_data import BackgroundVerification, TokenData, check_digests, share_bar, verify_in_background
from pretrain._config import VerifyMode
from pretrain._errors import RunFailedError

# A launch that has not begun yet ignores a stop request, which is therefore repeated.
_REPEAT_S = 1.0


@contextlib.contextmanager
def verified_data(
    data: TokenData, mode: VerifyMode, console: Console, *, stop: Callable[[str], object]
) -> Iterator[None]:
    """Verify token files while the block trains; with the mode `first`, before it.

    Args:
        data: the tokens. A file is verified once, until its size or time changes.
        mode: when to verify.
        console: shows the progress of `first`.
        stop: ends the training of the block, from a thread. It gets the sentence about the damaged file.

    Raises:
        DataError: with the mode `first`, a file is damaged. The block does not run.
        RunFailedError: a file is damaged. The block has ended, by `stop` or by itself.
    """
    if mode == "first" and data.digests:
        with share_bar(console, "verifying") as report:
            check_digests(data, report=report)
    if mode != "background":
        yield
        return
    has_ended = threading.Event()
    with verify_in_background(data) as verification:
        thread = threading.Thread(target=_stop_if_damaged, args=(verification, stop, has_ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            if damage := verification.poll():
                raise RunFailedError(damage)


def _stop_if_damaged(
    verification: BackgroundVerification, stop: Callable[[str], object], has_ended: threading.Event
) -> None:
    while not has_ended.wait(_REPEAT_S):
        if damage := verification.poll():
            stop(damage)
        elif verification.is_done:
            return
