"""Entries whose ranks hold pieces of one tensor: which rows to combine, and the result per mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.combine import CombinationPlan, Combined, apply_plan, plan_rows
from rankscope.assembly.interning import Description
from rankscope.layout.placement import Mesh, PieceKind
from rankscope.record.notes import Note
from rankscope.record.ranklists import ranks_named

__all__ = ["WholeTensors"]


class WholeTensors:
    """Combines entry after entry; plans are made once per layout and set of ranks."""

    def __init__(
        self, descriptions: Sequence[Description], rank_of_stream: NDArray[np.int64]
    ) -> None:
        self._descriptions = descriptions
        self._rank_of_stream = rank_of_stream
        self._plans: dict[bytes, list[tuple[NDArray[np.int64], CombinationPlan | str]]] = {}
        self._spread: dict[int, tuple[bool, bool]] = {}
        """By description: with several distinct values, with one."""

    def is_spread(self, description: int, *, folds: int) -> bool:
        """True where an entry is to be combined: its layout is known, and it is not one value that
        every rank holds whole.

        Args:
            description: number of its first row's description.
            folds: distinct values among its rows.
        """
        found = self._spread.get(description)
        if found is None:
            first = self._descriptions[description].piece
            is_placed = first.layout.mesh is not None and first.global_shape is not None
            is_whole = all(p.pieces is PieceKind.COPIES for p in first.layout.placements)
            found = self._spread[description] = (is_placed, is_placed and not is_whole)
        return found[folds == 1]

    def combine(
        self,
        rows: NDArray[Any],
        description: NDArray[np.int32],
        stream: NDArray[np.int32],
        has_digest: NDArray[np.bool_],
    ) -> list[Combined]:
        """Return the global statistics of one spread entry, one per distinct result; [] where no
        row has numbers.

        Args:
            rows: VALUE_DTYPE, the values of one entry.
            description: number of each row's description.
            stream: stream of each row.
            has_digest: False where a row has no numbers.
        """
        if not has_digest.any():
            return []
        results: list[Combined] = []
        for chosen, plan in self._plan(description, stream):
            ranks = tuple(self._rank_of_stream[stream[chosen]].tolist())
            blank = chosen[~has_digest[chosen]]
            if isinstance(plan, str):
                found = Combined(ranks=ranks, note=Note.words(plan))
            elif len(blank):
                held = ranks_named(self._rank_of_stream[stream[blank]].tolist())
                found = Combined(ranks=ranks, note=Note.words(f"not digested on {held}"))
            else:
                found = apply_plan(plan, rows[chosen])
            _add(results, found)
        return results

    def _plan(
        self, description: NDArray[np.int32], stream: NDArray[np.int32]
    ) -> list[tuple[NDArray[np.int64], CombinationPlan | str]]:
        key = description.tobytes() + b"|" + stream.tobytes()
        if key not in self._plans:
            ranks = self._rank_of_stream[stream].tolist()
            pieces = [self._descriptions[number].piece for number in description.tolist()]
            held = list(zip(ranks, pieces))
            by_mesh: dict[Mesh, list[int]] = {}
            for row, piece in enumerate(pieces):
                if piece.layout.mesh is not None:
                    by_mesh.setdefault(piece.layout.mesh, []).append(row)
            self._plans[key] = [
                (np.array(rows), plan_rows([held[row] for row in rows]))
                for rows in by_mesh.values()
            ]
        return self._plans[key]


def _add(results: list[Combined], found: Combined) -> None:
    """Fold a result into an equal one of another mesh of the family."""
    for i, known in enumerate(results):
        # repr, because NaN is not equal to itself
        if repr(replace(known, ranks=())) == repr(replace(found, ranks=())):
            results[i] = replace(known, ranks=tuple(sorted({*known.ranks, *found.ranks})))
            return
    results.append(found)
