"""The numbers of two jobs (ranks along an axis, micro-batches) that a factor between their values
may equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankscope.diagnosis.comparison.difference import Batches
from rankscope.tree.views import Trace

__all__ = ["Degrees"]


@dataclass(slots=True, kw_only=True)
class Degrees:
    """Numbers of the two jobs that a factor may equal, by name."""

    by_name: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, ref: Trace, test: Trace) -> Degrees:
        """Return the degrees that the run headers tell."""
        found = cls()
        for trace in (test, ref):
            for mesh in trace.run["meshes"]:
                for axis, size in zip(mesh["axes"], mesh["shape"]):
                    if size > 1:
                        found.by_name.setdefault(f"{axis}={size}", float(size))
        for trace, whose in ((test, ""), (ref, "the reference's ")):
            world = int(trace.run["world_size"])
            if world > 1:
                found.by_name.setdefault(f"{whose}number of ranks, {world}", float(world))
        return found

    def take(self, batches: Batches) -> None:
        """Add what a step shows: data-parallel ranks and micro-batches."""
        for samples, whose in ((batches.test, ""), (batches.ref, "the reference's ")):
            if samples.place_count > 1:
                name = f"{whose}data-parallel ranks, {samples.place_count}"
                self.by_name.setdefault(name, float(samples.place_count))
            if samples.micro_batches > 1:
                name = f"{whose}micro-batches, {samples.micro_batches}"
                self.by_name.setdefault(name, float(samples.micro_batches))

    def named(self, factor: float) -> list[str]:
        """Return the degrees that a factor, or one over it, equals."""
        if not math.isfinite(factor) or factor == 0:
            return []
        size = max(abs(factor), 1 / abs(factor))
        return [name for name, degree in self.by_name.items() if abs(size / degree - 1) < 0.02]
