"""Collectives of all ranks belong together, and give what their inputs give.

* A group name stands for the same members on every rank that uses it.
* The n-th collective of a group has the same op, reduce op, source and destination on all of its
  ranks, and (all_reduce, broadcast, reduce) dtype and shape.
* Order: each rank has the same call sites in the same order. Where sites differ altogether (stages
  of a pipeline) nothing is said.
* What was exchanged: outputs made equal are compared by hash, sums with the sketches of the inputs
  (they are linear), maxima with maxima, parts with means and norms, within rounding. Asked of
  collectives whose members were all recorded, and of messages whose two ends are known
  (`causes.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from rankscope.diagnosis.causes import Message, message_value
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
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
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
            for issues in grouped((id(issue.call), issue) for issue in group).values():
                if len({tuple(sorted(issue.members)) for issue in issues}) > 1:
                    yield _members_candidate(step_view, issues)
        elif doubtful.isdisjoint(*meant):
            for issues in grouped((issue.sequence, issue) for issue in group).values():
                facts = [facts_text(issue, issue.ranks.tolist()) for issue in issues]
                if len(set(facts)) > 1:
                    yield _facts_candidate(step_view, issues, facts)
            yield from _swapped(step_view, group)


def _members_candidate(step_view: StepView, issues: list[IssuedCollective]) -> Candidate:
    call = issues[0].call
    together = [*issues_in(call)]
    ranks = np.concatenate([issue.ranks for issue in issues])
    keys = np.array([str(sorted(issue.members)) for issue in issues for _ in issue.ranks])
    members = np.unique(np.concatenate([issue.ranks for issue in together]))
    blamed = minority(ranks, keys)
    meanings = [
        f"{ranks_named(issue.ranks)} mean {list(issue.members)} by group {issue.group}"
        for issue in together
    ]
    groups = [
        {"ranks": ranks_text(issue.ranks), "group": issue.group, "members": [*issue.members]}
        for issue in together
    ]
    return candidate_at(
        step_view,
        call,
        Kind.GROUP,
        issues[0].slot,
        members if len(blamed) == len(ranks) else blamed,
        f"{issues[0].op}: {'; '.join(meanings)}",
        members=members,
        evidence=partial(dict, groups=groups),
        priority=-3,
    )


def _facts_candidate(
    step_view: StepView, issues: list[IssuedCollective], facts: list[str]
) -> Candidate:
    ranks = np.concatenate([issue.ranks for issue in issues])
    keys = np.array([text for issue, text in zip(issues, facts) for _ in issue.ranks])
    times = np.concatenate([issue.call.times(issue.ranks) for issue in issues])
    order = np.argsort(ranks, kind="stable")
    sides = [
        {"ranks": ranks_text(issue.ranks), "path": issue.call.path, "call": text}
        for issue, text in zip(issues, facts)
    ]
    listed = "; ".join(
        f"{ranks_named(issue.ranks)}: {text} in {issue.call.path or '(root)'}"
        for issue, text in zip(issues, facts)
    )
    first = issues[0]
    return candidate_at(
        step_view,
        first.call,
        Kind.COLLECTIVE,
        first.slot,
        minority(ranks, keys),
        f"ranks disagree on collective {first.sequence} of group {first.group}: {listed}",
        evidence=partial(dict, sides=sides),
        members=ranks[order],
        times_ns=times[order],
        priority=-2,
    )


def facts_text(issue: IssuedCollective, ranks: Sequence[int]) -> str:
    """Return what must be the same on all ranks, as some of them issued it, as text."""
    facts = [f"{name}={issue.facts[name]}" for name in _FACTS if name in issue.facts]
    values = issue.call.slots.get("input.0")
    if issue.op in _SAME_SHAPE and values is not None:
        facts += [f"dtype={view.dtype}" for view in values.views if ranks[0] in view.ranks]
        shapes = (v.shapes()[r] for r in ranks for v in values.views if r in v.ranks)
        facts += [f"shape={list(shape)}" for shape in itertools.islice(shapes, 1)]
    return " ".join(facts)


# ---- order ---------------------------------------------------------------------------------------


def _swapped(step_view: StepView, group: list[IssuedCollective]) -> Iterator[Candidate]:
    """Yield both call sites where some ranks issued two collectives in the other order."""
    lines = issued_by_rank(i for i in group if i.facts.get("issuer") != "backward")
    sites = {rank: tuple(issue.site for issue in line) for rank, line in lines.items()}
    if len(set(sites.values())) < 2 or len({tuple(sorted(s)) for s in sites.values()}) > 1:
        return
    ranks = np.array(sorted(sites), np.int64)
    keys = np.array([str(sites[rank]) for rank in ranks.tolist()])
    crossed = [n for n, at_place in enumerate(zip(*sites.values())) if len(set(at_place)) > 1]
    swapped = {rank: [lines[rank][n] for n in crossed] for rank in ranks.tolist()}
    begins = [
        min(int(issue.call.times(np.array([rank]))[0]) for issue in issues)
        for rank, issues in swapped.items()
    ]
    sides = []
    for key in dict.fromkeys(keys.tolist()):
        members = ranks[keys == key]
        order = [issue.site for issue in swapped[int(members[0])][:8]]
        texts = [f"{path or '(root)'}{f' ({line})' if line else ''}" for path, line in order]
        sides.append({"ranks": ranks_text(members), "order": texts})
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
            evidence=partial(dict, sides=sides),
            priority=-2,
        )


# ---- what was exchanged --------------------------------------------------------------------------

_ADDED: Final = frozenset({*ROUNDING, "int32", "int64"})
"""dtypes whose sums do not wrap around, or not in practice."""
_SLACK: Final = 8
"""Times the rounding of the dtype that a sum may be off, relative to the norms of its summands."""


def wrong_exchanges(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every collective whose output is not what went in."""
    for issue in known_collectives(step_view):
        if len(issue.ranks) != len(issue.members) or len(issue.ranks) < 2:
            continue
        misaligned = step_view.passes_apart
        if misaligned is not None and misaligned.parts(issue.call.phase, None, issue.ranks):
            continue
        outputs = list(issue.call.outputs)
        for number, output in enumerate(outputs):
            if not output.are_known(issue.ranks):
                continue
            step_view.context.coverage.applied(output)
            if issue.op in EQUAL_OUTPUTS and output.agree(issue.ranks) is False:
                blamed = minority(issue.ranks, output.hashes[output.at(issue.ranks)])
                text = "its output differs between ranks"
                yield _exchange_candidate(step_view, issue, output, text, blamed)
            elif problem := _unlike_inputs(issue, output, number, len(outputs)):
                yield _exchange_candidate(step_view, issue, output, *problem)


