"""Commands, Python and tables of the folder docs.

The commands run in the order of the page, with small sizes. A command that needs GPUs, TPUs or the network is parsed by
the application's own parser, and its batch is checked against its devices.
"""

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from support import COMMAND, ROOT

from pretrain import PretrainConfig
from pretrain._cli import main, parse_command
from pretrain._resolve.devices import check_batch
from ray_jax_launch import parse_hardware

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "examples" / "README.md"]
PAGE = (ROOT / "docs" / "from-the-tutorials.md").read_text()
ITEMS = (ROOT / "docs" / "tutorial-items.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SECTION_OPTION = r"--(?:prepare|model|train|optimizer|mesh)\.[a-z][\w-]*(?=[^\w.*-])"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
SCRIPTS = [block for language, block in BLOCKS if language == "python"]
TINY = [
    "--tokenizer=bytes", "--hardware=local", "--model.num-layers=1", "--model.num-heads=1", "--model.embed-dim=16",
    "--model.seq-len=32", "--model.dtype=float32", "--train.global-batch-size=4", "--train.max-steps=3",
    "--train.eval-tokens=128",
]  # fmt: skip


def test_the_page_of_rays_version_lists_what_is_replaced_in_ray():
    text = (ROOT / "docs" / "decisions" / "ray-version.md").read_text()
    rows = re.findall(r"^\|.*", text.partition("\n## What is replaced\n")[2].partition("\n## ")[0], re.M)
    listed = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", "".join(rows)))))
    package = ROOT / "packages" / "ray-jax-launch" / "src" / "ray_jax_launch"
    sources = [path.read_text() for path in package.rglob("*.py")]
    assert sorted(name for name in listed if not any(name in source for source in sources)) == []
    internals = "".join(path.read_text() for path in (package / "_ray_internals").iterdir() if path.suffix == ".py")
    imported = set(re.findall(r"\w+", " ".join(re.findall(r"^from ray\.\S+ import (.*)", internals, re.M))))
    assigned = re.findall(r"^ +(\w+)\.\w+ = ", internals, re.M)
    subclassed = re.findall(r"^class \w+\((\w+)\):", internals, re.M)
    names = {alias: name for name, alias in re.findall(r"import (\w+) as (\w+)", internals)}
    assert sorted({names.get(name, name) for name in {*assigned, *subclassed} & imported} - listed) == []


def application(command):
    """The extra of a command and the arguments of the application."""
    program, subcommand, *words = shlex.split(command)
    assert (program, subcommand) == ("uv", "run")
    extra = words.pop(0) and words.pop(0) if words[0] == "--extra" else None
    assert words.pop(0) == "apps/pretrain"
    return extra, words


def needs(command):
    """The reason why a command cannot run in a test, or None."""
    _, words = application(command)
    if any(word.startswith(("gpu", "tpu")) for word in words):
        return "accelerators"
    return "the network" if words[0].startswith("--preset") and "--data" not in words else None


RUN = [command for command in COMMANDS if needs(command) is None]
PARSED = [command for command in COMMANDS if needs(command) is not None]


@pytest.fixture(scope="module")
def results(environment, tmp_path_factory):
    """The finished process of each command and of each Python block that runs."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("train", "val"):
        np.random.default_rng(0).integers(0, 257, 4_000, np.uint16).tofile(folder / f"{name}.bin")
        row = " A line of the article . \n"
        (folder / f"wiki.{name.replace('val', 'valid')}.txt").write_text(
            "".join(f" = {i} = \n{row * 9}" for i in range(40))
        )
    processes = {}
    for text in [*RUN, *SCRIPTS]:
        if text in SCRIPTS:
            command = [sys.executable, "-c", text]
        else:
            _, words = application(text)
            # The small sizes would be part of the default name, by which later commands of the page find the run.
            name = "tutorial-data" if "tutorial" in words else "wikitext-wiki"
            command = [*COMMAND, *words, *([*TINY, f"--name={name}"] if words[0].startswith("-") else [])]
        processes[text] = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_page_runs(results, command):
    assert results[command].returncode == 0, results[command].stderr
    assert results[command].stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.splitlines()[0])
def test_a_python_block_of_the_page_runs(results, script):
    assert results[script].returncode == 0, results[script].stderr
    assert results[script].stdout


@pytest.mark.parametrize("command", PARSED, ids=lambda command: f"{command} ({needs(command)})")
def test_the_application_accepts_a_command_that_needs_more_than_a_test_has(command):
    extra, words = application(command)
    assert extra is None or extra in EXTRAS
    config = parse_command(words)
    assert isinstance(config, PretrainConfig)
    if config.hardware != "auto":
        check_batch(config, parse_hardware(config.hardware))


def test_the_options_of_the_tables_exist(capsys):
    assert main(["train", "--help-all"]) == 0
    known = set(re.findall(r"--[a-z][\w.-]*\w", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][\w-]*(?:\.[a-z][\w-]*)?(?=[^\w.*-])", PAGE + ITEMS))
    named |= {option for page in PAGES for option in re.findall(SECTION_OPTION, page.read_text())}
    named -= {"--extra", "--rows", "--shm-size", "--prompt"}  # of uv, of owt-data, of docker, of sample
    assert sorted(named - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_application_accepts_the_commands_of_a_page(page):
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.splitlines():
            typed = line.removeprefix("$ ").partition("  #")[0]
            needs_a_run = "--from" in typed or "--config runs/" in typed
            if typed.startswith("uv run ") and " apps/pretrain" in typed and not needs_a_run and "[" not in typed:
                extra, words = application(typed)
                assert extra is None or extra in EXTRAS
                parse_command(words)


def test_the_commands_about_a_sweep_name_its_runs(tmp_path, monkeypatch, capsys):
    """The first block of the page about experiments: its names and patterns are those of the runs that it trains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A line of the book.\n" * 1000)
    block = re.findall(r"^```\n(.*?)^```", (ROOT / "docs" / "experiments.md").read_text(), re.M | re.S)[0]
    sweep, *others = (application(line)[1] for line in block.splitlines() if line.startswith("uv run "))
    assert main([*sweep, "--dry-run"]) == 0
    runs = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    named = [word.partition("@")[0] for words in others for word in words if word.startswith("baby-book-")]
    assert len(named) == 5
    assert [name for name in named if not fnmatch.filter(runs, name)] == []
    assert "--anneal" not in block or "--optimizer.schedule" in sweep  # a cosine has no step before its decay


def test_the_table_of_items_is_numbered_and_complete():
    rows = re.findall(r"^\| (\d+) \| ([JTG]) [^|]+ \| [^|]+ \| ([ypn]) \| [^|]+ \|$", ITEMS, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 129))
    counts = {answer: sum(row[2] == answer for row in rows) for answer in "ypn"}
    assert f"{counts['y']} are here (y), {counts['p']} partly (p), {counts['n']} not (n)" in ITEMS
