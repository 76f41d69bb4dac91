"""Which collectives of a group are one: the n-th of each of its ranks, counted over the whole run.

As long as all ranks take the same steps, the n-th of a step says the same, and rules look at one
step. Ranks that train apart, or evaluate more batches, do not. What tells is a step in which a rank
of the group ran and issued none of what others issued. Only such groups are followed over the run.

Numbers need every collective recorded. Where steps are missing, torch's own count is asked
(`calls.issued`). On some backends it counts what not all ranks issue, so it is believed only where
it makes more outputs equal than the steps do. Where neither is known, or where outputs are equal at
an offset more often than without one, nothing is said. Nor is a group numbered where a rank ended
by itself and others still wait: there the steps say who left one out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, zip_longest
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.context import Candidate, CheckContext, JudgedStep, candidate_at
from rankscope.diagnosis.evidence.distances import minority
from rankscope.diagnosis.evidence.issuedcollectives import (
    EQUAL_OUTPUTS,
    IssuedCollective,
    equal_by_offset,
    fits_shifted,
    known_collectives,
    ranks_in_doubt,
)
from rankscope.diagnosis.evidence.lastcalls import ORDERLY
from rankscope.diagnosis.evidence.stepview import StepView, grouped, step_view_of
from rankscope.diagnosis.rules.collectives import facts_text
from rankscope.record.call import Mode
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.value import ValueFlag
from rankscope.tree.views import Step

_Group = tuple[int, str, tuple[int, ...]]
"""Incarnation, name, members."""
_Owners = dict[tuple[Any, ...], dict[_Group, int]]
"""{`Candidate.where`: {group that issued something there: which of the steps it was in}}"""
_WAITS_FOR_ALL: Final = frozenset({"all_reduce", "all_gather", "all_gather_into_tensor"})
_MOST_ENDS: Final = 1_000_000
"""Of one rank; a longer line is not known."""
_PAIRS: Final = 16
"""Pairs of neighbouring ranks whose outputs are held to each other."""


class _OwnCall(NamedTuple):
    """A collective as one rank issued it."""

    time_ns: int
    sequence: int
    number: int
    call_id: str
    facts: str
    counted: tuple[str, int]
    """Kind of device, and which of the group's it was there by torch's count: 0 if not known."""
    value: tuple[int, bool] | None
    """What it gave, where that is the same on all ranks, as `SlotValues.told` has it."""


@dataclass(slots=True)
class _Met:
    """What steps show of one group."""

    came: set[int] = field(default_factory=set)
    passed: dict[int, int] = field(default_factory=dict)
    """{rank: the first step in which it ran and issued none of what others issued}"""
    torn: int | None = None
    """The first step in which a rank had left what others had not yet come to."""
    miscounted: int | None = None
    """The first step before which ranks had issued different numbers of collectives."""


@dataclass(slots=True)
class MatchedCollectives:
    """Filled step by step; what is kept does not grow with the number of steps."""

    _groups: defaultdict[_Group, _Met] = field(default_factory=lambda: defaultdict(_Met))
    _last: dict[tuple[int, int], int] = field(default_factory=dict)
    _steps: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    """{(incarnation, rank, mode): (how many steps, the highest number of one)}"""
    _apart: dict[_Group, dict[tuple[int, int], int] | None] = field(default_factory=dict)
    """{group: {(step, rank): number of its first in that step}}; None where that is not known."""
    _doubtful: set[tuple[int, int]] = field(default_factory=set)
    """(incarnation, rank) that issued what may be one more of any of its groups"""
    _level: dict[_Group, int] = field(default_factory=dict)
    """{group: the first step in which its ranks may stand apart}"""

    def note(self, step_view: JudgedStep, number: int) -> None:
        """Keep who came to what in one step."""
        if step_view.is_setup:
            return
        self._doubtful |= {(step_view.incarnation, rank) for rank in ranks_in_doubt(step_view)}
        # where the mode is not known, nor is whether a step before it is missing
        last = _MOST_ENDS if step_view.mode is Mode.UNKNOWN else step_view.step
        texts = {id(c.ranks): c.ranks for c in step_view.calls if c.phase is not Phase.COLLECTIVE}
        ran = {rank for ranks in texts.values() for rank in ranks.tolist()}
        for rank in ran:
            self._last[step_view.incarnation, rank] = number
            key = step_view.incarnation, rank, int(step_view.mode)
            count, highest = self._steps.get(key, (0, -1))
            self._steps[key] = count + 1, max(highest, last)
        came: defaultdict[_Group, set[int]] = defaultdict(set)
        counts: defaultdict[_Group, set[int]] = defaultdict(set)
        for issue in known_collectives(step_view):
            group = _group_of(step_view, issue)
            came[group].update(issue.ranks.tolist())
            if not issue.sequence:
                counts[group].update(issue.call.column("issued", issue.ranks).tolist())
            history = self._groups[group]
            if history.torn is None and _is_torn(issue, step_view.context):
                history.torn = number
        for group, ranks in came.items():
            history = self._groups[group]
            history.came |= ranks
            if history.miscounted is None and len(counts[group] - {0}) > 1:
                history.miscounted = number
            for rank in (ran & set(group[2])) - ranks:
                history.passed.setdefault(rank, number)

    def judged(
        self, candidates: list[Candidate], steps: Sequence[Step], ends: Mapping[int, str]
    ) -> list[Candidate]:
        """Return the candidates without those that say that ranks disagree on a collective of a
        step, and with one for the first on which they disagree over the run. Each of the `steps` is
        read again, and none is kept."""
        final = max((incarnation for incarnation, _ in self._last), default=0)
        ended = {rank for rank, end in ends.items() if end in ORDERLY}
        unlike = [group for group in self._groups if self._is_unlike(group, ended, final)]
        if not unlike:
            return candidates
        lines_of, owners = _lines(steps, set(unlike))
        mismatches: list[Candidate] = []
        for group in unlike:
            lines = lines_of[group]
            longest = max(map(len, lines.values()), default=0)
            short = {rank for rank, line in lines.items() if len(line) < longest}
            is_waited_for = not ended >= lines.keys() and not ended.isdisjoint(short)
            if self._is_doubtful(group) or longest >= _MOST_ENDS:
                self._apart[group] = None
            elif not self._are_whole(group[0], lines):
                mismatches += self._counted_group(group, lines, steps)
            elif group[0] != final or not is_waited_for:
                mismatches += self._judged_group(group, lines, steps)
        return [c for c in candidates if self._is_left(c, owners)] + mismatches

    def is_one(self, number: int, step_view: StepView, issue: IssuedCollective) -> bool:
        """True where an issue is one collective in step `number` of the trace; after `judged`."""
        group = _group_of(step_view, issue)
        return self._are_level(group, number, issue.ranks.tolist())

    def _is_unlike(self, group: _Group, ended: set[int], final: int) -> bool:
        """True where a rank passed by a step of others before its end. Where steps are missing,
        differing counts may say the same, and so may calls that nobody can have waited for in
        common, if all ranks ended by themselves."""
        incarnation, history = group[0], self._groups[group]
        if self._is_doubtful(group) or any(
            number < self._last[incarnation, rank] or (incarnation == final and rank in ended)
            for rank, number in history.passed.items()
            if rank in history.came
        ):
            return True
        is_over = incarnation == final and history.came <= ended
        signs = [history.miscounted, history.torn if is_over else None]
        signs_seen = [number for number in signs if number is not None]
        if not signs_seen or self._are_whole(incarnation, history.came):
            return False
        self._level[group] = min(signs_seen)
        return True

    def _is_doubtful(self, group: _Group) -> bool:
        return any((group[0], rank) in self._doubtful for rank in group[2])

    def _are_whole(self, incarnation: int, ranks: Container[int]) -> bool:
        return all(
            count == highest + 1
            for (life, rank, _), (count, highest) in self._steps.items()
            if life == incarnation and rank in ranks
        )

    def _judged_group(
        self, group: _Group, lines: dict[int, list[_OwnCall]], steps: Sequence[Step]
    ) -> Iterator[Candidate]:
        """Number one group, and yield a candidate for the first number on which ranks disagree."""
        first_ranks = sorted(lines)[: _PAIRS + 1]
        values = [{n: end.value for n, end in enumerate(lines[rank])} for rank in first_ranks]
        fits = (equal_by_offset(*pair) for pair in islice(combinations(values, 2), _PAIRS))
        if any(map(fits_shifted, fits)):
            self._apart[group] = None
            return
        first: dict[tuple[int, int], int] = {}
        for rank, line in lines.items():
            for place, end in enumerate(line):
                first.setdefault((end.number, rank), place)
        at_place = enumerate(zip_longest(*lines.values()))
        mismatches = (n for n, ends in at_place if len({end.facts for end in ends if end}) > 1)
        wrong = next(mismatches, None)
        if wrong is not None:
            sides = {rank: line[wrong] for rank, line in lines.items() if wrong < len(line)}
            if len({end.number for end in sides.values()}) == 1:
                return  # found in its step
            yield _candidate(group, wrong, sides, steps)
        self._apart[group] = first

    def _counted_group(
        self, group: _Group, lines: dict[int, list[_OwnCall]], steps: Sequence[Step]
    ) -> Iterator[Candidate]:
        """The same by torch's count, where that is known and fits what collectives gave."""
        by_count = _by(lines, lambda end: end.counted)
        in_steps = _equal_outputs(_by(lines, lambda end: (str(end.number), end.sequence)))
        fits = _equal_outputs(by_count) - in_steps
        if any(not end.counted[1] for line in lines.values() for end in line) or fits <= 0:
            history = self._groups[group]
            if fits < 0 and not history.passed and history.torn is None:
                return  # the ranks stand level: not all of them issue what is counted
            self._apart[group] = None
            return
        first: dict[tuple[int, int], int] = {}
        for rank, line in lines.items():
            for end in line:
                first.setdefault((end.number, rank), end.counted[1])
        self._apart[group] = first
        for key in sorted({key for line in by_count.values() for key in line}):
            sides = {rank: line[key] for rank, line in by_count.items() if key in line}
            if len({end.facts for end in sides.values()}) < 2:
                continue
            at = {end.number for end in sides.values()}
            if len(at) > 1 or not self._are_level(group, min(at), sides):
                yield _candidate(group, key[1] - 1, sides, steps)
            return  # else it was found in its step

    def _is_left(self, candidate: Candidate, owners: _Owners) -> bool:
        if candidate.kind is not Kind.COLLECTIVE:
            return True
        ranks = candidate.members.tolist()
        return all(
            self._are_level(group, number, ranks)
            for group, number in owners.get(candidate.where, {}).items()
            if set(ranks) <= set(group[2])
        )

    def _are_level(self, group: _Group, number: int, ranks: Iterable[int]) -> bool:
        """True where these ranks had issued equally many before a step."""
        if group not in self._apart or number < self._level.get(group, 0):
            return True
        first = self._apart[group]
        if first is None:
            return False
        return len({first[number, rank] for rank in ranks if (number, rank) in first}) <= 1


