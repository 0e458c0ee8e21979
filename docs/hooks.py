"""Parts of the documentation that come from the code: help pages, public names, tables of modules, and links."""

import ast
import os
import posixpath
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = {
    "owt-data": ROOT / "packages/owt-data/src/owt_data",
    "nnx-gpt2": ROOT / "packages/nnx-gpt2/src/nnx_gpt2",
    "ray-jax-launch": ROOT / "packages/ray-jax-launch/src/ray_jax_launch",
    "pretrain": ROOT / "apps/pretrain/src/pretrain",
}


def on_config(config: Any) -> Any:
    """Set the address of the repository, which `pyproject.toml` has, and the name of the link to it."""
    config.repo_url = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["release"]["repository"]
    config.repo_name = config.site_name
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links out of docs, and comments such as `modules: PACKAGE`, `names: PACKAGE`, `drawing: NAME`."""
    markdown = re.sub(r"<!-- modules: ([\w-]+) -->", lambda match: module_table(match[1]), markdown)
    markdown = re.sub(r"<!-- names: ([\w-]+) -->", lambda match: public_names(match[1]), markdown)
    markdown = re.sub(r"<!-- help: (.+?) -->", lambda match: help_page(match[1].split()), markdown)
    markdown = re.sub(r"<!-- table: (\S+) (.+?) -->", lambda match: readme_table(match[1], match[2]), markdown)
    markdown = re.sub(r"<!-- drawing: ([\w-]+) -->", lambda match: drawing(match[1]), markdown)
    folder = posixpath.dirname(page.file.src_uri)
    return re.sub(r"(?<=\]\()\.\./[^)#\s]+", lambda match: repository_link(match[0], folder, config), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep `--` and the word after it in one line, and break long sentences and commands in blocks of plain text."""
    html = re.sub(r"(?<!</span>)<code>[^<]*</code>", keep_dashes, html)
    return re.sub(r"<pre><span></span><code>[^<]*", wrap_lines, html)


def keep_dashes(match: re.Match[str]) -> str:
    """Return a piece of code in which a browser does not break an option after its dashes."""
    return re.sub(r"--\w[\w.]*", r'<span style="white-space: nowrap">\g<0></span>', match[0])


def wrap_lines(match: re.Match[str]) -> str:
    """Return a block that breaks its lines if it has commands, or a line longer than any of our drawings and tables.

    Commands with comments at their ends are a table.
    """
    text = match[0].rpartition(">")[2]
    breaks = "  # " not in text and any(one.startswith("uv run ") or len(one) > 120 for one in text.splitlines())
    return match[0].replace("<pre", '<pre style="white-space: pre-wrap"') if breaks else match[0]


def module_table(package: str) -> str:
    """Return a table of the modules of a package, each with the first sentence of its docstring."""
    source = SOURCES[package]
    rows = ["| module | content |", "|---|---|"]
    for path in sorted(source.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        if path.stem != "__init__":
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            rows.append(f"| `{path.relative_to(source)}` | {' '.join(docstring.split(chr(10) * 2)[0].split())} |")
    return "\n".join(rows)


def public_names(package: str) -> str:
    """Return the directives of mkdocstrings for the public names of a package, in alphabetic order."""
    source = SOURCES[package]
    stub = source / "__init__.pyi"
    tree = ast.parse((stub if stub.exists() else source / "__init__.py").read_text())
    places = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("_", f"{source.name}.")):
            module = f"{source.name}.{(node.module or '').removeprefix(source.name + '.')}"
            places |= {alias.name: f"{module}.{alias.name}" for alias in node.names}
    return "\n\n".join(f"::: {places[name]}" for name in sorted(places, key=str.lower))


def help_page(command: list[str]) -> str:
    """Return the help of a command as wide as a block of code on a laptop's screen, by the name that users type."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    page = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=True
    ).stdout
    module = command[0]
    page = page.replace(f"python -m {module}", module.replace("_", "-"))
    return f"```text\n{page.rstrip()}\n```"


def readme_table(path: str, heading: str) -> str:
    """Return the table below a heading of a README, which the site has no page of."""
    section = (ROOT / path).read_text().split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


def drawing(name: str) -> str:
    """Return a drawing of the folder assets, in the page itself: its lines have the color of the page's text."""
    svg = (ROOT / "docs/assets" / f"{name}.svg").read_text()
    return f'<div style="overflow-x: auto">\n{svg.rstrip()}\n</div>'


def repository_link(link: str, folder: str, config: Any) -> str:
    """Return the address of a file of the repository that is no page of the site; keep other links.

    Raises:
        FileNotFoundError: there is no such file.
    """
    target = posixpath.normpath(posixpath.join("docs", folder, link))
    if target.startswith("docs/") and not target.endswith(".py"):  # the site has no `.py` files
        return link
    if not (ROOT / target).exists():
        raise FileNotFoundError(f"{config['docs_dir']}/{folder} links to {link}, which does not exist")
    return f"{config.repo_url}/blob/main/{target}"
