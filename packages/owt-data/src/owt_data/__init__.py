"""Text to token files to Ray Datasets, in a window order that is a pure function.

Names load on first use, so that reading an option does not import datasets or Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from owt_data._errors import DataError
from owt_data._options import OrderKind, PrepareOptions, TokenizerName

if TYPE_CHECKING:
    from owt_data._inspect import Inspection, inspect
    from owt_data._manifest import FileRecord, Manifest, read_manifest
    from owt_data._open import TokenData, is_prepared, open_tokens
    from owt_data._order import WINDOW_ORDER_VERSION, num_windows, window_starts
    from owt_data._prepare import Progress, prepare
    from owt_data._progress import progress_bar, share_bar
    from owt_data._sources import Source, find_source
    from owt_data._stream import iter_steps, step_windows, token_windows
    from owt_data._text_stream import every_row, is_wikitext_title, stream_text
    from owt_data._tokenizers import load_tokenizer
    from owt_data._tokens import TokenMixture, Tokens, TokenSequence, TokenSpan
    from owt_data._verify import verify

_MODULE_OF = {
    "Inspection": "_inspect",
    "inspect": "_inspect",
    "FileRecord": "_manifest",
    "Manifest": "_manifest",
    "read_manifest": "_manifest",
    "TokenData": "_open",
    "is_prepared": "_open",
    "open_tokens": "_open",
    "WINDOW_ORDER_VERSION": "_order",
    "num_windows": "_order",
    "window_starts": "_order",
    "Progress": "_prepare",
    "prepare": "_prepare",
    "progress_bar": "_progress",
    "share_bar": "_progress",
    "Source": "_sources",
    "find_source": "_sources",
    "iter_steps": "_stream",
    "step_windows": "_stream",
    "token_windows": "_stream",
    "every_row": "_text_stream",
    "is_wikitext_title": "_text_stream",
    "stream_text": "_text_stream",
    "load_tokenizer": "_tokenizers",
    "TokenMixture": "_tokens",
    "TokenSequence": "_tokens",
    "TokenSpan": "_tokens",
    "Tokens": "_tokens",
    "verify": "_verify",
}

__all__ = [
    "WINDOW_ORDER_VERSION",
    "DataError",
    "FileRecord",
    "Inspection",
    "Manifest",
    "OrderKind",
    "PrepareOptions",
    "Progress",
    "Source",
    "TokenData",
    "TokenMixture",
    "TokenSequence",
    "TokenSpan",
    "TokenizerName",
    "Tokens",
    "every_row",
    "find_source",
    "inspect",
    "is_prepared",
    "is_wikitext_title",
    "iter_steps",
    "load_tokenizer",
    "num_windows",
    "open_tokens",
    "prepare",
    "progress_bar",
    "read_manifest",
    "share_bar",
    "step_windows",
    "stream_text",
    "token_windows",
    "verify",
    "window_starts",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # which takes longer than all the rest here

        return version("owt-data")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'owt_data' has no attribute {name!r}")
    return getattr(import_module(f"owt_data.{_MODULE_OF[name]}"), name)
