"""Numbers and times as short texts, and sparklines: the same on the screen, in the report and in pictures."""

from collections.abc import Sequence

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


def axis_number(number: float) -> str:
    """Return a number of an axis with at most 4 digits.

    >>> [axis_number(number) for number in (0, 0.25, 950, 12_500, 123_849_984, 9.035e9)]
    ['0', '0.25', '950', '12.5k', '123.8M', '9.035B']
    """
    for unit, name in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.4g}"


def loss(value: float) -> str:
    """Return a loss with 4 decimals, or 4 digits if it is large.

    >>> loss(1.81234), loss(123456.0)
    ('1.8123', '1.235e+05')
    """
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


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