def _group_of(step_view: StepView, issue: IssuedCollective) -> _Group:
    return step_view.incarnation, issue.group, tuple(sorted(issue.members))


def _is_torn(issue: IssuedCollective, context: CheckContext) -> bool:
    """True where a rank left a collective before another one of its host came. Asked of values on
    the CPU alone: elsewhere a call may return before the others come."""
    if issue.op not in _WAITS_FOR_ALL or issue.facts.get("async") or issue.facts.get("object"):
        return False
    entered = issue.call.slots.get("input.0")
    if entered is None:
        return False
    ranks = issue.ranks[np.isin(issue.ranks, entered.ranks)]
    if len(ranks) < 2 or not entered.are_known(ranks):
        return False
    if (entered.flags[entered.at(ranks)] & int(ValueFlag.MIX64)).any():
        return False
    begins, ends = issue.call.span(ranks)
    by_host = grouped((context.hosts.get(r, str(r)), n) for n, r in enumerate(ranks.tolist()))
    return any(
        bool(
            (ends[host_ranks] > begins[host_ranks]).all()
            and begins[host_ranks].max() > ends[host_ranks].min()
        )
        for host_ranks in by_host.values()
    )


# ---- numbers -------------------------------------------------------------------------------------


def _lines(
    steps: Sequence[Step], groups: set[_Group]
) -> tuple[dict[_Group, dict[int, list[_OwnCall]]], _Owners]:
    """Return what each rank issued in its own order, and whose each call is."""
    lines: dict[_Group, dict[int, list[_OwnCall]]] = {group: {} for group in groups}
    owners: _Owners = {}
    for number, step_view in enumerate(map(step_view_of, steps)):
        for issue in known_collectives(step_view):
            group = _group_of(step_view, issue)
            if group not in groups:
                continue
            step, call = (step_view.incarnation, step_view.mode, step_view.step), issue.call
            where = (*step, call.phase, call.path, call.micro_batch, issue.slot)
            owners.setdefault(where, {})[group] = number
            times = issue.call.times(issue.ranks).tolist()
            counts = issue.call.column("issued", issue.ranks).tolist()
            # a group may have a backend for each kind of device, and each backend counts its own
            slots = issue.call.slots
            values = slots.get("input.0") or slots.get("output.0")
            device = "" if values is None else values.views[0].device
            output = issue.call.slots.get("output.0") if issue.op in EQUAL_OUTPUTS else None
            for rank, time_ns, count in zip(issue.ranks.tolist(), times, counts):
                line = lines[group].setdefault(rank, [])
                if len(line) < _MOST_ENDS:
                    own_call = _OwnCall(
                        time_ns=time_ns,
                        sequence=issue.sequence,
                        number=number,
                        call_id=issue.call.node.id,
                        facts=facts_text(issue, [rank]),
                        counted=(device, count),
                        value=None if output is None else output.told(rank),
                    )
                    line.append(own_call)
    for group in groups:
        for line in lines[group].values():
            line.sort(key=lambda end: (end.time_ns, end.number, end.sequence))
    return lines, owners


