"""The one glob dialect: fnmatch on the whole name, case matters, `**` means what `*` means."""

from __future__ import annotations

import fnmatch
import re
from typing import Final

_WRAPPERS: Final = re.compile(
    r"^module\.|(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
)
"""What torch's wrappers put into names (DDP in front), and paths do not have."""


def without_wrappers(glob: str) -> str:
    """Return a glob without the names of wrappers: `blocks.*` of `module.blocks.*`."""
    return _WRAPPERS.sub("", glob)


def glob_matches(glob: str, name: str) -> bool:
    """True where a glob matches the whole of a path or word."""
    return fnmatch.fnmatchcase(name, glob.replace("**", "*"))


def slot_matches(glob: str, slot: str) -> bool:
    """True where a glob matches a slot, or one that it is nested in: `output` takes `output.1`."""
    return glob_matches(glob, slot) or glob_matches(f"{glob}.*", slot)


def split_place(glob: str) -> tuple[str, str]:
    """Return the globs of path and slot in `path:slot`; without a slot it is `*`."""
    path, colon, slot = glob.partition(":")
    return path, slot if colon else "*"


def place_matches(glob: str, path: str, slot: str) -> bool:
    """True where a glob `path:slot` matches this slot of this path."""
    of_path, of_slot = split_place(glob)
    return glob_matches(of_path, path) and slot_matches(of_slot, slot)
