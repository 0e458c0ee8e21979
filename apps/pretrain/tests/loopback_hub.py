"""A server with the hub's protocol for uploads, on loopback: repositories of one user, in memory."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret"
OWNER = "someone"


class Repository:
    """A repository: its files by name, and the names that each of its commits has added and deleted."""

    def __init__(self, *, is_private: bool) -> None:
        self.is_private = is_private
        self.files: dict[str, bytes] = {}
        self.commits: list[dict[str, list[str]]] = []

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class LoopbackHub:
    """The server. Use it in a `with` block.

    Large files go to an address of their own, by the protocol of git LFS, and get into a repository by a commit.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.rejects_objects = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_POST = do_PUT = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if request.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(_chunks(request))
        parts = request.path.split("?")[0].strip("/").split("/")
        if parts[0] != "objects" and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, answer = 401, {"error": "Invalid username or password."}
        else:
            status, answer = self._route(parts, body)
        text = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)

    def _route(self, parts: list[str], body: bytes) -> tuple[int, Any]:
        match parts:
            case ["api", "validate-yaml"]:
                is_card = json.loads(body)["content"].startswith("---\n")
                return (
                    (200, {"errors": [], "warnings": []}) if is_card else (400, {"errors": [{"message": "no header"}]})
                )
            case ["api", "repos", "create"]:
                return self._create(json.loads(body))
            case ["objects", oid]:
                if self.rejects_objects:
                    return 403, {}
                assert hashlib.sha256(body).hexdigest() == oid
                self.objects[oid] = body
                return 200, {}
            case ["api", "models", owner, name, *rest] if repository := self.repositories.get(f"{owner}/{name}"):
                return self._of_repository(f"{owner}/{name}", repository, rest, body)
            case [owner, name, "info", "lfs", "objects", "batch"] if f"{owner}/{name.removesuffix('.git')}" in (
                self.repositories
            ):
                return 200, {
                    "transfer": "basic",
                    "objects": [self._upload_action(o) for o in json.loads(body)["objects"]],
                }
        return 404, {"error": "Repository not found"}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        if wanted["organization"] != OWNER:
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        name = f"{OWNER}/{wanted['name']}"
        url = {"url": f"{self.endpoint}/{name}"}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", **url}
        is_private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.repositories[name] = Repository(is_private=is_private)
        return 200, url

    def _of_repository(self, name: str, repository: Repository, parts: list[str], body: bytes) -> tuple[int, Any]:
        match parts:
            case [] | ["revision", _]:
                return 200, {"_id": "0" * 24, "id": name, "sha": repository.sha, "siblings": []}
            case ["tree", _]:
                return 200, [
                    {"type": "file", "oid": _git_oid(content), "path": path, "size": len(content)}
                    for path, content in repository.files.items()
                ]
            case ["preupload", _]:
                return 200, {"files": [self._upload_mode(repository, file) for file in json.loads(body)["files"]]}
            case ["commit", _]:
                commit: dict[str, list[str]] = {"added": [], "deleted": []}
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "deletedFile":
                        del repository.files[value["path"]]
                        commit["deleted"].append(value["path"])
                    elif line["key"] in ("file", "lfsFile"):
                        is_large = line["key"] == "lfsFile"
                        content = self.objects[value["oid"]] if is_large else base64.b64decode(value["content"])
                        repository.files[value["path"]] = content
                        commit["added"].append(value["path"])
                repository.commits.append(commit)
                url = f"{self.endpoint}/{name}/commit/{repository.sha}"
                return 200, {"success": True, "commitOid": repository.sha, "commitUrl": url}
        return 404, {"error": "Entry not found"}

    def _upload_mode(self, repository: Repository, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith(".safetensors")
        mode = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
        if (content := repository.files.get(file["path"])) is not None:
            mode["oid"] = hashlib.sha256(content).hexdigest() if is_large else _git_oid(content)
        return mode

    def _upload_action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        found = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] not in self.objects:
            found["actions"] = {"upload": {"href": f"{self.endpoint}/objects/{wanted['oid']}"}}
        return found


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _chunks(request: BaseHTTPRequestHandler) -> list[bytes]:
    chunks = []
    while size := int(request.rfile.readline(), 16):
        chunks.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return chunks
