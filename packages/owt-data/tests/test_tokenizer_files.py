"""Tokenizers of `tokenizer.json` files and the larger encodings of tiktoken, and tokens of 32 bits that they give."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.registry
import tokenizers
from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
from tokenizers import decoders, models, normalizers, pre_tokenizers

from owt_data import (
    DataError,
    PrepareOptions,
    TokenSequence,
    end_of_text_id,
    find_text,
    inspect,
    load_tokenizer,
    named_tokenizer,
    open_documents,
    open_tokens,
    prepare,
    prepare_in_background,
    read_manifest,
    same_tokenizer,
    tokenizer_files,
    tokenizer_json,
    verify,
    vocab_size,
)
from owt_data._cli import main
from owt_data._tokenizer_names import VOCABULARIES
from owt_data._tokenizers import load_fast_tokenizer

TEXT = "Straße 日本語\n\n\tdef f(x): 🙂 <|endoftext|> naïve  1234567 \r\n"


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Path:
    """A `tokenizer.json` as GPT-2's: ids of single bytes not in their order, special tokens first and last, a gap."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        "<pad>": 0,
        **{piece: number for number, piece in enumerate(alphabet, 1)},
        "th": 257,
        "the": 258,
        "Ġthe": 259,
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<|endoftext|>"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=512)
    path = tmp_path_factory.mktemp("byte-level") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def large(byte_level, tmp_path) -> Path:
    """A `tokenizer.json` whose merges have ids above 65 536."""
    found = json.loads(byte_level.read_text())
    for piece, number in (("th", 70_000), ("the", 70_001), ("Ġthe", 70_002)):
        found["model"]["vocab"][piece] = number
    (tmp_path / "large.json").write_text(json.dumps(found))
    return tmp_path / "large.json"


def test_a_byte_level_file_gives_back_every_text(byte_level):
    for name in (byte_level, byte_level.parent, f"{byte_level}::<|endoftext|>"):
        tokenizer = load_tokenizer(name)
        tokens = tokenizer.encode_ordinary(TEXT + " the other the")
        assert tokenizer.decode(tokens) == TEXT + " the other the"
        assert b"".join(map(tokenizer.decode_single_token_bytes, tokens)) == (TEXT + " the other the").encode()
        assert 259 in tokens
        assert max(tokens) < 260
        assert (tokenizer.n_vocab, tokenizer.eot_token) == (261, 260) == (vocab_size(name), end_of_text_id(name))
        assert [number for number in range(261) if tokenizer.is_special_token(number)] == [0, 260]
        part = tokenizer.encode_ordinary("語")[:1]  # a model may draw any bytes
        assert (tokenizer.decode(part), tokenizer.decode(part, errors="ignore")) == ("\ufffd", "")


def test_added_tokens_have_the_bytes_of_their_text(byte_level, tmp_path):
    """A piece of the model spells each byte as a character, and an added token does not."""
    found = json.loads(byte_level.read_text())
    new = {**found["added_tokens"][0], "id": 263, "content": "<|Ġé|>", "special": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**found, "added_tokens": [*found["added_tokens"], new]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.n_vocab == 264
    assert tokenizer.decode_single_token_bytes(263) == "<|Ġé|>".encode()
    assert tokenizer.decode_single_token_bytes(261) == b""
    assert [number for number in range(264) if tokenizer.is_special_token(number)] == [0, 260, 261, 262]
    assert tokenizer.decode([263, 105]) == "<|Ġé|>" + tokenizer.decode([105])


def test_a_unigram_model_has_the_ids_of_the_order_of_its_pieces(byte_level, tmp_path):
    found = json.loads(byte_level.read_text())
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0], ["b", -2.0]]}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**found, "added_tokens": [], "model": model, "truncation": None, "padding": None}))
    assert (vocab_size(path), end_of_text_id(path)) == (4, 1)
    assert load_tokenizer(path).encode_ordinary("ab") == [2, 3]


