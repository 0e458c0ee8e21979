"""Versions, changelogs and files of every member."""

import re
import tomllib
from importlib.metadata import version

import pytest
from support import MEMBERS


def project(name):
    return tomllib.loads((MEMBERS[name] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", MEMBERS)
def test_the_changelog_has_the_version(name):
    declared = project(name)["version"]
    assert version(name) == declared
    assert re.search(
        rf"^## \[{re.escape(declared)}\] - \d{{4}}-\d\d-\d\d$", (MEMBERS[name] / "CHANGELOG.md").read_text(), re.M
    )


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_is_typed_and_documented(name):
    (source,) = (MEMBERS[name] / "src").iterdir()
    assert (source / "py.typed").exists()
    assert (MEMBERS[name] / "README.md").read_text().startswith(f"# {name}\n")


def test_the_application_takes_the_packages_by_range():
    declared = project("pretrain")["dependencies"]
    for name in ("owt-data", "nnx-gpt2", "ray-jax-launch"):
        major, minor, _ = project(name)["version"].split(".")
        assert f"{name}>={major}.{minor},<{major}.{int(minor) + 1}" in declared
