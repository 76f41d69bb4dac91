"""Backward passes before an optimizer step, of ranks that reduce their gradients together: as many
on each. DDP's reducer averages in C++, where nothing is recorded of it; elsewhere the reductions
are counted. Behind a step that one rank left out steps of one number are other passes: they are
comparable again once all have left out as many.

Ranks may go through unlike numbers of micro-batches and reduce once (`no_sync()`). Then what their
optimizers took is the same all the same, or they reduced equally often, and a step counts for one
pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.evidence.issuedcollectives import known_collectives
from rankscope.diagnosis.evidence.replicas import DDP
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    is_below,
)
from rankscope.record.phases import Phase
from rankscope.record.ranks import OPS
from rankscope.record.value import ValueFlag

_NO_SYNC: Final = int(ValueFlag.NO_SYNC)


class LeftOut(NamedTuple):
    """A forward with a graph, and no backward through it."""

    step: int
    time_ns: int
    """When it had ended, by the rank's own clock."""


@dataclass(slots=True)
class PassCount:
    """What one rank did with one wrapped model."""

    reduced: int = 0
    """Backward passes in which the rank has part in a reduction."""
    left_out: LeftOut | None = None
    """The first."""


class UnlikePasses(NamedTuple):
    """Ranks that stepped a model after unlike numbers of reduced passes."""

    path: str
    line: Array
    counts: dict[int, int]
    is_meant: bool
    """True where the ranks take turns to step and send what they made of the parameters."""


class PassesApart(NamedTuple):
    """Which values of a step are those of other passes on some ranks."""

    begins: int
    """The first micro-batch of which that holds."""
    ahead: Mapping[int, int]
    """{rank: passes that it is ahead of the others by the end of this step, or by its begin where
    it began so}"""

    def parts(self, phase: Phase, micro_batch: int | None, ranks: Array) -> bool:
        """True where a value of these ranks is of other passes on some of them."""
        is_before = phase is Phase.SETUP or (phase is Phase.COLLECTIVE and self.begins > 0)
        is_before |= micro_batch is not None and micro_batch < self.begins
        return not is_before and len({self.ahead.get(rank, 0) for rank in ranks.tolist()}) > 1


def unlike_passes(
    step_view: StepView,
    ddp_passes: Mapping[str, Mapping[int, PassCount]],
    ddp_lines: Sequence[Array],
    lines: Iterable[Array],
) -> Iterator[UnlikePasses]:
    """Yield the models that data-parallel ranks stepped after unlike numbers of passes: `ddp_lines`
    those that DDP wraps, `lines` the others."""
    gradients = list(step_view.gradients())
    for path, by_rank in ddp_passes.items() if ddp_lines else ():
        below = [values for values in gradients if is_below(values.call.path, path)]
        for line in ddp_lines:
            stepped = [values for values in below if values.has(line)]
            counts = {rank: by_rank[rank].reduced for rank in line.tolist() if rank in by_rank}
            is_unlike = len(counts) == len(line) and len(set(counts.values())) > 1
            if is_unlike and any(values.agree(line) is False for values in stepped):
                yield UnlikePasses(path, line, counts, _is_sent(step_view, line))
    for line in lines if not ddp_passes else ():
        for path, steppers in step_view.stepped.items():
            counts = _passes_of_line(step_view, path, line)
            is_unlike = len(set(counts.values())) > 1 and steppers >= counts.keys()
            below = [values for values in gradients if is_below(values.call.path, path)]
            if not is_unlike or is_reduced_all_the_same(below, line.tolist()):
                continue
            reduced = _reductions_of(step_view, line)
            shares = {reduced[rank] / count for rank, count in counts.items()}
            if len(shares) == 1 and shares != {0.0}:
                yield UnlikePasses(path, line, counts, _is_sent(step_view, line))


def _passes_of_line(step_view: StepView, path: str, line: Array) -> dict[int, int]:
    """Return {rank: backward passes through a root}, {} where one of the ranks has none."""
    backwards = (call for call in step_view.named(path) if call.phase is Phase.BACKWARD)
    micros = grouped((rank, c.micro_batch) for c in backwards for rank in c.ranks.tolist())
    counts = {rank: len(set(micros.get(rank, ()))) for rank in line.tolist()}
    return counts if all(counts.values()) else {}


