"""Files of tokenizers, read by Hugging Face's `tokenizers`."""

import itertools
import json
import random

import pytest
import tiktoken
import tiktoken.load
import tokenizers
from tiktoken_ext.openai_public import cl100k_base, r50k_pat_str

from owt_data import load_tokenizer, tokenizer_files
from owt_data._tokenizer_json import _as_object as as_object

TEXT = "Hé  didn't <|endof text|> 日本\r\n\x00🙂\t\n\n x²3 12345  \n"
END = "<|endoftext|>"


def opened(text: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(text)


def some_texts(characters: str, count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(characters, k=rng.randint(0, 30))) for _ in range(count)]


@pytest.mark.parametrize("name", ["bytes", "small_bpe", pytest.param("gpt2", marks=pytest.mark.shared_data)])
def test_texts_have_the_same_ids(name, request):
    plain = load_tokenizer("bytes") if name == "bytes" else request.getfixturevalue(name)
    tokenizer = opened(tokenizer_files(plain.name, max_tokens=32)["tokenizer.json"])
    assert tokenizer.get_vocab_size() == plain.n_vocab
    short = map("".join, itertools.product(" \n'sdre1!é", repeat=3))
    long = some_texts("  \n\r\t\u2003'sdmtlvreaethoinABC123²Ⅳ!?é日🙂\x00\xa0\xad", 500)
    for text in [TEXT, *short, *long]:
        ids = tokenizer.encode(text).ids
        assert ids == plain.encode_ordinary(text), repr(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["bytes", "small_bpe"])
def test_the_end_of_text_is_one_token_that_readers_leave_out(name, request):
    plain = load_tokenizer("bytes") if name == "bytes" else request.getfixturevalue(name)
    files = tokenizer_files(plain.name, max_tokens=32)
    tokenizer = opened(files["tokenizer.json"])
    ids = tokenizer.encode(f"a{END}").ids
    assert ids == [*plain.encode_ordinary("a"), plain.eot_token]
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)) == ("a", f"a{END}")
    config = json.loads(files["tokenizer_config.json"])
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": 32,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


def test_every_byte_has_its_own_id():
    vocabulary = json.loads(tokenizer_files("bytes", max_tokens=8)["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == [*range(257)]
    assert (vocabulary["A"], vocabulary["Ġ"], vocabulary["Ċ"], vocabulary["ÿ"], vocabulary[END]) == (
        65,
        32,
        10,
        255,
        256,
    )


@pytest.mark.shared_data
def test_the_merges_of_gpt2_are_the_published_ones(gpt2):
    """tiktoken's own cache has them as they were published."""
    published = tiktoken.load.read_file_cached(
        "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
    )
    merges = json.loads(tokenizer_files("gpt2", max_tokens=8)["tokenizer.json"])["model"]["merges"]
    assert merges == published.decode().splitlines()[1:]
    assert len(merges) == 50_000


def encoding(pattern: str, *pieces: str) -> tiktoken.Encoding:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {piece.encode(): rank for rank, piece in enumerate(pieces, 256)}
    return tiktoken.Encoding("other", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: 300, "<|x|>": 310})


def test_other_patterns_split_as_tiktoken_does(monkeypatch):
    monkeypatch.setattr("tiktoken_ext.openai_public.load_tiktoken_bpe", lambda *_, **__: {})  # the pattern alone
    plain = encoding(cl100k_base()["pat_str"], "12", "123", " \n", "\n\n", "  ", "'S", "\n ", "a\n", "!\n", " a")
    tokenizer = opened(json.dumps(as_object(plain)))
    for text in [TEXT, "a<|x|>", *some_texts("  \n\r'sSaé12345!?", 3000)]:
        assert tokenizer.encode(text).ids == plain.encode(text, allowed_special="all"), repr(text)


def test_a_token_that_no_merges_lead_to_is_found_as_a_word():
    """`abc` is the merge of `a` and `bc`, whose rank is below that of `ab`. `wxyz` is the merge of no two tokens."""
    plain = encoding(r50k_pat_str, "bc", "ab", "abc", "wxyz")
    serialized = as_object(plain)
    assert serialized["model"]["merges"] == ["b c", "a b", "a bc"]
    assert serialized["model"]["ignore_merges"]
    tokenizer = opened(json.dumps(serialized))
    for text in ["abc", "wxyz", " wxyz", "awxyz", "aabc", "abab bcbc"]:
        assert tokenizer.encode(text).ids == plain.encode_ordinary(text), text
    assert not as_object(encoding(r50k_pat_str, "bc", "abc"))["model"]["ignore_merges"]
