"""Outcomes added up: by half, and by who can see a mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.lab.faults.board import is_perfect
from tests.lab.faults.runs import Outcome
from tests.lab.unusual.rows import BY_NAME

RIGHT, SHOWN, ALIKE = (
    "right programs",
    "mistakes that the trace shows",
    "mistakes that only a reference shows",
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Runs of one kind and half."""

    runs: int
    exact: int
    """Silence for what is right (and, of `check`, for what only a reference shows); else place,
    ranks and kind, and nothing beside."""
    inexact: int
    """A fault was named, but not exactly that one, or where there is none."""
    silent: int
    """No fault was named where there is one."""


def counts(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Counts]:
    """Return the counts by kind and half, of those that there are."""
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault((_kind(outcome), outcome.run.row.half), []).append(outcome)
    return {key: _counted(group) for key, group in sorted(grouped.items(), key=_place)}


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the counts as a table in Markdown."""
    text = [
        "| runs of | half | runs | exact | named inexactly | no fault named |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, half), c in counts(outcomes).items():
        text.append(f"| {kind} | {half} | {c.runs} | {c.exact} | {c.inexact} | {c.silent} |")
    return "\n".join(text)


def _kind(outcome: Outcome) -> str:
    if not outcome.run.setup.is_faulty:
        return RIGHT
    return SHOWN if BY_NAME[outcome.run.name].is_shown_by_ranks else ALIKE


def _place(item: tuple[tuple[str, str], object]) -> tuple[int, str]:
    kind, half = item[0]
    return (RIGHT, SHOWN, ALIKE).index(kind), half


def _counted(outcomes: Sequence[Outcome]) -> Counts:
    exact = sum(map(is_perfect, outcomes))
    silent = sum(not is_perfect(outcome) and not _has_named(outcome) for outcome in outcomes)
    return Counts(len(outcomes), exact, len(outcomes) - exact - silent, silent)


def _has_named(outcome: Outcome) -> bool:
    """Whether a fault was named, right or wrong."""
    run = outcome.run
    is_to_be_named = run.setup.is_faulty and run.row.expected(run.setup) is not None
    return outcome.score.detected is is_to_be_named
