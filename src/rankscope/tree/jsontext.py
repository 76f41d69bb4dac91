"""JSON that a person can read with `less`: one line for each thing that there are many of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_BROKEN = frozenset({"groups", "hosts", "meshes", "setup", "steps"})
"""Keys whose lists get one line per item, wherever they stand."""
_SECTIONS = frozenset({"completeness", "run"})
"""Objects that get one line per member."""
_MAYBE_BROKEN = _BROKEN | _SECTIONS | {"ranks"}


def statistic(value: float) -> float | str | None:
    """Return a statistic as JSON holds it: null where undefined (NaN), infinities as strings."""
    return None if math.isnan(value) else number(value)


def number(value: float) -> float | str:
    """Return a float as JSON holds it: NaN and infinities as strings."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode
"""Returns data as JSON on one line."""


def json_text(document: Mapping[str, Any]) -> list[str]:
    """Return a document as pieces of text to be joined; lists under broken keys hold objects."""
    pieces: list[str] = []
    _write_object(document, "\n ", pieces, by_member=True)
    pieces.append("\n")
    return pieces


def _write_object(
    value: Mapping[str, Any], pad: str, pieces: list[str], *, by_member: bool = False
) -> None:
    """Append an object: members that fit on its line together, broken ones on lines of their
    own. What fits is encoded at once: encoders are fast, calling them is not."""
    line: dict[str, Any] = {}
    opening = "{"
    for key, item in value.items():
        is_broken = key in _MAYBE_BROKEN and _is_broken(key, item)
        if not is_broken and not by_member:
            line[key] = item
            continue
        if line:
            pieces.append(opening + encoded(line)[1:-1])
            line, opening = {}, ","
        pieces.append(f"{opening}{pad}{encoded(key)}: ")
        opening = ","
        if not is_broken:
            pieces.append(encoded(item))
        elif isinstance(item, dict):
            _write_object(item, pad + " ", pieces, by_member=True)
        else:
            _write_list(item, pad + " ", pieces)
    if line:
        pieces.append(("{" if opening == "{" else ", ") + encoded(line)[1:-1])
        opening = ","
    pieces.append("{}" if opening == "{" else "}")


def _write_list(items: Sequence[Mapping[str, Any]], pad: str, pieces: list[str]) -> None:
    opening = "["
    for item in items:
        pieces.append(opening + pad)
        _write_object(item, pad + " ", pieces)
        opening = ","
    pieces.append("]")


def _is_broken(key: str, item: object) -> bool:
    if key in _SECTIONS:
        return isinstance(item, dict)
    return isinstance(item, (list, tuple)) and bool(item) and isinstance(item[0], dict)
