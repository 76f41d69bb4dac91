"""Collectives of all ranks belong together: members, order, op.

* A group name stands for the same members on every rank that uses it.
* The n-th collective of a group is the same op with the same reduce op, source and destination on
  all of its ranks, and (all_reduce, broadcast, reduce) of the same dtype and shape.
* Two that were issued in the other order on some ranks: each rank has the same call sites, but not
  in the same order. Where sites differ altogether (stages of a pipeline) nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import minority
from rankscope.diagnosis.issuedcollectives import (
    IssuedCollective,
    issues_in,
    issues_of,
    ranks_in_doubt,
)
from rankscope.diagnosis.rankclock import times_of_call
from rankscope.diagnosis.stepview import StepView
from rankscope.record.finding import Kind
from rankscope.record.ranklists import ranks_named, ranks_text

__all__ = ["facts_text", "mismatched_collectives"]

Array = NDArray[Any]
_SAME_SHAPE: Final = frozenset({"all_reduce", "broadcast", "reduce"})
_FACTS: Final = ("op", "reduce", "src", "dst")


def mismatched_collectives(step_view: StepView, _: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every collective whose sides do not belong together."""
    doubtful = ranks_in_doubt(step_view)
    by_group: dict[str, list[IssuedCollective]] = {}
    for issue in issues_of(step_view):
        if issue.group and issue.members and not issue.is_message:
            by_group.setdefault(issue.group, []).append(issue)
    for group in by_group.values():
        meant = {tuple(sorted(issue.members)) for issue in group}
        if len(meant) > 1:
            yield from _other_members(step_view, group)
            continue
        if doubtful.intersection(*meant):
            continue
        yield from _other_facts(step_view, group)
        yield from _swapped(step_view, group)


# ---- members -------------------------------------------------------------------------------------


def _other_members(step_view: StepView, group: list[IssuedCollective]) -> Iterator[Candidate]:
    by_call: dict[int, list[IssuedCollective]] = {}
    for issue in group:
        by_call.setdefault(id(issue.call), []).append(issue)
    for issues in by_call.values():
        if len({tuple(sorted(issue.members)) for issue in issues}) > 1:
            yield _group_candidate(step_view, issues)


def _group_candidate(step_view: StepView, issues: list[IssuedCollective]) -> Candidate:
    call = issues[0].call
    together = [*issues_in(call)]
    ranks = np.concatenate([issue.ranks for issue in issues])
    keys = np.array([str(sorted(i.members)) for i in issues for _ in i.ranks])
    members = np.unique(np.concatenate([issue.ranks for issue in together]))
    blamed = minority(ranks, keys)
    if len(blamed) == len(ranks):
        blamed = members
    listed = "; ".join(
        f"{ranks_named(i.ranks.tolist())} mean {list(i.members)} by group {i.group}"
        for i in together
    )
    return candidate_at(
        step_view,
        call,
        Kind.GROUP,
        issues[0].slot,
        blamed,
        members,
        times_of_call(call, members),
        f"{issues[0].op}: {listed}",
        evidence=lambda: {
            "groups": [
                {"ranks": ranks_text(i.ranks.tolist()), "group": i.group, "members": [*i.members]}
                for i in together
            ]
        },
        priority=-3,
    )


# ---- arguments -----------------------------------------------------------------------------------


def _by_sequence(group: list[IssuedCollective]) -> dict[int, list[IssuedCollective]]:
    found: dict[int, list[IssuedCollective]] = {}
    for issue in group:
        found.setdefault(issue.sequence, []).append(issue)
    return found


def _other_facts(step_view: StepView, group: list[IssuedCollective]) -> Iterator[Candidate]:
    for issues in _by_sequence(group).values():
        facts = [facts_text(issue, issue.ranks.tolist()) for issue in issues]
        if len(issues) > 1 and len(set(facts)) > 1:
            yield _facts_candidate(step_view, issues, facts)


