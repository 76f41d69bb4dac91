"""Small JSON files that another process wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rankscope.errors import SpoolError

__all__ = ["read_json_map"]

_LARGEST_JSON = 16 << 20


def read_json_map(path: Path) -> dict[str, Any]:
    """Read a small JSON object.

    Raises:
        SpoolError: it is missing, too large, or no JSON object.
    """
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise SpoolError(f"{path}: larger than {_LARGEST_JSON} bytes; set it aside")
        decoded = json.loads(path.read_bytes())
    except OSError as error:
        raise SpoolError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpoolError(f"{path}: is no JSON ({error}); set it aside") from error
    if not isinstance(decoded, dict):
        raise SpoolError(f"{path}: expected a JSON object, found {type(decoded).__name__}")
    return decoded
