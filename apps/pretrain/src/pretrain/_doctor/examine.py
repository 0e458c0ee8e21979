"""The checks of `doctor`, all at once, each with a time limit."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from pretrain._doctor.accelerators import check_driver, check_jax
from pretrain._doctor.disks import check_cache, check_storage, check_temporary_files
from pretrain._doctor.downloads import check_data, check_tokenizer
from pretrain._doctor.finding import Finding, fail
from pretrain._doctor.machine_limits import check_open_files, check_shared_memory
from pretrain._doctor.python_packages import check_packages, check_python, check_settings
from pretrain._doctor.ray_cluster_start import check_ports, check_ray
from pretrain._surroundings.child import end_children
from ray_jax_launch import Hardware


@dataclass(frozen=True, slots=True)
class Check:
    """A check, which may hang."""

    name: str
    """The name of its findings."""

    examine: Callable[[], Sequence[Finding]]
    """Returns the findings."""

    within_s: float
    """Seconds after which the check has failed. A child process of the check has a shorter limit."""


def checks_of(
    *, hardware: Hardware | None, storage_path: str, data: Sequence[str], tokenizer: str | None
) -> list[Check]:
    """Return the checks in the order of the table.

    Args:
        hardware: the hardware of a run; None for `auto`.
        storage_path: the folder or URI of all runs.
        data: the names of the data; empty if it is not known yet.
        tokenizer: the tokenizer; None if it is not known yet.
    """
    checks = [
        Check("python", check_python, 5),
        Check("packages", check_packages, 25),
        Check("settings", check_settings, 65),
        Check("open files", check_open_files, 5),
        Check("/dev/shm", lambda: check_shared_memory(hardware), 5),
        Check("driver", lambda: check_driver(hardware), 25),
        Check("jax", lambda: check_jax(hardware), 65),
        Check("ports", check_ports, 5),
        Check("ray", lambda: check_ray(hardware), 125),
        Check("storage", lambda: check_storage(storage_path), 45),
        Check("cache", check_cache, 25),
        Check("temporary", check_temporary_files, 25),
        Check("tokenizer", lambda: check_tokenizer(tokenizer), 45),
    ]
    return [*checks, *(Check("data", lambda name=name: check_data(name), 45) for name in data)]


def run_checks(checks: Sequence[Check]) -> Generator[Finding, None, None]:
    """Run checks at once, and yield their findings in order, each as soon as it is there.

    A check that hangs is a finding. It stays in a thread that does not keep the process alive.
    """
    began_s = time.monotonic()
    running = [(check, _start(check)) for check in checks]
    try:
        for check, findings in running:
            try:
                yield from findings.result(timeout=max(0.0, began_s + check.within_s - time.monotonic()))
            except TimeoutError:
                yield fail(check.name, f"no answer within {check.within_s:.0f} s", "Find out what hangs there.")
    finally:
        end_children()


def _start(check: Check) -> Future[Sequence[Finding]]:
    findings: Future[Sequence[Finding]] = Future()

    def run() -> None:
        try:
            findings.set_result(check.examine())
        except BaseException as error:  # of any kind: the caller gets it
            findings.set_exception(error)

    threading.Thread(target=run, name=check.name, daemon=True).start()
    return findings
