"""Docstrings as the documentation shows them: an example that begins with >>> is a block of code."""

import re
from typing import Any

import griffe

# Lines from >>> to the next empty line: the example and its output.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts examples into blocks of code. In Markdown, >>> would be a quotation in a quotation in a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_block, obj.docstring.value)


def _block(example: re.Match[str]) -> str:
    code = re.sub(r"  # doctest: .*", "", example[0])
    return f"```pycon\n{code}\n```"
