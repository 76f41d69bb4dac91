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
from rankscope.record.ranks import ranks_named
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
        self.is_partial = bool(self.untraced)
        """True where values are skipped because of them."""
        self.broken = sorted(
            each["rank"]
            for each in completeness["ranks"]
            if each["incarnation"] == incarnation and each["end"] not in ORDERLY
        )
        self._expected: defaultdict[str, set[int]] = defaultdict(set)
        """By path: the ranks that call the module."""
        self._cut_from: dict[Mode, int] = {}
        """The first step that a broken rank may have left."""
        if self.broken:
            self._read(incarnation)

    def _read(self, incarnation: int) -> None:
        last: defaultdict[Mode, dict[int, int]] = defaultdict(lambda: dict.fromkeys(self.broken, 0))
        for step in (*self._trace.setup, *self._trace.steps):
            for top in step.fresh() if step.incarnation == incarnation else ():
                self._take(top)
                if not step.is_setup:
                    own = last[step.mode]
                    own |= {r: max(own[r], step.step) for r in top.ranks if r in own}
        self._cut_from = {mode: min(steps.values()) for mode, steps in last.items()}

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
        if call.phase is Phase.SETUP or not self.is_cut(call.node.head.mode, call.node.head.step):
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
        if not self.broken:
            return ""
        ended = "; ".join(endings(self._trace.completeness))
        return f"{name} broke off ({ended}): no difference in what was compared before"

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
