"""`owt-data`: the command line of this package."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from owt_data._errors import DataError
from owt_data._options import PrepareOptions

_FAILED, _BAD_INPUT = 1, 2


def _prepare(
    source: tyro.conf.Positional[str],
    out: tyro.conf.Positional[Path],
    *,
    options: Annotated[PrepareOptions, tyro.conf.arg(name="")] = PrepareOptions(),  # noqa: B008 - frozen
) -> int:
    """Write train.bin and val.bin (raw little-endian uint16 tokens) and manifest.json.

    For instance: owt-data prepare openwebtext data/openwebtext

    Args:
        source: builtin, a .txt, .jsonl or .parquet file, a folder of such files, or a Hugging Face dataset.
        out: The folder to write into.
        options: Tokenizer and split.
    """
    # Imported here because it takes seconds, which --help must not wait for.
    from owt_data._prepare import prepare
    from owt_data._progress import progress_bar

    console = Console(stderr=True)
    with progress_bar(console) as progress:
        manifest = prepare(source, out, options, progress=progress)
    for name, record in manifest.files.items():
        console.print(f"{out / name}: {record.num_tokens:,} tokens, {record.num_documents:,} documents")
    return 0


def _verify(folder: tyro.conf.Positional[Path], /) -> int:
    """Recompute every size and checksum of a prepared folder and name what differs from its manifest.

    Args:
        folder: The folder.
    """
    from owt_data._verify import verify

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    differences = verify(folder)
    for difference in differences:
        console.print(difference, markup=False)
    console.print(f"{folder}: {len(differences)} differences" if differences else f"{folder}: as its manifest says")
    return _FAILED if differences else 0


def main(args: Sequence[str] | None = None) -> int:
    """Run `owt-data` with these arguments, or those of the process.

    Returns:
        The exit code: 0, 1 where `verify` found a difference, or 2 for bad input.
    """
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # what fails there is said here, in a sentence
    try:
        return tyro.extras.subcommand_cli_from_dict(
            {"prepare": _prepare, "verify": _verify},
            prog="owt-data",
            description="Text to token files that nanoGPT, the Ray tutorial and nnx-gpt2 read.",
            args=args,
        )
    except DataError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        return _BAD_INPUT
