"""The layout of the source trees: names and import cycles."""

import ast
from graphlib import TopologicalSorter

import pytest
from support import MEMBERS

# Names with one meaning in every package.
COMMON = {"__init__", "__main__", "cli", "errors"}
SOURCES = {name: next((folder / "src").iterdir()) for name, folder in MEMBERS.items()}


def modules(name):
    """The source files of a member by their dotted names."""
    source = SOURCES[name]
    files = {path: path.relative_to(source.parent).with_suffix("").parts for path in source.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in files.items()}


def imported(path):
    """The names of all modules that a file imports, at the top and inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_two_packages_have_a_module_of_one_name():
    owners = {}
    for name in MEMBERS:
        for path in modules(name).values():
            owners.setdefault(path.stem if path.stem.startswith("__") else path.stem.strip("_"), set()).add(name)
    assert {stem for stem, names in owners.items() if len(names) > 1} <= COMMON


@pytest.mark.parametrize("name", MEMBERS)
def test_imports_have_no_cycle(name):
    found = modules(name)
    root = SOURCES[name].name
    graph = {module: (imported(path) & found.keys()) - {module, root} for module, path in found.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError
