"""The batches that each rank trained on, step by step, and those that came again in one order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rankscope.diagnosis.evidence.stepview import StepView, grouped

_FEWEST_AGAIN: Final = 2
"""Steps. One batch that comes again may have been asked for again: a skipped or repeated step."""


class BatchCycle(NamedTuple):
    """Ranks whose batches are those of their first steps over and over."""

    number: int
    """Of the first step that repeats one, among all steps of the trace."""
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    """The first ones, each with another batch."""
    again: int
    """Steps behind them, none with a batch of its own."""


@dataclass(slots=True)
class TrainedBatches:
    """All batches of a trace, as numbers; what steps hold otherwise is let go."""

    _batches: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    """{(incarnation, rank): (number of the step in the trace, step, hash of its batch)}."""

    def note(self, step_view: StepView, number: int) -> None:
        """Keep the batches of a train step; another model begins with batches of its own."""
        if step_view.is_setup or step_view.mode.word != "train":
            return
        inputs = [v for call in step_view.roots for v in call.inputs if not v.is_constant]
        parts = grouped(
            (rank, (values.call.path, told))
            for values in inputs
            for rank, told, is_known in zip(
                values.ranks.tolist(), values.hashes.tolist(), values.is_known.tolist()
            )
            if is_known
        )
        for rank, batch in parts.items():
            batches = self._batches.setdefault((step_view.incarnation, rank), [])
            batches.append((number, step_view.step, hash(tuple(batch))))

    def cycles(self) -> Iterator[BatchCycle]:
        """Yield what came again, for ranks alike; one batch for all steps is no cycle."""
        ranks_of = grouped(
            (cycle, rank)
            for (_, rank), batches in sorted(self._batches.items())
            for cycle in _cycle_of(batches)
        )
        for (number, steps, again), ranks in ranks_of.items():
            yield BatchCycle(number, tuple(ranks), steps, again)


def _cycle_of(batches: list[tuple[int, int, int]]) -> Iterator[tuple[int, tuple[int, ...], int]]:
    hashes = [told for _, _, told in batches]
    length = next((n for n in range(1, len(hashes)) if hashes[n] == hashes[0]), 0)
    again = len(hashes) - length
    is_cycle = all(first == later for first, later in zip(hashes, hashes[length:]))
    if length > 1 and again >= _FEWEST_AGAIN and is_cycle and len({*hashes}) == length:
        yield batches[length][0], tuple(step for _, step, _ in batches[:length]), again
