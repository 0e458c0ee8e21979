"""Environment variables that a run cannot work with, and those that it takes from JAX."""

import pytest

from pretrain._errors import UsageError
from pretrain._surroundings.environment import check_ray_variables, is_on

SECONDS = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("True", True), ("yes", True), ("on", True), ("0", False), ("false", False), ("", False)],
)
def test_a_variable_is_on_as_jax_reads_it(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", value)
    assert is_on("JAX_ENABLE_X64") is expected
    monkeypatch.delenv("JAX_ENABLE_X64")
    assert not is_on("JAX_ENABLE_X64")


@pytest.mark.parametrize(
    ("name", "value"),
    [(SECONDS, "0"), (SECONDS, "inf"), (SECONDS, ""), ("RAY_TRAIN_V2_ENABLED", "False"), ("RAY_TRAIN_V2_ENABLED", "0")],
)
def test_a_variable_of_ray_that_ends_a_run_is_rejected(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} must be"):
        check_ray_variables()


@pytest.mark.parametrize(
    ("name", "value"), [(SECONDS, "0.5"), ("RAY_TRAIN_V2_ENABLED", "1"), ("RAY_TRAIN_NAME", "x"), ("RAY_OTHER_S", "x")]
)
def test_other_variables_of_ray_are_accepted(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    check_ray_variables()
