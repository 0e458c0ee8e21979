"""Verification of token files against their manifest."""

import logging
import os
from collections.abc import Callable

import numpy as np
from pyarrow.fs import FileType

from owt_data._digests import share_counter
from owt_data._errors import DataError, check_function, show_name
from owt_data._paths import (
    MANIFEST_NAME,
    base_name,
    join,
    look_up,
    look_up_as,
    normalize,
    read_blocks,
    type_name,
)
from owt_data._tokenizer_files import end_of_text_id, name_from_folder
from owt_data._tokenizers import load_tokenizer, tokenizer_digest
from owt_data._tokens.document_index import index_name, open_index
from owt_data._tokens.layout import Layout
from owt_data._tokens.manifest import FileRecord, Manifest, read_manifest
from owt_data._tokens.summary import summary_of

_log = logging.getLogger("owt_data")


def verify(folder: str | os.PathLike[str], *, report: Callable[[float], None] | None = None) -> list[str]:
    """Recompute every count and checksum of a prepared folder, and the tokenizer's.

    If the tokenizer cannot be loaded, it is not compared and a warning is logged.

    Args:
        folder: a folder on disk or in object storage.
        report: called with the share done, after each block.

    Returns:
        One sentence for each difference from the manifest.

    Raises:
        DataError: the folder has no manifest, or a file cannot be read.
    """
    check_function("report", report)
    name = normalize(folder)
    look_up_as(name, FileType.Directory, "a folder that owt-data prepared")
    manifest = read_manifest(name)
    if manifest is None:
        raise DataError(f"{show_name(folder)} must hold {MANIFEST_NAME}, got no such file. Name a prepared folder.")
    tokenizer = name_from_folder(name, manifest.tokenizer)
    end_of_text = end_of_text_id(tokenizer)
    differences = _differences_of_manifest(manifest, tokenizer)
    advance = share_counter(sum(record.num_tokens for record in manifest.files.values()), report)
    for file, record in manifest.files.items():
        differences += [
            f"{file}: {found}" for found in _differences(join(name, file), record, manifest, end_of_text, advance)
        ]
        differences += _differences_of_index(join(name, file), record)
    return differences


def _differences_of_manifest(manifest: Manifest, name: str) -> list[str]:
    facts = []
    try:
        tokenizer = load_tokenizer(name)
        facts += [
            ("the tokenizer's SHA-256", manifest.tokenizer_sha256, tokenizer_digest(tokenizer)),
            ("a vocabulary of", str(manifest.vocab_size), str(tokenizer.n_vocab)),
        ]
    except DataError as error:
        _log.warning("the tokenizer is not compared: %s", error)
    return [
        f"{MANIFEST_NAME}: expected {label} {expected}, found {found}"
        for label, expected, found in facts
        if expected != found
    ]


def _differences(
    path: str, expected: FileRecord, manifest: Manifest, end_of_text: int, advance: Callable[[int], None]
) -> list[str]:
    info = look_up(path)
    expected_size = Layout(manifest.dtype).place(expected.num_tokens)
    if info.type is not FileType.File:
        return [f"expected a file, found {'none' if info.type is FileType.NotFound else type_name(info)}"]
    if info.size != expected_size:
        return [f"expected {expected_size} bytes, found {info.size}"]
    summary = summary_of(base_name(path), manifest.options["documents"], manifest.split, end_of_text)
    for block in read_blocks(path):
        tokens = np.frombuffer(block, dtype=manifest.dtype)
        summary.add(tokens)
        advance(len(tokens))
    found = summary.record()
    differences = []
    if found.sha256 != expected.sha256:
        differences.append(f"expected SHA-256 {expected.sha256}, found {found.sha256}")
    if found.num_documents != expected.num_documents:
        differences.append(f"expected {expected.num_documents} documents, found {found.num_documents}")
    if summary.largest >= manifest.vocab_size:
        differences.append(f"expected ids below {manifest.vocab_size}, found {summary.largest}")
    return differences


def _differences_of_index(path: str, expected: FileRecord) -> list[str]:
    """Return what is wrong with the index of a token file. A missing one is made again when it is needed."""
    name = index_name(path)
    if look_up(name).type is FileType.NotFound:
        return []
    index = open_index(path, expected.sha256)
    if index is None:
        found = "expected an index of the token file, found another or a damaged file"
    else:
        found = index.check(expected.num_tokens)
    return [] if found is None else [f"{base_name(name)}: {found}"]