def _unlike_inputs(
    issue: IssuedCollective, output: SlotValues, number: int, outputs: int
) -> tuple[str, Array] | None:
    slots, ranks = issue.call.slots, issue.ranks
    entered = slots.get(f"input.{number}" if issue.op != "all_gather" else "input.0")
    entered = entered or slots.get("input")
    if entered is None or entered.dtype == "python" or issue.facts.get("object"):
        return None
    late = int(ValueFlag.AFTER_CALL)
    if not entered.are_known(ranks) or (entered.flags[entered.at(ranks)] & late).any():
        return None
    if not (entered.is_finite(ranks) and output.is_finite(ranks)):
        return None
    is_part = issue.op == "all_gather" and outputs == len(issue.members)
    if is_part or issue.op == "broadcast":
        sender = issue.members[number] if is_part else issue.facts.get("src", -1)
        sent = entered.hashes[entered.at(np.array([sender]))[0]]
        wrong = ranks[output.hashes[output.at(ranks)] != sent]
        text = f"rank {sender}'s part is not what it gave"
        text = text if is_part else "it is not what the source gave"
        return (text, wrong) if len(wrong) else None
    test = _TESTS.get((issue.op, str(issue.facts.get("reduce", ""))))
    if test is None or entered.dtype not in _ADDED:
        return None
    # values without elements, and those near the end of a dtype's range, have no numbers
    numbers = [
        values.column(name)[values.at(ranks)]
        for values in (entered, output)
        for name in ("min", "l2", "sketch")
    ]
    if not all(np.isfinite(column).all() for column in numbers) or test(issue, entered, output):
        return None
    return "its output is not what its inputs give", ranks


