"""What the programs of the sixth set share, and where their numbers begin."""

from laterprograms import (
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    Drawing,
    Gpt,
    Job,
    cross_entropy,
    full,
)

__all__ = [
    "HEADS",
    "LENGTH",
    "VOCABULARY",
    "WIDTH",
    "Attention",
    "Block",
    "Gpt",
    "Job",
    "cross_entropy",
    "full",
    "points",
    "rows",
    "run",
]

_DRAWING = Drawing(seed=1613, rows_from=310_000, points_from=350_000)
run, rows, points = _DRAWING.run, _DRAWING.rows, _DRAWING.points
