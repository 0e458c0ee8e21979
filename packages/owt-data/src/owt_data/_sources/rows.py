"""Rows of text: lines of a file, rows that begin a document, and a limit on the number of rows."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from owt_data._errors import check_type, encoding_error, file_errors

StartsDocument = Callable[[str], bool]
"""Predicate: True for a row of text that begins a document."""

_TITLE = re.compile(r" = [^=](?:.*[^=])? = \n?")
_READ_BYTES = 1 << 20


def is_wikitext_title(row: str) -> bool:
    r"""Return whether a row of wikitext is an article's title, ` = Title = `. Section headings have more signs.

    >>> is_wikitext_title(" = Robert Boulter = \n"), is_wikitext_title(" = = Career = = \n")
    (True, False)

    Raises:
        DataError: the row is no text.
    """
    check_type("row", row, str, "a text", "Give the row as text.")
    return _TITLE.fullmatch(row) is not None


def every_row(row: str) -> bool:
    """Return True: each row is a document, as in JSON lines of articles."""
    return True


def read_lines(path: Path, begin: int, errors: str) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the lines of a text file, in groups of about 1 MiB.

    A line holds its line break. A line of blanks is the empty row, as in the wikitext of the Hugging Face hub.

    Args:
        path: the file.
        begin: offset of the first line, in bytes.
        errors: how to decode bytes that are not UTF-8, `strict` or `replace`.

    Yields:
        The lines, and the offset in bytes after each line.

    Raises:
        RejectedDocumentsError: a line is not UTF-8.
        DataError: the file cannot be read.
    """
    offset = begin
    with file_errors("readable", path), path.open("rb") as file:
        file.seek(begin)
        while group := file.readlines(_READ_BYTES):
            rows, offsets = [], []
            for line in group:
                try:
                    row = line.decode("utf-8", errors)
                except UnicodeDecodeError as error:
                    raise encoding_error(path, f"at byte {offset + error.start}") from error
                offset += len(line)
                rows.append(row if row.strip() else "")
                offsets.append(offset)
            yield rows, offsets
