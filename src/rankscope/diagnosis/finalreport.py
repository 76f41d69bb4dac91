"""From candidates to the report: which faults are origins, which are victims, and the verdict.

On one rank everything has an order. Between ranks there is only what joins them: a collective ends
nowhere before every member has come, a message is not there before it was sent. So a fault reaches
a later one where a chain of joins leads from the first to the second; a fault that no other reaches
is an origin. Two faults that reach each other are one. Clocks of different ranks are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, CheckContext
from rankscope.diagnosis.coverage import Coverage
from rankscope.diagnosis.evidence.stepview import Array, grouped
from rankscope.record.finding import (
    NAMED_VICTIMS,
    Finding,
    Kind,
    Report,
    Severity,
    Skipped,
    Verdict,
)
from rankscope.record.notes import NoteKind
from rankscope.record.ranks import ranks_named
from rankscope.tree.summary import NO_STEP
from rankscope.tree.views import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What was before it on any of `givers` is before what comes after it on all of `takers`."""

    givers: Array
    begins: Array
    """Per sender, ns on its own clock."""
    takers: Array
    ends: Array
    """Per receiver, ns on its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """A fault on some ranks, and when on each."""

    ranks: Array
    times_ns: Array


@dataclass(slots=True, kw_only=True)
class CauseOrder:
    """Which faults are origins."""

    origin_of: list[int | None]
    """Per place the origin that reaches it; None for origins."""
    unordered: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of origins without a common rank or a chain between them."""


