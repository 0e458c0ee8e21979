"""Ray's private modules are used in one folder. Files that Ray's parts write there."""

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

import ray_jax_launch
from ray_jax_launch._ray_internals.ray_train import TrainController, write_file

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


def test_the_controller_has_the_variables_of_this_launch_in_a_process_with_those_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, found = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", list[Any]()
    monkeypatch.setenv(name, "60")
    of_ray = f"{TrainController.__module__}.RayTrainController.__init__"
    monkeypatch.setattr(of_ray, lambda _, **options: found.append((os.environ[name], options)))
    TrainController({name: "7"}, callbacks=[])
    assert found == [("7", {"callbacks": []})]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_reader_sees_the_old_file_or_the_new_one_complete(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "list.json"
    path.touch()
    filesystem, name = [
        (LocalFileSystem(), str(path)),
        (SubTreeFileSystem(str(tmp_path), LocalFileSystem()), path.name),
        (SubTreeFileSystem(tmp_path.name, SubTreeFileSystem(str(tmp_path.parent), LocalFileSystem())), path.name),
    ][depth]
    for text in ("first", "a longer second", "3rd \u00e9"):
        before = path.read_text()
        with path.open() as reader:
            write_file(filesystem, name, text)
            assert reader.read() == before
        assert path.read_text() == text
        assert [*tmp_path.iterdir()] == [path]


def test_a_file_whose_write_fails_is_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    write_file(LocalFileSystem(), str(path), "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(LocalFileSystem(), str(path), "half a character: \ud800")
    assert path.read_text() == "old"
