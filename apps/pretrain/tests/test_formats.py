"""Numbers and times as texts: the values around which their form changes."""

import pytest

from pretrain import _formats as formats
from pretrain._commands.compare import _nats
from pretrain._commands.data import _ranges


@pytest.mark.parametrize(
    ("seconds", "decimals", "expected"),
    [
        (0.0, 0, "0 s"),
        (59.9, 0, "59 s"),
        (59.94, 1, "59.9 s"),
        (7.25, 2, "7.25 s"),
        (60.0, 1, "1:00"),
        (3599.9, 0, "59:59"),
        (3600.0, 0, "1:00:00"),
        (172_799.0, 0, "47:59:59"),
        (172_800.0, 0, "2 d 0 h"),
        (9 * 86_400 + 7 * 3600 + 59 * 60.0, 0, "9 d 7 h"),
    ],
)
def test_a_duration_has_the_unit_of_its_size(seconds: float, decimals: int, expected: str) -> None:
    assert formats.duration(seconds, decimals=decimals) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5.0, "0 s"), (0.0, "0 s"), (59.9, "59 s"), (60.0, "1 min"), (3599.9, "59 min"), (3600.0, "1 h"),
        (86_399.0, "23 h"), (86_400.0, "1 d"), (9 * 86_400.0, "9 d"),
    ],
)  # fmt: skip
def test_an_age_has_its_largest_unit(seconds: float, expected: str) -> None:
    assert formats.age(seconds) == expected


@pytest.mark.parametrize(
    ("number", "exact_below", "expected"),
    [
        (0, 1e6, "0"),
        (999_999, 1e6, "999,999"),
        (1_000_000, 1e6, "1M"),
        (1_234_567, 1e6, "1.23M"),
        (12_345_678, 1e6, "12.3M"),
        (123_456_789, 1e6, "123M"),
        (999_600_000, 1e6, "1,000M"),
        (3_700_000_000, 1e6, "3.7B"),
        (9_000_000_000_000, 1e6, "9T"),
        (999, 1e3, "999"),
        (1000, 1e3, "1k"),
        (999_600, 1e3, "1,000k"),
    ],
)
def test_a_count_has_three_digits_and_a_unit(number: float, exact_below: float, expected: str) -> None:
    assert formats.count(number, exact_below=exact_below) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(999, "999"), (1000, "1k"), (-12_500, "-12.5k"), (-0.25, "-0.25"), (1e6, "1M"), (7.125e9, "7.125B"), (3e12, "3T")],
)
def test_a_number_of_an_axis_has_a_unit(number: float, expected: str) -> None:
    assert formats.axis_number(number) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, "0.0000"), (99.99994, "99.9999"), (100.0, "100"), (-100.0, "-100"), (1234.5, "1,234")]
)
def test_a_large_loss_has_four_digits(value: float, expected: str) -> None:
    assert formats.loss(value) == expected


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 9, ""),
        ([5.0], 9, ""),
        ([2.0, 2.0, 2.0], 3, "▁▁▁"),
        ([1.0, 3.0, 5.0], 9, "▁▅█"),
        ([7.0, 7.0, 0.0, 0.0, 2.0, 3.0, 5.5], 3, "█▁▅"),  # of 2, 2 and 3 values
        ([-1.0, -3.0], 2, "█▁"),
    ],
)
def test_a_sparkline_has_the_means_of_parts_of_equal_length(values: list[float], width: int, expected: str) -> None:
    assert formats.sparkline(values, width) == expected


def test_a_stored_loss_is_rounded_half_up() -> None:
    assert [formats.loss(value) for value in (2.56525, 2.56525061, 2.56515, -0.00005, 0.0)] == [
        "2.5653", "2.5653", "2.5652", "-0.0001", "0.0000",
    ]  # fmt: skip
    assert formats.loss(float("inf")) == "inf"


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (400, "0 kB"), (999_000, "999 kB"), (1e6, "1.00 MB"), (999e6, "999.00 MB"), (1e9, "1.00 GB"), (1e12, "1.00 TB"),
        (2_345_678_901_234, "2.35 TB"),
    ],
)  # fmt: skip
def test_a_disk_is_counted_in_powers_of_a_thousand(num_bytes: float, expected: str) -> None:
    assert formats.decimal_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.01, "0.01000"), (0.0099, "9.9e-3"), (-2.5, "-2.500"), (9.9994, "9.999"), (123.456, "123.5"),
        (9999.4, "9999"), (10_000.0, "10k"), (-12_345.0, "-12.35k"),
    ],
)  # fmt: skip
def test_a_value_of_a_chart_has_four_digits(value: float, expected: str) -> None:
    assert formats.four_digits(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.001, "0.0010"), (0.00099, "9.9e-04"), (-0.00099, "-9.9e-04"), (0.0, "0.0000"), (-0.12345, "-0.1235"),
    ],
)  # fmt: skip
def test_a_difference_has_four_decimals_or_two_digits(value: float, expected: str) -> None:
    assert _nats(value) == expected
    assert _nats(abs(value), sign="+") == f"+{expected.removeprefix('-')}"


@pytest.mark.parametrize(
    ("steps", "full", "expected"),
    [
        ([5], False, "5"),
        ([5, 6], False, "5, 6"),
        ([5, 6, 7], False, "5 to 7"),
        ([999, 1000, 1001, 4000], False, "999 to 1,001, 4,000"),
        ([*range(0, 16, 2)], False, "0, 2, 4, 6, 8, 10, 12, 14"),
        ([*range(0, 20, 2)], False, "0, 2, 4, 6, 8, 10, 12, 14, and 2 more"),
        ([*range(0, 20, 2)], True, "0, 2, 4, 6, 8, 10, 12, 14, 16, 18"),
    ],
)
def test_steps_that_follow_each_other_are_a_range(steps: list[int], full: bool, expected: str) -> None:
    assert _ranges(steps, full) == expected
