"""Downloads from the Hugging Face hub by its own client, from a local server with the hub's protocol."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"
REVISION = "a" * 40
FILES = {name: (FOLDER / name).read_bytes() for name in ("config.json", "model.safetensors")}
FILES["pytorch_model.bin"] = b"a pickle that is never requested"


class Hub(BaseHTTPRequestHandler):
    """Server of one repository, org/tiny, that records the requested files."""

    requested: set[str]

    def do_GET(self):
        _, *parts = self.path.split("?")[0].split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            answer: Any = {"_id": "0" * 24, "id": "org/tiny", "sha": REVISION, "siblings": []}
            if parts[4] == "tree":
                answer = [{"type": "file", "oid": "b" * 40, "path": n, "size": len(FILES[n])} for n in FILES]
            self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        elif parts[:3] == ["org", "tiny", "resolve"] and parts[4] in FILES:
            self.requested.add(parts[4])
            self.answer(200, FILES[parts[4]], {"ETag": f'"{parts[4]}"', "X-Repo-Commit": REVISION})
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


@pytest.fixture
def hub():
    Hub.requested = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def load(name, endpoint, cache):
    code = (
        "import sys; from nnx_gpt2 import GPT2\n"
        "try: print(GPT2.from_pretrained(sys.argv[1]).config)\n"
        "except ValueError as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code, name], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_a_model_is_downloaded_by_name_without_its_pickles(hub, tmp_path):
    assert load("org/tiny", hub, tmp_path).startswith("GPT2Config(vocab_size=")
    assert Hub.requested == {"config.json", "model.safetensors"}


def test_an_unknown_name_is_rejected(hub, tmp_path):
    expected = "path or name must be a folder, or a repository on the hub that can be reached, got org/none"
    assert load("org/none", hub, tmp_path).startswith(expected)
