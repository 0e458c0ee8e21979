"""Whether token files still are what their manifest says."""

import hashlib
import os
from pathlib import Path

from owt_data._errors import DataError
from owt_data._manifest import MANIFEST_NAME, read_manifest


def verify(folder: Path) -> list[str]:
    """Recompute the size and checksum of every file in a prepared folder.

    Returns:
        One sentence per difference from the manifest; none if all is well.

    Raises:
        DataError: the folder has no manifest, or lacks a file.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"expected {MANIFEST_NAME} in {folder}, found none: name a folder that owt-data prepared")
    differences = []
    for name, record in manifest.files.items():
        path = folder / name
        if not path.exists():
            raise DataError(f"expected {path}, which the manifest lists, but it does not exist: prepare it again")
        size, expected = os.path.getsize(path), 2 * record.num_tokens
        if size != expected:
            differences.append(f"{name}: expected {expected} bytes, found {size}")
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != record.sha256:
            differences.append(f"{name}: expected SHA-256 {record.sha256}, found {digest}")
    return differences
