"""Checks of Python, its packages, uv's environment, and variables of the libraries."""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from pretrain._doctor.finding import Finding, fail, ok, warn
from pretrain._errors import UsageError
from pretrain._surroundings.child import ChildError, run_program
from pretrain._surroundings.environment import check_ray_variables, check_variables

_UV_HOOK = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_WITHIN_S = 10.0


def check_python() -> list[Finding]:
    """Check that this Python is the one of the active environment, and that nothing hides its packages."""
    name, found = "python", f"Python {platform.python_version()} in {sys.prefix}"
    active = os.environ.get("VIRTUAL_ENV")
    if active and Path(active).resolve() != Path(sys.prefix).resolve():
        remedy = "Run `deactivate`: what you install goes into the other one."
        return [warn(name, f"{found}, but VIRTUAL_ENV is {active}", remedy)]
    if paths := os.environ.get("PYTHONPATH"):
        return [warn(name, f"{found}, but PYTHONPATH is {paths}", "Unset it: modules there hide those installed.")]
    return [ok(name, found)]


def check_packages() -> list[Finding]:
    """Check by uv that the packages fit each other, and that the lock of this environment's project is up to date."""
    name, uv = "packages", os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        return [warn(name, "not checked: there is no uv", "Run `pip install uv`.")]
    try:
        run_program([uv, "pip", "check", "--offline", "--python", sys.executable], within_s=_WITHIN_S)
    except ChildError as error:
        return [fail(name, f"they do not fit each other: {error}", "Run `uv sync`, with your --extra.")]
    project = Path(sys.prefix).parent
    if (project / "uv.lock").exists():
        try:
            run_program([uv, "lock", "--check", "--offline", "--project", str(project)], within_s=_WITHIN_S)
        except ChildError as error:
            return [warn(name, f"uv.lock is not that of pyproject.toml: {error}", "Run `uv sync`, with your --extra.")]
    return [ok(name, "they fit each other" + (", and the lock" if (project / "uv.lock").exists() else ""))]


def check_settings() -> list[Finding]:
    """Check the environment variables of JAX, XLA and Ray."""
    name = "settings"
    checks: tuple[Callable[[], None], ...] = (check_ray_variables, check_variables)
    for check in checks:
        try:
            check()
        except UsageError as error:
            return [fail(name, str(error), "Unset the variable.")]
    hook = os.environ.get(_UV_HOOK, "0")
    if hook.lower() not in ("0", "false") and "UV_RUN_RECURSION_DEPTH" in os.environ:
        found = f"{_UV_HOOK}={hook}: Ray starts `uv run` for each worker, and may copy the working folder"
        return [warn(name, found, f"Unset {_UV_HOOK}.")]
    given = sorted(
        name for name in os.environ if name.startswith(("JAX_", "XLA_", "RAY_", "NCCL_")) and name != _UV_HOOK
    )
    return [ok(name, f"set: {', '.join(given)}" if given else "no variable of JAX, XLA, Ray or NCCL is set")]
