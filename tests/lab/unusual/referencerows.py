"""The rows with a program of one process: what `diff` is held to."""

from __future__ import annotations

from tests.lab.unusual.rows import CASES

ROWS = tuple(
    case.for_diff()
    for case in CASES
    if case.reference is not None and (case.beside is not None or not case.has_fault)
)
BY_NAME = {row.name: row for row in ROWS}
