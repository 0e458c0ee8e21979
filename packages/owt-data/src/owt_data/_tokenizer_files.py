"""Files of tokenizers, `tokenizer.json`, by their names, and what is asked of a tokenizer by its name."""

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileType

from owt_data._errors import DataError, one_line, show, show_name
from owt_data._paths import base_name, is_uri, join, look_up, look_up_as, normalize, read_file, suggest_one
from owt_data._tokenizer_names import VOCABULARIES, is_tokenizer_file

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_MARK = "::"
# End-of-text tokens of published tokenizers: of GPT-2 and its followers, of Llama 3 and 2, of Gemma.
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_DIGITS = 16
# Digests of the ids of tokenizers of `TokenizerName`: see `_digest_of_ids`.
_NAMED = {
    "9f8411c44d54eb392b1a4899ac3906acaa384c929affa4ae56f78497fa187b93": "gpt2",
    "a1d7c30a2508f9f849d40bfd0298fc41c9f81399de42df8d6eb39fe4cffe8af8": "bytes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFile:
    """A `tokenizer.json`, read."""

    content: bytes
    """The file."""

    description: dict[str, Any]
    """The file as JSON."""

    end_of_text: str
    """The token that ends a document."""

    ids: dict[str, int]
    """The id of each token."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest one and one more."""
        return max(self.ids.values()) + 1

    @property
    def sha256(self) -> str:
        """SHA-256 of the file and the end-of-text token. Equal digests mean equal encodings."""
        return hashlib.sha256(self.content + b"\0" + self.end_of_text.encode()).hexdigest()


def tokenizer_name(name: str | os.PathLike[str]) -> str:
    """Return a name of a tokenizer that does not depend on the working folder. The file of a path is not looked up.

    Args:
        name: a name of `TokenizerName`; or the path of a `tokenizer.json` or of a folder with one, on disk or in object
            storage. `::TOKEN` after the path names the end-of-text token.

    Raises:
        DataError: it is neither a known name nor a path.
    """
    text = name.__fspath__() if isinstance(name, os.PathLike) else name
    if isinstance(text, str) and text in VOCABULARIES:
        return text
    if not isinstance(text, str) or not _is_path(text.partition(_MARK)[0]):
        known = suggest_one(text, VOCABULARIES) if isinstance(text, str) else None
        raise DataError(
            f"The tokenizer must be {', '.join(VOCABULARIES)}, or the path of a {TOKENIZER_FILE}, got {show(name)}."
            + (f" Did you mean {known}?" if known else "")
        )
    path, mark, token = text.partition(_MARK)
    path = normalize(path)
    path = path if path.endswith(".json") else join(path, TOKENIZER_FILE)
    return path + mark + token


def _is_path(text: str) -> bool:
    """Return whether a text is a path or a URI, and not a misspelled name."""
    if not text or "\0" in text:
        return False
    is_path = is_uri(text) or text.startswith("~") or os.sep in text or text.endswith(".json")
    return is_path or os.path.exists(text)  # noqa: PTH110 - names here are strings


def read_tokenizer_file(name: str) -> TokenizerFile:
    """Read a `tokenizer.json` by the name that `tokenizer_name` returns.

    Without `::TOKEN`, the end-of-text token is `eos_token` of a `tokenizer_config.json` beside the file, or the first
    of `<|endoftext|>`, `<|end_of_text|>`, `</s>` and `<eos>` that the file has.

    Raises:
        DataError: the file does not exist, cannot be read, has another format, or has no such token.
    """
    path, _, token = name.partition(_MARK)
    look_up_as(path, FileType.File, f"a {TOKENIZER_FILE} of the library tokenizers", is_possible=_is_tokenizer)
    content = read_file(path)
    try:
        description = json.loads(content)
        ids = _ids(description)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{show_name(path)} must be a {TOKENIZER_FILE} of the library tokenizers, got another or a damaged file: "
            f"{type(error).__name__}, {one_line(error)}. Name a file that it has written."
        ) from error
    token = token or _configured_end(path)
    ends = [one for one in ([token] if token else _ENDS_OF_TEXT) if one in ids]
    if not ends:
        wanted = show(token) if token else ", ".join(_ENDS_OF_TEXT)
        raise DataError(
            f"{show_name(path)} must have an end-of-text token, got a vocabulary without {wanted}. Name one of its "
            f"tokens as {base_name(path)}{_MARK}TOKEN."
        )
    return TokenizerFile(content=content, description=description, end_of_text=ends[0], ids=ids)


