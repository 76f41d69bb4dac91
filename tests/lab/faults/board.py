"""The scoreboard: outcomes to rows of a table, and the table to text or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.faults.runs import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """All runs of one program, faulty or not."""

    name: str
    about: str
    is_faulty: bool
    ranks: tuple[int, ...]
    runs: int
    detected: int
    """Of a program that is right: reported clean."""
    module: int
    rank: int
    kind: int
    false_alarms: int


def lines(outcomes: Iterable[Outcome]) -> list[Line]:
    """Add up outcomes by program, faults first, in the order in which programs came first."""
    kept: dict[tuple[bool, int], list[Outcome]] = {}
    places: dict[str, int] = {}
    for outcome in outcomes:
        run = outcome.run
        place = places.setdefault(run.name, len(places))
        kept.setdefault((not run.setup.is_faulty, place), []).append(outcome)
    return [_added(group) for _, group in sorted(kept.items(), key=lambda item: item[0])]


def _added(group: Sequence[Outcome]) -> Line:
    scores = [outcome.score for outcome in group]
    run = group[0].run
    is_off = run.has_fault and not run.setup.is_faulty
    return Line(
        name=run.name,
        about="the program of that fault, without it" if is_off else run.about,
        is_faulty=run.setup.is_faulty,
        ranks=tuple(sorted({outcome.run.setup.ranks for outcome in group})),
        runs=len(group),
        detected=sum(s.detected for s in scores),
        module=sum(s.module for s in scores),
        rank=sum(s.ranks for s in scores),
        kind=sum(s.kind for s in scores),
        false_alarms=sum(s.false_alarms for s in scores),
    )


def table(found: Sequence[Line]) -> str:
    """Return both tables as Markdown: faults, and programs that are right."""
    faults = [line for line in found if line.is_faulty]
    others = [line for line in found if not line.is_faulty]
    text = []
    if faults:
        text += [
            "| fault | what it is | ranks | runs | found | module | rank | kind | false alarms |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_fault_row(line) for line in faults),
            _fault_row(_sum(faults)),
        ]
    if others:
        text += [""] if text else []
        text += [
            "| no fault | what it is | ranks | runs | clean | false alarms |",
            "|---|---|---|---|---|---|",
            *(_silent_row(line) for line in others),
            _silent_row(_sum(others)),
        ]
    return "\n".join(text)


def _sum(found: Sequence[Line]) -> Line:
    return Line(
        name="**all**",
        about="",
        is_faulty=found[0].is_faulty,
        ranks=(),
        runs=sum(line.runs for line in found),
        detected=sum(line.detected for line in found),
        module=sum(line.module for line in found),
        rank=sum(line.rank for line in found),
        kind=sum(line.kind for line in found),
        false_alarms=sum(line.false_alarms for line in found),
    )


def _fault_row(line: Line) -> str:
    counts = (line.runs, line.detected, line.module, line.rank, line.kind, line.false_alarms)
    return _row(line, counts)


def _silent_row(line: Line) -> str:
    return _row(line, (line.runs, line.detected, line.false_alarms))


def _row(line: Line, counts: Sequence[int]) -> str:
    cells = (line.name, line.about, ", ".join(map(str, line.ranks)), *map(str, counts))
    return f"| {' | '.join(cells)} |"


def as_json(found: Sequence[Line], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return lines and what was said in runs that are not as they should be."""
    names = ("name", "is_faulty", "ranks", "runs", "detected", "module", "rank", "kind")
    return {
        "format": "rankscope.faults/1",
        "lines": [{n: getattr(x, n) for n in (*names, "false_alarms")} for x in found],
        "wrong": [
            {"run": outcome.run.label, "said": outcome.score.said}
            for outcome in outcomes
            if not is_perfect(outcome)
        ],
    }


def is_perfect(outcome: Outcome) -> bool:
    """Whether everything was named, and nothing beside it."""
    found = outcome.score
    return found.detected and found.module and found.ranks and found.kind and not found.false_alarms
