"""Examples, commands and links in the READMEs. Examples run in a fresh interpreter in an empty folder."""

import re
import subprocess
import sys

import pytest
from support import ROOT

# `nox -s build` runs the README of nnx-gpt2 from its wheel. The tests of ray-jax-launch run its README in its own
# environment.
EXAMPLES = [".", pytest.param("packages/owt-data", marks=pytest.mark.slow)]
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT", "MAINTAINERS")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "deploy" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples" / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("apps/*/README.md")),
]


@pytest.mark.parametrize("folder", EXAMPLES)
def test_python_examples_of_a_readme_run(folder, tmp_path, environment):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / folder / "README.md").read_text(), re.S)
    assert blocks
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", ["pip install uv", "uv run apps/pretrain", "uv run nox -s tests"])
def test_the_readme_names_the_commands(command):
    assert command in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_exist(document):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_readme_of_the_benchmarks_has_the_table_of_their_results():
    script = ROOT / "benchmarks" / "bench.py"
    command = [sys.executable, str(script), "--table", str(ROOT / "benchmarks" / "results")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.strip() in (ROOT / "benchmarks" / "README.md").read_text()