def _is_tokenizer(path: str) -> bool:
    """Return whether a file on disk has the form of a `tokenizer.json`."""
    try:
        return path.endswith(".json") and bool(_ids(json.loads(read_file(path))))
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def _ids(description: dict[str, Any]) -> dict[str, int]:
    """Return the id of each token of a `tokenizer.json`."""
    vocab = description["model"]["vocab"]
    # That of Unigram is a list of tokens with their scores.
    ids = {piece: number for number, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    ids.update({token["content"]: token["id"] for token in description.get("added_tokens") or []})
    if not ids or not all(isinstance(number, int) and number >= 0 for number in ids.values()):
        raise ValueError("no ids")
    return ids


def _configured_end(path: str) -> str:
    """Return the end-of-text token of the `tokenizer_config.json` beside a file; empty without one."""
    config = join(path.rpartition("/")[0], _CONFIG_FILE)
    if look_up(config).type is not FileType.File:
        return ""
    try:
        token = json.loads(read_file(config)).get("eos_token") or ""
    except (ValueError, AttributeError) as error:
        raise DataError(f"{show_name(config)} must hold JSON, got {one_line(error)}. Repair or remove it.") from error
    return token["content"] if isinstance(token, dict) else token


def vocab_size(name: str | os.PathLike[str]) -> int:
    """Return the number of ids of a tokenizer. A name of `TokenizerName` needs no tokenizer files.

    Raises:
        DataError: the name is unknown, or the file of a path cannot be read.
    """
    name = tokenizer_name(name)
    return read_tokenizer_file(name).vocab_size if is_tokenizer_file(name) else VOCABULARIES[name].vocab_size


def end_of_text_id(name: str | os.PathLike[str]) -> int:
    """Return the id of the end-of-text token of a tokenizer. A name of `TokenizerName` needs no tokenizer files.

    Raises:
        DataError: as `vocab_size`.
    """
    name = tokenizer_name(name)
    if not is_tokenizer_file(name):
        return VOCABULARIES[name].end_of_text
    file = read_tokenizer_file(name)
    return file.ids[file.end_of_text]


def tokenizer_label(name: str | os.PathLike[str]) -> str:
    """Return a label that is equal for equal tokenizers, wherever their files are: the name, or a digest of the file.

    Raises:
        DataError: as `vocab_size`.
    """
    name = tokenizer_name(name)
    return f"tokenizer-{read_tokenizer_file(name).sha256[:_DIGITS]}" if is_tokenizer_file(name) else name


def same_tokenizer(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Return whether two names are those of equal tokenizers: two files are, if they have the same contents.

    Raises:
        DataError: as `vocab_size`.
    """
    return first == second or tokenizer_label(first) == tokenizer_label(second)


def named_tokenizer(name: str | os.PathLike[str]) -> str:
    """Return `gpt2` or `bytes` for a `tokenizer.json` with their ids, as transformers and `tokenizer_files` write it.

    Any other name is returned as `tokenizer_name` does: also that of a file of another size with the same end of text.

    Raises:
        DataError: as `vocab_size`.
    """
    name = tokenizer_name(name)
    return _NAMED.get(_digest_of_ids(read_tokenizer_file(name)), name) if is_tokenizer_file(name) else name


def _digest_of_ids(file: TokenizerFile) -> str:
    """Return a digest of the id of each token, and of the end of text."""
    return hashlib.sha256(json.dumps([sorted(file.ids.items()), file.end_of_text]).encode()).hexdigest()


def tokenizer_json(name: str | os.PathLike[str]) -> bytes | None:
    """Return the contents of the `tokenizer.json` of a tokenizer, or None for a name of `TokenizerName`.

    Raises:
        DataError: as `vocab_size`.
    """
    name = tokenizer_name(name)
    return read_tokenizer_file(name).content if is_tokenizer_file(name) else None


def name_in_folder(name: str) -> str:
    """Return the name that a copy of a tokenizer in a folder of tokens has there; the name itself if it has no file."""
    return f"{TOKENIZER_FILE}{_MARK}{read_tokenizer_file(name).end_of_text}" if is_tokenizer_file(name) else name


def is_name_in_folder(name: str) -> bool:
    """Return whether a name is one that `name_in_folder` returns."""
    return name in VOCABULARIES or name.startswith(f"{TOKENIZER_FILE}{_MARK}")


def name_from_folder(folder: str, name: str) -> str:
    """Return the name of a tokenizer from its name in a folder of tokens."""
    return join(folder, name) if is_tokenizer_file(name) else name
