"""Commands in a shell: their output, their environment, and files that are not what they seem."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = "--data book.txt --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --train.max-steps 10"
TRAIN = f"--name run {SMALL}"
SAMPLE = "sample run --max-new-tokens 3"
EVAL = "eval run"
EXPORT = "export run out"
COMMANDS = (TRAIN, SAMPLE, EVAL, EXPORT)


FULL = "the output must be writable, got No space left on device. Free some space, or write it elsewhere."
GONE = "mkdir gone && cd gone && rmdir ../gone"
MOVES = "allow, log or log_explicit: each step moves arrays"


def no_seconds(name, value):
    """A variable of Ray that must be a time."""
    return (
        f"{name}={value} $PRETRAIN runs",
        2,
        f"{name} must be a positive number of seconds, got '{value}'. Correct or",
    )


def absent_platform(line, platform):
    """A platform that JAX does not have here."""
    return (f"JAX_PLATFORMS={platform} $PRETRAIN {line}", 2, f"with JAX_PLATFORMS={platform}. Correct or unset")


def rejected_setting(line, setting, message):
    """A variable whose value JAX or XLA rejects."""
    name = setting.partition("=")[0]
    return (f"XLA_FLAGS=; export {setting}; $PRETRAIN {line}", 2, f"JAX and XLA must accept {name}, got {message}")


def unusable_mode(line, name, value, constraint):
    """A mode of JAX in which the step does not work."""
    return (f"{name}={value} $PRETRAIN {line}", 2, f"{name} must be {constraint}, got {value}. Unset it.")


def no_cache_folder(path):
    """A path at which no folder can be."""
    return (
        f"JAX_COMPILATION_CACHE_DIR={path} $PRETRAIN {SAMPLE}",
        2,
        f"_CACHE_DIR must be a folder, got {path}. Correct",
    )


# What bash runs, the exit code, and what standard error has.
SHELL = [
    (f"PYTHONUNBUFFERED=1 $PRETRAIN {SAMPLE} > /dev/full", 2, FULL),
    ("PYTHONUNBUFFERED= $PRETRAIN --help > /dev/full", 2, FULL),
    (f"$PRETRAIN {EVAL} >&- 2>&-", 0, ""),
    (f"$PRETRAIN {SAMPLE} | true", 141, ""),
    (f"PYTHONIOENCODING=ascii $PRETRAIN {SAMPLE} --prompt \u00fc | grep '^.xfc'", 0, ""),
    (f"LC_ALL=C $PRETRAIN {SAMPLE} --prompt $'\\xff'", 2, "--prompt must be a text in UTF-8, got \\udcff."),
    ("COLUMNS=0 $PRETRAIN runs | grep -c finished", 0, ""),
    (f"RAY_TRAIN_V2_ENABLED=0 $PRETRAIN {TRAIN}", 2, "RAY_TRAIN_V2_ENABLED must be 1, got 0. Unset it."),
    ("cp -r runs/run runs/$'\\e[31mred'; $PRETRAIN runs | grep -F '[31mred' | cat -v | grep -F '\\x1b[31mred'", 0, ""),
    (f"GCE_METADATA_ROOT=127.0.0.1:9 $PRETRAIN --storage-path gs://bucket/runs {SMALL}", 2, "got gs://bucket/runs/"),
    (
        f"cd runs/run/checkpoints && cp -r 1 2 && echo > $(find 2/params -path '*/d/*' | head -1) && cd ../../.. && "
        f"$PRETRAIN {SAMPLE}",
        0,
        "checkpoint 2 in ",
    ),
    (f"chmod 0 runs/run; $LIMITED $PRETRAIN {SAMPLE}", 2, "Permission denied"),
    (
        f"chmod 500 runs; $LIMITED $PRETRAIN --name new {SMALL}",
        2,
        "runs/new must be accessible, got Permission denied.",
    ),
    (
        f"touch runs/run/.lock; chmod 500 runs/run; $LIMITED $PRETRAIN {TRAIN}",
        2,
        "runs/run must be writable, got a read-only folder.",
    ),
    (f"chmod 500 .; $LIMITED $PRETRAIN {EXPORT}", 2, "out.partial must be accessible, got Permission denied."),
    (
        # Code that replaces the device, run by root, must not replace the machine's own.
        "full=/dev/full; mknod -m 666 full c 1 7 2>/dev/null && (: > full) 2>/dev/null && full=full; "
        "$PRETRAIN report run --out $full; code=$?; test -c $full && exit $code",
        2,
        "full (No space left on device). Give another --out.",
    ),
    (f"{GONE} && $PRETRAIN {TRAIN}", 2, "The working folder was deleted."),
    ("HOME='~' $PRETRAIN runs", 2, "HOME must be a folder, got '~'."),
    (f"PYTHONOPTIMIZE=2 $PRETRAIN {TRAIN}", 2, "Python must keep docstrings, which Ray reads, got -OO or PYTHONOPT"),
    ("RAY_memory_usage_threshold=x $PRETRAIN runs", 2, "Ray must be able to read RAY_memory_usage_threshold, got a cr"),
    no_seconds("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "x"),
    (
        f"HF_HUB_DOWNLOAD_TIMEOUT=x $PRETRAIN {TRAIN} --hardware local --data one/two --name hub",
        2,
        "The variables HF_... must be values that the library `datasets` accepts, got invalid literal for int() with",
    ),
    ("$PRETRAIN sample $'\\xff'", 2, "RUN must be a text in UTF-8, got \\udcff."),
    absent_platform(SAMPLE, "cuda"),
    rejected_setting(
        SAMPLE, "JAX_ENABLE_X64=maybe", "ValueError: invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'."
    ),
    rejected_setting(EVAL, "XLA_FLAGS=--bogus=1", "Unknown flag in XLA_FLAGS: --bogus=1. Correct or unset it."),
    (f"JAX_DISABLE_JIT=1 $PRETRAIN {TRAIN}", 2, "JAX_DISABLE_JIT must be off: sharded steps need the compiler, got 1."),
    unusable_mode(SAMPLE, "JAX_TRANSFER_GUARD", "disallow", MOVES),
    no_cache_folder("book.txt/x"),
    (
        # Under a limit, Python would cut its files of bytecode short.
        f"export PYTHONDONTWRITEBYTECODE=1; ulimit -f 4; $PRETRAIN {EXPORT}",
        2,
        " could not be written: File too large. Free some space, raise the limit",
    ),
    ("ulimit -v 300000; $PRETRAIN runs", 2, "a process must be allowed to map at least 4 GiB of memory, got 292 MiB."),
    (f"ulimit -n 100; $PRETRAIN {TRAIN}", 2, "a process must be allowed to open at least 256 files, got 100. Raise"),
    ("mkfifo pipe; $PRETRAIN --config pipe", 2, "--config must be a file, got pipe, a pipe or a device."),
    ("$PRETRAIN --config /dev/stdin < /dev/zero", 2, "--config must be a file of at most 32,000 bytes, got /d"),
    ("echo 'seed = 7' | $PRETRAIN --config /dev/stdin --print-config | grep '^seed = 7$' > /dev/null", 0, ""),
    ("mkdir -m 0 sealed; $LIMITED $PRETRAIN runs . | grep '^sealed *unreadable' > /dev/null", 0, ""),
    (f"$PRETRAIN {TRAIN} --prompts ''", 2, "prompts must be texts of at least one character, got ['']."),
]
# The same kinds of mistakes in other commands, variables and limits.
OTHERS = [
    ("PYTHONUNBUFFERED=1 $PRETRAIN --help > /dev/full", 2, FULL),
    (f"PYTHONUNBUFFERED= $PRETRAIN {TRAIN} > /dev/full", 2, FULL),
    ("$PRETRAIN sample nowhere 2> /dev/full", 2, ""),
    (f"$PRETRAIN {EXPORT} >&-", 0, ""),
    (
        f"JAX_PLATFORMS= JAX_PLATFORM_NAME=gpu $PRETRAIN {SAMPLE}",
        2,
        ", with JAX_PLATFORM_NAME=gpu. Correct or unset it.",
    ),
    (f"chmod 0 book.txt; $LIMITED $PRETRAIN {TRAIN}", 2, "Permission denied"),
    (
        f"chmod 0 runs/run/metrics.jsonl; $LIMITED $PRETRAIN {TRAIN}",
        2,
        "metrics.jsonl must be accessible, got Permission",
    ),
    (f"chmod 0 runs/run/result.json; $LIMITED $PRETRAIN {TRAIN}", 2, "result.json must be accessible, got Permission"),
    (f"{GONE} && $PRETRAIN runs", 2, "The working folder was deleted."),
    no_seconds("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "-1"),
    no_seconds("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "nan"),
    ("mkdir $'\\xff' && cd $'\\xff' && $PRETRAIN runs", 2, "The name of the working folder is not UTF-8."),
    ("$PRETRAIN report run $'\\xff'", 2, "RUN must be texts in UTF-8, got run \\udcff."),
    absent_platform(EVAL, "tpu"),
    absent_platform(EXPORT, "bogus"),
    absent_platform(f"{TRAIN} --hardware local", "cuda"),
    rejected_setting(EVAL, "JAX_DEBUG_NANS=", "ValueError: invalid truth value '' for environment 'JAX_DEBUG_NANS'."),
    rejected_setting(
        TRAIN, "JAX_DEFAULT_MATMUL_PRECISION=x", 'ValueError: Invalid value "x" for JAX flag jax_default_matmul'
    ),
    rejected_setting(SAMPLE, "XLA_FLAGS=' '", 'Could not open file " "'),
    rejected_setting(TRAIN, "XLA_FLAGS=--xla_force_host_platform_device_count=0", "jaxlib"),
    rejected_setting(
        EXPORT, "XLA_FLAGS=--xla_force_host_platform_device_count=two", "Couldn't interpret value two for flag"
    ),
    unusable_mode(TRAIN, "JAX_NUMPY_RANK_PROMOTION", "raise", "allow or warn"),
    unusable_mode(EVAL, "JAX_NUMPY_DTYPE_PROMOTION", "strict", "standard"),
    unusable_mode(SAMPLE, "JAX_TRANSFER_GUARD_HOST_TO_DEVICE", "disallow_explicit", MOVES),
    unusable_mode(SAMPLE, "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE", "disallow", MOVES),
    unusable_mode(SAMPLE, "JAX_TRANSFER_GUARD_DEVICE_TO_HOST", "disallow", MOVES),
    (f"JAX_NUMPY_RANK_PROMOTION=allow JAX_TRANSFER_GUARD=allow $PRETRAIN {SAMPLE}", 0, ""),
    no_cache_folder("book.txt"),
    (f"ulimit -f 0; $PRETRAIN {EXPORT}", 2, "files and the network must be usable, got No usable temporary directory"),
    (f"ulimit -v 3000000; $PRETRAIN {TRAIN}", 2, "a process must be allowed to map at least 4 GiB of memory, got 2929"),
    ("ulimit -S -n 100; ulimit -H -n 1000; $PRETRAIN sample run --max-new-tokens 3 > /dev/null", 0, ""),
    ("$PRETRAIN --config /dev/zero", 2, "--config must be a file, got /dev/zero, a pipe or a device."),
    ("$PRETRAIN --config <(echo 'seed = 7') --print-config | grep '^seed = 7$' > /dev/null", 0, ""),
    ("$PRETRAIN sample run --num-samples 1000000000 --max-new-tokens 3 | head -n 3 | grep -c .", 141, ""),
]


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full, and gives up root's rights by setpriv")
@pytest.mark.parametrize(
    ("line", "code", "message"), [*SHELL, *(pytest.param(*row, marks=pytest.mark.slow) for row in OTHERS)]
)
def test_in_a_shell(line, code, message, place):
    # root may read everything, unless it gives up the right to.
    limited = "setpriv --bounding-set=-dac_override,-dac_read_search" if os.geteuid() == 0 else ""
    pretrain = f"{sys.executable} {Path(__file__).parents[2]}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("$PRETRAIN", pretrain).replace("$LIMITED", limited)],
        cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "WARNING" not in done.stderr  # a line of a library's own format
    assert done.stderr.count("\n") == (1 if message else 0)
