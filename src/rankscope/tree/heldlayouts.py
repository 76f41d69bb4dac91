"""The layout that a step says of a value."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from rankscope.layout.placement import Layout, LayoutSource, Mesh, Placement, parse_placement
from rankscope.record.value import TensorFacts

_SOURCES: Final = frozenset(source.value for source in LayoutSource)


@lru_cache(maxsize=4096)
def placements_of(facts: TensorFacts) -> dict[str, Placement]:
    """Return {axis: placement}; {} where the layout is unknown."""
    if facts.source not in _SOURCES:
        return {}
    return {axis: parse_placement(text) for axis, text in facts.placements}


def source_of(facts: TensorFacts) -> LayoutSource:
    """Return the source of a layout, unknown where a newer rankscope has one of its own."""
    return LayoutSource(facts.source) if facts.source in _SOURCES else LayoutSource.UNKNOWN


def layout_of(facts: TensorFacts, mesh: Mesh | None) -> Layout:
    """Return the layout of a value that lies over a mesh, None for one that is not known."""
    if mesh is None:
        return Layout(source=source_of(facts))
    placements = placements_of(facts)
    placed = tuple(placements[axis] for axis in mesh.axes)
    return Layout(source=source_of(facts), mesh=mesh, placements=placed)
