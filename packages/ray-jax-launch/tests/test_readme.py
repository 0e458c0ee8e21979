"""The example of the README runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    script = tmp_path / "example.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.S)))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("{'step': 10, 'loss': ")
    assert lines[-1].startswith("{'processes': 2, 'w': [1.0, -2.0, 3.0]}")
