"""Numbers and texts of a caller: the bounds that are accepted, and their form in an error."""

import pickle
from typing import Any

import numpy as np
import pytest

from ray_jax_launch import LaunchError, TrainingFailed
from ray_jax_launch._errors import in_a_line, shown
from ray_jax_launch._numbers import check_number, check_resources_per_worker
from ray_jax_launch._train.failures import WorkersFailed


@pytest.mark.parametrize(
    ("value", "whole", "found"),
    [
        (3, True, 3), (7, True, 7), (np.int8(5), True, 5), (3, False, 3.0), (7.0, False, 7.0), (3.25, False, 3.25),
        (2, True, None), (8, True, None), (2.75, False, None), (7.25, False, None), (5.0, True, None),
        (True, False, None), ("5", False, None), (np.float32("nan"), False, None), (float("inf"), False, None),
    ],
)  # fmt: skip
def test_a_number_is_accepted_from_the_smallest_to_the_largest(value: Any, whole: bool, found: float | None) -> None:
    bounds: dict[str, Any] = {"at_least": 3, "at_most": 7, "whole": whole}
    if found is None:
        with pytest.raises(LaunchError, match=r"^a size must be a "):
            check_number("a size", value, **bounds)
        return
    number = check_number("a size", value, **bounds)
    assert (number, type(number)) == (found, type(found))


def test_a_number_without_a_largest_one_may_be_any_finite_one() -> None:
    assert check_number("a size", 10**300, at_least=-1) == 10**300
    assert check_number("a size", -1, at_least=-1) == -1
    with pytest.raises(LaunchError, match="of at least -1, got inf"):
        check_number("a size", float("inf"), at_least=-1, whole=False)


def test_a_worker_may_need_none_or_a_part_of_a_resource() -> None:
    check_resources_per_worker(None)
    check_resources_per_worker({"CPU": 0, "GPU": 0.25, "memory": 8e9})
    for amount in (-0.25, float("nan"), True):
        with pytest.raises(LaunchError, match=r"^resources_per_worker"):
            check_resources_per_worker({"CPU": 3, "GPU": amount})


@pytest.mark.parametrize("length", [79, 80, 81, 399, 5000])
def test_a_text_is_cut_in_its_middle_to_80_characters(length: int) -> None:
    text = "".join(chr(0x100 + number % 97) for number in range(length))
    found = in_a_line(text)
    assert len(found) == min(length, 80)
    if length > 80:
        start, _, end = found.partition("\N{HORIZONTAL ELLIPSIS}")
        assert (start, end) == (text[: len(start)], text[-len(end) :])
        assert len(start) > len(end) >= 20
    else:
        assert found == text


def test_characters_that_would_end_a_line_are_written_as_escapes() -> None:
    assert in_a_line("a\nb\x1b[0m\u2028\u00e9") == "a\\nb\\x1b[0m\\u2028\u00e9"
    assert shown("a\n") == repr("a\n")


@pytest.mark.parametrize(("length", "is_cut"), [(399, False), (400, True), (9999, True)])
def test_only_a_word_that_no_path_has_is_cut_in_an_error(length: int, is_cut: bool) -> None:
    word = "a" * (length - 1) + "b"
    text = str(LaunchError(f"folder must exist, got {word} ({word}). Make it."))
    assert text.startswith("folder must exist, got aaa")
    assert text.endswith("b). Make it.")
    assert (len(text) < 250) == is_cut
    assert LaunchError(7, word).args[0] == 7


def test_the_parts_of_a_failure_keep_their_places() -> None:
    failed = TrainingFailed("worker 7 failed", 7, "a traceback", "/logs")
    assert (str(failed), failed.rank) == ("worker 7 failed (full logs: /logs)", 7)
    assert (failed.details, failed.log_folder) == ("a traceback", "/logs")
    assert str(TrainingFailed("lost nodes", None, "", "")) == "lost nodes"


@pytest.mark.parametrize("kind", [TrainingFailed, WorkersFailed])
def test_a_failed_launch_can_be_raised_in_another_process(kind):
    failed = kind("worker 7 failed", 7, "a traceback", "/logs")
    copy = pickle.loads(pickle.dumps(failed))
    assert (type(copy), str(copy), copy.__dict__) == (kind, str(failed), failed.__dict__)
