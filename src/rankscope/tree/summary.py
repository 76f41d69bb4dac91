"""A trace in a few words: how big the job was, how much of it is here, how its ranks ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.record.call import CallStatus, Mode
from rankscope.record.run import EndReason
from rankscope.tree.ranks import ranks_named

if TYPE_CHECKING:
    from rankscope.tree.reader import Step, Trace
    from rankscope.tree.views import Node

__all__ = ["Crash", "as_json", "counted", "crashes", "endings", "extent", "state"]

_ENDED = {
    EndReason.RAISED.value: "raised",
    EndReason.LOST.value: "lost",
    EndReason.SWITCHED_OFF.value: "switched off",
    EndReason.RUNNING.value: "still running",
}
"""Ends that are said beside the ranks; the others are in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The exception that ended a rank, and the innermost call it left."""

    rank: int
    incarnation: int
    mode: Mode
    step: int
    path: str
    error: str
    """Its type and the beginning of its text, on one line."""
    start_us: float
    """When that call began, since the first call of the run."""

    def __str__(self) -> str:
        where = f"in {self.path or '(root)'}, {self.mode.word} step {self.step}"
        return f"{self.error or 'an exception'}  {where}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def extent(trace: Trace) -> str:
    """Return ranks, hosts, lives and meshes of the job, separated by commas."""
    run = trace.run
    lives = 1 + max((rank["incarnation"] for rank in run["ranks"]), default=0)
    parts = [
        f"{counted(run['world_size'], 'rank')} on {counted(len(run['hosts']), 'host')}",
        *([f"{lives} lives"] if lives > 1 else []),
        *(["; ".join(f"mesh {mesh['name']}" for mesh in run["meshes"])] if run["meshes"] else []),
    ]
    return ", ".join(parts)


def state(trace: Trace) -> str:
    """Return whether all of it is here, and what else must be known before any number is read."""
    word = "complete" if trace.is_complete else "incomplete"
    return "; ".join([word, *endings(trace), *([] if trace.steps else ["no step was traced"])])


def endings(trace: Trace) -> list[str]:
    """Return which ranks did not end in order, in their last life: `ranks 0-1 raised`."""
    last = {rank["rank"]: rank["end"] for rank in trace.completeness["ranks"]}
    said = []
    for end, word in _ENDED.items():
        ranks = [rank for rank, how in last.items() if how == end]
        if ranks:
            said.append(f"{ranks_named(ranks)} {word}")
    missing = trace.completeness["missing"]
    return [*said, f"nothing from {ranks_named(missing)}"] if missing else said


def crashes(trace: Trace) -> list[Crash]:
    """Return, for every life of a rank that an exception ended, where it left a module's call.

    That is the last call the rank made: what it raised before, the program has caught. A rank that
    raised outside of any module's call has none. The first in time comes first.
    """
    raised = [
        (rank["rank"], rank["incarnation"])
        for rank in trace.completeness["ranks"]
        if rank["end"] == EndReason.RAISED.value
    ]
    found = [crash for rank, life in raised if (crash := _crash(trace, rank, life))]
    return sorted(found, key=lambda crash: (crash.incarnation, crash.start_us, crash.rank))


def _crash(trace: Trace, rank: int, incarnation: int) -> Crash | None:
    last: tuple[Step, Node] | None = None
    for mode in Mode:
        for step in reversed(trace.steps):
            if step.mode is mode and step.incarnation == incarnation:
                calls = [node for node in step.nodes if rank in node.ranks]
                if calls:
                    node = max(calls, key=_start)
                    last = (step, node) if last is None or _start(last[1]) < _start(node) else last
                    break
    error = None if last is None else _error(last[1], rank)
    if last is None or error is None:
        return None
    step, node = last
    inner: Node | None = node
    while inner is not None:
        node = inner
        inner = next(
            (each for each in reversed(node.children) if _error(each, rank) == error), None
        )
    return Crash(
        rank=rank, incarnation=incarnation, mode=step.mode, step=step.step, path=node.path,
        error=" ".join(error.split()), start_us=_start(node),
    )  # fmt: skip


def _start(node: Node) -> float:
    return node.time.start_us


def _error(node: Node, rank: int) -> str | None:
    """Return the text of the exception that left a rank's call, None where none did."""
    if node.has_returned:
        return None
    raised = (
        o.error for o in node.outcomes if o.status == CallStatus.RAISED.word and rank in o.ranks
    )
    return next(raised, None)


def as_json(crash: Crash) -> Mapping[str, Any]:
    """Return a crash as `rankscope verify --json` writes it."""
    return {
        "rank": crash.rank,
        "incarnation": crash.incarnation,
        "mode": crash.mode.word,
        "step": crash.step,
        "path": crash.path,
        "error": crash.error,
    }
