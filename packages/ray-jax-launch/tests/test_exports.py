import subprocess
import sys

import ray_jax_launch


def test_public_names_are_sorted_and_load():
    assert ray_jax_launch.__all__ == sorted(
        ray_jax_launch.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    for name in ray_jax_launch.__all__:
        assert getattr(ray_jax_launch, name) is not None
    assert set(ray_jax_launch._MODULE_OF) <= set(ray_jax_launch.__all__)


def test_unknown_names_are_refused():
    assert not hasattr(ray_jax_launch, "Nothing")


def test_importing_it_imports_nothing_heavy():
    code = "import sys, ray_jax_launch; sys.exit(bool({'jax', 'ray', 'orbax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
