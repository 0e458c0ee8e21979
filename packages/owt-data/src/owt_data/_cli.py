"""`owt-data`: the command line of this package."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from owt_data._errors import DataError
from owt_data._options import PrepareOptions, TokenizerName

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130


def _prepare(
    paths: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE [SOURCE...] OUT")]],
    *,
    options: Annotated[PrepareOptions, tyro.conf.arg(name="")] = PrepareOptions(),  # noqa: B008 - frozen
    num_processes: int | None = None,
    ray: bool = False,
) -> int:
    """Write train.bin and val.bin (raw little-endian uint16 tokens) and manifest.json. Killed, it goes on from there.

    For instance:
      owt-data prepare openwebtext data/openwebtext
      owt-data prepare articles/*.jsonl data/articles --text-column body
      owt-data prepare train=a.parquet val=b.parquet data/ab

    Args:
        paths: One or more sources, and the folder to write into. A source is builtin, a .txt, .jsonl, .jsonl.gz or
            .parquet file, a folder or a glob of such files, or a Hugging Face dataset
            (NAME[:CONFIGURATION[:SPLIT]]). With train= and val= before the names, the split is given.
        options: Tokenizer and split.
        num_processes: How many tokenize at once. Default: one for each core.
        ray: Tokenize as tasks of the Ray cluster at RAY_ADDRESS, whose machines must all see OUT.
    """
    if len(paths) < 2:
        raise DataError(f"expected one or more sources and a folder to write into, got {' '.join(paths) or 'nothing'}")
    # Imported here because it takes seconds, which --help must not wait for.
    from owt_data._manifest import read_manifest
    from owt_data._prepare import local_folder, prepare
    from owt_data._progress import progress_bar

    console = _console()
    *sources, out = paths
    if read_manifest(local_folder(out)) is not None:
        console.print(f"{out} is prepared already: only its source, options and sizes are compared", markup=False)
    with progress_bar(console) as progress:
        manifest = prepare(sources, out, options, num_processes=num_processes, use_ray=ray, progress=progress)
    for name, record in manifest.files.items():
        console.print(f"{Path(out) / name}: {record.num_tokens:,} tokens, {record.num_documents:,} documents")
    return 0


def _verify(folder: tyro.conf.Positional[str], /) -> int:
    """Recompute every count and checksum of a prepared folder and name what differs from its manifest.

    Args:
        folder: The folder, on disk, or s3://... or gs://...
    """
    from owt_data._progress import share_bar
    from owt_data._verify import verify

    console = _console()
    with share_bar(console, "verifying") as report:
        differences = verify(folder, report=report)
    for difference in differences:
        console.print(difference, markup=False)
    console.print(f"{folder}: {len(differences)} differences" if differences else f"{folder}: as its manifest says")
    return _FAILED if differences else 0


def _inspect(name: tyro.conf.Positional[str], /, *, tokenizer: TokenizerName = "gpt2", window_tokens: int = 64) -> int:
    """Show what token files hold: counts, sizes, the tokenizer, and text from the beginning, the middle and the end.

    Args:
        name: A folder of token files or a .bin file, on disk, or s3://... or gs://...
        tokenizer: What wrote the tokens, where no manifest says so.
        window_tokens: Length of the samples.
    """
    from owt_data._inspect import inspect

    found = inspect(name, tokenizer=tokenizer, window_tokens=window_tokens)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{name}: tokenizer {found.tokenizer}, vocabulary of {found.vocab_size:,}", markup=False)
    if found.manifest is not None:
        console.print(f"made from {found.manifest.source} by owt-data {found.manifest.version}", markup=False)
    for split, num_tokens in found.num_tokens.items():
        record = found.manifest.files[f"{split}.bin"] if found.manifest is not None else None
        documents = f", {record.num_documents:,} documents" if record is not None else ""
        console.print(f"\n{split}: {num_tokens:,} tokens, {2 * num_tokens:,} bytes{documents}", markup=False)
        for place, text in found.samples[split].items():
            console.print(f"  {place}: {text!r}", markup=False)
    return 0


def _console() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Answer SIGTERM as Ctrl-C, unless the process ignores it or has a handler of its own."""
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
        The exit code: 0, 1 where `verify` found a difference, 2 for bad input, or 130 after Ctrl-C or SIGTERM.
    """
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # what fails there is said here, in a sentence
    try:
        with _sigterm_as_ctrl_c():
            return tyro.extras.subcommand_cli_from_dict(
                {"prepare": _prepare, "verify": _verify, "inspect": _inspect},
                prog="owt-data",
                description="Text to token files that nanoGPT, the Ray tutorial and nnx-gpt2 read.",
                args=args,
            )
    except DataError as error:
        _console().print(f"error: {error}", markup=False)
        return _BAD_INPUT
    except KeyboardInterrupt:
        _console().print("interrupted: the same command again goes on from there")
        return _INTERRUPTED
