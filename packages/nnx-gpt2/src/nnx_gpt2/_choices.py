"""Fields of a configuration that name one of a few values."""

from typing import Any


def check_choice(section: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{section}.{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}")