# ---- arithmetic ----------------------------------------------------------------------------------


def _allowed(entered: SlotValues, places: Array) -> float:
    slack = _SLACK * max(rounding_of(entered.dtype), 1e-9)
    return float(slack * entered.column("l2")[places].sum())


def _sums(issue: IssuedCollective, entered: SlotValues, output: SlotValues) -> bool:
    ins, outs = entered.at(issue.ranks), output.at(issue.ranks)
    divisor = len(issue.members) if issue.facts["reduce"] == "avg" else 1
    total = entered.column("sketch")[ins].sum(0) / divisor
    distance = np.sqrt(np.mean((output.column("sketch")[outs] - total) ** 2, axis=1)).max()
    return bool(distance <= _allowed(entered, ins) / divisor + 1e-30)


def _extremes(issue: IssuedCollective, entered: SlotValues, output: SlotValues) -> bool:
    name = str(issue.facts["reduce"])
    numbers = entered.column(name)[entered.at(issue.ranks)]
    extreme = numbers.max() if name == "max" else numbers.min()
    return bool((output.column(name)[output.at(issue.ranks)] == extreme).all())


def _parts_sum(issue: IssuedCollective, entered: SlotValues, output: SlotValues) -> bool:
    """Reduce-scatter: what all parts add up to."""
    ins, outs = entered.at(issue.ranks), output.at(issue.ranks)
    sums = [
        float((values.column("mean") * values.counts)[places].sum())
        for values, places in ((entered, ins), (output, outs))
    ]
    width = float(np.sqrt(entered.counts[ins].max()))
    return abs(sums[0] - sums[1]) <= _allowed(entered, ins) * width + 1e-30


def _parts_kept(issue: IssuedCollective, entered: SlotValues, output: SlotValues) -> bool:
    """All-gather into one tensor: every output holds all inputs."""
    ins, outs = entered.at(issue.ranks), output.at(issue.ranks)
    if (output.counts[outs] != entered.counts[ins].sum()).any():
        return True  # gathered in other shapes than one flat tensor: nothing is known
    norm = float(np.sqrt((entered.column("l2")[ins] ** 2).sum()))
    return bool((np.abs(output.column("l2")[outs] - norm) <= 1e-6 * norm + 1e-30).all())


_TESTS: Final[dict[tuple[str, str], Callable[[IssuedCollective, SlotValues, SlotValues], bool]]] = {
    ("all_reduce", "sum"): _sums,
    ("all_reduce", "avg"): _sums,
    ("all_reduce", "max"): _extremes,
    ("all_reduce", "min"): _extremes,
    ("reduce_scatter_tensor", "sum"): _parts_sum,
    ("all_gather_into_tensor", ""): _parts_kept,
}


# ---- sums in backward ----------------------------------------------------------------------------

_MULTIPLIED_ADVICE: Final = (
    "Behind a sum over ranks that share a layer the gradient is there on each of them: hand it on "
    "as it is. It is right where the loss was divided by the number of ranks."
)


