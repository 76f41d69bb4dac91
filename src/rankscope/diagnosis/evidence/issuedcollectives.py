"""Collectives as the ranks issued them: who called what, with whom, as which of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.evidence.stepview import Array, CallView, StepView, grouped
from rankscope.record.phases import Phase
from rankscope.record.ranks import MESSAGES, OPS, parse_ranks

EQUAL_OUTPUTS: Final = frozenset(
    {"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "broadcast"}
)
"""What gives the same to all of its ranks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IssuedCollective:
    """What some ranks issued alike in one call."""

    call: CallView
    ranks: Array
    facts: Mapping[str, Any]
    """`collective` of docs/trace-format.md."""
    op: str
    group: str
    members: tuple[int, ...]
    """In the group's own order, as these ranks mean it."""
    sequence: int
    """Which of its group in the step; a message: of its channel since `since`."""

    @property
    def is_message(self) -> bool:
        """A send or a recv."""
        return self.op in MESSAGES

    @property
    def lacks(self) -> str:
        """The fact that the rules need and the trace does not have, "" where it has all."""
        if self.op not in OPS:
            return f"known op ({self.op[:40]!r})" if self.op else "op"
        if not self.facts.get("group"):
            return "group"
        names = ("members", *OPS[self.op])
        return next((name for name in names if self.facts.get(name) in (None, [])), "")

    @property
    def slot(self) -> str:
        """Name of the call in findings."""
        return f"collective.{self.call.ordinal}"

    @property
    def site(self) -> tuple[str, str]:
        """Where in the program it was issued: the module, and the line if that was recorded."""
        return self.call.path, str(self.facts.get("at", ""))


def issues_of(step_view: StepView) -> Iterator[IssuedCollective]:
    """Yield what ranks issued in one step."""
    return (issue for call in step_view.of(Phase.COLLECTIVE) for issue in issues_in(call))


def moves_numbers(issue: IssuedCollective) -> bool:
    """True where tensors went from rank to rank that are more than a loss or a count."""
    return any((values.counts > 1).any() for values in (*issue.call.inputs, *issue.call.outputs))


def known_collectives(step_view: StepView) -> Iterator[IssuedCollective]:
    """Yield the collectives of one step whose facts are all known; no messages."""
    return (issue for issue in issues_of(step_view) if not (issue.is_message or issue.lacks))


def ranks_in_doubt(step_view: StepView) -> set[int]:
    """Return the ranks that issued what lacks a fact: it may be one more of any group."""
    return {rank for issue in issues_of(step_view) if issue.lacks for rank in issue.ranks.tolist()}


def issues_in(call: CallView) -> Iterator[IssuedCollective]:
    """Yield what ranks issued in one call: none of other calls, several where ranks differ."""
    issued = call.node.collectives
    for text, facts in issued:
        ranks = call.ranks if len(issued) == 1 else np.array(parse_ranks(text), np.int64)
        yield IssuedCollective(
            call=call,
            ranks=ranks,
            facts=facts,
            op=str(facts.get("op", "")),
            group=str(facts.get("group", "")),
            members=tuple(facts.get("members", ())),
            sequence=int(facts.get("sequence", 0)),
        )


def issued_by_rank(issues: Iterable[IssuedCollective]) -> dict[int, list[IssuedCollective]]:
    """Return {rank: what it issued of one group, in order}."""
    in_order = sorted(issues, key=lambda issue: issue.sequence)
    return grouped((rank, issue) for issue in in_order for rank in issue.ranks.tolist())


def equal_by_offset(
    first: Mapping[int, tuple[int, bool] | None], second: Mapping[int, tuple[int, bool] | None]
) -> dict[int, int]:
    """Return {offset of numbers: how many values are equal at it}; None is an unknown value."""
    numbers_of = grouped((value, number) for number, value in first.items())
    pairs = ((number, value) for number, value in second.items() if value is not None)
    return Counter(match - number for number, value in pairs for match in numbers_of.get(value, ()))


def fits_shifted(fits: Mapping[int, int]) -> bool:
    """True where more values are equal at some offset than without one: numbers are wrong."""
    return any(count > fits.get(0, 0) for count in fits.values())
