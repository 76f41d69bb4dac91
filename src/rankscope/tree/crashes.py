"""The exceptions that ended ranks: what each was, and which call it left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.tree.views import Node, Step, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The exception that ended a rank: the innermost call it left, or the line outside of all."""

    rank: int
    incarnation: int
    pid: int
    mode: Mode | None
    """Of the rank's last recorded step, None without a step."""
    step: int | None
    path: str | None
    """None outside of any module's call."""
    phase: Phase | None
    error: str
    """Type and text, shortened, on one line."""
    causes: tuple[str, ...]
    """The exceptions it was raised from, or while handling; the nearest first."""
    where: str
    """`file.py:12 function` of the innermost line of the program it left, "" where not known."""
    start_us: float
    """When that call began, or the last one of the rank, since the first call of the run."""

    @property
    def sentence(self) -> str:
        """The exception and, outside of any module's call, what it came of and where."""
        error = self.error or "an exception"
        if self.path is not None:
            return error
        cause = f", after {self.causes[0]}" if self.causes else ""
        at = f", at {self.where}" if self.where else ""
        return f"{error}{cause}, outside of any module's call{at}"

    def __str__(self) -> str:
        last = "before any step" if self.mode is None else f"{self.mode.word} step {self.step}"
        if self.path is None:
            return f"{self.sentence}  {last if self.mode is None else f'last traced: {last}'}"
        return f"{self.sentence}  in {self.path or '(root)'}, {last}"


def crashes(trace: Trace) -> list[Crash]:
    """Return, for every life of a rank that an exception ended, what it was and where.

    A module's call was left by it where the rank's last call was: what a rank raised before, the
    program has caught. Otherwise it was raised outside of any module's call; of such a rank there
    is nothing to tell where its trace has no text. The first in time comes first.
    """
    raised = [rank for rank in trace.completeness["ranks"] if rank["end"] == EndReason.RAISED.value]
    pids = {(life["rank"], life["incarnation"]): life["pid"] for life in trace.run["ranks"]}
    crash_list = [crash for state in raised if (crash := _crash(trace, state, pids))]
    return sorted(crash_list, key=lambda crash: (crash.incarnation, crash.start_us, crash.rank))


def _crash(
    trace: Trace, state: Mapping[str, Any], pids: Mapping[tuple[int, int], int]
) -> Crash | None:
    rank, incarnation = state["rank"], state["incarnation"]
    pid = pids.get((rank, incarnation), 0)
    raised = state.get("raised", {"error": "", "causes": (), "where": ""})
    texts = (raised["error"], *raised["causes"])
    last: tuple[Step, Node] | None = None
    for mode in Mode:
        for step in reversed(trace.steps):
            is_own = step.mode is mode and step.incarnation == incarnation
            if is_own and (calls := [node for node in step.nodes if rank in node.ranks]):
                node = max(calls, key=_start)
                last = (step, node) if last is None or _start(last[1]) < _start(node) else last
                break
    error = None if last is None else _error(last[1], rank)
    if last is None or error is None or ("raised" in state and error not in texts):
        if "raised" not in state:
            return None
        return Crash(
            rank=rank, incarnation=incarnation, pid=pid, path=None, phase=None,
            error=raised["error"],
            mode=last[0].mode if last else None, step=last[0].step if last else None,
            causes=tuple(raised["causes"]), where=raised["where"],
            start_us=_start(last[1]) if last else 0.0,
        )  # fmt: skip
    step, node = last
    inner: Node | None = node
    while inner is not None:
        node = inner
        modules = (c for c in reversed(node.children) if c.phase is not Phase.COLLECTIVE)
        inner = next((c for c in modules if _error(c, rank) == error), None)
    return Crash(
        rank=rank, incarnation=incarnation, pid=pid, mode=step.mode, step=step.step, path=node.path,
        phase=node.phase, error=error, causes=tuple(raised["causes"]), where=raised["where"],
        start_us=_start(node),
    )  # fmt: skip


def _start(node: Node) -> float:
    return node.time.start_us


def _error(node: Node, rank: int) -> str | None:
    """Return the text of the exception that left a rank's call, None where none did."""
    if node.has_returned:
        return None
    ends = (o for o in node.outcomes if rank in o.ranks)
    text = next((o.error for o in ends if o.status == CallStatus.RAISED.word), None)
    return None if text is None else " ".join(text.split())


def as_json(crash: Crash) -> Mapping[str, Any]:
    """Return a crash as `rankscope verify --json` writes it."""
    names = ("rank", "incarnation", "mode", "step", "path", "error", "causes", "where")
    fields = {name: getattr(crash, name) for name in names}
    mode = None if crash.mode is None else crash.mode.word
    return {**fields, "mode": mode, "causes": list(crash.causes)}
