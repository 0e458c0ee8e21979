"""Command line `owt-data`: `prepare`, `verify` and `inspect`."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

import tyro
from rich.console import Console

from owt_data._errors import DataError, show_name
from owt_data._options import PrepareOptions, TokenizerName

_ROW_WIDTH = 120
_SPLITS = {
    "documents": "documents",
    "position": "position",
    "start": "position, with validation at its start",
    "sources": "its sources",
}
_FAILED, _BAD_INPUT, _INTERRUPTED, _NO_READER = 1, 2, 130, 141


def _prepare(
    paths: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE [SOURCE...] OUT")]],
    *,
    options: Annotated[PrepareOptions, tyro.conf.arg(name="")] = PrepareOptions(),  # noqa: B008 - frozen
    num_processes: int | None = None,
    on_cluster: Annotated[bool, tyro.conf.arg(aliases=["--ray"])] = False,
) -> int:
    """Write train.bin and val.bin (raw little-endian uint16 tokens) and manifest.json. Resumes after a kill.

    For example:
      owt-data prepare openwebtext data/openwebtext
      owt-data prepare articles/*.jsonl data/articles --text-column body
      owt-data prepare train=a.parquet val=b.parquet data/ab
      owt-data prepare wiki.txt data/wiki --documents wikitext-titles

    Args:
        paths: One or more sources, and the folder to write into. A source is builtin, a .txt, .jsonl, .jsonl.gz or
            .parquet file, a folder or a glob of such files, or a Hugging Face dataset
            (NAME[:CONFIGURATION[:SPLIT]]). Names that begin with train= and val= give the split.
        options: Tokenizer, documents and split.
        num_processes: Number of tokenizing processes. Default: one for each core.
        on_cluster: Tokenize as tasks of the Ray cluster at RAY_ADDRESS. All its machines must share OUT.
    """
    if len(paths) < 2:
        raise DataError(
            f"The names must be sources and a folder, got {show_name(' '.join(paths) or 'no names')}. Name both."
        )
    # The imports take seconds, which --help must not wait for.
    from owt_data._paths import join
    from owt_data._prepare.prepare import local_folder, prepare
    from owt_data._prepare.progress_bar import progress_bar
    from owt_data._tokens.manifest import read_manifest

    console = _console()
    *sources, out = paths
    was_prepared = read_manifest(local_folder(out)) is not None
    with progress_bar(console) as progress:
        manifest = prepare(sources, out, options, num_processes=num_processes, use_ray=on_cluster, progress=progress)
    if was_prepared:
        console.print(f"{out} is unchanged: it was prepared from the same source and options", markup=False)
    console.print(f"the text was split by {_SPLITS[manifest.split]}", markup=False)
    total = sum(record.num_tokens for record in manifest.files.values())
    for name, record in manifest.files.items():
        share = f"{100 * record.num_tokens / total:.3g} %"
        counts = f"{record.num_tokens:,} tokens ({share}), {record.num_documents:,} documents"
        console.print(f"{join(out, name)}: {counts}", markup=False)
    return 0


def _verify(folder: tyro.conf.Positional[str], /) -> int:
    """Recompute every count and checksum of a prepared folder, and print the differences from its manifest.

    Args:
        folder: A folder on disk, s3://... or gs://...
    """
    from owt_data._prepare.progress_bar import share_bar
    from owt_data._tokens.verify import verify

    console = _console()
    with share_bar(console, "verifying") as report:
        differences = verify(folder, report=report)
    for difference in differences:
        console.print(difference, markup=False)
    found = "1 difference" if len(differences) == 1 else f"{len(differences)} differences"
    console.print(f"{folder}: {found if differences else 'no difference from its manifest'}", markup=False)
    return _FAILED if differences else 0


def _inspect(
    name: tyro.conf.Positional[str],
    /,
    *,
    tokenizer: TokenizerName = "gpt2",
    window_tokens: int = 64,
    rows: int | None = None,
    text_column: str = "text",
) -> int:
    """Show counts, sizes, the tokenizer, and samples of token files from their start, middle and end.

    With --rows, show the first rows of a source of text instead.

    Args:
        name: A folder of token files or a .bin file, on disk, s3://... or gs://... With --rows, a source of prepare.
        tokenizer: Tokenizer of files without a manifest.
        window_tokens: Length of a sample.
        rows: Number of rows of text to show. A line of a .txt file is a row.
        text_column: Column with the text, for --rows.
    """
    console = _console(stderr=False)
    if rows is not None:
        from owt_data._sources.documents import first_rows

        for number, row in enumerate(first_rows(name, rows, text_column=text_column)):
            shown = row if len(row) <= _ROW_WIDTH else f"{row[:_ROW_WIDTH]}..."
            console.print(f"row {number}: {shown!r}", markup=False)
        return 0
    from owt_data._tokens.inspect import inspect

    found = inspect(name, tokenizer=tokenizer, window_tokens=window_tokens)
    console.print(f"{name}: tokenizer {found.tokenizer}, vocabulary of {found.vocab_size:,}", markup=False)
    if found.manifest is not None:
        console.print(
            f"made from {show_name(found.manifest.source)} by owt-data {show_name(found.manifest.version)}",
            markup=False,
        )
    for split, num_tokens in found.num_tokens.items():
        record = found.manifest.files[f"{split}.bin"] if found.manifest is not None else None
        documents = f", {record.num_documents:,} documents" if record is not None else ""
        console.print(f"\n{split}: {num_tokens:,} tokens, {2 * num_tokens:,} bytes{documents}", markup=False)
        for place, text in found.samples[split].items():
            console.print(f"  {place}: {text!r}", markup=False)
    return 0


class _Console(Console):
    """Console that raises a `BrokenPipeError`, which `main` handles."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


def _console(*, stderr: bool = True) -> Console:
    return _Console(stderr=stderr, soft_wrap=True, highlight=False)


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
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, unless the process ignores it or has its own handler."""
    # Python sets signal handlers in the main thread only.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(args: Sequence[str] | None = None) -> int:
    """Run `owt-data` with these arguments, or those of the process.

    Returns:
        The exit code: 0; 1 if `verify` found a difference; 2 for bad input, and output that cannot be written; 130
        after Ctrl-C or SIGTERM; or 141 if the reader of the output is gone.
    """
    _open_streams()
    try:
        try:
            return _run(args)
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
            _console().print(f"error: The output must be writable, got {error.strerror}. Write it elsewhere.")
        return _BAD_INPUT


def _run(args: Sequence[str] | None) -> int:
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # its errors become DataErrors here
    try:
        with _sigterm_as_ctrl_c():
            return tyro.extras.subcommand_cli_from_dict(
                {"prepare": _prepare, "verify": _verify, "inspect": _inspect},
                prog="owt-data",
                description="Text to token files that nanoGPT, the Ray tutorial and nnx-gpt2 read.",
                args=args,
            )
    except DataError as error:
        _console().print(f"error: {' '.join(str(error).split())}", markup=False)
        return _BAD_INPUT
    except KeyboardInterrupt:
        _console().print("interrupted: run the same command again to resume")
        return _INTERRUPTED
