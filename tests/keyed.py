"""A key file for all collectors and relays of one test process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from rankscope.companion.curve import new_keys
from rankscope.run.connection import write_keys

_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def key_file() -> Path:
    """Return the collector's file; beside it lies the relays'."""
    _folders.append(tempfile.TemporaryDirectory(prefix="keys-"))
    path = Path(_folders[-1].name) / "keys"
    write_keys(path, new_keys())
    return path
