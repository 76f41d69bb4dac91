"""Collectives of all ranks belong together, and give what their inputs give.

* A group name stands for the same members on every rank that uses it.
* The n-th collective of a group has the same op, reduce op, source and destination on all of its
  ranks, and (all_reduce, broadcast, reduce) dtype and shape.
* Order: each rank has the same call sites in the same order. Where sites differ altogether (stages
  of a pipeline) nothing is said.
* What was exchanged: outputs made equal are compared by hash, sums with the sketches of the inputs
  (they are linear), maxima with maxima, parts with means and norms, within rounding. Asked of
  collectives of which every member was recorded, and messages known to be one (`joins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.evidence.distances import ROUNDING, minority, rounding_of, sides
from rankscope.diagnosis.evidence.issuedcollectives import (
    EQUAL_OUTPUTS,
    IssuedCollective,
    issued_by_rank,
    issues_in,
    issues_of,
    known_collectives,
    ranks_in_doubt,
)
from rankscope.diagnosis.evidence.joins import Message, message_value
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped
from rankscope.record.finding import Kind
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.value import ValueFlag

_SAME_SHAPE: Final = frozenset({"all_reduce", "broadcast", "reduce"})
_FACTS: Final = ("op", "reduce", "src", "dst")


def mismatched_collectives(step_view: StepView) -> Iterator[Candidate]:
    """Yield a candidate for every collective whose sides do not belong together."""
    doubtful = ranks_in_doubt(step_view)
    named = (issue for issue in issues_of(step_view) if issue.group and issue.members)
    by_group = grouped((issue.group, issue) for issue in named if not issue.is_message)
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
    for issues in grouped((id(issue.call), issue) for issue in group).values():
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
        f"{ranks_named(i.ranks)} mean {list(i.members)} by group {i.group}" for i in together
    )
    return candidate_at(
        step_view,
        call,
        Kind.GROUP,
        issues[0].slot,
        blamed,
        f"{issues[0].op}: {listed}",
        members=members,
        evidence=lambda: {
            "groups": [
                {"ranks": ranks_text(i.ranks), "group": i.group, "members": [*i.members]}
                for i in together
            ]
        },
        priority=-3,
    )


# ---- arguments -----------------------------------------------------------------------------------


def _other_facts(step_view: StepView, group: list[IssuedCollective]) -> Iterator[Candidate]:
    for issues in grouped((issue.sequence, issue) for issue in group).values():
        facts = [facts_text(issue, issue.ranks.tolist()) for issue in issues]
        if len(issues) > 1 and len(set(facts)) > 1:
            yield _facts_candidate(step_view, issues, facts)


def facts_text(issue: IssuedCollective, ranks: Sequence[int]) -> str:
    """Return what must be the same on all ranks, as some of them issued it, as text."""
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
    times = np.concatenate([i.call.times(i.ranks) for i in issues])
    order = np.argsort(ranks, kind="stable")
    listed = "; ".join(
        f"{ranks_named(i.ranks)}: {text} in {i.call.path or '(root)'}"
        for i, text in zip(issues, facts)
    )
    first = issues[0]
    return candidate_at(
        step_view,
        first.call,
        Kind.COLLECTIVE,
        first.slot,
        minority(ranks, keys),
        f"number {first.sequence} of group {first.group} is not one collective: {listed}",
        evidence=lambda: {
            "sides": [
                {"ranks": ranks_text(i.ranks), "path": i.call.path, "call": text}
                for i, text in zip(issues, facts)
            ]
        },
        members=ranks[order],
        times_ns=times[order],
        priority=-2,
    )


# ---- order ---------------------------------------------------------------------------------------


def _swapped(step_view: StepView, group: list[IssuedCollective]) -> Iterator[Candidate]:
    """Yield both call sites where some ranks issued two collectives in the other order."""
    lines = issued_by_rank(i for i in group if i.facts.get("issuer") != "backward")
    sites = {rank: tuple(issue.site for issue in line) for rank, line in lines.items()}
    if len(set(sites.values())) < 2 or len({tuple(sorted(s)) for s in sites.values()}) > 1:
        return
    ranks = np.array(sorted(sites), np.int64)
    keys = np.array([str(sites[rank]) for rank in ranks.tolist()])
    crossed = [n for n, there in enumerate(zip(*sites.values())) if len(set(there)) > 1]
    swapped = {rank: [lines[rank][n] for n in crossed] for rank in ranks.tolist()}
    begins = [
        min(int(issue.call.times(np.array([rank]))[0]) for issue in issues)
        for rank, issues in swapped.items()
    ]
    sides = [
        {
            "ranks": ranks_text(ranks[keys == key]),
            "order": [_site_text(issue) for issue in swapped[int(ranks[keys == key][0])][:8]],
        }
        for key in dict.fromkeys(keys.tolist())
    ]
    listed = "; ".join(f"ranks {side['ranks']}: {' then '.join(side['order'])}" for side in sides)
    places: dict[tuple[str, str], IssuedCollective] = {}
    for issues in zip(*swapped.values()):
        for issue in issues:
            places.setdefault((issue.call.path, issue.slot), issue)
    for issue in places.values():
        yield candidate_at(
            step_view,
            issue.call,
            Kind.COLLECTIVE,
            issue.slot,
            minority(ranks, keys),
            f"{issue.op} was issued in another order on some ranks of group {issue.group}: "
            f"{listed}",
            members=ranks,
            times_ns=np.array(begins),
            evidence=lambda: {"sides": sides},
            priority=-2,
        )


def _site_text(issue: IssuedCollective) -> str:
    path, line = issue.site
    return f"{path or '(root)'}{f' ({line})' if line else ''}"


# ---- what was exchanged --------------------------------------------------------------------------

_ADDED: Final = frozenset({*ROUNDING, "int32", "int64"})
"""dtypes whose sums do not wrap around, or not in practice."""
_SLACK: Final = 8
"""Times the rounding of the dtype that a sum may be off, relative to the norms of its summands."""


def wrong_exchanges(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every collective whose output is not what went in."""
    for issue in known_collectives(step_view):
        if len(issue.ranks) == len(issue.members) > 1:
            yield from _judged_exchange(step_view, issue)


