"""The wording that all errors of this package share."""

from typing import Any


def require(holds: bool, name: str, constraint: str, got: Any, remedy: str = "") -> None:
    """Raise ValueError, `<name> must <constraint>, got <got>. <remedy>`, unless the constraint holds."""
    if not holds:
        raise ValueError(f"{name} must {constraint}, got {got}. {remedy}".rstrip())
