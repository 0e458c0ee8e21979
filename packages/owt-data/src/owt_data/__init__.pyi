"""Public names of owt_data and their modules. `__init__.py` loads each name on first use."""

from ._errors import DataError as DataError
from ._options import STREAM_ORDERS as STREAM_ORDERS
from ._options import DocumentsKind as DocumentsKind
from ._options import OrderKind as OrderKind
from ._options import PrepareOptions as PrepareOptions
from ._options import TokenizerName as TokenizerName
from ._prepare.background import prepare_in_background as prepare_in_background
from ._prepare.prepare import prepare as prepare
from ._prepare.progress import Progress as Progress
from ._prepare.progress_bar import progress_bar as progress_bar
from ._prepare.progress_bar import share_bar as share_bar
from ._sources.rows import every_row as every_row
from ._sources.rows import is_wikitext_title as is_wikitext_title
from ._sources.source import Source as Source
from ._sources.source import find_source as find_source
from ._stream.batches import Batches as Batches
from ._stream.ray_reader import iter_steps as iter_steps
from ._stream.ray_reader import read_steps_by_tasks as read_steps_by_tasks
from ._stream.ray_reader import step_windows as step_windows
from ._stream.ray_reader import token_windows as token_windows
from ._stream.text import stream_text as stream_text
from ._stream.thread_reader import read_steps as read_steps
from ._tokenizers import load_tokenizer as load_tokenizer
from ._tokenizers import vocab_size as vocab_size
from ._tokens.growing_tokens import GrowingTokens as GrowingTokens
from ._tokens.inspect import Inspection as Inspection
from ._tokens.inspect import inspect as inspect
from ._tokens.manifest import FileRecord as FileRecord
from ._tokens.manifest import Manifest as Manifest
from ._tokens.manifest import read_manifest as read_manifest
from ._tokens.open import TokenData as TokenData
from ._tokens.open import is_prepared as is_prepared
from ._tokens.open import open_tokens as open_tokens
from ._tokens.sequence import TokenMixture as TokenMixture
from ._tokens.sequence import Tokens as Tokens
from ._tokens.sequence import TokenSequence as TokenSequence
from ._tokens.sequence import TokenSpan as TokenSpan
from ._tokens.verification import BackgroundVerification as BackgroundVerification
from ._tokens.verification import check_digests as check_digests
from ._tokens.verification import verify_in_background as verify_in_background
from ._tokens.verify import verify as verify
from ._tokens.window_order import WINDOW_ORDER_VERSION as WINDOW_ORDER_VERSION
from ._tokens.window_order import num_windows as num_windows
from ._tokens.window_order import window_starts as window_starts

__version__: str
