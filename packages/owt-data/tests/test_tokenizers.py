import numpy as np
import pytest
import tiktoken

from owt_data import DataError, load_tokenizer
from owt_data._tokenizers import encode, tokenizer_digest

TEXT = "Hé <|endoftext|> 日本\r\n\x00🙂"


def test_bytes_are_the_utf8_bytes_and_end_of_text():
    tokenizer = load_tokenizer("bytes")
    tokens = encode(tokenizer, TEXT)
    assert tokens.dtype == np.dtype("<u2")
    assert tokens.tolist() == [*TEXT.encode(), 256]
    assert tokenizer.decode(tokens[:-1].tolist()) == TEXT
    assert tokenizer.n_vocab == 257


def test_gpt2_is_tiktokens(gpt2):
    plain = tiktoken.get_encoding("gpt2")
    assert encode(gpt2, TEXT).tolist() == [*plain.encode_ordinary(TEXT), 50256]
    assert gpt2.n_vocab == 50257


def test_digests_tell_tokenizers_apart(small_bpe):
    assert tokenizer_digest(load_tokenizer("bytes")) != tokenizer_digest(small_bpe)
    assert tokenizer_digest(load_tokenizer("bytes")) == (
        "2114b7354135602ea50165381fc6469346dce0a93373908a1d30ff4c2d51410e"
    )


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(DataError, match="The tokenizer must be bytes or gpt2, got 'words'"):
        load_tokenizer("words")
