"""JSON that a person can read with `less`: one line per node head, slot and value, children indented."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["number", "read_number", "statistic", "write_json"]

_BROKEN = frozenset(
    {
        "children",
        "combined",
        "groups",
        "hosts",
        "meshes",
        "nodes",
        "setup",
        "slots",
        "steps",
        "values",
    }
)
"""Keys whose lists get one line per item, wherever they stand."""
_SECTIONS = frozenset({"completeness", "run"})
"""Objects that get one line per member."""


def statistic(value: float) -> float | str | None:
    """Return a statistic as JSON holds it: null where it is undefined (NaN), "inf" and "-inf" as strings."""
    return None if math.isnan(value) else number(value)


def number(value: float) -> float | str:
    """Return a float as JSON holds it: NaN and infinities as strings."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def read_number(value: Any) -> float:
    """Return the float that `number` or `statistic` wrote."""
    return math.nan if value is None else float(value)


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def write_json(document: Mapping[str, Any], *, by_member: bool = True) -> Iterator[str]:
    """Yield the text of a document in pieces.

    Args:
        document: JSON data; the broken keys' lists hold objects.
        by_member: one line per member of the top object.
    """
    yield from _object(document, 0, by_member=by_member)
    yield "\n"


def _object(value: Mapping[str, Any], indent: int, *, by_member: bool = False) -> Iterator[str]:
    pad = " " * (indent + 1)
    yield "{"
    for place, (key, item) in enumerate(value.items()):
        is_broken = _is_broken(key, item)
        if place:
            yield ",\n" + pad if is_broken or by_member else ", "
        elif is_broken or by_member:
            yield "\n" + pad
        yield _line(key) + ": "
        if not is_broken:
            yield _line(item)
        elif isinstance(item, Mapping):
            yield from _object(item, indent + 1, by_member=True)
        else:
            yield "["
            for i, each in enumerate(item):
                yield ("," if i else "") + "\n" + pad + " "
                yield from _object(each, indent + 2)
            yield "]"
    yield "}"


def _is_broken(key: str, item: object) -> bool:
    if isinstance(item, Mapping):
        return key in _SECTIONS
    if key == "ranks" or key in _BROKEN:
        return isinstance(item, (list, tuple)) and bool(item) and isinstance(item[0], Mapping)
    return False