def test_a_file_of_sentencepiece_keeps_its_pieces(tmp_path):
    vocab = {
        "<unk>": 0,
        "</s>": 1,
        **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)},
        "▁a": 258,
        "▁": 259,
        "a": 260,
    }
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.eot_token == 1
    assert found.encode_ordinary("a aé") == [258, 258, 2 + 0xC3, 2 + 0xA9]
    assert found.decode(found.encode_ordinary("a aé")) == " a aé"


def test_a_file_with_the_ids_of_a_named_tokenizer_has_its_name(byte_level, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_files("bytes", max_tokens=8)["tokenizer.json"])
    assert named_tokenizer(path) == "bytes"
    content = json.loads(path.read_bytes())
    content["model"]["vocab"] |= {"a": ord("b"), "b": ord("a")}
    path.write_text(json.dumps(content))
    assert named_tokenizer(path) == str(path)
    assert named_tokenizer(byte_level) == str(byte_level)
    assert named_tokenizer("o200k_base") == "o200k_base"


def test_prepared_tokens_keep_their_tokenizer(byte_level, articles, tmp_path):
    shutil.copy(byte_level, tmp_path / "mine.json")
    options = PrepareOptions(tokenizer=str(tmp_path / "mine.json"), val_fraction=0.1)
    for processes in (1, 2):
        prepare(str(articles), tmp_path / f"out{processes}", options, num_processes=processes)
    (tmp_path / "out1").rename(tmp_path / "moved")
    (tmp_path / "mine.json").unlink()
    moved, other = (open_tokens(tmp_path / name, tokenizer="gpt2") for name in ("moved", "out2"))
    assert moved.fingerprint == other.fingerprint
    assert (moved.vocab_size, moved.end_of_text) == (261, 260)
    assert moved.tokenizer == f"{tmp_path}/moved/tokenizer.json::<|endoftext|>"
    assert same_tokenizer(moved.tokenizer, other.tokenizer)
    assert same_tokenizer(moved.tokenizer, byte_level)
    assert tokenizer_json(moved.tokenizer) == byte_level.read_bytes()
    assert verify(tmp_path / "moved") == []
    documents = open_documents(moved)
    tokenizer = load_tokenizer(moved.tokenizer)
    texts = [json.loads(line)["text"] for line in articles.read_text().splitlines()]
    for number in (0, 1, 50):
        row = documents.describe(np.array([number]))[0].row
        assert row is not None
        assert tokenizer.decode(documents.read(number)[:-1].tolist()) == texts[row]
    wanted = "Straße"
    matches = find_text(documents, wanted, tokenizer=moved.tokenizer)
    assert sum(match.num_matches for match in matches) > 10
    # Another tokenizer is other data, and a changed copy is found.
    found = json.loads(byte_level.read_text())
    found["model"]["merges"] = found["model"]["merges"][:1]
    (tmp_path / "moved" / "tokenizer.json").write_text(json.dumps(found))
    assert "expected the tokenizer's SHA-256" in verify(tmp_path / "moved")[0]
    assert open_tokens(tmp_path / "moved", tokenizer="gpt2").fingerprint != other.fingerprint
    with pytest.raises(DataError, match=r"All tokens must be of one tokenizer, got \['tokenizer-"):
        open_tokens([str(tmp_path / "moved"), str(tmp_path / "out2")], tokenizer="gpt2")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_preparation_reads_its_own_copy_of_the_file_with_the_end_of_text_that_was_named(
    num_processes, byte_level, articles, tmp_path, monkeypatch
):
    for name in ("MIN", "MAX"):
        monkeypatch.setattr(f"owt_data._prepare.planning.{name}_SHARD_BYTES", 5000)
    monkeypatch.setattr("owt_data._prepare.prepare.MIN_SHARD_BYTES", 5000)
    path, seen = tmp_path / "mine.json", []
    shutil.copy(byte_level, path)

    def replace_the_file(progress):
        if progress.stage == "tokenizing" and not seen:
            seen.append(path.write_text("another file"))

    options = PrepareOptions(tokenizer=f"{path}::<pad>", val_fraction=0.1)
    manifest = prepare(str(articles), tmp_path / "out", options, num_processes=num_processes, progress=replace_the_file)
    assert seen
    assert manifest.tokenizer == "tokenizer.json::<pad>"
    assert (tmp_path / "out/tokenizer.json").read_bytes() == byte_level.read_bytes()
    assert verify(tmp_path / "out") == []
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    assert (data.end_of_text, data.vocab_size) == (0, 261)
    assert len(open_documents(data)) == 270 == np.count_nonzero(np.fromfile(tmp_path / "out/train.bin", "<u2") == 0)


