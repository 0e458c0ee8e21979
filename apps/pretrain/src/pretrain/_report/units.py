"""Numbers as people read them."""


def short(number: float) -> str:
    """Return a count with at most 4 significant digits.

    >>> [short(n) for n in (0, 950, 12_500, 123_849_984, 9.035e9)]
    ['0', '950', '12.5k', '123.8M', '9.035G']
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> [duration(s) for s in (0.25, 39.2, 332, 9000, 200_000)]
    ['0.25 s', '39.2 s', '5 min 32 s', '2 h 30 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, part, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return "60 s"


def show_utc(time: str) -> str:
    """Return a time in ISO 8601 in plain form.

    >>> show_utc("2026-09-21T14:13:20+00:00")
    '2026-09-21 14:13:20 UTC'
    """
    return time.replace("T", " ").replace("+00:00", " UTC")
