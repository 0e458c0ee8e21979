"""Shared fixtures: corpora, token files, tokenizers, a Ray cluster, an S3 server, a hub."""

import base64
import io
import json
import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import flask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import tiktoken
import tiktoken.load
import tiktoken.registry
from beartype import BeartypeConf
from beartype.claw import beartype_package
from tiktoken_ext.openai_public import r50k_pat_str
from werkzeug.serving import make_server

# Check the types of all calls in the package. Must precede its first import.
beartype_package("owt_data", conf=BeartypeConf(is_pep484_tower=True))  # an int is a float

from owt_data import PrepareOptions, TokenSequence, TokenSpan, load_tokenizer, prepare  # noqa: E402 - see above
from owt_data._tokenizer_names import VOCABULARIES  # noqa: E402 - see above

SHARED_DATA = {"gpt2", "corpora"}
TIMEOUT_S = 120

# The tests, and what they start, answer signals also where the parent ignores them, as `nohup` does.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """A cache of digests of this session, in place of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items):
    """Mark tests whose fixtures need shared data. Tests that request them by parameter have the mark already."""
    for item in items:
        if SHARED_DATA & set(item.fixturenames):
            item.add_marker(pytest.mark.shared_data)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Waits until a condition holds, for two minutes at most. A process that is given must run until then."""

    def wait(condition, process=None):
        stop = time.monotonic() + TIMEOUT_S
        while not condition():
            assert process is None or process.poll() is None, process.communicate()[1]
            assert time.monotonic() < stop
            time.sleep(0.002)

    return wait


HOLD = """
import importlib, itertools, sys
def hold_at(module, name, number):
    module, calls = importlib.import_module(module), itertools.count(1)
    function = getattr(module, name)
    def call(*args, **options):
        if next(calls) == number:
            print("held", flush=True)
            sys.stdin.readline()
        return function(*args, **options)
    setattr(module, name, call)
"""


@pytest.fixture(scope="session")
def hold_at() -> Callable[[str, int], str]:
    """Returns code that holds a process before a call of a function, by the number of the call.

    The process prints `held`, and goes on once it gets a line, or the end of its standard input.
    """

    def code(function: str, number: int) -> str:
        module, _, name = function.rpartition(".")
        return f"{HOLD}hold_at({module!r}, {name!r}, {number})\n"

    return code


@pytest.fixture(scope="session")
def wait_until_held() -> Callable[[subprocess.Popen[str]], None]:
    """Waits until a process is held, see `hold_at`. It must not end before."""

    def wait(process):
        assert process.stdout.readline() == "held\n", process.communicate()[1]

    return wait


@pytest.fixture(scope="session")
def tokenizing_processes() -> Callable[[], list[int]]:
    """Lists the tokenizing processes that this process has started."""

    def find():
        command = ["ps", "-Aww", "-o", "pid=,ppid=,command="]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S).stdout
        fields = [line.split(maxsplit=2) for line in found.splitlines()]
        return [int(pid) for pid, parent, name in fields if int(parent) == os.getpid() and "tokenize_worker" in name]

    return find


@pytest.fixture(scope="session")
def gpt2() -> tiktoken.Encoding:
    """GPT-2's own tokenizer."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    if not folder or not any(Path(folder).glob("*")):
        pytest.skip("needs TIKTOKEN_CACHE_DIR, a folder with the files of tiktoken's gpt2")
    encoding = load_tokenizer("gpt2")
    assert isinstance(encoding, tiktoken.Encoding)
    return encoding


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Path:
    """A file of 400 byte pairs in tiktoken's format, learned from this package's own source by GPT-2's method."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("src/*/*.py")))
    words = Counter(tuple(bytes([byte]) for byte in word.encode()) for word in regex.findall(r50k_pat_str, text))
    learned = [bytes([byte]) for byte in range(256)]
    for _ in range(400):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learned.append(best[0] + best[1])
        words = Counter({merged(word, best) if best[0] in word else word: count for word, count in words.items()})
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(learned)))
    return path


def merged(word, pair):
    """A word's pieces, with each occurrence of a pair made one piece."""
    pieces, position = [], 0
    while position < len(word):
        if word[position : position + 2] == pair:
            pieces.append(pair[0] + pair[1])
            position += 2
        else:
            pieces.append(word[position])
            position += 1
    return tuple(pieces)


@pytest.fixture
def small_bpe(ranks, monkeypatch) -> tiktoken.Encoding:
    """A tokenizer of GPT-2's kind with 657 ids, which needs no download, as this process's `gpt2`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")  # the file is here already
        pairs = tiktoken.load.load_tiktoken_bpe(str(ranks))
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=pairs, special_tokens={"<|endoftext|>": len(pairs)}
    )
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "gpt2", encoding)
    monkeypatch.setitem(VOCABULARIES, "gpt2", type(VOCABULARIES["gpt2"])(len(pairs) + 1, len(pairs)))
    return encoding


@pytest.fixture(scope="session")
def corpora() -> Path:
    """A folder with `shakespeare.txt` and `wikitext-2-valid.txt`."""
    if "OWT_DATA_CORPORA" not in os.environ:
        pytest.skip("needs OWT_DATA_CORPORA, a folder with shakespeare.txt and wikitext-2-valid.txt")
    return Path(os.environ["OWT_DATA_CORPORA"])


@pytest.fixture
def no_ranks(tmp_path) -> dict[str, str]:
    """The environment of a command on a machine that has no tokenizer files and cannot download them."""
    (tmp_path / "no-ranks").mkdir()
    closed = "http://127.0.0.1:9"
    return {
        **os.environ,
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "no-ranks"),
        "HTTPS_PROXY": closed,
        "https_proxy": closed,
    }


@pytest.fixture
def tokens(tmp_path, positions) -> TokenSequence:
    """Tokens that equal their positions, which shows the origin of a window."""
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


@pytest.fixture
def prepared(articles, tmp_path) -> Path:
    """A folder of token files, prepared from `articles`."""
    prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer="bytes", val_fraction=0.1))
    return tmp_path / "out"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """10 MB of documents as JSON lines: about forty shards."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for _ in range(4000):
            file.write(json.dumps({"text": "".join(rng.choices("abcdefgh \n", k=rng.randrange(5000)))}) + "\n")
    return path


