"""Passes through models that DDP wraps. Its reducer averages gradients in C++, where nothing is
recorded of it: all of its ranks have to go through as many backward passes.

Ranks may go through unlike numbers of micro-batches inside `no_sync()`. Then what their optimizers
took is the same all the same, and a step counts for one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.evidence.replicas import DDP
from rankscope.diagnosis.evidence.stepview import CallView, SlotValues, StepView, grouped, is_below
from rankscope.record.phases import Phase
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