def facts_text(issue: IssuedCollective, ranks: Sequence[int]) -> str:
    """Return what must be the same on all ranks, as text.

    Args:
        issue: what they issued.
        ranks: those of its ranks that are asked.
    """
    facts = [f"{name}={issue.facts[name]}" for name in _FACTS if name in issue.facts]
    values = issue.call.slots.get("input.0")
    if issue.op in _SAME_SHAPE and values is not None:
        own = [view for view in values.views if ranks[0] in view.ranks]
        facts += [f"dtype={view.dtype}" for view in own]
        shape = next((v.shapes()[r] for r in ranks for v in values.views if r in v.ranks), None)
        facts += [f"shape={list(shape)}"] if shape is not None else []
    return " ".join(facts)


def _facts_candidate(
    step_view: StepView, issues: list[IssuedCollective], facts: list[str]
) -> Candidate:
    ranks = np.concatenate([issue.ranks for issue in issues])
    keys = np.array([text for issue, text in zip(issues, facts) for _ in issue.ranks])
    times = np.concatenate([times_of_call(i.call, i.ranks) for i in issues])
    order = np.argsort(ranks, kind="stable")
    listed = "; ".join(
        f"{ranks_named(i.ranks.tolist())}: {text} in {i.call.path or '(root)'}"
        for i, text in zip(issues, facts)
    )
    first = issues[0]
    return candidate_at(
        step_view,
        first.call,
        Kind.COLLECTIVE,
        first.slot,
        minority(ranks, keys),
        ranks[order],
        times[order],
        f"number {first.sequence} of group {first.group} is not one collective: {listed}",
        evidence=lambda: {
            "sides": [
                {"ranks": ranks_text(i.ranks.tolist()), "path": i.call.path, "call": text}
                for i, text in zip(issues, facts)
            ]
        },
        priority=-2,
    )


# ---- order ---------------------------------------------------------------------------------------


def _swapped(step_view: StepView, group: list[IssuedCollective]) -> Iterator[Candidate]:
    """Yield both call sites where some ranks issued two collectives in the other order."""
    forward = [i for i in group if i.facts.get("issuer") != "backward"]
    lines: dict[int, list[tuple[int, IssuedCollective]]] = {}
    for issue in forward:
        for rank in issue.ranks.tolist():
            lines.setdefault(rank, []).append((issue.sequence, issue))
    for line in lines.values():
        line.sort(key=lambda each: each[0])
    sites = {rank: tuple(issue.site for _, issue in line) for rank, line in lines.items()}
    if len(set(sites.values())) < 2 or len({tuple(sorted(s)) for s in sites.values()}) > 1:
        return
    ranks = np.array(sorted(sites), np.int64)
    keys = np.array([str(sites[rank]) for rank in ranks.tolist()])
    length = len(next(iter(sites.values())))
    crossed = [n for n in range(length) if len({line[n] for line in sites.values()}) > 1]
    times = np.array(
        [
            min(int(times_of_call(lines[r][n][1].call, np.array([r]))[0]) for n in crossed)
            for r in ranks.tolist()
        ]
    )
    seen: set[tuple[str, str]] = set()
    for n in crossed:
        for rank in ranks.tolist():
            issue = lines[rank][n][1]
            place = (issue.call.path, issue.slot)
            if place not in seen:
                seen.add(place)
                yield _swap_candidate(step_view, issue, ranks, keys, times, crossed, lines)


def _swap_candidate(
    step_view: StepView,
    issue: IssuedCollective,
    ranks: Array,
    keys: Array,
    times: Array,
    crossed: list[int],
    lines: dict[int, list[tuple[int, IssuedCollective]]],
) -> Candidate:
    def order_of(rank: int) -> list[str]:
        return [_site_text(lines[rank][n][1]) for n in crossed[:8]]

    sides = [
        {
            "ranks": ranks_text(ranks[keys == key].tolist()),
            "order": order_of(int(ranks[keys == key][0])),
        }
        for key in dict.fromkeys(keys.tolist())
    ]
    listed = "; ".join(f"ranks {side['ranks']}: {' then '.join(side['order'])}" for side in sides)
    return candidate_at(
        step_view,
        issue.call,
        Kind.COLLECTIVE,
        issue.slot,
        minority(ranks, keys),
        ranks,
        times,
        f"{issue.op} was issued in another order on some ranks of group {issue.group}: {listed}",
        evidence=lambda: {"sides": sides},
        priority=-2,
    )


def _site_text(issue: IssuedCollective) -> str:
    path, line = issue.site
    return f"{path or '(root)'}{f' ({line})' if line else ''}"
