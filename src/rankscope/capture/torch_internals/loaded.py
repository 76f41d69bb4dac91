"""Classes of modules that somebody else imported."""

from __future__ import annotations

import sys


def loaded_class(module: str, name: str) -> type | None:
    """Return a class of a module somebody else imported: else no such object exists."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
