"""What the tests share: token files on disk, the gpt2 tokenizer where it can be had, a Ray cluster, an S3 server."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from owt_data import DataError, TokenSequence, TokenSpan, load_tokenizer


@pytest.fixture(scope="session")
def gpt2() -> tiktoken.Encoding:
    try:
        return load_tokenizer("gpt2")
    except DataError as error:
        pytest.skip(f"needs the network or TIKTOKEN_CACHE_DIR: {error}")


@pytest.fixture(scope="session")
def corpora() -> Path:
    """A folder with `shakespeare.txt` and `wikitext-2-valid.txt`."""
    if "OWT_DATA_CORPORA" not in os.environ:
        pytest.skip("needs OWT_DATA_CORPORA, a folder with shakespeare.txt and wikitext-2-valid.txt")
    return Path(os.environ["OWT_DATA_CORPORA"])


@pytest.fixture
def tokens(tmp_path, positions) -> TokenSequence:
    """Tokens that are their own positions, so that a window shows where it came from."""
    return positions(tmp_path / "tokens.bin", 0, 5000)


@pytest.fixture(scope="session")
def positions() -> Callable[[Path, int, int], TokenSequence]:
    """Makes a file of the tokens `start` to `stop - 1`."""

    def make(path: Path, start: int, stop: int) -> TokenSequence:
        np.arange(start, stop, dtype="<u2").tofile(path)
        return TokenSequence((TokenSpan(path=str(path), start=0, stop=stop - start),))

    return make


@pytest.fixture
def articles(tmp_path) -> Path:
    """300 documents as JSON lines, of many lengths and scripts, one of them empty."""
    rng = np.random.default_rng(0)
    words = ["the", "Straße", "日本語", "def f(x):", "\n\n", "<|endoftext|>", "🙂", "naïve", "1234567", "\t"]
    texts = [" ".join(rng.choice(words, size=rng.integers(1, 60))) for _ in range(299)]
    texts.insert(7, "")
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture(scope="session")
def s3():
    """The URI of an empty bucket on an S3 server of this machine."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    yield "s3://bucket"
    server.stop()


@pytest.fixture(scope="session")
def cluster(s3):
    """A Ray cluster on this machine, whose tasks know the S3 server."""
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