def _by(
    lines: Mapping[int, list[_OwnCall]], key: Callable[[_OwnCall], tuple[str, int]]
) -> dict[int, dict[tuple[str, int, int], _OwnCall]]:
    """Return {rank: {key, and how many of this rank had the same before: call}}."""
    numbered: dict[int, dict[tuple[str, int, int], _OwnCall]] = {}
    for rank, line in lines.items():
        by_key = grouped((key(end), end) for end in line)
        numbered[rank] = {
            (*of, n): end for of, ends in by_key.items() for n, end in enumerate(ends)
        }
    return numbered


def _equal_outputs(by_rank: Mapping[int, Mapping[tuple[str, int, int], _OwnCall]]) -> int:
    """Return how often two ranks were given the same by what one key says was one collective."""
    count = 0
    for first, second in islice(combinations(sorted(by_rank), 2), _PAIRS):
        for key in by_rank[first].keys() & by_rank[second].keys():
            value = by_rank[first][key].value
            count += value is not None and value == by_rank[second][key].value
    return count


def _candidate(
    group: _Group, wrong: int, sides: Mapping[int, _OwnCall], steps: Sequence[Step]
) -> Candidate:
    ranks = np.array(sorted(sides), np.int64)
    keys = np.array([sides[rank].facts for rank in ranks.tolist()])
    blamed = minority(ranks, keys)
    at = max(sides[rank].number for rank in blamed.tolist())
    blamed_rank = next(rank for rank in blamed.tolist() if sides[rank].number == at)
    step_view = step_view_of(steps[at])
    issue = next(
        i for i in known_collectives(step_view) if i.call.node.id == sides[blamed_rank].call_id
    )
    ranks_by_text = [(text, ranks[keys == text].tolist()) for text in dict.fromkeys(keys.tolist())]
    listed = "; ".join(f"{ranks_named(some)}: {text}" for text, some in ranks_by_text)
    return candidate_at(
        step_view,
        issue.call,
        Kind.COLLECTIVE,
        issue.slot,
        blamed,
        f"ranks disagree on collective {wrong} of group {group[1]}, counted over the run: {listed}",
        evidence=lambda: {
            "sides": [{"ranks": ranks_text(some), "call": text} for text, some in ranks_by_text]
        },
        members=ranks,
        times_ns=np.array([sides[rank].time_ns for rank in ranks.tolist()], np.int64),
        priority=-2,
    )
