"""What one claim is, and the run that it is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.lab.claims.held import ByRank, Held, Place

Finding = Mapping[str, Any]
STATISTIC = 1e-4
"""Relative: how far a printed number may be off."""
SKETCH = (0.15, 6.0)
"""Times the true one that an estimated distance may be: of 95 in 100 it is 0.68 to 1.92 times
(docs/commands/diff.md), and of all here once 0.19 times."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that a report says."""

    text: str
    is_true: bool | None
    """None where full tensors do not tell."""
    why: str = ""
    """What the tensors hold instead, or why they do not tell."""


@dataclass(slots=True, kw_only=True)
class Case:
    """A run, its report, and the tensors behind both."""

    label: str
    report: Mapping[str, Any]
    test: Held
    ref: Held | None = None
    rules: Sequence[tuple[str, str]] = field(default_factory=list)
    """How paths of the test become those of the reference."""

    def ref_path(self, path: str) -> str:
        """Return the reference's path of a module of the test."""
        for pattern, text in self.rules:
            path = re.sub(pattern, text, path)
        return path


Recompute = Callable[[Case, Finding, Any], Iterable[Claim]]


def any_call(found: Sequence[ByRank], test: Callable[[ByRank], bool | None]) -> bool | None:
    """Return whether what is said holds in one of these calls: a finding names no ordinal."""
    answers = [test(by_rank) for by_rank in found]
    return True if True in answers else False if False in answers else None


def at_place(
    case: Case, place: Place, text: str, test: Callable[[ByRank], bool | None]
) -> Iterator[Claim]:
    """Yield a claim about what ranks of the test hold at a place."""
    found = case.test.all_of(place)
    answer = any_call(found, test)
    if not found:
        yield Claim(text, None, "no tensor was kept there")
    else:
        why = "the tensors say otherwise" if answer is False else ""
        yield Claim(text, answer, why if answer is not None else "not on all of these ranks")


def is_near(number: float, true: float, scale: float, slack: float = STATISTIC) -> bool:
    """True where a printed statistic is that of the tensor; `scale`: size of its elements."""
    if math.isnan(number) or math.isnan(true):
        return math.isnan(number) and math.isnan(true)
    if math.isinf(number) or math.isinf(true):
        return number == true
    return abs(number - true) <= slack * max(abs(true), scale) + 1e-12


def is_estimate(number: float, true: float) -> bool:
    """True where a distance that sketches gave may be the true one."""
    low, high = SKETCH
    return low * true - 1e-6 <= number <= high * true + 1e-6


def plain(number: Any) -> float:
    """Return a number of a report, in which NaN and infinity are words."""
    return float(number) if not isinstance(number, str) else float(number.replace("inf", "inf"))


def parts(text: str, pattern: str) -> Iterator[re.Match[str]]:
    """Yield the places where a sentence says something of this form."""
    yield from re.finditer(pattern, text)


__all__ = [
    "SKETCH",
    "STATISTIC",
    "ByRank",
    "Case",
    "Claim",
    "Finding",
    "Held",
    "Place",
    "Recompute",
    "any_call",
    "at_place",
    "is_estimate",
    "is_near",
    "parts",
    "plain",
]
