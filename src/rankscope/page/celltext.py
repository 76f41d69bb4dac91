"""The map as text, a line for each module: for `grep`, for screen readers, for who has no
JavaScript."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.page.cellplanes import CellPlanes
from rankscope.page.modulerows import ModuleRows
from rankscope.page.pagesteps import PageStep
from rankscope.page.verdicthtml import text
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.visibletext import visible

__all__ = ["map_text"]

Array = NDArray[Any]
_LONGEST: Final = 200
"""Characters of a name that a line shows."""
_MOST_TEXT: Final = 1_500_000
"""Characters of all lines."""


def map_text(
    planes: CellPlanes, rows: ModuleRows, steps: Sequence[PageStep], words: Sequence[str]
) -> str:
    """Return the map as HTML text, until there are too many lines; says how many are left out.
    `words` are those of the classes."""
    kept: list[str] = []
    size = left = 0
    for line in _lines(planes, rows, steps, words):
        size += len(line)
        if size <= _MOST_TEXT:
            kept.append(text(line, _MOST_TEXT))
        else:
            left += 1
    if left:
        kept.append(f"and {left:,} modules more: rankscope show lists them")
    return "\n".join(kept)


def _lines(
    planes: CellPlanes, rows: ModuleRows, steps: Sequence[PageStep], words: Sequence[str]
) -> Iterator[str]:
    """Yield `path  phase: as the others (ranks 0-3, steps 0-9); differs (rank 1, step 3)  phase: …`
    for every module that was called."""
    keys = list(dict.fromkeys((step, phase) for step, phase, _ in planes.made()))
    phases = sorted({phase for _, phase in keys})
    by_phase = {
        phase: {step: planes.merged(step, phase) for step, own in keys if own is phase}
        for phase in phases
    }
    for row, path in enumerate(rows.paths):
        parts = []
        for phase, merged in by_phase.items():
            told = _of_phase({step: plane[row] for step, plane in merged.items()}, steps, words)
            if told:
                parts.append(f"{phase.word}: {told}")
        if parts:
            name = visible(path)[:_LONGEST] or "(root)"
            yield f"{name}  {'  '.join(parts)}"


def _of_phase(lines: dict[int, Array], steps: Sequence[PageStep], words: Sequence[str]) -> str:
    """Return which classes the cells of one module have in one phase, with ranks and steps."""
    found: dict[int, dict[bytes, list[int]]] = {}
    held: dict[bytes, Array] = {}
    for step, line in lines.items():
        for cell in np.unique(line).tolist():
            if cell:
                ranks = np.flatnonzero(line == cell)
                key = ranks.tobytes()
                held[key] = ranks
                found.setdefault(cell, {}).setdefault(key, []).append(step)
    told = []
    for cell, by_ranks in sorted(found.items()):
        places = [
            f"{ranks_named(held[key].tolist())}, {_steps_named(own, steps)}"
            for key, own in by_ranks.items()
        ]
        told.append(f"{words[cell]} ({'; '.join(places)})")
    return "; ".join(told)


def _steps_named(own: Sequence[int], steps: Sequence[PageStep]) -> str:
    """Return `steps 0-9`, `eval steps 1,2 and setup`."""
    plain: dict[tuple[str, int], list[int]] = {}
    others = []
    for number in own:
        step = steps[number]
        if step.is_setup:
            others.append(step.label)
        else:
            plain.setdefault((step.mode.word, step.incarnation), []).append(step.number)
    parts = []
    for (mode, life), numbers in plain.items():
        noun = "step" if len(numbers) == 1 else "steps"
        parts.append(f"{mode} {noun} {ranks_text(numbers)}" + (f" (life {life})" if life else ""))
    return " and ".join([*others, *parts])
