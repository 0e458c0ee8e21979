"""Fixtures of all tests: each test has its own cache."""

import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_package

# Check the types of all calls in the package. Must precede its first import.
beartype_package("pretrain", conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Tests write nothing into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