def _is_sent(step_view: StepView, line: Array) -> bool:
    """True where a broadcast gave ranks what the step made of a parameter on one of them."""
    sent = {
        number
        for issue in known_collectives(step_view)
        if issue.op == "broadcast"
        for values in issue.call.outputs
        for number in values.hashes.tolist()
    }
    parameters = (v for v in step_view.parameters(Phase.PARAMS) if sent and v.has(line))
    return any(not v.is_constant and not sent.isdisjoint(v.hashes.tolist()) for v in parameters)


def _reductions_of(step_view: StepView, line: Array) -> Counter[int]:
    """Return {rank: reductions of more than a number that it had part in with others of the line,
    behind a forward}."""
    issues = (
        issue
        for issue in known_collectives(step_view)
        if "reduce" in OPS.get(issue.op, ()) and issue.facts.get("issuer") != "forward"
        if np.isin(line, issue.members).sum() > 1
        if any((values.counts > 1).any() for values in issue.call.inputs)
    )
    return Counter(rank for issue in issues for rank in issue.ranks.tolist() if rank in line)


def passes_in(step_view: StepView) -> dict[str, dict[int, PassCount]]:
    """Return {path of a wrapped model: {rank: its passes in a step}}."""
    calls = grouped((c.path, c) for c in step_view.of(Phase.FORWARD, Phase.BACKWARD) if is_ddp(c))
    return {path: dict(_passes_of_ranks(step_view, path, calls[path])) for path in calls}


def is_ddp(call: CallView) -> bool:
    """True for a call of what DDP wraps."""
    return DDP in call.node.wrappers


def _passes_of_ranks(
    step_view: StepView, path: str, calls: list[CallView]
) -> Iterator[tuple[int, PassCount]]:
    made: dict[int, dict[int | None, int]] = {}
    backwards: dict[int, list[int | None]] = {}
    for call in calls:
        for rank in call.ranks.tolist():
            if call.phase is Phase.BACKWARD:
                backwards.setdefault(rank, []).append(call.micro_batch)
            elif _has_graph(call, rank):
                end = int(call.times(np.array([rank]), is_end=True)[0])
                made.setdefault(rank, {}).setdefault(call.micro_batch, end)
    below = [values for values in step_view.gradients() if is_below(values.call.path, path)]
    unsynced = {rank for v in below for rank in v.ranks[(v.flags & _NO_SYNC) != 0].tolist()}
    counts = {rank: len(passes) for rank, passes in backwards.items()}
    if len(set(counts.values())) > 1 and is_reduced_all_the_same(below, sorted(counts)):
        counts = dict.fromkeys(counts, 1)
    for rank in sorted({*made, *backwards}):
        passes = backwards.get(rank, [])
        without = [end for micro, end in made.get(rank, {}).items() if micro not in passes]
        if without:  # the latest thing of all may still get its backward
            tops = (c for c in step_view.calls if c.parent is None and rank in c.ranks)
            latest = max(int(c.times(np.array([rank]))[0]) for c in tops)
            without = [end for end in without if end < latest]
        count = counts.get(rank, 0) - (rank in unsynced and rank in counts)
        left_out = LeftOut(step_view.step, min(without)) if without else None
        yield rank, PassCount(count, left_out)


def _has_graph(call: CallView, rank: int) -> bool:
    pieces = (piece for v in call.outputs if v.place(rank) >= 0 for piece in v.pieces)
    return any(piece.requires_grad for piece in pieces)


def is_reduced_all_the_same(gradients: list[SlotValues], ranks: list[int]) -> bool:
    """True where these ranks stepped with gradients that are equal on them."""
    members = np.array(ranks, np.int64)
    agrees = [v.agree(members) for v in gradients if v.has(members) and not v.is_constant]
    return True in agrees and False not in agrees


@dataclass(slots=True)
class ReducedPasses:
    """The passes of all steps of a trace; filled step by step."""

    _passes: dict[tuple[int, str], dict[int, PassCount]] = field(default_factory=dict)

    def note(self, incarnation: int, passes: Mapping[str, Mapping[int, PassCount]]) -> None:
        """Add those of one step, as `passes_in` returns them."""
        for path, by_rank in passes.items():
            totals = self._passes.setdefault((incarnation, path), {})
            for rank, count in by_rank.items():
                total = totals.setdefault(rank, PassCount())
                total.reduced += count.reduced
                total.left_out = total.left_out or count.left_out

    def of(self, incarnation: int) -> Iterator[tuple[str, Mapping[int, PassCount]]]:
        """Yield the path of each wrapped model, with the passes of its ranks."""
        for (life, path), by_rank in self._passes.items():
            if life == incarnation:
                yield path, by_rank
