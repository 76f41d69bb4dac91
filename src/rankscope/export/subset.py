"""What of a trace to export, in the words of `rankscope show`; here all of it where nothing is
asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.errors import SelectionError
from rankscope.globs import glob_matches
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.run.filenames import Progress
from rankscope.tree.selection import (
    nothing_matched,
    parse_mode,
    parse_path,
    parse_phases,
    parse_ranges,
)
from rankscope.tree.views import Node, Step, Trace

_SHOWN = 1000
"""Ranks of a range that an error repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Steps, modules, phases and ranks."""

    path: str = "*"
    steps: tuple[range, ...] = ()
    """() for all."""
    mode: Mode | None = None
    phases: frozenset[Phase] = frozenset(Phase)
    wanted_ranks: tuple[range, ...] = ()
    """() for all."""
    with_setup: bool = True

    @classmethod
    def parse(cls, *, path: str, step: str, mode: str, phase: str, rank: str) -> Selection:
        """Read the options of `rankscope export`, empty where not given; SelectionError: a step,
        mode, phase or rank that cannot be."""
        named = parse_phases(phase) if phase else None
        return cls(
            path=parse_path(path),
            steps=parse_ranges("step", step),
            mode=parse_mode(mode) if mode else None,
            phases=frozenset(Phase) if named is None else named,
            wanted_ranks=parse_ranges("rank", rank),
            with_setup=Phase.SETUP in named if named is not None else not (step or mode),
        )

    def ranks(self, trace: Trace) -> frozenset[int]:
        """Return the ranks that are asked for; SelectionError: the trace holds none of them."""
        held = {int(rank["rank"]) for rank in trace.run["ranks"]}
        if not self.wanted_ranks:
            return frozenset(held)
        found = frozenset(r for r in held if any(r in wanted for wanted in self.wanted_ranks))
        if not found:
            asked = ranks_text(rank for wanted in self.wanted_ranks for rank in wanted[:_SHOWN])
            raise SelectionError(f"--rank {asked}: the trace holds ranks {ranks_text(held)}")
        return found

    def groups(self, trace: Trace) -> list[Step]:
        """Return the setups and steps asked for; SelectionError: the trace holds none of them."""
        setup = list(trace.setup) if self.with_setup else []
        steps = [
            step
            for step in trace.steps
            if self.phases != {Phase.SETUP}
            and (self.mode is None or step.mode is self.mode)
            and (not self.steps or any(step.step in wanted for wanted in self.steps))
        ]
        if not setup and not steps:
            there = ", ".join(s.head.label for s in (*trace.setup, *trace.steps)[:20]) or "nothing"
            raise SelectionError(f"the trace holds no such step; it holds {there}")
        return [*setup, *steps]

    def walk(
        self, trace: Trace, progress: Progress, what: str
    ) -> Iterator[tuple[Step, list[Node]]]:
        """Yield every group with the nodes that are asked for, in the order of the tree; `progress`
        is told `what` is done. SelectionError: no node has such a path; lists near ones."""
        seen: set[str] = set()
        groups = self.groups(trace)
        for done, step in enumerate(groups):
            progress(what, done / len(groups))
            nodes = []
            for node in step.passing():
                path = node.path
                seen.add(path)
                if glob_matches(self.path, path) and node.phase in self.phases:
                    nodes.append(node)
            yield step, nodes
        if not any(glob_matches(self.path, path) for path in seen):
            raise nothing_matched("--path", self.path, seen)
