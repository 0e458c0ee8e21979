"""Environment variables that a run cannot work with, and those that it takes from JAX."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from pretrain._errors import UsageError
from pretrain._surroundings import environment
from pretrain._surroundings.environment import check_ray_variables, check_variables, is_on

CHECK = "from pretrain._surroundings.environment import check_variables; check_variables()"
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


@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_only_a_python_that_drops_docstrings_is_rejected(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = subprocess.run([sys.executable, option, "-c", CHECK], capture_output=True, text=True, check=False)
    assert ("Python must keep docstrings" in done.stderr, done.returncode) == (
        (True, 1) if option == "-OO" else (False, 0)
    )


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [("XLA_FLAGS", "garbage", check_variables), ("RAY_memory_usage_threshold", "x", check_ray_variables)],
)
def test_a_check_that_takes_too_long_on_a_busy_machine_is_left_out(
    name: str, value: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_WITHIN_S", 0.001)
    check()