@pytest.fixture(scope="session")
def s3_requests() -> list[tuple[str, str]]:
    """Requests to the S3 server so far, as the method and the path."""
    return []


@pytest.fixture(scope="session")
def s3(s3_requests):
    """The URI of an empty bucket on an S3 server of this machine."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    assert server._server is not None
    answer = server._server.app

    def note_and_answer(environ, start_response):
        s3_requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        return answer(environ, start_response)

    server._server.app = note_and_answer
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


HUB_CARD = """---
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
---
"""


class Hub:
    """A dataset repository of some parquet files, whose newest revision can be moved."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.texts = ["".join(rng.choice(list("abc é\n"), size=rng.integers(3000))) for _ in range(1200)]
        self.first_files = {"README.md": HUB_CARD.encode()}
        for number in range(4):
            rows = self.texts[300 * number : 300 * (number + 1)]
            self.first_files[f"plain_text/train-{number}.parquet"] = self.parquet(rows)
        self.reset()
        app = flask.Flask("hub")
        app.before_request(self.fail)
        for name in ("org/corpus", "HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu"):
            app.add_url_rule(f"/api/datasets/{name}", view_func=self.info)
            app.add_url_rule(f"/api/datasets/{name}/revision/<revision>", view_func=self.info)
            app.add_url_rule(f"/api/datasets/{name}/tree/<revision>", view_func=self.tree)
            app.add_url_rule(f"/api/datasets/{name}/tree/<revision>/<path:folder>", view_func=self.tree)
            app.add_url_rule(f"/api/datasets/{name}/paths-info/<revision>", view_func=self.paths, methods=["POST"])
            app.add_url_rule(f"/datasets/{name}/resolve/<revision>/<path:path>", view_func=self.resolve)
        self.server = make_server("127.0.0.1", 0, app, threaded=True)

    @staticmethod
    def parquet(rows):
        """The bytes of a file with these rows."""
        buffer = io.BytesIO()
        pq.write_table(pa.table({"text": rows}), buffer, row_group_size=50)
        return buffer.getvalue()

    def reset(self):
        """Forget the requests, and what a test has set."""
        self.revision = "a" * 40
        self.requests: list[str] = []
        self.sent: Counter[str] = Counter()
        self.fails_with: int | None = None
        self.files = dict(self.first_files)

    def fail(self):
        """Answer every request with the status that was set, if one was."""
        if self.fails_with is not None:
            return flask.Response(status=self.fails_with, headers={"Retry-After": "0"})
        return None

    def info(self, revision=None):
        siblings = [{"rfilename": name} for name in self.files]
        return {"_id": "0" * 24, "id": "org/corpus", "sha": revision or self.revision, "siblings": siblings}

    def tree(self, revision, folder=""):
        below = {name.removeprefix(folder).lstrip("/"): name for name in self.files if name.startswith(folder)}
        entries = [
            {"type": "file", "oid": "b" * 40, "size": len(self.files[path]), "path": path}
            for name, path in below.items()
            if "/" not in name or flask.request.args.get("recursive") == "true"
        ]
        folders = {path.partition("/")[0] for name, path in below.items() if "/" in name}
        entries += [{"type": "directory", "oid": "c" * 40, "size": 0, "path": path} for path in sorted(folders)]
        return flask.jsonify(entries)

    def paths(self, revision):
        asked = flask.request.form.getlist("paths")
        folders = {path for path in asked if any(name.startswith(f"{path}/") for name in self.files)}
        entries = [
            {"type": "file", "oid": "b" * 40, "size": len(self.files[path]), "path": path}
            for path in asked
            if path in self.files
        ]
        return flask.jsonify(
            entries + [{"type": "directory", "oid": "c" * 40, "size": 0, "path": path} for path in folders]
        )

    def resolve(self, revision, path):
        self.requests.append(f"{revision[0]} {path}")
        if path not in self.files:
            return flask.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        commit = self.revision if revision == "main" else revision
        headers = {"ETag": f'"{path}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        response = flask.Response(self.files[path], headers=headers)
        response.make_conditional(flask.request, accept_ranges=True, complete_length=len(self.files[path]))
        if flask.request.method == "GET":
            self.sent[path] += len(response.get_data())
        return response


@pytest.fixture(scope="module")
def hub_server():
    """A server of the hub's protocol. Tests that change it use `hub`."""
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()


@pytest.fixture
def hub(hub_server) -> Hub:
    """A server of the hub's protocol, as it was at first."""
    hub_server.reset()
    return hub_server
