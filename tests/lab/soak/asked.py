"""What a job that holds its last steps back was asked for, by what the programs wrote down, and
what its trace says of that (`completeness.asked`).

What has to be asked for, of all ranks of that life:

* a value that is not finite in step s of a rank: steps s - N to s;
* a rank that died in step k, the first of its life: steps k - N + 1 to k. It may have begun the
  next step, of which nothing is written down. Of the others too, unless nobody was left to see it.

A trace may ask for more than that, and is held to it all the same. A step that its rank never ran
is not missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Account", "Asked", "ranks_of"]

_AT_ONCE_S = 3.0
"""Of ranks that die within this time any may count as the first."""
_OF_DEATHS = ("ended", "vanished", "stalled", "recovered")


@dataclass
class Account:
    """What one process of a rank wrote down."""

    rank: int
    pid: int
    written_at: float = 0.0
    """When it wrote its last line; seconds since the epoch."""
    life: int = 0
    nans: list[int] = field(default_factory=list)
    """Steps in which it saw a value that is not finite."""
    calls: list[tuple[int, str]] = field(default_factory=list)
    values: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    steps: int = 0
    """Whole ones."""
    has_ended: bool = False
    has_died: bool = False
    """On purpose, by itself."""

    @property
    def last_step(self) -> int:
        """The last one that it was in; -1 for none."""
        return self.calls[-1][0] if self.calls else -1


class Asked:
    """Steps asked for, and what a trace says of them."""

    def __init__(self, completeness: Mapping[str, Any], told: Sequence[Account], last: int) -> None:
        self._events: list[Mapping[str, Any]] = list(completeness.get("asked", ()))
        self._told = told
        self._last = last

    def steps(self, one: Account) -> set[int]:
        """Return the steps asked for that this process of a rank ran."""
        runs = [(event["first"], event["last"]) for event in self._events if _is_of(event, one)]
        runs += [
            self._before(step)
            for other in self._told
            if other.life == one.life
            for step in other.nans
        ]
        return _steps(runs, one) | self.own(one)

    def own(self, one: Account) -> set[int]:
        """Return the steps asked for by what happened to this process itself, or what it saw: it
        has to hold these however late anybody else hears of it."""
        runs = [self._before(step) for step in one.nans]
        if one.pid in self._first_dead(one.life):
            runs.append(self._before_death(one))
        return _steps(runs, one)

    def said(self, one: Account, step: int) -> tuple[int, int, list[str]]:
        """Return how many events of the trace ask for a step, how many of them say that it is
        missing, and why."""
        asking, naming, why = 0, 0, []
        for event in self._events:
            if _is_of(event, one) and event["first"] <= step <= event["last"]:
                said = [
                    lack["why"]
                    for lack in event["missing"]
                    if one.rank in ranks_of(lack["ranks"]) and step in ranks_of(lack["steps"])
                ]
                asking, naming, why = asking + 1, naming + bool(said), [*why, *said]
        return asking, naming, why

    def _before(self, step: int) -> tuple[int, int]:
        return max(0, step - self._last), step

    def _before_death(self, one: Account) -> tuple[int, int]:
        return max(0, one.last_step - self._last + 1), one.last_step

    def _first_dead(self, life: int) -> set[int]:
        """Return the process that died first; of several that died at once those whose last steps
        an event of the trace asks for, if there are any."""
        dead = sorted(
            (o for o in self._told if o.life == life and (o.has_died or not o.has_ended)),
            key=lambda one: one.written_at,
        )
        at_once = [o for o in dead if o.written_at <= dead[0].written_at + _AT_ONCE_S]
        known = {
            one.pid
            for one in at_once
            for event in self._events
            if event["event"] in _OF_DEATHS
            and event["incarnation"] == life
            and event["first"] <= self._before_death(one)[0]
            and one.last_step <= event["last"]
        }
        return known or {one.pid for one in at_once[:1]}


def _steps(runs: Iterable[tuple[int, int]], one: Account) -> set[int]:
    """Return the steps of these runs that a process ran."""
    ran = {step for step, _ in one.calls}
    return {step for first, last in runs for step in range(first, last + 1)} & ran


def _is_of(event: Mapping[str, Any], one: Account) -> bool:
    is_train: bool = event["mode"] == "train"
    return is_train and event["incarnation"] == one.life


def ranks_of(text: str) -> Iterator[int]:
    """Read a list of ranks, or of steps: `0-2,5`."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
