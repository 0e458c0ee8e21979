"""Public names: all of them load, and the package itself is light to import."""

import os
import subprocess
import sys

import pytest

import ray_jax_launch


def test_public_names_load_and_are_seen_by_completion():
    assert "launch" in dir(ray_jax_launch)
    for name in dir(ray_jax_launch):
        assert getattr(ray_jax_launch, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(ray_jax_launch, "Nothing")


def test_the_package_imports_neither_jax_nor_ray_nor_orbax():
    code = "import sys, ray_jax_launch; sys.exit(bool({'jax', 'ray', 'orbax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_session_of_a_worker_imports_neither_ray_nor_jax():
    """Checkpoints ask for it, also in a program that only evaluates."""
    code = "import sys, ray_jax_launch._control.session; sys.exit(bool({'jax', 'ray', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_control_actor_imports_little():
    """Each launch starts a process for it, and imports of a second would be CPU time of each start."""
    heavy = {"jax", "orbax", "pandas", "pyarrow", "ray.data", "ray.train"}
    code = f"import sys, ray_jax_launch._control.control_actor; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("given", "found"), [(None, "False 0"), ("1", "True 1")])
def test_ray_does_not_run_uv_again_in_the_workers_also_if_it_is_imported_first(given, found):
    code = (
        "import os, ray, ray_jax_launch; from ray._private import ray_constants\n"
        "print(ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV, os.environ['RAY_ENABLE_UV_RUN_RUNTIME_ENV'])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"}
    if given is not None:
        variables["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = given
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
