"""What ranks did together, as far as a trace shows it: the joints of the order of causes.

Recorded collectives come first; messages, which may join two steps, are in `messages.py`.
Reductions of gradients run in C++ and show in no record, so the gradients just before an optimizer
step join the ranks that hold parts of one parameter, or replicas of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.causeorder import Join
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.issuedcollectives import IssuedCollective, known_collectives
from rankscope.diagnosis.rankclock import span_of_call, times_of_call, times_of_value
from rankscope.diagnosis.rules.stages import StageLink, stage_edges
from rankscope.diagnosis.stepview import StepView
from rankscope.record.phases import Phase

__all__ = ["joins_of"]

Array = NDArray[Any]
_ONE_WAY: Final = {"broadcast", "scatter"}
_TO_ONE: Final = {"reduce", "gather", "gather_into_tensor"}


def joins_of(
    step_view: StepView,
    context: CheckContext,
    is_one: Callable[[StepView, IssuedCollective], bool],
) -> Iterator[Join]:
    """Yield the joints of one step, but for its messages.

    Args:
        step_view: the step.
        context: what is known beyond it.
        is_one: says of what ranks issued in the step whether it is one collective.
    """
    for issue in known_collectives(step_view):
        if len(issue.ranks) > 1 and is_one(step_view, issue):
            yield _collective(issue)
    for edge in stage_edges(step_view):
        yield from _stage(edge)
    yield from _events(step_view, context)


def _collective(issue: IssuedCollective) -> Join:
    ranks = issue.ranks
    begins, ends = span_of_call(issue.call, ranks)
    ends = np.maximum(ends, begins + 1)
    every = np.ones(len(ranks), bool)
    givers = ranks == issue.facts.get("src") if issue.op in _ONE_WAY else every
    takers = ranks == issue.facts.get("dst") if issue.op in _TO_ONE else every
    if not givers.any() or not takers.any():
        givers = takers = every
    return Join(
        givers=ranks[givers], begins=begins[givers], takers=ranks[takers], ends=ends[takers]
    )


def _stage(edge: StageLink) -> Iterator[Join]:
    sender, receiver = np.array([edge.sender]), np.array([edge.receiver])
    for micro in edge.sent.keys() & edge.taken.keys():
        sent, taken = edge.sent[micro], edge.taken[micro]
        if sent[1] == taken[1]:
            yield Join(
                givers=sender,
                begins=times_of_value(sent[0], sender),
                takers=receiver,
                ends=times_of_value(taken[0], receiver),
            )


def _events(step_view: StepView, context: CheckContext) -> Iterator[Join]:
    """Yield one joint for every group of ranks whose gradients were reduced together."""
    seen: set[bytes] = set()
    incarnation = context.incarnation(step_view.incarnation)
    for values in step_view.values(Phase.GRADS):
        meshes = [np.sort(np.array(m.ranks, np.int64)) for v in values.views for m in v.meshes]
        groups = meshes or list(incarnation.replicas.lines)
        if not groups and values.agree(values.ranks):
            groups = [values.ranks]
        for group in groups:
            own = group[np.isin(group, values.ranks)]
            if len(own) < 2 or own.tobytes() in seen or (not meshes and values.agree(own) is False):
                continue
            seen.add(own.tobytes())
            times = times_of_call(values.call, own)
            yield Join(givers=own, begins=times - 1, takers=own, ends=times - 1)
