"""Notices of complete and of failed checkpoints."""

from typing import Any

import pytest

from ray_jax_launch._checkpoint.save_events import notify, notify_of_failure, notify_of_saves


def test_a_notice_reaches_the_functions_of_all_open_blocks_and_no_others() -> None:
    seen: list[tuple[str, Any]] = []

    def notices_of(name: str) -> Any:
        return notify_of_saves(
            lambda folder, step: seen.append((name, (folder, step))), lambda error: seen.append((name, error))
        )

    def fail() -> None:
        with notices_of("inner"):
            notify("runs", 3)
            notify_of_failure(error)
            raise error

    error = OSError("full")
    with notices_of("outer"):
        with pytest.raises(OSError, match="full"):
            fail()
        assert seen == [("outer", ("runs", 3)), ("inner", ("runs", 3)), ("outer", error), ("inner", error)]
        seen.clear()
        notify("runs", 7)
    notify("runs", 9)
    notify_of_failure(error)
    assert seen == [("outer", ("runs", 7))]
