import subprocess
import sys

import ray_jax_launch


def test_public_names_load_and_are_seen_by_completion():
    assert "launch" in dir(ray_jax_launch)
    for name in dir(ray_jax_launch):
        assert getattr(ray_jax_launch, name) is not None


def test_unknown_names_are_refused():
    assert not hasattr(ray_jax_launch, "Nothing")


def test_importing_it_imports_nothing_heavy():
    code = "import sys, ray_jax_launch; sys.exit(bool({'jax', 'ray', 'orbax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
