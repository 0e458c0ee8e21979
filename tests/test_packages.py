"""Versions, changelogs and required files of each member."""

import re
import tomllib
from importlib.metadata import version

import pytest
from support import MEMBERS


def project(name):
    return tomllib.loads((MEMBERS[name] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", MEMBERS)
def test_the_installed_version_is_the_declared_version(name):
    assert version(name) == project(name)["version"]


@pytest.mark.parametrize("name", MEMBERS)
def test_the_changelog_has_the_version_with_a_date(name):
    declared = project(name)["version"]
    assert re.search(
        rf"^## \[{re.escape(declared)}\] - \d{{4}}-\d\d-\d\d$", (MEMBERS[name] / "CHANGELOG.md").read_text(), re.M
    )


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_has_types(name):
    (source,) = (MEMBERS[name] / "src").iterdir()
    assert (source / "py.typed").exists()


@pytest.mark.parametrize("name", MEMBERS)
def test_the_readme_of_a_member_has_its_name_as_title(name):
    assert (MEMBERS[name] / "README.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("name", ["owt-data", "nnx-gpt2", "ray-jax-launch"])
def test_the_application_requires_the_current_minor_version(name):
    major, minor, _ = project(name)["version"].split(".")
    assert f"{name}>={major}.{minor},<{major}.{int(minor) + 1}" in project("pretrain")["dependencies"]