def _judged_exchange(step_view: JudgedStep, issue: IssuedCollective) -> Iterator[Candidate]:
    outputs = [h for s, h in issue.call.slots.items() if s.split(".")[0] == "output"]
    for number, output in enumerate(outputs):
        if output.dtype == "python" or not output.are_known(issue.ranks):
            continue
        problem = _unequal(issue, output) or _unlike_inputs(issue, output, number, len(outputs))
        step_view.context.coverage.applied(output)
        if problem is not None:
            text, blamed = problem
            yield _exchange_candidate(step_view, issue, output, text, blamed)


def _unequal(issue: IssuedCollective, output: SlotValues) -> tuple[str, Array] | None:
    if issue.op not in EQUAL_OUTPUTS or output.agree(issue.ranks) is not False:
        return None
    blamed = minority(issue.ranks, output.hashes[output.at(issue.ranks)])
    return "its output differs between ranks", blamed


def _unlike_inputs(
    issue: IssuedCollective, output: SlotValues, number: int, outputs: int
) -> tuple[str, Array] | None:
    given = issue.call.slots.get(f"input.{number}" if issue.op != "all_gather" else "input.0")
    given = given or issue.call.slots.get("input")
    if given is None or given.dtype == "python" or issue.facts.get("object"):
        return None
    late = int(ValueFlag.AFTER_CALL)
    if not given.are_known(issue.ranks) or (given.flags[given.at(issue.ranks)] & late).any():
        return None
    if not (given.is_finite(issue.ranks) and output.is_finite(issue.ranks)):
        return None
    is_part = issue.op == "all_gather" and outputs == len(issue.members)
    if is_part or issue.op == "broadcast":
        sender = issue.members[number] if is_part else issue.facts.get("src", -1)
        sent = given.hashes[given.at(np.array([sender]))[0]]
        wrong = issue.ranks[output.hashes[output.at(issue.ranks)] != sent]
        text = f"rank {sender}'s part is not what it gave"
        text = text if is_part else "it is not what the source gave"
        return (text, wrong) if len(wrong) else None
    test = _TESTS.get((issue.op, str(issue.facts.get("reduce", ""))))
    if test is None or given.dtype not in _ADDED:
        return None
    has_numbers = _has_numbers(given, issue.ranks) and _has_numbers(output, issue.ranks)
    if not has_numbers or test(issue, given, output):
        return None
    return "its output is not what its inputs give", issue.ranks


def _has_numbers(values: SlotValues, ranks: Array) -> bool:
    """False without elements, and for numbers near the end of a dtype's range, which overflow."""
    places = values.at(ranks)
    return all(np.isfinite(values.column(n)[places]).all() for n in ("min", "l2", "sketch"))


