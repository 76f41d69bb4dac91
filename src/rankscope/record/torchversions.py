"""Which versions of torch rankscope is made for, and which it was tested with."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["OLDEST_TORCH", "is_too_old", "untested"]

OLDEST_TORCH: Final = "2.8"
_NEWEST_TESTED: Final = "2.15"


def is_too_old(version: str) -> bool:
    """True for a torch that ranks cannot be traced with."""
    return _numbers(version, OLDEST_TORCH) < _numbers(OLDEST_TORCH)


def untested(version: str) -> str:
    """Return a sentence on a torch that is newer than every one that was tested, else ""."""
    if _numbers(version, _NEWEST_TESTED) <= _numbers(_NEWEST_TESTED):
        return ""
    return (
        f"torch {version} is newer than {_NEWEST_TESTED}, the newest that this rankscope was "
        "tested with: nothing is known to be wrong with it, but nobody has looked"
    )


def _numbers(version: str, otherwise: str = "0.0") -> tuple[int, ...]:
    """Return major and minor number, those of another version where there are none."""
    found = re.match(r"(\d+)\.(\d+)", version) or re.match(r"(\d+)\.(\d+)", otherwise)
    return tuple(map(int, found.groups())) if found else ()
