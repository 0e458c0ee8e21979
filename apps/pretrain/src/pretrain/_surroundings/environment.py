"""Surroundings in which no command can work: a deleted working folder, small limits, and wrong variables."""

import contextlib
import os
import re
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pretrain._errors import UsageError, short, shown
from pretrain._surroundings.address_space import lack_of_address_space

_IMPORT_JAX = "import jax; "
_MAKE_DEVICES = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_WITHIN_S = 60.0
# `start_jax` checks the first. The second is the name of a folder.
_UNCHECKED = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")
_TRUE = ("y", "yes", "t", "true", "on", "1")
_GUARD = "allow, log or log_explicit: each step moves arrays", ("disallow", "disallow_explicit")
# What these variables must be, and values that JAX accepts, and with which a run fails.
_REJECTED = {
    "JAX_DISABLE_JIT": ("off: sharded steps need the compiler", _TRUE),
    "JAX_NUMPY_RANK_PROMOTION": ("allow or warn", ("raise",)),
    "JAX_NUMPY_DTYPE_PROMOTION": ("standard", ("strict",)),
    "JAX_TRANSFER_GUARD": _GUARD,
    "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": _GUARD,
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": _GUARD,
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": _GUARD,
}
# A run with Ray on two CPU cores needs more than 128. The limit of macOS is 256.
_FEWEST_OPEN_FILES, _OPEN_FILES = 256, 4096
_CHOOSE_DEVICES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES", "CUDA_VISIBLE_DEVICES")
# A line of XLA's log: its level and date, its time, its thread, its place, and the message.
_LOG_LINE = re.compile(r"^[EF]\d{4} [\d:.]+ +\d+ [^\]]*\] (.*)", re.MULTILINE)


def check_folders() -> None:
    """Check that the working folder exists, and that libraries can name it and the home folder.

    Raises:
        UsageError: it was deleted, its name is not UTF-8, or there is no home folder.
    """
    try:
        os.getcwd().encode()  # noqa: PTH109 - Path.cwd() does the same
    except FileNotFoundError:
        raise UsageError("The working folder was deleted. Change to another folder.") from None
    except UnicodeEncodeError:
        raise UsageError("The name of the working folder is not UTF-8. Rename it.") from None
    try:
        Path.home()
    except RuntimeError:
        raise UsageError(f"HOME must be a folder, got {shown(os.environ.get('HOME'))}. Set it to one.") from None


def check_variables() -> None:
    """Check the variables of Python, and of XLA and JAX in a child process, if any is set: wrong ones abort a process.

    Raises:
        UsageError: a run cannot work with a value, JAX cannot be imported, or XLA cannot start.
    """
    if sys.flags.optimize > 1:
        raise UsageError("Python must keep docstrings, which Ray reads, got -OO or PYTHONOPTIMIZE=2. Leave it out.")
    for variable, (constraint, rejected) in _REJECTED.items():
        if (value := os.environ.get(variable, "")).lower() in rejected:
            raise UsageError(f"{variable} must be {constraint}, got {value}. Unset it.")
    if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        path = Path(cache)
        if any(one.exists() and not one.is_dir() for one in (path, *path.parents)):
            raise UsageError(f"JAX_COMPILATION_CACHE_DIR must be a folder, got {short(cache)}. Correct or unset it.")
    names = [name for name in os.environ if name.startswith("JAX_") and name not in _UNCHECKED]
    if os.environ.get("XLA_FLAGS"):  # a blank is a name of a file to XLA
        names.append("XLA_FLAGS")
    if names and (reason := _rejection(tuple((name, os.environ[name]) for name in sorted(names)))):
        remedy = "Correct or unset it." if len(names) == 1 else "Correct or unset them."
        raise UsageError(f"JAX and XLA must accept {', '.join(sorted(names))}, got {reason.rstrip('.')}. {remedy}")


