"""Preparation in the background, while the first tokens are already read."""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from owt_data._errors import DataError, RejectedDocumentsError, show
from owt_data._options import PrepareOptions, check_arguments
from owt_data._paths import Names
from owt_data._prepare.prepare import local_folder, prepare_for
from owt_data._prepare.progress import Progress, Report
from owt_data._prepare.shards import Follower
from owt_data._sources.source import find_splits
from owt_data._tokens.growing_tokens import GrowingTokens, note_end, note_life, note_start, read_num_wanted
from owt_data._tokens.journal import staging_path
from owt_data._tokens.open import TokenData, open_tokens

_log = logging.getLogger("owt_data")
_POLL_S, _SIGN_OF_LIFE_S = 0.1, 10.0


class _Stopped(Exception):
    """Raised in the thread when its tokens are not needed any more."""


@contextlib.contextmanager
def prepare_in_background(
    sources: Names,
    out: str | os.PathLike[str],
    options: PrepareOptions,
    *,
    num_processes: int | None = None,
    use_ray: bool = False,
    progress: Report | None = None,
) -> Iterator[TokenData]:
    """Prepare token files in a thread, and yield their tokens as soon as the first are there.

    The training tokens grow. A reader waits for tokens that do not exist yet, and the preparation keeps a few shards
    ahead of the readers. When all documents are tokenized, it writes the files of `prepare`, and the readers continue
    in these. The end of the block waits for the shard in progress and
    stops the preparation. The same call resumes it, and `prepare` can finish it.

    Readers in other processes, or on other machines that share `out`, may read too. They read the training windows in
    the order `sequential` or `sequential-first`.

    Args:
        sources: see `find_source`. Names that begin with `train=` and `val=` give the split.
        out: the folder; made if missing.
        options: tokenizer and split. Without `train=` and `val=`, the split must be `start`.
        num_processes: number of tokenizing processes, or of concurrent tasks. Default: the usable CPUs.
        use_ray: tokenize as tasks of the connected Ray cluster. All its machines must share `out`.
        progress: called in the thread after each step.

    Raises:
        DataError: as `prepare`; or the split is unsuitable. A failure after the first tokens is raised to the readers
            that wait for tokens, and its cause is logged.
    """
    num_processes = check_arguments(options, num_processes, use_ray, progress)
    is_one_source = "all" in find_splits(sources)
    if is_one_source and options.split != "start":
        raise DataError(
            f"split must be start for one source that is read while it is prepared, got {show(options.split)}. Choose "
            "it, or name both splits, train=... and val=...."
        )
    worker = _Worker(local_folder(out), progress)
    thread = threading.Thread(
        target=worker.run,
        args=(sources, options),
        kwargs={"num_processes": num_processes, "use_ray": use_ray},
        name="prepare",
        daemon=True,
    )
    sign_of_life = threading.Thread(target=worker.show_life, name="prepare-life", daemon=True)
    thread.start()
    sign_of_life.start()
    try:
        worker.wait(is_one_source=is_one_source)
        yield open_tokens(str(worker.folder), tokenizer=options.tokenizer)
    finally:
        worker.stop.set()
        thread.join()
        sign_of_life.join()
        if isinstance(worker.error, RejectedDocumentsError):
            # The source must change, so its shards are useless.
            shutil.rmtree(staging_path(worker.folder), ignore_errors=True)


class _Worker:
    """The thread that prepares, and follows the readers of its shards."""

    def __init__(self, folder: Path, progress: Report | None) -> None:
        self.folder = folder
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._progress = progress
        self._begun = threading.Event()
        self._is_read = threading.Event()
        self._ended = threading.Event()

    def run(self, sources: Names, options: PrepareOptions, *, num_processes: int | None, use_ray: bool) -> None:
        """Prepare. A failure is kept for `wait`, and noted for the readers."""
        follower = Follower(begin=self._begin, num_wanted=self._num_wanted)
        try:
            prepare_for(
                follower,
                sources,
                self.folder,
                options,
                num_processes=num_processes,
                use_ray=use_ray,
                report=self._report,
            )
        except _Stopped:
            pass
        except Exception as error:  # of any kind: `wait` raises it in the other thread
            self.error = error
            if self._is_read.is_set():  # else `wait` raises it at once
                _log.warning("no more text can be tokenized, the readers get what exists: %s", error)
        finally:
            note_end(self.folder, self.error)
            self._ended.set()

    def show_life(self) -> None:
        """Give the readers a sign of life until the preparation ends: a killed one leaves its notes behind."""
        while not self._ended.wait(_SIGN_OF_LIFE_S):
            note_life(self.folder)

    def wait(self, *, is_one_source: bool) -> None:
        """Wait until all validation tokens exist, and training can begin.

        Raises:
            Exception: the preparation has failed.
        """
        val = GrowingTokens(self.folder, "val", is_one_source=is_one_source)
        train = GrowingTokens(self.folder, "train", is_one_source=is_one_source)
        while not self._ended.is_set():
            has_begun = self._begun.is_set()  # all shards of the validation text exist, unless it is part of one text
            if has_begun and len(val) and len(train):
                self._is_read.set()
                return
            if has_begun and not is_one_source and not len(val):
                raise DataError("The text of val=... must have at least one document, got none. Give more text.")
            self._ended.wait(_POLL_S)
        if self.error is not None:
            raise self.error

    def _begin(self) -> None:
        note_start(self.folder)
        self._begun.set()

    def _num_wanted(self) -> int:
        if self.stop.is_set():
            raise _Stopped
        return read_num_wanted(self.folder)

    def _report(self, progress: Progress) -> None:
        if self.stop.is_set():
            raise _Stopped
        if self._progress is not None:
            self._progress(progress)
