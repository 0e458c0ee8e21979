"""Text to token files to Ray Datasets, in a window order that is a pure function.

Names load on first use, so that reading an option does not import datasets or Ray.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from owt_data._errors import DataError
from owt_data._options import OrderKind, PrepareOptions, TokenizerName

if TYPE_CHECKING:
    from owt_data._manifest import FileRecord, Manifest, read_manifest
    from owt_data._order import num_windows, window_starts
    from owt_data._prepare import prepare
    from owt_data._progress import progress_bar
    from owt_data._sources import Source, find_source, load_documents
    from owt_data._stream import iter_steps, step_windows, token_windows
    from owt_data._tokenizers import load_tokenizer
    from owt_data._tokens import TokenData, TokenSpan, is_prepared, open_tokens
    from owt_data._verify import verify

_MODULE_OF = {
    "FileRecord": "_manifest",
    "Manifest": "_manifest",
    "read_manifest": "_manifest",
    "num_windows": "_order",
    "window_starts": "_order",
    "prepare": "_prepare",
    "progress_bar": "_progress",
    "Source": "_sources",
    "find_source": "_sources",
    "load_documents": "_sources",
    "iter_steps": "_stream",
    "step_windows": "_stream",
    "token_windows": "_stream",
    "load_tokenizer": "_tokenizers",
    "TokenData": "_tokens",
    "TokenSpan": "_tokens",
    "is_prepared": "_tokens",
    "open_tokens": "_tokens",
    "verify": "_verify",
}

__version__ = version("owt-data")

__all__ = [
    "DataError",
    "FileRecord",
    "Manifest",
    "OrderKind",
    "PrepareOptions",
    "Source",
    "TokenData",
    "TokenSpan",
    "TokenizerName",
    "find_source",
    "is_prepared",
    "iter_steps",
    "load_documents",
    "load_tokenizer",
    "num_windows",
    "open_tokens",
    "prepare",
    "progress_bar",
    "read_manifest",
    "step_windows",
    "token_windows",
    "verify",
    "window_starts",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'owt_data' has no attribute {name!r}")
    return getattr(import_module(f"owt_data.{_MODULE_OF[name]}"), name)
