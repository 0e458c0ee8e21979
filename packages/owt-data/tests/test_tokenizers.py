import itertools

import pytest
import tiktoken

from owt_data import DataError, load_tokenizer
from owt_data._tokenizers import encode_pieces, load_fast_tokenizer, tokenizer_digest

TEXT = "Hé <|endoftext|> 日本\r\n\x00🙂"


def test_bytes_are_the_utf8_bytes_and_end_of_text():
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode_ordinary(TEXT)
    assert tokens == [*TEXT.encode()]
    assert tokenizer.decode(tokens) == TEXT
    assert (tokenizer.eot_token, tokenizer.n_vocab) == (256, 257)


def test_bytes_are_not_searched_for_words(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_fast_tokenizer("bytes")
    expected = [256, *tokenizer.encode_ordinary(TEXT), *tokenizer.encode_ordinary(TEXT), 256]
    monkeypatch.delattr(tiktoken.Encoding, "encode_to_numpy")
    tokens = encode_pieces([(TEXT, True, False), ("", False, False), (TEXT, False, True)], tokenizer)
    assert tokens.tolist() == expected
    assert tokens.dtype == "<u2"


def test_gpt2_is_tiktokens(gpt2):
    plain = tiktoken.get_encoding("gpt2")
    assert gpt2.encode_ordinary(TEXT) == plain.encode_ordinary(TEXT)
    assert (gpt2.eot_token, gpt2.n_vocab) == (50256, 50257)


@pytest.mark.parametrize("kind", ["small_bpe", pytest.param("gpt2", marks=pytest.mark.shared_data)])
def test_the_fast_tokenizer_encodes_every_short_text_like_tiktoken(kind, request):
    plain = request.getfixturevalue(kind)
    fast = load_fast_tokenizer("gpt2")
    assert isinstance(fast, tiktoken.Encoding)
    assert fast._pat_str != plain._pat_str  # equal after a change in tiktoken, which needs a new fast pattern
    # ² and Ⅳ are numbers without being decimal digits.
    texts = [itertools.product(" \n\u2003'sdmtlvre1!é", repeat=4), itertools.product(" x1٣²Ⅳ!\n", repeat=4)]
    for characters in itertools.chain(*texts):
        text = "".join(characters)
        assert fast.encode_ordinary(text) == plain.encode_ordinary(text), repr(text)


@pytest.mark.parametrize("text", [" ", "x", "x\n", "1", "!"])
def test_the_fast_tokenizer_encodes_long_runs_like_tiktoken(text, small_bpe):
    # The stack of tiktoken's regex library has a million entries.
    assert load_fast_tokenizer("gpt2").encode_ordinary(text * 1_100_000) == small_bpe.encode_ordinary(text * 1_100_000)


def test_digests_differ_between_tokenizers(small_bpe):
    assert tokenizer_digest(load_tokenizer("bytes")) != tokenizer_digest(small_bpe)
    assert tokenizer_digest(load_tokenizer("bytes")) == (
        "0e09e33811f0032bb2f93ae6fb1107a5c821e93999459cf55f53173d87fac8d8"
    )


def test_the_same_pieces_with_other_ids_have_another_digest():
    pieces = {bytes([number]): number for number in range(256)} | {b"ab": 256, b"cd": 257}
    others = pieces | {b"ab": 257, b"cd": 256}
    digests = {
        tokenizer_digest(
            tiktoken.Encoding("pair", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
        )
        for ranks in (pieces, others)
    }
    assert len(digests) == 2


def test_an_unknown_tokenizer_is_rejected():
    with pytest.raises(DataError, match=r"The tokenizer must be bytes, gpt2, .* or the path of a .*, got 'words'"):
        load_tokenizer("words")
