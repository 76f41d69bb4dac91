"""Which root is called what, so that the same module has the same path on every rank.

The largest root of a rank (or the one the user named) is ""; others are "@ClassName",
"@ClassName.2" in order of first call. Two rules make ranks agree: a root that is smaller than
another on some rank is named by its class on every rank, and the numbers are given over all ranks
together, lowest rank first. A module that was once called as a root, and later turned out to live
inside another, takes its path there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RootDefinition:
    """A root definition of one stream."""

    number: int
    """Its definition; definitions come in order of first call."""
    class_name: str
    parameters: int
    """Elements of its parameters, DTensors by their global shape."""
    is_preferred: bool = False
    """The user named it as the root: it is taken for the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRoots:
    """The roots of one stream, and which of them live inside another."""

    roots: tuple[RootDefinition, ...]
    inside: Mapping[int, tuple[int, str]]
    """Root -> (the root that contains it, its path there)."""


def join_path(*parts: str) -> str:
    """Return module path parts joined by dots, empty ones left out."""
    return ".".join(part for part in parts if part)


def name_roots(streams: Sequence[StreamRoots]) -> list[dict[int, str]]:
    """Return, per stream, {root definition: path of that root}; lowest rank first in `streams`."""
    outer = [[r for r in s.roots if r.number not in s.inside] for s in streams]
    tops = [max(roots, key=_size, default=None) for roots in outer]
    minor = {
        _signature(root)
        for roots, top in zip(outer, tops)
        for root in roots
        if top is not None and root.number != top.number and _signature(root) != _signature(top)
    }
    numbers: dict[str, dict[tuple[int, int], int]] = {}
    names: list[dict[int, str]] = []
    for stream, roots, top in zip(streams, outer, tops):
        named: dict[int, str] = {}
        seen: Counter[tuple[str, int]] = Counter()
        for root in sorted(roots, key=lambda r: r.number):
            if root is top and (root.is_preferred or _signature(root) not in minor):
                named[root.number] = ""
                continue
            of_class = numbers.setdefault(root.class_name, {})
            key = (root.parameters, seen[_signature(root)])
            seen[_signature(root)] += 1
            number = of_class.setdefault(key, len(of_class) + 1)
            named[root.number] = f"@{root.class_name}" + (f".{number}" if number > 1 else "")
        for number in stream.inside:
            named[number] = _inside_path(number, stream.inside, named)
        names.append(named)
    return names


def _size(root: RootDefinition) -> tuple[bool, int, int]:
    return root.is_preferred, root.parameters, -root.number


def _signature(root: RootDefinition) -> tuple[str, int]:
    return root.class_name, root.parameters


def _inside_path(
    number: int, inside: Mapping[int, tuple[int, str]], named: Mapping[int, str]
) -> str:
    path, seen = "", set[int]()
    while number in inside and number not in seen:
        seen.add(number)
        number, place = inside[number]
        path = join_path(place, path)
    return join_path(named.get(number, ""), path)
