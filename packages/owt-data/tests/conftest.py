"""What the tests share: token files on disk, the gpt2 tokenizer where it can be had, one Ray cluster."""

import json

import numpy as np
import pytest
import tiktoken

from owt_data import DataError, TokenSpan, load_tokenizer


@pytest.fixture(scope="session")
def gpt2() -> tiktoken.Encoding:
    try:
        return load_tokenizer("gpt2")
    except DataError as error:
        pytest.skip(f"needs the network or TIKTOKEN_CACHE_DIR: {error}")


@pytest.fixture
def span(tmp_path) -> TokenSpan:
    """Tokens that are their own positions, so that a window shows where it came from."""
    path = tmp_path / "tokens.bin"
    np.arange(5000, dtype="<u2").tofile(path)
    return TokenSpan(path=path, start=0, stop=5000)


@pytest.fixture
def articles(tmp_path):
    """300 documents as JSON lines, of many lengths and scripts, one of them empty."""
    rng = np.random.default_rng(0)
    words = ["the", "Straße", "日本語", "def f(x):", "\n\n", "<|endoftext|>", "🙂", "naïve", "1234567", "\t"]
    texts = [" ".join(rng.choice(words, size=rng.integers(1, 60))) for _ in range(299)]
    texts.insert(7, "")
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path