# ---- arithmetic ----------------------------------------------------------------------------------


def _allowed(given: SlotValues, places: Array) -> float:
    return float(_SLACK * max(rounding_of(given.dtype), 1e-9) * given.column("l2")[places].sum())


def _sums(issue: IssuedCollective, given: SlotValues, output: SlotValues) -> bool:
    ins, outs = given.at(issue.ranks), output.at(issue.ranks)
    divisor = len(issue.members) if issue.facts["reduce"] == "avg" else 1
    wanted = given.column("sketch")[ins].sum(0) / divisor
    apart = np.sqrt(np.mean((output.column("sketch")[outs] - wanted) ** 2, axis=1)).max()
    return bool(apart <= _allowed(given, ins) / divisor + 1e-30)


def _extremes(issue: IssuedCollective, given: SlotValues, output: SlotValues) -> bool:
    name = str(issue.facts["reduce"])
    each = given.column(name)[given.at(issue.ranks)]
    found = output.column(name)[output.at(issue.ranks)]
    return bool((found == (each.max() if name == "max" else each.min())).all())


def _parts_sum(issue: IssuedCollective, given: SlotValues, output: SlotValues) -> bool:
    """Reduce-scatter: what all parts add up to."""
    ins, outs = given.at(issue.ranks), output.at(issue.ranks)
    entered = float((given.column("mean") * given.counts)[ins].sum())
    left = float((output.column("mean") * output.counts)[outs].sum())
    width = float(np.sqrt(given.counts[ins].max()))
    return abs(entered - left) <= _allowed(given, ins) * width + 1e-30


def _parts_kept(issue: IssuedCollective, given: SlotValues, output: SlotValues) -> bool:
    """All-gather into one tensor: every output holds all inputs."""
    ins, outs = given.at(issue.ranks), output.at(issue.ranks)
    if (output.counts[outs] != given.counts[ins].sum()).any():
        return True  # gathered in other shapes than one flat tensor: nothing is known
    norm = float(np.sqrt((given.column("l2")[ins] ** 2).sum()))
    return bool((np.abs(output.column("l2")[outs] - norm) <= 1e-6 * norm + 1e-30).all())


_TESTS: Final[dict[tuple[str, str], Callable[[IssuedCollective, SlotValues, SlotValues], bool]]] = {
    ("all_reduce", "sum"): _sums,
    ("all_reduce", "avg"): _sums,
    ("all_reduce", "max"): _extremes,
    ("all_reduce", "min"): _extremes,
    ("reduce_scatter_tensor", "sum"): _parts_sum,
    ("all_gather_into_tensor", ""): _parts_kept,
}


# ---- messages ------------------------------------------------------------------------------------


def wrong_messages(step_view: StepView, wrong: list[Message]) -> Iterator[Candidate]:
    """Yield a candidate for each of these messages, all of them received in this step."""
    by_call = {(message.received.call_id, message.receiver): message for message in wrong}
    for issue in issues_of(step_view):
        for rank in issue.ranks.tolist() if issue.op == "recv" else ():
            message = by_call.get((issue.call.node.id, rank))
            received = message_value(issue)
            if message is not None and received is not None:
                text = f"rank {rank} received something else than rank {message.sender} sent"
                own = np.array([rank])
                yield _exchange_candidate(step_view, issue, received, text, own, members=own)


def _exchange_candidate(
    step_view: StepView,
    issue: IssuedCollective,
    output: SlotValues,
    text: str,
    blamed: Array,
    members: Array | None = None,
) -> Candidate:
    ranks = issue.ranks if members is None else members
    given = [h for s, h in issue.call.slots.items() if s.split(".")[0] == "input"]
    return candidate_at(
        step_view,
        issue.call,
        Kind.COLLECTIVE,
        issue.slot,
        blamed,
        f"{issue.op} of {ranks_named(issue.ranks)}: {text}",
        evidence=lambda: {
            "op": issue.op,
            "reduce": issue.facts.get("reduce"),
            "group": issue.group,
            "members": [*issue.members],
            "inputs": [side for values in given[:2] for side in sides(values, issue.ranks)],
            "outputs": sides(output, issue.ranks),
        },
        members=ranks,
        times_ns=issue.call.times(ranks, is_end=True),
        priority=-1,
    )
