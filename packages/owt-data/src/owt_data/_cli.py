"""Command line `owt-data`: `prepare`, `tokenizer`, `verify` and `inspect`."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console

from owt_data._command_line import Command, run_command
from owt_data._errors import DataError, one_line, show, show_name
from owt_data._options import PrepareOptions

_ROW_WIDTH = 120
_SPLITS = {
    "documents": "documents",
    "position": "position",
    "start": "position, with validation at its start",
    "sources": "its sources",
}
# Signals within this time of an interruption are its repetitions. Later ones end a cleanup that takes too long.
_REPEATED_WITHIN_S = 5.0
_FAILED, _BAD_INPUT, _INTERRUPTED, _NO_READER = 1, 2, 130, 141


@dataclass(frozen=True, kw_only=True, slots=True)
class _Processes:
    """Processes of `prepare`."""

    num_processes: int | None = None
    """Number of tokenizing processes. Default: one for each core."""

    on_cluster: bool = field(default=False, metadata={"alias": "--ray"})
    """Tokenize as tasks of the Ray cluster at RAY_ADDRESS. All its machines must share OUT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    """Options of `tokenizer`."""

    vocab: int = 4096
    """Number of ids: the 256 bytes, the merges, and <|endoftext|>."""

    text_column: str = "text"
    """Column with the text, in JSON lines, parquet files and hub datasets."""

    limit_rows: int | None = None
    """Number of rows to read, for a large source. A .txt file is one row."""

    num_processes: int | None = None
    """Number of threads that count words. Default: one for each core. The file is the same for any number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inspection:
    """Options of `inspect`."""

    tokenizer: str = "gpt2"
    """Tokenizer of files without a manifest; see `prepare`."""

    window_tokens: int = 64
    """Length of a sample."""

    rows: int | None = None
    """Number of rows of text to show. A line of a .txt file is a row."""

    text_column: str = "text"
    """Column with the text, for --rows."""


def _prepare(names: Sequence[str], processes: _Processes, options: PrepareOptions) -> int:
    """Write train.bin and val.bin (raw little-endian uint16, or uint32 for more than 65 536 ids) and manifest.json."""
    # The imports take seconds, which --help must not wait for.
    from owt_data._paths import join
    from owt_data._prepare.prepare import local_folder, prepare
    from owt_data._prepare.progress_bar import progress_bar
    from owt_data._tokens.manifest import read_manifest

    console = _console()
    *sources, out = names
    was_prepared = read_manifest(local_folder(out)) is not None
    with progress_bar(console) as progress:
        manifest = prepare(
            sources, out, options,
            num_processes=processes.num_processes, use_ray=processes.on_cluster, progress=progress,
        )  # fmt: skip
    if was_prepared:
        console.print(f"{show_name(out)} is unchanged: it was prepared from the same source and options", markup=False)
    console.print(f"the text was split by {_SPLITS[manifest.split]}", markup=False)
    total = sum(record.num_tokens for record in manifest.files.values())
    for name, record in manifest.files.items():
        share = f"{100 * record.num_tokens / total:.3g} %"
        counts = f"{record.num_tokens:,} tokens ({share}), {record.num_documents:,} documents"
        console.print(f"{show_name(join(out, name))}: {counts}", markup=False)
    return 0


def _tokenizer(names: Sequence[str], options: _Training) -> int:
    """Train a byte-level BPE tokenizer, and write OUT/tokenizer.json, for --tokenizer OUT."""
    from owt_data._prepare.progress_bar import progress_bar
    from owt_data._prepare.train_tokenizer import train_tokenizer
    from owt_data._tokenizer_files import vocab_size

    console = _console()
    *sources, out = names
    with progress_bar(console) as progress:
        path = train_tokenizer(
            sources, out,
            vocab_size=options.vocab, text_column=options.text_column, limit_rows=options.limit_rows,
            num_processes=options.num_processes, progress=progress,
        )  # fmt: skip
    num_ids = vocab_size(path)
    shortage = "" if num_ids == options.vocab else ", as the text has no more pairs to merge"
    console.print(f"{show_name(path)}: {num_ids:,} ids{shortage}", markup=False)
    return 0


def _verify(names: Sequence[str]) -> int:
    """Recompute every count and checksum of a prepared folder, and print the differences from its manifest."""
    from owt_data._prepare.progress_bar import share_bar
    from owt_data._tokens.verify import verify

    (folder,) = names
    console = _console()
    with share_bar(console, "verifying") as report:
        differences = verify(folder, report=report)
    for difference in differences:
        console.print(one_line(difference), markup=False)
    found = "1 difference" if len(differences) == 1 else f"{len(differences)} differences"
    console.print(f"{show_name(folder)}: {found if differences else 'no difference from its manifest'}", markup=False)
    return _FAILED if differences else 0


def _inspect(names: Sequence[str], options: _Inspection) -> int:
    """Show counts, sizes, the tokenizer, and samples of token files from their start, middle and end."""
    (name,) = names
    console = _console(stderr=False)
    if options.rows is not None:
        for option in ("tokenizer", "window_tokens"):
            value = getattr(options, option)
            if value != getattr(_Inspection(), option):
                flag = f"--{option.replace('_', '-')}"
                raise DataError(f"{flag} must be absent with --rows, got {show(value)}. Leave it out.")
        from owt_data._sources.documents import first_rows

        for number, row in enumerate(first_rows(name, options.rows, text_column=options.text_column)):
            shown = row if len(row) <= _ROW_WIDTH else f"{row[:_ROW_WIDTH]}..."
            console.print(f"row {number}: {shown!r}", markup=False)
        return 0
    if options.text_column != _Inspection().text_column:
        raise DataError(f"--text-column must be absent without --rows, got {show(options.text_column)}. Leave it out.")
    from owt_data._tokens.inspect import inspect

    found = inspect(name, tokenizer=options.tokenizer, window_tokens=options.window_tokens)
    console.print(f"{show_name(name)}: tokenizer {found.tokenizer}, vocabulary of {found.vocab_size:,}", markup=False)
    if found.manifest is not None:
        console.print(
            f"made from {show_name(found.manifest.source)} by owt-data {show_name(found.manifest.version)}",
            markup=False,
        )
    for split, num_tokens in found.num_tokens.items():
        record = found.manifest.files[f"{split}.bin"] if found.manifest is not None else None
        documents = f", {record.num_documents:,} documents" if record is not None else ""
        console.print(f"\n{split}: {num_tokens:,} tokens, {found.num_bytes[split]:,} bytes{documents}", markup=False)
        for place, text in found.samples[split].items():
            console.print(f"  {place}: {text!r}", markup=False)
    return 0


_DESCRIPTION = "Text to token files that nanoGPT, the Ray tutorial and nnx-gpt2 read."
_COMMANDS = {
    "prepare": Command(
        run=_prepare,
        names={
            "SOURCE...": "builtin, a .txt, .jsonl, .jsonl.gz or .parquet file, a folder or a glob of such files, or a "
            "Hugging Face dataset, NAME[:CONFIGURATION[:SPLIT]], where openwebtext, fineweb and fineweb-edu are short "
            "names. Names that begin with train= and val= give the split.",
            "OUT": "The folder to write into.",
        },
        kinds=(_Processes, PrepareOptions),
        examples=(
            "owt-data prepare openwebtext data/openwebtext",
            "owt-data prepare articles/*.jsonl data/articles --text-column body",
            "owt-data prepare train=a.parquet val=b.parquet data/ab",
            "owt-data prepare wiki.txt data/wiki --documents wikitext-titles",
        ),
    ),
    "tokenizer": Command(
        run=_tokenizer,
        names={
            "SOURCE...": "Text, as for prepare. Of names that begin with train= and val=, only the first are read.",
            "OUT": "The folder to write tokenizer.json into, or a name that ends in .json.",
        },
        kinds=(_Training,),
        examples=(
            "owt-data tokenizer articles/*.jsonl data/tokenizer --vocab 4096",
            "owt-data prepare articles/*.jsonl data/articles --tokenizer data/tokenizer",
        ),
    ),
    "verify": Command(
        run=_verify,
        names={"FOLDER": "The folder, on disk, s3://... or gs://..."},
        examples=("owt-data verify data/openwebtext", "owt-data verify s3://bucket/articles"),
    ),
    "inspect": Command(
        run=_inspect,
        names={
            "NAME": "A folder of token files or a .bin file, on disk, s3://... or gs://... With --rows, it is a source "
            "of prepare, and its first rows are shown instead."
        },
        kinds=(_Inspection,),
        examples=("owt-data inspect data/openwebtext", "owt-data inspect openwebtext --rows 5"),
    ),
}


class _Console(Console):
    """Console that raises a `BrokenPipeError`, which `main` handles."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