@cache
def _rejection(settings: tuple[tuple[str, str], ...]) -> str | None:
    """Try the variables of this process in a child process, once for the same values. Return why it failed."""
    imports_jax = any(name != "XLA_FLAGS" for name, _ in settings)
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _IMPORT_JAX * imports_jax + _MAKE_DEVICES],
            capture_output=True, text=True, errors="replace", check=False, timeout=_WITHIN_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # the machine is busy
        return None
    if tried.returncode == 0:
        return None
    message = _LOG_LINE.search(tried.stderr)
    return message[1] if message else (tried.stderr.strip().splitlines() or ["no message"])[-1]


def check_ray_variables() -> None:
    """Check the variables of Ray, and those of its C++ code in a child process: wrong ones crash a process.

    Raises:
        UsageError: a value is wrong, or Ray Train is not the version that is needed.
    """
    if (version := os.environ.get("RAY_TRAIN_V2_ENABLED", "1")).lower() in ("0", "false"):
        raise UsageError(f"RAY_TRAIN_V2_ENABLED must be 1, got {version}. Unset it.")
    for name, value in os.environ.items():
        if re.fullmatch(r"RAY_TRAIN_\w+_S", name) and not _is_duration(value):
            raise UsageError(f"{name} must be a positive number of seconds, got {shown(value)}. Correct or unset it.")
    names = sorted(name for name in os.environ if re.match("RAY_[a-z]", name))
    if not names:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):  # the machine is busy
        command = [sys.executable, "-c", "import ray._raylet"]
        if subprocess.run(command, capture_output=True, check=False, timeout=_WITHIN_S).returncode:
            raise UsageError(
                f"Ray must be able to read {', '.join(names)}, got a crash. Correct or unset what is wrong."
            )


def _is_duration(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def is_on(variable: str) -> bool:
    """Return whether JAX takes the value of an environment variable for true."""
    return os.environ.get(variable, "").lower() in _TRUE


def check_limits() -> None:
    """Raise the number of files that this process may open to the most it may set, and check the limits of `ulimit`.

    Ray, Orbax and XLA wait or abort where a file cannot be opened, or memory cannot be mapped.

    Raises:
        UsageError: a limit is too small.
    """
    if lack := lack_of_address_space():
        raise UsageError(lack)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        soft = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < _FEWEST_OPEN_FILES:
        raise UsageError(
            f"a process must be allowed to open at least {_FEWEST_OPEN_FILES} files, got {soft}. Raise the limit with "
            "`ulimit -n`."
        )


# The same threads in all processes, whatever their CPUs: the bits of `nnx_gpt2.TreeTrainStep` depend on the number.
FIXED_THREADS = MappingProxyType({"NPROC": "2", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"})


def start_jax(*, with_fixed_threads: bool = False) -> None:
    """Start JAX's devices in this process.

    Args:
        with_fixed_threads: start them with the variables `FIXED_THREADS`.

    Raises:
        UsageError: the variable `JAX_PLATFORMS` names a platform that this machine does not have, or a device fails; or
            JAX has started without these.
    """
    import jax  # takes half a second, which `--help` does not need

    if with_fixed_threads:
        _fix_threads()
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second is for cuda without its plugin
        reason = str(error).removesuffix(" (set JAX_PLATFORMS='' to automatically choose an available backend)")
        given = {name: os.environ[name] for name in _CHOOSE_DEVICES if os.environ.get(name)}
        variables = ", ".join(f"{name}={value}" for name, value in given.items())
        remedy = f", with {variables}. Correct or unset {'it' if len(given) == 1 else 'them'}." if given else "."
        raise UsageError(f"JAX must find a device, got {reason.rstrip('.') or 'none'}{remedy}") from error


def _fix_threads() -> None:
    """Set the variables of JAX's CPU backend before it starts.

    Raises:
        UsageError: it has started without them.
    """
    import jax

    if all(os.environ.get(name) == value for name, value in FIXED_THREADS.items()):
        return
    number = jax.config.values["jax_num_cpu_devices"]
    try:  # jax rejects another number once it has started
        jax.config.update("jax_num_cpu_devices", number + 1)
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        raise UsageError(
            "train.num_shards must be given to a process in which JAX has not started, got one in which it has. "
            "Restart Python, or give --hardware cpu:1."
        ) from None
    os.environ.update(FIXED_THREADS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
