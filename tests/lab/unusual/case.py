"""A row of this board: what `check` must say of its mistake, what `diff` must, and its half."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.lab.faults.answers import all_ranks
from tests.lab.faults.expected import Expected
from tests.lab.faults.rows import Row, always_right
from tests.lab.faults.setup import Setup

Answer = Callable[[Setup], Expected]
SEED = 36
"""Draws the halves."""


def only_a_reference(setup: Setup) -> None:
    """A mistake that all ranks make alike: `check` cannot see it, and must not alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Row):
    """One program; with a mistake where `expected` or `beside` says what must be said of it."""

    ranks: tuple[int, ...] = (2,)
    dtypes: tuple[str, ...] = ("float32",)
    beside: Answer | None = None
    """What `diff` must say of the mistake."""

    @property
    def is_shown_by_ranks(self) -> bool:
        """Whether the trace alone shows the mistake."""
        return self.expected not in (always_right, only_a_reference)

    @property
    def is_unseen(self) -> bool:
        """Whether the row is in the half that is looked at only at the end."""
        return zlib.crc32(f"{SEED}:{self.name}".encode()) % 2 == 1

    @property
    def half(self) -> str:
        """Return "seen" or "unseen"."""
        return "unseen" if self.is_unseen else "seen"

    def for_check(self) -> Case:
        """Return the row as `check` is asked: without a reference."""
        return replace(self, reference=None)

    def for_diff(self) -> Case:
        """Return the row as `diff` is asked."""
        return replace(self, expected=self.beside or always_right)


def said(
    kinds: str,
    phases: str,
    *places: str,
    ranks: tuple[int, ...] | str = "all",
    or_ranks: tuple[tuple[int, ...], ...] = (),
    step: int | None = 0,
    evidence: tuple[str, ...] = (),
    all_of: tuple[str, ...] = (),
) -> Answer:
    """Return an answer: kinds and phases with "|" between them, places as "path:slot".

    `ranks`: which are named, "all" or "culprit", the rank the mistake is made on.
    """

    def answer(setup: Setup) -> Expected:
        named = {"all": all_ranks(setup), "culprit": (setup.culprit,)}
        return Expected(
            kinds=tuple(kinds.split("|")),
            phases=tuple(phases.split("|")),
            places=tuple(_place(place) for place in places),
            all_of=tuple(_place(place) for place in all_of),
            ranks=named[ranks] if isinstance(ranks, str) else ranks,
            or_ranks=or_ranks,
            step=step,
            evidence=evidence,
        )

    return answer


def _place(text: str) -> tuple[str, str]:
    path, _, slot = text.partition(":")
    return path, slot
