"""The tokenizer of weights in Hugging Face's format."""

import json
from pathlib import Path

from owt_data import DataError, named_tokenizer, vocab_size
from pretrain._errors import UsageError, short

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_GPT2_VOCABULARY = 50_257
# Tokenizers by their end-of-text token.
_NAMES = {256: "bytes", 50_256: "gpt2"}


def published_tokenizer(name: str, num_ids: int) -> str | None:
    """Return the name of the tokenizer of weights; None if their files do not tell.

    It is that of `tokenizer.json`. Without this file, the end of text in `config.json` tells `gpt2` or `bytes`.

    Args:
        name: a folder, or a name on the hub whose `config.json` has been downloaded.
        num_ids: size of the vocabulary of the weights. A tokenizer with more ids is not theirs.

    Raises:
        UsageError: the files cannot be downloaded.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _download(name)
    file = folder / _TOKENIZER
    if file.is_file():
        try:
            return named_tokenizer(file) if vocab_size(file) <= num_ids else None
        except DataError:  # a user of the tokenizer gets this error. The weights alone can be used
            return str(file)
    end_of_text = json.loads((folder / _CONFIG).read_bytes()).get("eos_token_id")
    if end_of_text is None and num_ids == _GPT2_VOCABULARY:
        return "gpt2"
    return _NAMES.get(end_of_text) if isinstance(end_of_text, int) and end_of_text < num_ids else None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # takes most of a second

    try:
        return Path(snapshot_download(name, allow_patterns=[_CONFIG, "tokenizer*.json"]))
    except Exception as error:  # the disk's, the hub's or its HTTP client's, which have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(
            f"the download of the tokenizer of {short(name)} has failed: {reason}. Repeat the command."
        ) from error
