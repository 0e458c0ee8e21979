"""Imports between the package's modules, read from their source."""

import ast
from pathlib import Path

import nnx_gpt2

SOURCES = {path.stem: ast.parse(path.read_text()) for path in Path(nnx_gpt2.__file__).parent.glob("_*.py")}


def imported_siblings(tree):
    """Return the modules of the package that the code imports, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = "nnx_gpt2" if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {module for module in SOURCES if f"nnx_gpt2.{module}" in names}


def test_no_module_imports_a_sibling_inside_a_function():
    late = {
        (module, function.name)
        for module, tree in SOURCES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and imported_siblings(function)
    }
    assert not late
