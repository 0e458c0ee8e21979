"""Checks of the NVIDIA driver, and of the devices that jax finds."""

import os
import shutil
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrain._doctor.finding import Finding, fail, ok, warn
from pretrain._surroundings.child import ChildError, call_in_child, run_program
from pretrain._surroundings.environment import start_jax
from ray_jax_launch import Hardware

# The oldest drivers that jax's CUDA 12 and 13 work with, and the oldest GPUs by their compute capability:
# https://docs.jax.dev/en/latest/installation.html, "pip installation: NVIDIA GPU (CUDA)".
_OLDEST_DRIVER = {12: 525, 13: 580}
_OLDEST_GPU = {12: 5.2, 13: 7.5}
_QUERY = ("--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
_DRIVER_WITHIN_S, _JAX_WITHIN_S = 20.0, 60.0


def check_driver(hardware: Hardware | None) -> list[Finding]:
    """Check that the NVIDIA driver is new enough for the CUDA of jax.

    Args:
        hardware: to use on this machine; None for `auto`.
    """
    name, cuda = "driver", _cuda()
    needs_gpu = _is_here(hardware, "gpu")
    if shutil.which("nvidia-smi") is None:
        if needs_gpu:
            return [fail(name, "there is no nvidia-smi", "Install the NVIDIA driver, or choose other --hardware.")]
        return [ok(name, "no NVIDIA driver, and none needed")]
    try:
        lines = run_program(["nvidia-smi", *_QUERY], within_s=_DRIVER_WITHIN_S).strip().splitlines()
        gpus = [[field.strip() for field in line.rsplit(",", 2)] for line in lines]
        driver, oldest = int(gpus[0][1].split(".")[0]), min(float(gpu[2]) for gpu in gpus)
    except (ChildError, ValueError, IndexError) as error:
        reason = str(error) if isinstance(error, ChildError) else "its output is not that of a driver"
        found, remedy = f"nvidia-smi fails: {reason}", "Restart the machine, or install the driver again."
        return [fail(name, found, remedy) if needs_gpu or cuda else warn(name, found, remedy)]
    kinds = Counter(gpu[0] for gpu in gpus)
    found = f"{' and '.join(f'{number} x {kind}' for kind, number in kinds.items())}, driver {gpus[0][1]}"
    if cuda is None:
        fitting = [
            number for number, least in _OLDEST_DRIVER.items() if driver >= least and oldest >= _OLDEST_GPU[number]
        ]
        remedy = f"Add --extra cuda{max(fitting)} after `uv run`." if fitting else "Install a newer driver."
        unused = f"{found}, which jax does not use: its CUDA is not installed"
        return [fail(name, unused, remedy) if needs_gpu else warn(name, unused, remedy)]
    if (plugin := version(f"jax-cuda{cuda}-plugin")) != version("jaxlib"):
        remedy = f"Run `uv sync --extra cuda{cuda}`."
        return [fail(name, f"jax-cuda{cuda}-plugin is {plugin}, and jaxlib is {version('jaxlib')}", remedy)]
    if oldest < _OLDEST_GPU[cuda]:
        found += f", compute capability {oldest}{' of one' if len(kinds) > 1 else ''}"
        found += f", and CUDA {cuda} needs {_OLDEST_GPU[cuda]}"
        return [fail(name, found, "Use --extra cuda12." if oldest >= _OLDEST_GPU[12] else "Use newer GPUs.")]
    if driver < _OLDEST_DRIVER[cuda]:
        other = "Use --extra cuda12, or install" if cuda > 12 and driver >= _OLDEST_DRIVER[12] else "Install"
        remedy = f"{other} driver {_OLDEST_DRIVER[cuda]} or later."
        return [fail(name, f"{found}, and jax's CUDA {cuda} needs {_OLDEST_DRIVER[cuda]}", remedy)]
    if toolkits := [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if _holds_toolkit(path)]:
        found += f", but LD_LIBRARY_PATH has another CUDA toolkit in {toolkits[0]}"
        return [warn(name, found, "Unset LD_LIBRARY_PATH: Ray's workers leave it out, --hardware local does not.")]
    return [ok(name, f"{found}, for jax's CUDA {cuda}")]


def check_jax(hardware: Hardware | None) -> list[Finding]:
    """Check that jax finds devices, and as many as the hardware has if it is on this machine."""
    name = "jax"
    try:
        # The process takes no memory of a GPU that others use.
        quiet = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        devices = call_in_child(find_devices, within_s=_JAX_WITHIN_S, variables=quiet)
    except ChildError as error:
        return [fail(name, str(error), _jax_remedy() or "Run `uv sync` again, or end what uses the devices.")]
    number, platform = devices["number"], devices["platform"]
    found = f"jax {devices['version']}: {number} x {devices['kind']} ({platform})"
    for kind in ("gpu", "tpu"):
        if hardware is not None and _is_here(hardware, kind) and (platform != kind or number < hardware.num_devices):
            remedy = _jax_remedy() or "Choose other --hardware, or set RAY_ADDRESS."
            return [fail(name, f"{found}, and {hardware} needs {hardware.num_devices} of {kind}", remedy)]
    return [ok(name, found)]


def _jax_remedy() -> str:
    """Return what to do about the variable that chooses jax's devices, or an empty text without it."""
    platforms = os.environ.get("JAX_PLATFORMS")
    return f"Unset JAX_PLATFORMS={platforms}." if platforms else ""


def find_devices() -> dict[str, Any]:
    """Return the devices that jax finds. Imports jax, and so takes a second; for a child process."""
    import jax  # in the child alone

    start_jax()
    device = jax.local_devices()[0]
    return {
        "version": jax.__version__,
        "platform": device.platform,
        "kind": device.device_kind,
        "number": jax.local_device_count(),
    }


def _is_here(hardware: Hardware | None, kind: str) -> bool:
    """Return whether a run uses devices of a kind on this machine, and not in a cluster."""
    return hardware is not None and hardware.kind == kind and not os.environ.get("RAY_ADDRESS")


def _holds_toolkit(folder: str) -> bool:
    """Return whether a folder has a CUDA toolkit, which jax would load in place of its own libraries."""
    return bool(folder) and any(Path(folder).glob("libcudart.so*"))


def _cuda() -> int | None:
    """Return the version of jax's CUDA that is installed."""
    for number in _OLDEST_DRIVER:
        try:
            version(f"jax-cuda{number}-plugin")
        except PackageNotFoundError:
            continue
        return number
    return None