def _reached_from(place: FaultPlace, joins: Sequence[Join], size: int) -> Array:
    """Return [size] per rank the first moment that a fault can have touched."""
    reached = np.full(size, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(reached, place.ranks, place.times_ns)
    while True:
        before = reached.copy()
        for join in joins:
            if (reached[join.givers] <= join.begins).any():
                np.minimum.at(reached, join.takers, join.ends)
        if (before == reached).all():
            return reached


def _limits_of(place: FaultPlace, joins: Sequence[Join], size: int) -> Array:
    """Return [size] per rank the moment before which a fault can have touched the place."""
    limit = np.full(size, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(limit, place.ranks, place.times_ns)
    while True:
        before = limit.copy()
        for join in reversed(joins):
            if (join.ends < limit[join.takers]).any():
                np.maximum.at(limit, join.givers, join.begins + 1)
        if (before == limit).all():
            return limit


def sort_causes(places: Sequence[FaultPlace], joins: Sequence[Join]) -> CauseOrder:
    """Return which of these faults are origins, and which origin reaches each other one.

    Args:
        places: the faults, in any order.
        joins: in any order (near the order of time is faster).
    """
    size = 1 + max((int(p.ranks.max()) for p in places if len(p.ranks)), default=0)
    size = max(size, *(1 + int(max(j.givers.max(), j.takers.max())) for j in joins), 0)
    starts = [int(p.times_ns.min()) if len(p.times_ns) else 0 for p in places]
    origin_of: list[int | None] = [None] * len(places)
    left = sorted(range(len(places)), key=starts.__getitem__)
    origins: list[int] = []
    while left:
        first = _minimal(left, places, joins, size)
        reached = _reached_from(places[first], joins, size)
        still = []
        for index in left:
            if index == first:
                continue
            other = places[index]
            is_after = bool((reached[other.ranks] < other.times_ns).any())
            if is_after and not _is_mutual(places[first], other):
                origin_of[index] = first
            else:
                still.append(index)
        left = still
        origins.append(first)
    unordered = [
        (one, other)
        for one, other in itertools.combinations(origins, 2)
        if not np.isin(places[one].ranks, places[other].ranks).any()
    ]
    return CauseOrder(origin_of=origin_of, unordered=unordered)


def _minimal(
    left: Sequence[int], places: Sequence[FaultPlace], joins: Sequence[Join], size: int
) -> int:
    """Return one that no other reaches: begin with the first by clock, go back to its causes."""
    earliest = left[0]
    seen = {earliest}
    while True:
        limit = _limits_of(places[earliest], joins, size)
        for index in left:
            one = places[index]
            is_before = index not in seen and (one.times_ns < limit[one.ranks]).any()
            if is_before and not _is_mutual(one, places[earliest]):
                earliest = index
                seen.add(index)
                break
        else:
            return earliest


def _is_before_locally(one: FaultPlace, other: FaultPlace) -> bool:
    shared, own, others = np.intersect1d(one.ranks, other.ranks, return_indices=True)
    return bool(len(shared) and (one.times_ns[own] < other.times_ns[others]).any())


def _is_mutual(one: FaultPlace, other: FaultPlace) -> bool:
    """True where each is before the other on some rank: they are one fault."""
    return _is_before_locally(one, other) and _is_before_locally(other, one)


# ---- report --------------------------------------------------------------------------------------


_MOST_EVENTS = 2_000
"""Events that are put in order; what comes later by clock than that many counts as a victim."""
_HANDED_UNEQUAL: Final = (
    "What came in already differs on these ranks. Look at what ran before it, in backward at what "
    "stands behind it in the model: the data, the loss, code between modules, hooks, weights."
)


def made_report(
    trace: Trace, context: CheckContext, candidates: Sequence[Candidate], joins: Sequence[Join]
) -> Report:
    """Return the report of these candidates."""
    faults = _distinct(s for s in candidates if s.severity is Severity.FAULT)
    warnings = [s for s in candidates if s.severity is Severity.WARNING]
    findings = _ordered(faults, joins)
    findings += [_finding(w, is_origin=False, victims=[]) for w in warnings]
    coverage, declared = context.coverage, context.layouts.declared
    skipped = tuple(Skipped(reason=r, count=n) for r, n in sorted(coverage.skipped.items()))
    unmatched = _unmatched_globs(trace)
    lacks = "" if findings else _lacks(trace, coverage, unmatched)
    return Report(
        command="check",
        verdict=verdict_of(findings, lacks, is_complete=trace.is_complete),
        compared=coverage.compared,
        skipped=skipped,
        recorded=coverage.recorded,
        alone=coverage.compared - coverage.with_others,
        undeclared=coverage.undeclared,
        undeclared_names=tuple(coverage.undeclared_names),
        findings=tuple(findings),
        notes=(*unmatched, *coverage.unjudged(), *coverage.notes),
        lacks=lacks,
        layout=declared.name if declared else str(trace.run.get("layout", {}).get("file", "")),
        is_live=trace.is_live,
    )


def verdict_of(findings: Sequence[Finding], lacks: str, *, is_complete: bool) -> Verdict:
    """Return the word for what was found, `lacks` being why nothing could be judged."""
    if any(finding.severity is Severity.FAULT for finding in findings):
        return Verdict.FAULT
    return Verdict.INCOMPLETE if lacks or not is_complete else Verdict.CLEAN


def _unmatched_globs(trace: Trace) -> list[str]:
    unmatched = [
        {note.fields["glob"]: note for note in notes if note.kind is NoteKind.UNMATCHED_GLOB}
        for notes in trace.error_notes
    ]
    return [
        str(note)
        for glob, note in unmatched[0].items()
        if all(glob in own for own in unmatched[1:])
    ]


def _lacks(trace: Trace, coverage: Coverage, unmatched: Sequence[str]) -> str:
    """Return why nothing was judged, and what to do; "" where something was."""
    if unmatched and not coverage.is_any_inside:
        return f"{unmatched[0]}: trace again with globs of whole paths ('*.name', 'layers.0.*')"
    lacking = (NoteKind.NO_STEP_REACHED, NoteKind.NO_STEP_BEGUN)
    is_lacking = any(note.kind in lacking for notes in trace.error_notes for note in notes)
    if not trace.steps and (is_lacking or not coverage.compared):
        return f"{NO_STEP}: choose steps that the job reaches (--rs-steps)"
    if coverage.compared:
        return ""
    if not coverage.recorded:
        return "no value was recorded: trace again with --rs-digest full and --rs-phases all"
    return "none of its values has numbers to judge: trace again with --rs-digest full"


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Leave out what repeats another of its place. Ranks crash at one place each by itself."""
    distinct: dict[Any, Candidate] = {}
    for s in candidates:
        key = (s.where, s.ranks if s.kind is Kind.CRASH else ())
        same = distinct.get(key)
        if same is None or s.priority < same.priority:
            distinct[key] = s
    return list(distinct.values())


def _ordered(faults: list[Candidate], joins: Sequence[Join]) -> list[Finding]:
    """Return findings, origins first, each followed in the list by nothing that caused it."""
    events = grouped(((s.members.tobytes(), s.times_ns.tobytes()), s) for s in faults)
    listed = sorted(events.values(), key=lambda e: _first_ns(e[0]))
    near, far = listed[:_MOST_EVENTS], listed[_MOST_EVENTS:]
    order = sort_causes(
        [FaultPlace(ranks=e[0].members, times_ns=e[0].times_ns) for e in near], joins
    )
    victims: dict[int, list[Candidate]] = {}
    for index, origin in enumerate(order.origin_of):
        if origin is not None:
            victims.setdefault(origin, []).extend(near[index])
    origins = [index for index, origin in enumerate(order.origin_of) if origin is None]
    if origins:
        victims.setdefault(origins[0], []).extend(s for event in far for s in event)
    findings = [
        _finding(
            candidate,
            is_origin=True,
            victims=victims.get(index, []),
            beside=_beside(index, near, order),
        )
        for index in origins
        for candidate in near[index]
    ]
    later = [s for group in victims.values() for s in group]
    return findings + [
        _finding(s, is_origin=False, victims=[]) for s in sorted(later, key=_first_ns)
    ]


def _first_ns(candidate: Candidate) -> int:
    return int(candidate.times_ns.min()) if len(candidate.times_ns) else 0


def _beside(index: int, events: list[list[Candidate]], order: CauseOrder) -> list[str]:
    others = {b if a == index else a for a, b in order.unordered if index in (a, b)}
    return [f"{events[o][0].place} ({ranks_named(events[o][0].ranks)})" for o in sorted(others)][:4]


def _finding(
    candidate: Candidate, *, is_origin: bool, victims: list[Candidate], beside: Sequence[str] = ()
) -> Finding:
    evidence = dict(candidate.make_evidence()) if is_origin or not victims else {}
    if beside:
        evidence["unordered"] = list(beside)
    if candidate.incarnation:
        evidence["incarnation"] = candidate.incarnation
    names = dict.fromkeys(v.place for v in sorted(victims, key=_first_ns))
    kind = candidate.kind
    usual = kind.advice
    if kind is Kind.REPLICA:
        facts = candidate.phase.facts
        usual = _HANDED_UNEQUAL if candidate.slot.startswith(facts.handed) else facts.unequal
    told = {
        "is_origin": is_origin,
        "victims": sum(v.weight for v in victims) + candidate.weight - 1,
        "victim_names": tuple(names)[:NAMED_VICTIMS],
        "evidence": evidence,
        "message": f"{candidate.place}: {candidate.message}",
        "advice": candidate.advice or usual,
    }
    return Finding(**{each.name: getattr(candidate, each.name) for each in fields(Finding)} | told)
