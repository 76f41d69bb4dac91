"""Which ranks of a run a trace knows nothing of, and where others broke off: what such ranks would
have held is unknown, so values that they may have a part in are not compared.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from rankscope.diagnosis.evidence.lastcalls import ORDERLY
from rankscope.diagnosis.evidence.stepview import SlotValues
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named
from rankscope.tree.summary import endings
from rankscope.tree.views import Node, Trace

_BROKEN_OFF: Final = "not all of its ranks came here before the run broke off"


class LostRanks:
    """What is unknown of one incarnation of a run."""

    def __init__(self, trace: Trace, incarnation: int) -> None:
        run, completeness = trace.run, trace.completeness
        self._trace = trace
        self.world = int(run["world_size"])
        self.untraced = frozenset(range(self.world)) - {each["rank"] for each in run["ranks"]}
        """Ranks of which the trace holds nothing."""
        self.is_partial = bool(self.untraced)
        """True where values are skipped because of them."""
        self.broken = sorted(
            each["rank"]
            for each in completeness["ranks"]
            if each["incarnation"] == incarnation and each["end"] not in ORDERLY
        )
        """Ranks that did not end in order."""
        self._expected: defaultdict[str, set[int]] = defaultdict(set)
        self._cut_from: dict[Mode, int] = {}
        if self.broken:
            self._read(incarnation)

    def _read(self, incarnation: int) -> None:
        """Learn which ranks call what, and the first step that a broken rank may have left."""
        last: defaultdict[Mode, dict[int, int]] = defaultdict(dict)
        for step in (*self._trace.setup, *self._trace.steps):
            if step.incarnation != incarnation:
                continue
            for top in step.fresh():
                self._take(top)
                if not step.is_setup:
                    own = last[step.mode]
                    for rank in set(top.ranks).intersection(self.broken):
                        own[rank] = max(own.get(rank, 0), step.step)
        for mode, steps in last.items():
            self._cut_from[mode] = min(steps.get(rank, 0) for rank in self.broken)

    def _take(self, top: Node) -> None:
        """Note the ranks of a call and of those inside it: a rank that did not come back from one
        may not have come to what is inside."""
        waiting: list[tuple[Node, frozenset[int]]] = [(top, frozenset())]
        while waiting:
            node, stuck = waiting.pop()
            self._expected[node.path].update(node.ranks, stuck)
            left = [r for each in node.outcomes if not each.has_returned for r in each.ranks]
            waiting.extend((child, stuck.union(left)) for child in node.children)

    def is_cut(self, mode: Mode, step: int) -> bool:
        """True for a step that some rank may have left before its end."""
        return mode in self._cut_from and step >= self._cut_from[mode]

    def of(self, values: SlotValues) -> str:
        """Return why nothing can be said of a value; "" where nothing of it is missing."""
        if self.is_partial:
            return f"{self._untraced} of the run {self._was} not traced"
        call = values.call
        if not self.broken or call.phase is Phase.SETUP:
            return ""
        head = call.node.head
        if not self.is_cut(head.mode, head.step):
            return ""
        came = set(values.ranks[values.is_known].tolist())
        return _BROKEN_OFF if self._expected[call.path] - came else ""

    @property
    def _untraced(self) -> str:
        return ranks_named(sorted(self.untraced))

    @property
    def _was(self) -> str:
        return "was" if len(self.untraced) == 1 else "were"

    def lacks(self, name: str) -> str:
        """Return what of this trace (`name`: REF or TEST) is unknown, and what to do; "" for
        nothing."""
        if self.is_partial:
            return (
                f"{self._untraced} of {self.world} {self._was} not traced in {name}: trace all "
                "ranks, or the same ranks of the same topology in both runs"
            )
        if self.broken:
            ended = "; ".join(endings(self._trace.completeness))
            return f"{name} broke off ({ended}): no difference in what was compared before"
        return ""

    def notes(self, name: str) -> list[str]:
        """Return how ranks that raised an exception say they ended."""
        found = []
        for each in self._trace.completeness["ranks"]:
            raised = each.get("raised")
            if each["rank"] in self.broken and raised:
                text = str(raised.get("error", "")).partition("\n")[0]
                where = f" ({raised['where']})" if raised.get("where") else ""
                found.append(f"{name}: rank {each['rank']} raised {text}{where}")
        return found[:4]
