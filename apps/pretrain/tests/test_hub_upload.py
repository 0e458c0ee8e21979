"""Uploads by the hub's own client, to a server with the hub's protocol on loopback."""

import contextlib
import os
import re
import subprocess
import sys

import pytest
from loopback_hub import OWNER, TOKEN, LoopbackHub

from pretrain._errors import UsageError
from pretrain._export.hub_upload import check_repository, upload

# The client passes bytes to its library in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")

NAME = f"{OWNER}/tiny"
# The client reads `HF_ENDPOINT` when it is imported.
CLOSED = """
import sys
from pathlib import Path
from pretrain._export.hub_upload import upload
try:
    upload(Path(sys.argv[1]), "someone/tiny", message="a model")
except ValueError as error:
    print(error)
"""


def result(call, *arguments, **options):
    """Return the result of a call, or its error."""
    try:
        return call(*arguments, **options)
    except UsageError as error:
        return str(error)


@pytest.fixture(scope="module")
def open_hub():
    """A function that starts a hub, which the client of this process then uses."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", TOKEN)

        def start():
            hub = stack.enter_context(LoopbackHub())
            patch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
            return hub

        yield start


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """An export of one file of weights, and one of two files."""
    folders = []
    for number, names in enumerate((["model.safetensors"], ["model-1-of-2.safetensors", "model-2-of-2.safetensors"])):
        folder = tmp_path_factory.mktemp("export")
        for name in names:
            (folder / name).write_bytes(bytes([number]) * 1000 + name.encode())
        (folder / "config.json").write_text("{}")
        (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n\n# {number}\n")
        folders.append(folder)
    (folders[1] / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return folders


@pytest.fixture(scope="module")
def uploaded(open_hub, exports):
    """A hub, after the uploads of one export, of the same again, of the other, and of the first again."""
    one, other = exports
    hub = open_hub()
    return hub, [upload(folder, NAME, message="a model") for folder in (one, one, other, one)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_is_one_commit_in_a_private_repository(uploaded, exports):
    hub, addresses = uploaded
    repository = hub.repositories[NAME]
    assert repository.is_private
    assert sorted(repository.commits[0]["added"]) == ["README.md", "config.json", "model.safetensors"]
    assert repository.files == contents(exports[0])
    assert addresses[0].startswith(f"{hub.endpoint}/{NAME}/commit/")


def test_the_same_files_again_are_no_commit(uploaded):
    hub, addresses = uploaded
    assert addresses[0] == addresses[1]
    assert len(hub.repositories[NAME].commits) == 3


def test_weights_of_an_earlier_export_are_deleted(uploaded, exports):
    """Readers take `model.safetensors` before the index, or the index before `model.safetensors`."""
    one, other = (contents(folder).keys() for folder in exports)
    commits = uploaded[0].repositories[NAME].commits
    assert commits[1]["deleted"] == ["model.safetensors"]
    assert sorted(commits[2]["deleted"]) == sorted(other - one)


@pytest.mark.fault
def test_an_upload_that_fails_changes_no_repository(open_hub, exports, record_property):
    record_property("fault", "a hub that rejects the weights of an upload")
    record_property("lost", "nothing: the repository is as it was, and the same command uploads the export")
    one, other = exports
    hub = open_hub()
    upload(one, NAME, message="a model")
    hub.rejects_objects = True
    with pytest.raises(UsageError, match=f"{other} is complete, but its upload to {NAME} failed: .* The same command"):
        upload(other, NAME, message="another")
    assert hub.repositories[NAME].files == contents(one)
    hub.rejects_objects = False
    upload(other, NAME, message="another")
    assert hub.repositories[NAME].files == contents(other)


def test_what_the_hub_rejects_is_one_sentence(open_hub, exports, monkeypatch):
    open_hub()
    sentence = result(upload, exports[0], "other/tiny", message="a model")
    assert "its upload to other/tiny failed: " in sentence
    assert "rights to create a model under this namespace" in sentence
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    sentence = result(upload, exports[0], NAME, message="a model")
    assert f"its upload to {NAME} failed: " in sentence
    assert "hf_wrong" not in sentence


def test_a_hub_that_is_out_of_reach_is_one_sentence(exports, tmp_path):
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CLOSED, str(exports[0])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    failed = f"{exports[0]} is complete, but its upload to {NAME} failed"
    assert re.fullmatch(rf"{failed}: \[Errno \d+\] [^;]+\. The same command uploads it\.", done.stdout.strip())


def test_a_name_and_a_token_are_checked_first(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_repository(NAME)
    for name in ("tiny", "a/b/c", "a/b c", ""):
        with pytest.raises(UsageError, match="--push-to must be OWNER/NAME of a repository on the hub, got "):
            check_repository(name)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UsageError, match=r"needs a token of the hub, got none\. Set HF_TOKEN, or run: hf auth login"):
        check_repository(NAME)
