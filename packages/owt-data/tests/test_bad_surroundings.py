"""Machines that get in a command's way: permissions, storage, Ray and output streams. One sentence, no traceback."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from owt_data import PrepareOptions, prepare

COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
OPTIONS = PrepareOptions(tokenizer="bytes")
CLOSED = "http://127.0.0.1:9"
BYTES = ("--tokenizer", "bytes", "--num-processes", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder of a command, with a book and its token files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 20)
    prepare("book.txt", "out", OPTIONS)
    return tmp_path


def run(*arguments, before=(), environment=None, **options):
    """`owt-data` with these arguments, as a process of its own."""
    command = [*before, sys.executable, "-c", COMMAND, *map(str, arguments)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, env=environment or os.environ, text=True, check=False, timeout=300, **given)


UNREADABLE = {
    "a source folder": ("closed", ("prepare", "closed", "new", *BYTES)),
    "a file in a closed folder": ("closed", ("prepare", "closed/a.txt", "new", *BYTES)),
    "a source file": ("closed.txt", ("prepare", "closed.txt", "new", *BYTES)),
    "the folder to write into": ("closed", ("prepare", "book.txt", "closed/new", *BYTES)),
    "a prepared folder": ("closed", ("verify", "closed")),
    "a folder to inspect": ("closed", ("inspect", "closed", *BYTES[:2])),
    "a token file to verify": ("a/val.bin", ("verify", "a")),
    "a token file to inspect": ("a/val.bin", ("inspect", "a", *BYTES[:2])),
    "a manifest to verify": ("b/manifest.json", ("verify", "b")),
    "a manifest to compare": ("b/manifest.json", ("prepare", "book.txt", "b", *BYTES)),
}

RUN_ALL = """
import contextlib, io, json, sys
from owt_data._cli import main
answers = {}
for name, (_, arguments) in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    answers[name] = code, err.getvalue()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code and stderr for each case of `UNREADABLE`, from a process without the superuser's rights."""
    before = ()
    if os.geteuid() == 0:
        before = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
        if shutil.which("setpriv") is None or subprocess.run([*before, "true"], check=False).returncode:
            pytest.skip("needs setpriv, as the superuser may read everything")
    folder = tmp_path_factory.mktemp("unreadable")
    (folder / "book.txt").write_text("It was a bright cold day in April. " * 20)
    (folder / "closed").mkdir()
    for name in ("closed/a.txt", "closed.txt"):
        (folder / name).write_text("a text")
    for name in ("a", "b"):
        prepare(str(folder / "book.txt"), folder / name, OPTIONS)
    closed = [folder / name for name in dict.fromkeys(name for name, _ in UNREADABLE.values())]
    for path in closed:
        path.chmod(0)
    command = [*before, sys.executable, "-c", RUN_ALL, json.dumps(UNREADABLE)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    for path in closed:
        path.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert not (folder / "new").exists()
    assert not list(folder.rglob("*.partial"))
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_may_not_be_read_is_named(case, answers):
    code, err = answers[case]
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert UNREADABLE[case][0] in err
    assert "Permission denied" in err


@pytest.mark.fault
def test_storage_that_does_not_answer_is_reported_within_half_a_minute(tmp_path, record_property):
    record_property("fault", "no network and no credentials for s3://... and gs://...")
    record_property("lost", "nothing")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "GOOGLE_", "GCE_"))},
        "HOME": str(tmp_path),
        "AWS_ENDPOINT_URL": CLOSED,
        "AWS_EC2_METADATA_DISABLED": "true",
        "GCE_METADATA_HOST": CLOSED.partition("//")[2],
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": CLOSED,
    }
    began = time.monotonic()
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", COMMAND, "verify", name], env=environment, stderr=subprocess.PIPE, text=True
        )
        for name in ("s3://bucket/folder", "gs://bucket/folder")
    }
    for name, process in started.items():
        _, err = process.communicate()
        assert process.returncode == 2
        assert err.startswith(f"error: {name} must be readable, got ")
        assert err.count("\n") == 1
    assert time.monotonic() - began < 30


def test_token_files_of_gpt2_are_opened_without_the_tokenizer_and_not_shown(folder, no_ranks):
    np.arange(50_257, dtype="<u2").tofile("gpt2.bin")
    code = "from owt_data import open_tokens; print(open_tokens('gpt2.bin', tokenizer='gpt2').vocab_size)"
    done = subprocess.run([sys.executable, "-c", code], env=no_ranks, capture_output=True, text=True, check=False)
    assert done.stdout == "50257\n", done.stderr
    done = run("inspect", "gpt2.bin", environment=no_ranks)
    assert done.returncode == 2
    assert "set TIKTOKEN_CACHE_DIR to a folder that has them, or prepare text with the tokenizer" in done.stderr
    assert done.stderr.count("\n") == 1


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}


def test_names_that_the_terminal_cannot_show_are_escaped(folder):
    (folder / "книга.txt").write_text("Был холодный ясный апрельский день. " * 20)
    for arguments, code in (
        (("prepare", "книга.txt", "том", *BYTES), 0),
        (("inspect", "том", "--window-tokens", "20"), 0),
        (("verify", "нет"), 2),
    ):
        done = run(*arguments, environment={**os.environ, **ASCII})
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert "\\u04" in done.stderr + done.stdout
        assert done.stderr.isascii()


def test_a_locale_that_cannot_hold_the_name_is_named(folder):
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (folder / "книга.txt").write_text("a text")
    done = run("prepare", "книга.txt", "out", *BYTES, environment=ascii_only)
    assert done.returncode == 2
    assert "must be UTF-8 text, got ascii of the locale. Set PYTHONUTF8=1, or LC_ALL." in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "help"])
def test_output_that_cannot_be_written_is_reported(command, folder):
    arguments = {"inspect": ("inspect", "out"), "help": ("prepare", "--help")}[command]
    with Path("/dev/full").open("w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "error: The output could not be written: No space left on device. Write it elsewhere.\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("inspect out >&-", 0),
        ("verify nowhere 2>&-", 2),
        ("inspect out >&- 2>&-", 0),
        ("verify nowhere 2>/dev/full", 2),
    ],
)
def test_closed_streams_and_a_full_error_stream_keep_the_exit_code(arguments, code, folder):
    command = ["sh", "-c", f'exec "$@" {arguments}', "sh", sys.executable, "-c", COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
