"""Downloads from the Hugging Face hub by its own client, from a local server with the hub's protocol."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"
CONFIG, WEIGHTS = ((FOLDER / name).read_bytes() for name in ("config.json", "model.safetensors"))
PICKLE = {"pytorch_model.bin": b"a pickle that is never requested"}
INDEX = b'{"weight_map": {"wte.weight": "model-1.safetensors"}}'
COMMITS = {"main": "a" * 40, "indexed": "b" * 40}
FILES = {
    COMMITS["main"]: {"config.json": CONFIG, "model.safetensors": WEIGHTS} | PICKLE,
    COMMITS["indexed"]: {
        "config.json": CONFIG, "model-1.safetensors": WEIGHTS, "model.safetensors.index.json": INDEX,
    } | PICKLE,
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """Server of one repository, org/tiny, with two revisions, that records the requested files and their commits."""

    requested: set[tuple[str, str]]
    status = 200
    """Status of the answers to requests for the content of a file."""

    def do_GET(self):
        _, *parts = self.path.split("?")[0].split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            kind, revision = parts[4:]
            commit = COMMITS.get(revision, revision)
            if commit not in FILES:
                return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            answer: Any = {"_id": "0" * 24, "id": "org/tiny", "sha": commit, "siblings": []}
            if kind == "tree":
                files = FILES[commit].items()
                answer = [{"type": "file", "oid": "c" * 40, "path": n, "size": len(content)} for n, content in files]
            self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        elif parts[:3] == ["org", "tiny", "resolve"] and parts[4] in FILES[parts[3]]:
            _, _, _, commit, name = parts
            self.requested.add((commit, name))
            if self.command == "GET" and self.status != 200:
                return self.answer(self.status, b"", {})
            self.answer(200, FILES[commit][name], {"ETag": f'"{name}"', "X-Repo-Commit": commit})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def files_of(commit):
    """The files of a commit that hold the model."""
    return {(commit, name) for name in FILES[commit].keys() - PICKLE.keys()}


@pytest.fixture
def hub():
    Hub.requested, Hub.status = set(), 200
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def load(name, endpoint, cache, revision=None):
    code = (
        "import sys; from nnx_gpt2 import GPT2\n"
        f"try: print(GPT2.from_pretrained(sys.argv[1], revision={revision!r}).config)\n"
        "except ValueError as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code, name], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.mark.parametrize(("revision", "downloaded"), [(None, "main"), ("indexed", "indexed")])
def test_a_revision_is_downloaded_without_its_pickles(hub, tmp_path, revision, downloaded):
    assert load("org/tiny", hub, tmp_path, revision).startswith("GPT2Config(vocab_size=")
    assert Hub.requested == files_of(COMMITS[downloaded])


@pytest.mark.parametrize("revision", [None, "indexed"])
def test_the_config_alone_is_downloaded_without_jax(hub, tmp_path, revision):
    code = (
        "import sys; from nnx_gpt2 import pretrained_config\n"
        f"print(pretrained_config('org/tiny', revision={revision!r}, seq_len=9).seq_len, 'jax' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "9 False\n"
    assert Hub.requested == {(COMMITS[revision or "main"], "config.json")}
    # The rest follows into the same cache.
    assert load("org/tiny", hub, tmp_path, revision).startswith("GPT2Config(vocab_size=")
    assert Hub.requested == files_of(COMMITS[revision or "main"])


def test_an_unknown_name_is_rejected(hub, tmp_path):
    expected = "the hub has no model org/none, or shows it to others alone. Correct the name, or set HF_TOKEN.\n"
    assert load("org/none", hub, tmp_path) == expected


def test_an_unknown_revision_is_rejected(hub, tmp_path):
    expected = "the model org/tiny has no revision none on the hub. Correct it.\n"
    assert load("org/tiny", hub, tmp_path, "none") == expected


@pytest.mark.parametrize("of", ["server", "disk"])
def test_a_download_that_fails_is_one_sentence_and_can_be_repeated(hub, tmp_path, of):
    """The hub's client itself repeats requests after some errors, for half a minute. These are others."""
    cache = tmp_path / "cache"
    if of == "disk":
        cache.write_text("a file where the folder should be")
    else:
        Hub.status = 400
    text = load("org/tiny", hub, cache)
    assert "\\n" not in text
    assert re.fullmatch(r"the download of org/tiny from the hub has failed: .+\. Repeat it to continue\.\n", text)
    Hub.status = 200
    cache.unlink() if of == "disk" else None
    assert load("org/tiny", hub, cache).startswith("GPT2Config(vocab_size=")


def test_the_error_for_a_hub_name_names_the_extra_to_install():
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from nnx_gpt2 import GPT2\n"
        "try: GPT2.from_pretrained('gpt2')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "To download it from the hub, install nnx-gpt2[hub]." in done.stdout
