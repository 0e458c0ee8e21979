"""The code in the READMEs runs, as it stands there, in a fresh interpreter in an empty folder."""

import re
import subprocess
import sys

import pytest
from support import ROOT

# That of nnx-gpt2 runs from its wheel: `nox -s build`. That of ray-jax-launch is among its own tests, which run where
# nothing else is installed.
READMES = ["packages/owt-data"]


@pytest.mark.parametrize("folder", READMES)
def test_python_examples_run(folder, tmp_path, environment):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / folder / "README.md").read_text(), re.S)
    assert blocks
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_readme_names_the_commands():
    readme = (ROOT / "README.md").read_text()
    for command in ("pip install uv", "uv run apps/pretrain", "uv run nox -s tests"):
        assert command in readme


def test_links_between_files_lead_somewhere():
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "deploy" / "README.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("apps/*/README.md"),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path}: {target}"
