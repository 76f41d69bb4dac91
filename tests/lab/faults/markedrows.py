"""A second table: programs marked as Megatron marks them, and the same with a layout file instead.

`python -m tests.lab.faults` does not run it; tests/lab/faults/test_marked.py does.
"""

from __future__ import annotations

from tests.lab.faults import answers
from tests.lab.faults.programs import megatron
from tests.lab.faults.rows import Oracle, Program, Row
from tests.lab.faults.setup import Setup

TABLE = "tests.lab.faults.markedrows"
_CASES = (
    ("tensor", megatron.tensor_parallel, megatron.unmarked, answers.row_reduce),
    ("norms", megatron.norms_apart, megatron.norms_apart_unmarked, answers.norm_apart),
    (
        "sequence",
        megatron.sequence_parallel,
        megatron.sequence_parallel_unmarked,
        answers.partial_norm,
    ),
    (
        "forgotten",
        megatron.norms_forgotten,
        megatron.norms_forgotten_unmarked,
        answers.partial_norms,
    ),
)


def _row(name: str, program: Program, oracle: Oracle, layout: str, expected: object) -> Row:
    return Row(
        name=name,
        about="two ranks share each layer",
        program=program,
        oracle=oracle,
        expected=expected,
        layout=layout,
    )


ROWS: tuple[Row, ...] = tuple(
    row
    for name, marked, bare, expected in _CASES
    for row in (
        _row(f"{name}-marked", marked, megatron.replicas_right, "", expected),
        _row(f"{name}-declared", bare, megatron.replicas_right, megatron.LAYOUT, expected),
        _row(f"{name}-bare", bare, megatron.replicas_right, "", expected),
    )
)
BY_NAME = {row.name: row for row in ROWS}

__all__ = ["BY_NAME", "ROWS", "TABLE", "Setup"]