def test_a_second_preparation_with_the_same_file_elsewhere_is_the_same(byte_level, articles, tmp_path):
    first = prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer=str(byte_level), val_fraction=0.1))
    shutil.copy(byte_level, tmp_path / "copy.json")
    again = PrepareOptions(tokenizer=str(tmp_path / "copy.json"), val_fraction=0.1)
    assert prepare(str(articles), tmp_path / "out", again) == first
    (tmp_path / "copy.json").write_text(byte_level.read_text() + "\n")
    with pytest.raises(DataError, match=r"tokenizer 'tokenizer-.*' and 'tokenizer-.*' differ"):
        prepare(str(articles), tmp_path / "out", again)


def test_ids_above_16_bits_are_prepared_and_read(large, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat and the dog of the other. " * 3000)
    options = PrepareOptions(tokenizer=str(large), split="start", documents="wikitext-titles")
    (tmp_path / "text.txt").write_text(" = Title = \n the cat and the dog of the other . \n" * 8000)
    with prepare_in_background(str(tmp_path / "text.txt"), tmp_path / "out", options) as growing:
        assert (growing.vocab_size, growing.end_of_text) == (70_003, 260)
        early = growing.train.windows(np.arange(20), seq_len=33, order="sequential", seed=0)
        same = load_tokenizer(growing.tokenizer)
    prepare(str(tmp_path / "text.txt"), tmp_path / "out", options)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest.dtype, manifest.vocab_size) == ("<u4", 70_003)
    data = open_tokens(tmp_path / "out", tokenizer="gpt2")
    assert isinstance(data.train, TokenSequence)
    assert (tmp_path / "out" / "train.bin").stat().st_size == 4 * len(data.train)
    np.testing.assert_array_equal(data.train.windows(np.arange(20), seq_len=33, order="sequential", seed=0), early)
    assert early.dtype == np.uint32
    text = same.decode([token for token in data.train.read().tolist() if token != 260])
    assert (tmp_path / "text.txt").read_text().endswith(text)
    assert 70_002 in data.train.read()
    assert verify(tmp_path / "out") == []
    assert isinstance(data.val, TokenSequence)
    assert inspect(tmp_path / "out").num_bytes == {"train": 4 * len(data.train), "val": 4 * len(data.val)}
    assert main(["inspect", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "::<|endoftext|>, vocabulary of 70,003\n" in shown
    assert f"train: {len(data.train):,} tokens, {4 * len(data.train):,} bytes, " in shown


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model": None},
            "must be a tokenizer.json of the library tokenizers, got another or a damaged file: Type",
        ),
        ({"model": {"vocab": {"a": "b"}}}, "got another or a damaged file: ValueError, no ids"),
        (
            {"added_tokens": []},
            "must have an end-of-text token, got a vocabulary without <|endoftext|>, <|end_of",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "must be a file that tokenizers"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_sentence(change, sentence, byte_level, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(byte_level.read_text()) | change))
    with pytest.raises(DataError) as error:
        load_tokenizer(path)
    assert sentence in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_missing_or_truncated_file_is_one_sentence(byte_level, tmp_path):
    with pytest.raises(DataError, match=r"nothing/tokenizer.json must be a tokenizer.json .*, got a name that does"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_bytes(byte_level.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"got another or a damaged file: JSONDecodeError"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"got a vocabulary without '</s>'. Name one of its tokens as tokenizer.json::"):
        load_tokenizer(f"{byte_level}::</s>")


def test_the_end_of_text_is_that_of_the_name_then_of_the_configuration_beside_it(byte_level, tmp_path):
    shutil.copy(byte_level, tmp_path / "tokenizer.json")
    assert end_of_text_id(tmp_path) == 260
    for value in ("<pad>", {"content": "<pad>", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        assert end_of_text_id(tmp_path) == 0
    assert end_of_text_id(f"{tmp_path}::the") == 258
    (tmp_path / "tokenizer_config.json").unlink()
    found, ends = json.loads(byte_level.read_text()), []
    for number, token in enumerate(("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"), 300):
        ends.append({**found["added_tokens"][0], "id": number, "content": token})
        (tmp_path / "tokenizer.json").write_text(json.dumps({**found, "added_tokens": ends}))
        assert end_of_text_id(tmp_path) == number  # that of GPT-2 comes first, and that of Gemma last
    assert not same_tokenizer(tmp_path, f"{tmp_path}::<eos>")


def test_the_facts_about_the_encodings_are_those_of_tiktoken(gpt2):
    folder = os.environ["TIKTOKEN_CACHE_DIR"]
    loaded = []
    for name in set(VOCABULARIES) - {"bytes"}:
        try:
            encoding = load_tokenizer(name)
        except DataError:
            continue
        loaded.append(name)
        assert (encoding.n_vocab, encoding.eot_token) == VOCABULARIES[name], folder
        assert encoding.decode(encoding.encode_ordinary(TEXT)) == TEXT
    assert {"gpt2", "r50k_base"} <= {*loaded}


def test_the_vocabularies_are_those_that_tiktoken_states(monkeypatch):
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):  # their files need a network
        monkeypatch.setattr(f"tiktoken_ext.openai_public.{name}", lambda *_, **__: {})
    assert {*VOCABULARIES} - {"bytes"} <= {*ENCODING_CONSTRUCTORS}
    for name in {*VOCABULARIES} - {"bytes"}:
        stated = ENCODING_CONSTRUCTORS[name]()
        special = stated["special_tokens"]
        size = stated.get("explicit_n_vocab", max(special.values()) + 1)
        assert (vocab_size(name), end_of_text_id(name)) == (size, special["<|endoftext|>"]), name


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_a_larger_encoding_prepares_32_bits_and_decodes_every_id(name, articles, tmp_path, monkeypatch):
    """With the number of ranks and the special tokens of the encoding; its file needs a network."""
    vocabulary = VOCABULARIES[name]
    num_ranks = 100_256 if name == "cl100k_base" else 199_998
    pieces = [bytes([byte]) for byte in range(256)] + [b"\xff%d" % number for number in range(256, num_ranks - 3)]
    ranks = {piece: number for number, piece in enumerate([*pieces, b"34", b"th", b"the"])}
    monkeypatch.setattr("tiktoken_ext.openai_public.load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, name, raising=False)
    try:
        prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer=name, val_fraction=0.1), num_processes=1)
        tokenizer = load_tokenizer(name)
        # Three digits are a word of these encodings. For gpt2 any number of them are.
        assert load_fast_tokenizer(name).encode_ordinary("the 1234") == tokenizer.encode_ordinary("the 1234")
        assert tokenizer.encode_ordinary("1234")[-1] == ord("4")
    finally:
        tiktoken.registry.ENCODINGS.pop(name, None)
    assert (tokenizer.n_vocab, tokenizer.eot_token) == vocabulary
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    assert (data.vocab_size, data.end_of_text) == vocabulary
    assert isinstance(data.train, TokenSequence)
    tokens = data.train.read()
    assert tokens.dtype == np.uint32
    assert int(tokens.max()) == vocabulary.end_of_text
    assert num_ranks - 1 in tokens
    assert len(open_documents(data)) == np.count_nonzero(tokens == vocabulary.end_of_text)
    assert tokenizer.is_special_token(vocabulary.vocab_size - 2)
    assert tokenizer.decode_single_token_bytes(vocabulary.vocab_size - 2)