def multiplying_sums(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield one warning for a sum in backward over what all its ranks hold alike, unless gradients
    are averaged over two of them afterwards, which divides them again."""
    for issue in known_collectives(step_view):
        is_sum = (issue.op, issue.facts.get("reduce")) == ("all_reduce", "sum")
        if not is_sum or issue.facts.get("issuer") != "backward":
            continue
        entered, ranks = issue.call.slots.get("input.0"), issue.ranks
        is_whole = len(ranks) == len(issue.members) > 1
        if not is_whole or entered is None or entered.is_constant or not entered.agree(ranks):
            continue
        if any(np.isin(ranks, line).sum() > 1 for line in _averaging(step_view)):
            continue
        text = f"adds up what all of them hold alike: {len(ranks)} times the gradient"
        candidate = _exchange_candidate(step_view, issue, entered, text, ranks)
        advice, severity = _MULTIPLIED_ADVICE, Severity.WARNING
        yield replace(candidate, advice=advice, severity=severity, once="multiplying sum")
        return


def _averaging(step_view: JudgedStep) -> Iterator[Array]:
    """Yield ranks over which gradients are reduced: replicas, and those of sums behind backward."""
    yield from step_view.life.data_parallel_lines
    yield from step_view.life.replicas.lines
    for issue in issues_of(step_view):
        is_inside = issue.facts.get("issuer") in ("forward", "backward")
        if not is_inside and any((v.counts > 1).any() for v in issue.call.inputs):
            yield np.array(issue.members, np.int64)


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
                receiver = np.array([rank])
                yield _exchange_candidate(step_view, issue, received, text, receiver, receiver)


_RETURN_ADVICE: Final = (
    "Send the gradient of a tensor to the rank that the tensor came from: look at the order in "
    "which gradients are sent, and at the ranks that they are sent to."
)


def gradients_sent_elsewhere(step_view: StepView) -> Iterator[Candidate]:
    """Yield a candidate for every send of a tensor's gradient to a rank that had not made that
    tensor, though another one made it and sent it."""
    ends = [
        (rank, int(values.hashes[values.place(rank)]), issue, values)
        for issue in issues_of(step_view)
        if issue.is_message and not issue.lacks
        for values in [message_value(issue)]
        if values is not None and not values.is_constant
        for rank in issue.ranks.tolist()
    ]
    sources = grouped((end[:2], int(end[2].facts["peer"])) for end in ends if end[2].op == "recv")
    sends = grouped((end[:2], end[2:]) for end in ends if end[2].op == "send")
    if not (sources and sends):
        return
    forwards = grouped((call.identity, call) for call in step_view.of(Phase.FORWARD))
    outputs = [v for calls in forwards.values() for call in calls for v in call.outputs]
    makers_of = grouped(pair for v in outputs for pair in zip(v.hashes.tolist(), v.ranks.tolist()))
    pairs = (
        (call.slots.get(gradient.slot.removeprefix("grad_")), gradient)
        for backward in step_view.of(Phase.BACKWARD)
        for call in forwards.get(backward.identity, ())
        for gradient in backward.outputs
    )
    for entered, gradient in pairs:
        for rank in gradient.ranks.tolist() if entered is not None else ():
            if entered is None or (at := entered.place(rank)) < 0:
                continue
            makers = makers_of.get(int(entered.hashes[at]), [])
            sender = set(makers) & set(sources.get((rank, int(entered.hashes[at])), ()))
            answers = sends.get((rank, int(gradient.hashes[gradient.place(rank)])), [])
            peers = [int(issue.facts["peer"]) for issue, _ in answers]
            if len(sender) == 1 and answers and set(peers).isdisjoint(makers):
                maker, ranks = sender.pop(), np.array([rank])
                text = f"the gradient of what rank {maker} made and sent goes to rank {peers[0]}"
                wrong = _exchange_candidate(step_view, *answers[0], text, ranks, ranks)
                yield replace(wrong, advice=_RETURN_ADVICE)


def _exchange_candidate(
    step_view: StepView,
    issue: IssuedCollective,
    output: SlotValues,
    text: str,
    blamed: Array,
    members: Array | None = None,
) -> Candidate:
    ranks = issue.ranks if members is None else members
    inputs = list(issue.call.inputs)[:2]
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
            "inputs": [side for values in inputs for side in sides(values, issue.ranks)],
            "outputs": [] if output in inputs else sides(output, issue.ranks),
        },
        members=ranks,
        times_ns=issue.call.times(ranks, is_end=True),
        priority=-1,
    )
