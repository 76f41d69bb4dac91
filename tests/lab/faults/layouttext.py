"""Texts of layout files, for programs whose ranks hold plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Entry = tuple[str, str, Mapping[str, str]]
"""(path, slot, {axis: placement})"""


def layout_text(axes: str, entries: Iterable[Entry]) -> str:
    """Return the file that declares these entries."""
    lines = [f'axes = "{axes}"']
    for path, slot, placements in entries:
        placed = ", ".join(f'{axis} = "{placement}"' for axis, placement in placements.items())
        lines += ["[[layout]]", f'path = "{path}"', f'slot = "{slot}"']
        lines.append(f"placements = {{ {placed} }}")
    return "\n".join(lines) + "\n"


def weights(placements: Mapping[str, str], *paths: str) -> list[Entry]:
    """Return the entries of weights that lie alike."""
    return [(path, "param:weight", placements) for path in paths]