def _console(*, stderr: bool = True) -> Console:
    return _Console(stderr=stderr, soft_wrap=True, highlight=False, emoji=False)


def _open_streams() -> None:
    """Make both streams accept all text: a closed stream discards it, and unknown characters are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - open until the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discard the buffers of streams that cannot be written, because Python writes them again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _signals_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, unless the process ignores them or has its own handlers.

    A repeated signal does not disturb the cleanup. After it, the process ignores all three signals until it ends.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    # Python sets signal handlers in the main thread only.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {
        number: found for number, found in defaults.items() if in_main_thread and signal.getsignal(number) is found
    }
    last_s = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        if time.monotonic() > last_s + _REPEATED_WITHIN_S:
            last_s = time.monotonic()
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        is_interrupted = last_s > 0
        for number, found in before.items():
            signal.signal(number, signal.SIG_IGN if is_interrupted else found)


def main(args: Sequence[str] | None = None) -> int:
    """Run `owt-data` with these arguments, or those of the process.

    Returns:
        The exit code: 0; 1 if `verify` found a difference; 2 for bad input, and output that cannot be written; 130
        after Ctrl-C, SIGTERM or SIGHUP; or 141 if the reader of the output is gone.
    """
    _open_streams()
    try:
        try:
            return _run(sys.argv[1:] if args is None else args)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        _discard_output()
        return _NO_READER
    # This is an error of a stream, because the errors of files are DataErrors.
    except OSError as error:
        _discard_output()
        with suppress(OSError):  # stderr itself may be full
            _console().print(f"error: The output could not be written: {error.strerror}. Write it elsewhere.")
        return _BAD_INPUT


def _run(arguments: Sequence[str]) -> int:
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # its errors become DataErrors here
    if not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "/")):  # noqa: PTH117 - a text
        del os.environ["XDG_CACHE_HOME"]  # the XDG specification ignores a relative path, but datasets uses it
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name, "").strip("0") == "":  # rich would print nothing
            os.environ.pop(name, None)
    try:
        with _signals_as_ctrl_c():
            return run_command("owt-data", _DESCRIPTION, _COMMANDS, arguments)
    except DataError as error:
        _console().print(f"error: {' '.join(str(error).split())}", markup=False)
        return _BAD_INPUT
    except (ImportError, MemoryError) as error:
        found = one_line(error) or "no memory"
        _console().print(
            f"error: owt-data could not load its libraries or data: {found}. Free memory, or install it again.",
            markup=False,
        )
        return _BAD_INPUT
    except KeyboardInterrupt:
        is_resumable = [*arguments][:1] == ["prepare"]
        _console().print("interrupted" + (": run the same command again to resume" if is_resumable else ""))
        return _INTERRUPTED
