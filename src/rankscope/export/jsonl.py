"""`--format jsonl`: one JSON object a line, a value on a rank, every line with the same keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rankscope.errors import SelectionError
from rankscope.export.place import ExportPlace
from rankscope.export.rows import Row, rows_of
from rankscope.export.subset import Selection
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.record.value import Digest
from rankscope.run.filenames import Progress
from rankscope.tree.jsontext import number, statistic
from rankscope.tree.step import StepColumns
from rankscope.tree.views import Trace

__all__ = ["write"]

_NUMBERS = (*COUNTS, *NUMBERS, "hash", "sketch")


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write the lines, one step in memory at a time."""
    ranks = selection.ranks(trace)
    groups, lines = len(selection.groups(trace)), 0
    encode = json.JSONEncoder(check_circular=False, allow_nan=False).encode
    with place.target.open("w", encoding="ascii") as file:
        for done, (step, nodes) in enumerate(selection.walk(trace)):
            progress("writing values", done / groups)
            for node in nodes:
                for row in rows_of(step, node, ranks):
                    file.write(encode(_line(row, node.step)) + "\n")
                    lines += 1
    if not lines:
        raise SelectionError("the trace holds no value in what is asked for")
    return (f"{lines} values, one a line",)


def _line(row: Row, columns: StepColumns) -> dict[str, Any]:
    shared, fold, rank, at = row
    digest = columns.digest(at)
    return {
        **shared,
        "rank": rank,
        "shape": fold.shape,
        "flags": fold.flags,
        "requires_grad": fold.requires_grad,
        "note": fold.note,
        "time_ns": int(columns["values.time_ns"][at]),
        "reference": int(columns["values.reference"][at]) or None,
        "digested": digest is not None,
        **(dict.fromkeys(_NUMBERS) if digest is None else _numbers(digest)),
    }


def _numbers(digest: Digest) -> dict[str, Any]:
    return {
        **{name: digest.number(name) for name in COUNTS},
        **{name: statistic(digest.number(name)) for name in NUMBERS},
        "hash": f"{digest.hash:016x}",
        "sketch": [number(each) for each in digest.sketch],
    }
