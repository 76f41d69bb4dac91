"""Which versions of torch rankscope is made for, and which it was tested with."""

from __future__ import annotations

import re
from typing import Final

OLDEST_TORCH: Final = "2.8"
_NEWEST_TESTED: Final = "2.15"


def is_older(version: str, other: str) -> bool:
    """True where a version is of a minor release before another's; text without one is of none."""
    numbers = [re.match(r"(\d+)\.(\d+)", each) for each in (version, other)]
    one, two = (tuple(map(int, each.groups())) if each else () for each in numbers)
    return bool(one and two) and one < two


def untested(version: str) -> str:
    """Return a sentence on a torch that is newer than every one that was tested, else ""."""
    said = f"torch {version} is newer than {_NEWEST_TESTED}, the newest that was tested with this "
    said += "rankscope: nothing is known to be wrong with it, but nobody has looked"
    return said if is_older(_NEWEST_TESTED, version) else ""
