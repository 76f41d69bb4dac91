"""The one glob dialect: fnmatch on the whole name, case matters, `**` means what `*` means."""

from __future__ import annotations

import fnmatch

__all__ = ["glob_matches", "slot_matches"]


def glob_matches(glob: str, name: str) -> bool:
    """True where a glob matches the whole of a path or word."""
    return fnmatch.fnmatchcase(name, glob.replace("**", "*"))


def slot_matches(glob: str, slot: str) -> bool:
    """True where a glob matches a slot, or one that it is nested in: `output` takes `output.1`."""
    return glob_matches(glob, slot) or glob_matches(f"{glob}.*", slot)
