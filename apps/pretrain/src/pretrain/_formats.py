"""Numbers and times as short texts, and sparklines: the same on the screen, in the report and in pictures."""

import json
import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

_LEVELS = "▁▂▃▄▅▆▇█"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float, *, decimals: int = 0) -> str:
    """Return a time as text.

    >>> duration(8.4), duration(208), duration(7384), duration(200_000), duration(8.4, decimals=1)
    ('8 s', '3:28', '2:03:04', '2 d 7 h', '8.4 s')

    Args:
        seconds: the time.
        decimals: decimals of a time below a minute.
    """
    if seconds >= 60:
        return clock_time(seconds)
    return f"{seconds:.{decimals}f} s" if decimals else f"{int(seconds)} s"


def clock_time(seconds: float) -> str:
    """Return a time as text with a colon, or as days.

    >>> clock_time(8.4), clock_time(200_000)
    ('0:08', '2 d 7 h')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def age(seconds: float) -> str:
    """Return the age of something in its largest unit.

    >>> age(30), age(7000), age(200_000)
    ('30 s', '1 h', '2 d')
    """
    for unit_s, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {name}"
    return f"{max(0, int(seconds))} s"


def count(number: float, *, exact_below: float = 1e6) -> str:
    """Return a number with 3 or more digits.

    >>> count(18_432.4), count(1_536_000), count(9_035_582_198), count(18_432.4, exact_below=1e3)
    ('18,432', '1.54M', '9.04B', '18.4k')

    Args:
        number: the number.
        exact_below: the least number that is not written in full.
    """
    for unit, name in _UNITS:
        if number >= max(unit, exact_below):
            return f"{number / unit:.3g}{name}" if number < 999.5 * unit else f"{number / unit:,.0f}{name}"
    return f"{number:,.0f}"


def plain(number: float, digits: int = 12) -> str:
    """Return a number as people write it: small and huge ones with an exponent, and without the noise of a division.

    >>> [plain(number) for number in (0.0003 * 1.0000000000000002, 1500, 0.1, 1.0, 2.5e-5, 65_536.0, 1e15)]
    ['3e-4', '1,500', '0.1', '1', '2.5e-5', '65,536', '1e15']

    Args:
        number: a finite number.
        digits: significant digits at most.
    """
    text = f"{number:,.{digits}g}"
    if "e" not in text and (abs(number) >= 0.01 or number == 0):
        return text
    mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def option(name: str, value: Any) -> str:
    """Return the value of an option as people write it.

    >>> option("optimizer.learning_rate", 3e-4), option("train.max_steps", 1500), option("seed", 2357)
    ('3e-4', '1,500', '2357')
    >>> option("model.mlp_dim", None), option("mask", True), option("data", "web=1:a"), option("prompts", ("def ", "a"))
    ('none', 'true', 'web=1:a', '"def ", "a"')

    Args:
        name: the name. Seeds are names more than numbers.
        value: the value.
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value) if name.endswith("seed") or not math.isfinite(value) else plain(value)
    if isinstance(value, str):
        return value if value.isprintable() and value.strip() else json.dumps(value)
    return json.dumps(value)[1:-1]


def axis_number(number: float) -> str:
    """Return a number of an axis with at most 4 digits.

    >>> [axis_number(number) for number in (0, 0.25, 0.0003, 950, 12_500, 123_849_984, 9.035e9, 2e17)]
    ['0', '0.25', '3e-4', '950', '12.5k', '123.8M', '9.035B', '2e17']
    """
    for unit, name in _UNITS:
        if unit <= abs(number) < 1e15:
            return f"{number / unit:.4g}{name}"
    return plain(number, 4)


def four_digits(value: float) -> str:
    """Return a value with 4 significant digits, or at most 3 of a small one.

    >>> [four_digits(value) for value in (2.85, 0.00059999, 0.0, 123456.0)]
    ['2.850', '6e-4', '0', '123.5k']
    """
    if not 0.01 <= abs(value) < 1e4:
        return axis_number(value) if abs(value) > 1 else plain(value, 3)
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def loss(value: float) -> str:
    """Return a loss with 4 decimals, or 4 digits if it is large.

    The decimal digits are rounded half up: a stored loss has few, so that a 5 may be the last one.

    >>> loss(1.81234), loss(2.56525), loss(123456.0)
    ('1.8123', '2.5653', '1.235e5')
    """
    if not abs(value) < 100:
        return plain(value, 4)
    return f"{Decimal(repr(float(value))).quantize(Decimal('0.0001'), ROUND_HALF_UP):f}"


def gibibytes(num_bytes: float) -> str:
    """Return bytes as GiB.

    >>> gibibytes(3 * 2**29)
    '1.5 GiB'
    """
    return f"{num_bytes / 2**30:.1f} GiB"


def decimal_bytes(num_bytes: float) -> str:
    """Return bytes in powers of 1,000, as disks are sold.

    >>> decimal_bytes(70_000), decimal_bytes(4_480_000_000)
    ('70 kB', '4.48 GB')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1e3:.0f} kB"


def show_utc(time: str) -> str:
    """Return a time in ISO 8601 in plain form.

    >>> show_utc("2026-09-21T14:13:20+00:00")
    '2026-09-21 14:13:20 UTC'
    """
    return time.replace("T", " ").replace("+00:00", " UTC")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a line of at most `width` blocks, whose heights are the means of equal parts of the values.

    >>> sparkline([3.0, 2.0, 1.0, 1.0], 4)
    '█▅▁▁'
    """
    width = min(width, len(values))
    parts = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    if len(means) < 2:
        return ""
    low, high = min(means), max(means)
    height = high - low or 1.0
    return "".join(_LEVELS[round((len(_LEVELS) - 1) * ((mean - low) / height))] for mean in means)
