"""`--format jsonl`: one JSON object a line, a value on a rank, every line with the same keys."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from rankscope.errors import SelectionError
from rankscope.export.formats import Cells, ExportedStep, ExportPlace, Selection
from rankscope.run.folders import Progress
from rankscope.tree.jsontext import number
from rankscope.tree.views import Trace

_TOGETHER = 4096
"""Lines that are made at a time."""


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write the lines, one step in memory at a time."""
    ranks = selection.ranks(trace)
    lines = 0
    encode = json.JSONEncoder(check_circular=False, allow_nan=False).encode
    with place.target.open("w", encoding="ascii") as file:
        for step, nodes in selection.walk(trace, progress, "writing values"):
            exported = ExportedStep(step, nodes, ranks)
            rows = exported.values()
            for begin in range(0, len(rows), _TOGETHER):
                cells = exported.value_cells(rows[begin : begin + _TOGETHER])
                columns = (_finite(column) for column in cells.values())
                file.writelines(encode(dict(zip(cells, line))) + "\n" for line in zip(*columns))
            lines += len(rows)
    if not lines:
        raise SelectionError("the trace holds no value in what is asked for")
    return (f"{lines} values, one a line",)


def _finite(cells: Cells) -> list[object]:
    """Return rows with NaN and infinities as JSON holds them."""
    listed, items = cells.listed(), cells.items
    if cells.place is None and items.dtype.kind == "f":
        for row in np.flatnonzero(~np.isfinite(items.reshape(len(items), -1)).all(axis=1)).tolist():
            if items.ndim == 1:
                listed[row] = None if listed[row] is None else number(listed[row])
            else:
                listed[row] = listed[row] and [number(element) for element in listed[row]]
    return listed
