"""Where a value came from and who took it: values of one step with the same bytes on one rank.

A call's input that has the bytes of an earlier call's output came from it, as far as bytes can
tell. Values that hold one number alone tell nothing, and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

from rankscope.diagnosis.stepview import CallView, SlotValues, StepView, is_input, is_output
from rankscope.record.phases import Phase

__all__ = ["ValueEnd", "ValueLinks"]

_LINKED: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
_MOST_TAKERS: Final = 6


class ValueEnd(NamedTuple):
    """One end of a link."""

    call: CallView
    slot: str


class ValueLinks:
    """The links of one step."""

    def __init__(self, step_view: StepView) -> None:
        self._from: dict[tuple[int, str], ValueEnd] = {}
        self._to: defaultdict[tuple[int, str], list[ValueEnd]] = defaultdict(list)
        made: dict[tuple[Phase, int, int], list[ValueEnd]] = {}
        for call in step_view.calls:
            if call.phase not in _LINKED:
                continue
            own = [(slot, _key(values)) for slot, values in call.slots.items()]
            for slot, key in own:
                if key is not None and is_input(slot, call.phase):
                    self._link(ValueEnd(call, slot), made.get(key, []), key)
            for slot, key in own:
                if key is not None and is_output(slot, call.phase):
                    made.setdefault(key, []).append(ValueEnd(call, slot))

    def _link(self, taker: ValueEnd, makers: list[ValueEnd], key: tuple[Phase, int, int]) -> None:
        around = set(_around(taker.call))
        beside = [maker for maker in makers if maker.call not in around]
        if beside:
            maker = beside[-1]
            outer = {each.call: each for each in beside}
            for call in _around(maker.call):
                if call in around:
                    break
                maker = outer.get(call, maker)
        else:
            parent = taker.call.parent
            given = () if parent is None else parent.slots.items()
            handed = [s for s, v in given if is_input(s, taker.call.phase) and _key(v) == key]
            if parent is None or not handed:
                return
            maker = ValueEnd(parent, handed[0])
        self._from[id(taker.call), taker.slot] = maker
        takers = self._to[id(maker.call), maker.slot]
        if len(takers) < _MOST_TAKERS:
            takers.append(taker)

    def producer(self, call: CallView, slot: str) -> ValueEnd | None:
        """Return what made an input, or the call that handed it down; None where bytes do not
        tell."""
        return self._from.get((id(call), slot))

    def consumers(self, call: CallView, slot: str) -> list[ValueEnd]:
        """Return the first calls that took a value."""
        return self._to.get((id(call), slot), [])


def _key(values: SlotValues) -> tuple[Phase, int, int] | None:
    """Return what values with the same bytes share; None where they may share it by chance."""
    if values.dtype == "python" or not len(values.ranks) or not values.is_known[0]:
        return None
    if not values.column("min")[0] < values.column("max")[0]:
        return None
    return values.call.phase, int(values.ranks[0]), int(values.hashes[0])


def _around(call: CallView) -> list[CallView]:
    found = []
    at: CallView | None = call
    while at is not None:
        found.append(at)
        at = at.parent
    return found
