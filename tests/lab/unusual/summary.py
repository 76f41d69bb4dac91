"""Outcomes added up: by half, and by who can see a mistake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.lab.faults.board import is_perfect
from tests.lab.faults.runs import Outcome

RIGHT, SHOWN, ALIKE = (
    "right programs",
    "mistakes that the trace shows",
    "mistakes that only a reference shows",
)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table as Markdown: runs by kind and half, and what became of them.

    A right answer is exact: silence for what is right (and, of `check`, for what only a reference
    shows), else place, ranks and kind and nothing beside.
    """
    text = [
        "| runs of | half | runs | exact | another fault named | no fault named |",
        "|---|---|---|---|---|---|",
    ]
    for kind in (RIGHT, SHOWN, ALIKE):
        for half in ("seen", "unseen"):
            text += _line(
                kind, half, (o for o in outcomes if _kind(o) == kind and o.run.row.half == half)
            )
    return "\n".join(text)


def _kind(outcome: Outcome) -> str:
    if not outcome.run.setup.is_faulty:
        return RIGHT
    return SHOWN if outcome.run.row.is_shown_by_ranks else ALIKE


def _line(kind: str, half: str, outcomes: Iterable[Outcome]) -> list[str]:
    chosen = list(outcomes)
    exact = sum(map(is_perfect, chosen))
    silent = sum(not is_perfect(o) and not _has_named(o) for o in chosen)
    cells = (kind, half, len(chosen), exact, len(chosen) - exact - silent, silent)
    return [f"| {' | '.join(map(str, cells))} |"] if chosen else []


def _has_named(outcome: Outcome) -> bool:
    """Whether a fault was named, right or wrong."""
    run = outcome.run
    is_to_be_named = run.setup.is_faulty and run.row.expected(run.setup) is not None
    return outcome.score.detected is is_to_be_named
