"""Ray's private modules are used in one folder."""

import ast
from pathlib import Path

import pytest

import ray_jax_launch

SOURCES = Path(ray_jax_launch.__file__).parent


def private_names_of_ray(source):
    """The private modules and names of Ray that a source text uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in names if name.startswith("ray.") and "._" in name)


@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.worker",
        "from ray.train.v2._internal import exceptions",
        "from ray.train.v2.jax.config import _JaxBackend",
        "import ray\nray._private.state",
    ],
)
def test_private_use_is_found(source):
    assert [*private_names_of_ray(source)]


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_only_ray_internals_uses_private_modules_of_ray(path):
    assert bool([*private_names_of_ray(path.read_text())]) == (
        path.parent.name == "_ray_internals" and path.name != "__init__.py"
    )
