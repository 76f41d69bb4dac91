"""What a collective handed on without its graph: the parameters behind it never learn.

The collectives of `torch.distributed` keep no graph: the gradient of what goes through one ends
there. It is named for a parameter that an optimizer steps, that took part in forward and has no
gradient on any rank, if a collective behind its module took a value that needs a gradient, like the
module's output; a module behind was handed the result without a graph; and that module took part in
the loss. Branches that the loss does not use, and `no_grad`, are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, candidate_at
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, issues_in
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.value import ValueFlag

_ADVICE: Final = (
    "Gather or reduce with an autograd function (torch.distributed.nn.functional, or one of your "
    "own with a backward), or freeze the parameter if it is not meant to learn."
)
_SAME_NORM: Final = 1e-6
"""Relative distance within which two norms of the same elements lie."""


def detached_by_collectives(step_view: StepView) -> Iterator[Candidate]:
    """Yield a candidate for every parameter whose gradient ends at a collective."""
    stepped = {
        values.parameter
        for values in step_view.parameters(Phase.PARAMS)
        if not (values.flags & int(ValueFlag.AFTER_CALL)).any()
    }
    ended: dict[str, IssuedCollective | None] = {}
    for call in step_view.of(Phase.GRADS):
        for values in call.slots.values():
            is_absent = bool((values.flags & int(ValueFlag.ABSENT)).all())
            if not is_absent or values.parameter not in stepped:
                continue
            if call.path not in ended:
                ended[call.path] = _end_of_graph(step_view, call.path)
            issue = ended[call.path]
            if issue is not None:
                yield _candidate(step_view, values, issue)


def _end_of_graph(step_view: StepView, path: str) -> IssuedCollective | None:
    """Return the collective at which the graph of a module's every output ends, None for none."""
    calls = [call for call in step_view.named(path) if call.phase is Phase.FORWARD]
    found = [_taken(call) for call in calls]
    return found[0] if found and None not in found else None


def _taken(call: CallView) -> IssuedCollective | None:
    given = [values for values in call.outputs if _needs_gradient(values)]
    inner, around = call, call.parent
    while given and around is not None:
        at = next(n for n, child in enumerate(around.children) if child is inner)
        behind = around.children[at + 1 :]
        for n, child in enumerate(behind):
            if child.phase is not Phase.COLLECTIVE:
                continue
            for issue in issues_in(child):
                if _takes(issue, given) and any(_is_handed(issue, to) for to in behind[n + 1 :]):
                    return issue
        inner, around = around, around.parent
    return None


def _needs_gradient(values: SlotValues) -> bool:
    return all(piece.requires_grad for piece in values.pieces)


def _takes(issue: IssuedCollective, given: list[SlotValues]) -> bool:
    if issue.is_message or issue.lacks or len(issue.ranks) != len(issue.members):
        return False
    taken = issue.call.slots.get("input.0")
    if taken is None or not _needs_gradient(taken):
        return False
    places = taken.at(issue.ranks)
    return any(
        (places >= 0).all()
        and (at := values.at(issue.ranks)).min(initial=0) >= 0
        and np.array_equal(values.counts[at], taken.counts[places])
        for values in given
    )


def _is_handed(issue: IssuedCollective, call: CallView) -> bool:
    """True where a call that took part in the loss was handed what came out, with no graph."""
    if call.phase is not Phase.FORWARD or not any(map(_needs_gradient, call.outputs)):
        return False
    outputs = [v for s, v in issue.call.slots.items() if s.split(".")[0] == "output"]
    known = [output for output in outputs if output.are_known(issue.ranks)]
    return any(
        not any(piece.requires_grad for piece in values.pieces)
        and (
            (
                not values.is_constant
                and values.are_known(issue.ranks)
                and any(values.equals(output, issue.ranks) for output in known)
            )
            or _are_joined(values, outputs, issue.ranks)
        )
        for values in call.inputs
    )


def _are_joined(values: SlotValues, outputs: list[SlotValues], ranks: Array) -> bool:
    """True where a value has as many elements and the norm of all outputs put together."""
    places, at = values.at(ranks), [output.at(ranks) for output in outputs]
    if len(outputs) < 2 or (places < 0).any() or any((each < 0).any() for each in at):
        return False
    counts = sum(output.counts[each] for output, each in zip(outputs, at))
    norms = sum(output.column("l2")[each] ** 2 for output, each in zip(outputs, at))
    wanted = values.column("l2")[places] ** 2
    is_like = (values.counts[places] == counts) & (abs(norms - wanted) <= _SAME_NORM * wanted)
    return bool(is_like.all() and (wanted > 0).all())


def _candidate(step_view: StepView, values: SlotValues, issue: IssuedCollective) -> Candidate:
    ranks = values.ranks
    at = str(issue.facts.get("at", ""))
    return candidate_at(
        step_view,
        values.call,
        Kind.PARAMETER,
        f"param:{values.parameter[1]}",
        ranks,
        f"has no gradient on {ranks_named(ranks)}: what the module gave went through "
        f"{issue.op}{f' ({at})' if at else ''}, which keeps no graph",
        advice=_ADVICE,
        evidence=lambda: {"collective": {"op": issue.op, "path": issue.call.path, "at": at}},
    )
