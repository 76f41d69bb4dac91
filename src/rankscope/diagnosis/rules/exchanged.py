"""What a collective gave is what its inputs give, and what was received is what was sent.

Outputs that a collective makes equal are compared by hash. Sums are held to the sketches of the
inputs (they are linear), maxima to maxima, parts to means and norms; all within rounding. Only
collectives of which every member was recorded are looked at, and only messages that are known to be
one (`diagnosis/messages.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import ROUNDING, minority, rounding_of, sides
from rankscope.diagnosis.issuedcollectives import (
    EQUAL_OUTPUTS,
    IssuedCollective,
    issues_of,
    known_collectives,
)
from rankscope.diagnosis.messages import Message, message_value
from rankscope.diagnosis.rankclock import times_of_call
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind
from rankscope.record.ranklists import ranks_named
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import ValueFlag

__all__ = ["wrong_exchanges", "wrong_messages"]

Array = NDArray[Any]
_ADDED: Final = frozenset({*ROUNDING, "int32", "int64"})
"""dtypes whose sums do not wrap around, or not in practice."""
_SLACK: Final = 8
"""Times the rounding of the dtype that a sum may be off, relative to the norms of its summands."""


def wrong_exchanges(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every collective whose output is not what went in."""
    for issue in known_collectives(step_view):
        if len(issue.ranks) == len(issue.members) > 1:
            yield from _judged(step_view, context, issue)


def _judged(
    step_view: StepView, context: CheckContext, issue: IssuedCollective
) -> Iterator[Candidate]:
    outputs = [h for s, h in issue.call.slots.items() if s.split(".")[0] == "output"]
    for number, output in enumerate(outputs):
        if output.dtype == "python" or not _is_there(output, issue.ranks):
            continue
        problem = _unequal(issue, output) or _unlike_inputs(issue, output, number, len(outputs))
        context.coverage.applied(output)
        if problem is not None:
            text, blamed = problem
            yield _candidate(step_view, issue, output, text, blamed)


def _is_there(values: SlotValues, ranks: Array) -> bool:
    places = values.at(ranks)
    return bool((places >= 0).all() and values.is_known[places].all())


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
    if not _is_there(given, issue.ranks) or _is_late(given, issue.ranks):
        return None
    if not (_is_finite(given, issue.ranks) and _is_finite(output, issue.ranks)):
        return None
    if issue.op == "all_gather" and outputs == len(issue.members):
        sender = issue.members[number]
        is_whole = given.hashes[given.at(np.array([sender]))[0]]
        wrong = issue.ranks[output.hashes[output.at(issue.ranks)] != is_whole]
        return (f"rank {sender}'s part is not what it gave", wrong) if len(wrong) else None
    if issue.op == "broadcast":
        source = given.hashes[given.at(np.array([issue.facts.get("src", -1)]))[0]]
        wrong = issue.ranks[output.hashes[output.at(issue.ranks)] != source]
        return ("it is not what the source gave", wrong) if len(wrong) else None
    test = _TESTS.get((issue.op, str(issue.facts.get("reduce", ""))))
    if test is None or given.dtype not in _ADDED:
        return None
    if not (_has_numbers(given, issue.ranks) and _has_numbers(output, issue.ranks)):
        return None
    if test(issue, given, output):
        return None
    return "its output is not what its inputs give", issue.ranks


def _is_late(values: SlotValues, ranks: Array) -> bool:
    return bool((values.flags[values.at(ranks)] & int(ValueFlag.AFTER_CALL)).any())


def _is_finite(values: SlotValues, ranks: Array) -> bool:
    places = values.at(ranks)
    return not any(values.column(n)[places].any() for n in NONFINITE)


def _has_numbers(values: SlotValues, ranks: Array) -> bool:
    """True where the statistics and sketches of all ranks are numbers: nothing without elements has
    any, and those of elements near the end of a dtype's range overflow."""
    places = values.at(ranks)
    return all(np.isfinite(values.column(n)[places]).all() for n in ("min", "l2", "sketch"))


# ---- arithmetic ----------------------------------------------------------------------------------


def _allowed(given: SlotValues, places: Array) -> float:
    return float(_SLACK * max(rounding_of(given.dtype), 1e-9) * given.column("l2")[places].sum())


def _sums(
    issue: IssuedCollective, given: SlotValues, output: SlotValues, *, divisor: int = 1
) -> bool:
    ins, outs = given.at(issue.ranks), output.at(issue.ranks)
    wanted = given.column("sketch")[ins].sum(0) / divisor
    apart = np.sqrt(np.mean((output.column("sketch")[outs] - wanted) ** 2, axis=1)).max()
    return bool(apart <= _allowed(given, ins) / divisor + 1e-30)


def _averages(issue: IssuedCollective, given: SlotValues, output: SlotValues) -> bool:
    return _sums(issue, given, output, divisor=len(issue.members))


def _extreme(name: str) -> Callable[[IssuedCollective, SlotValues, SlotValues], bool]:
    def test(issue: IssuedCollective, given: SlotValues, output: SlotValues) -> bool:
        least = given.column(name)[given.at(issue.ranks)]
        found = output.column(name)[output.at(issue.ranks)]
        return bool((found == (least.max() if name == "max" else least.min())).all())

    return test


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
    ("all_reduce", "avg"): _averages,
    ("all_reduce", "max"): _extreme("max"),
    ("all_reduce", "min"): _extreme("min"),
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
                yield _candidate(step_view, issue, received, text, own, members=own)


def _candidate(
    step_view: StepView,
    issue: IssuedCollective,
    output: SlotValues,
    text: str,
    blamed: Array,
    members: Array | None = None,
) -> Candidate:
    ranks = issue.ranks if members is None else members
    given = [h for s, h in issue.call.slots.items() if s.split(".")[0] == "input"]

    def evidence() -> dict[str, Any]:
        return {
            "op": issue.op,
            "reduce": issue.facts.get("reduce"),
            "group": issue.group,
            "members": [*issue.members],
            "inputs": [side for values in given[:2] for side in sides(values, issue.ranks)],
            "outputs": sides(output, issue.ranks),
        }

    return candidate_at(
        step_view,
        issue.call,
        Kind.COLLECTIVE,
        issue.slot,
        blamed,
        ranks,
        times_of_call(issue.call, ranks, is_end=True),
        f"{issue.op} of {ranks_named(issue.ranks.tolist())}: {text}",
        evidence=evidence,
        priority=-1,
    )
