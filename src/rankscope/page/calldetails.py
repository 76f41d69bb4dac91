"""What is behind the cells: calls with their values, in blocks of modules that the browser inflates
when one of them is looked at."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from rankscope.diagnosis.stepview import CallView, SlotValues, StepView, is_input, is_output
from rankscope.page.modulerows import ModuleRows
from rankscope.page.slotdetails import python_detail, slot_detail
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.visibletext import visible

__all__ = ["ROWS_PER_BLOCK", "CallDetails", "packed_blocks", "packed_json"]

ROWS_PER_BLOCK: Final = 32
_MOST_ERROR: Final = 500
_MOST_MEMBERS: Final = 2_000
_LINKED: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
_MOST_TAKERS: Final = 6


def packed_json(data: Any) -> bytes:
    """Return JSON data, deflated (zlib)."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return zlib.compress(text.encode("ascii"), 9)


def packed_blocks(calls: Iterable[dict[str, Any]]) -> dict[int, bytes]:
    """Return calls, those of 32 modules together, deflated: by row // ROWS_PER_BLOCK."""
    blocks: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        blocks[call["m"] // ROWS_PER_BLOCK].append(call)
    return {number: packed_json(own) for number, own in sorted(blocks.items())}


class CallDetails:
    """The details of chosen modules in chosen steps."""

    def __init__(self, rows: ModuleRows, marked: Mapping[int, Collection[int]]) -> None:
        self._rows, self._marked = rows, marked
        self.calls: list[dict[str, Any]] = []
        """As JSON data; `m` is the row of the module, `static/detail.js` reads the other fields."""

    def add(
        self,
        step: int,
        step_view: StepView,
        held: Collection[int] | bytearray,
        chosen: Collection[int] | None,
    ) -> None:
        """Add a step.

        Args:
            step: its number on the page.
            step_view: its calls.
            held: for every slot of its calls, in order, whether it was held to others.
            chosen: rows that are wanted, None for all.
        """
        links = _ValueLinks(step_view)
        place = 0
        judged = bytes(held)
        for call in (*step_view.calls, *step_view.left_by_passes):
            row = self._rows.of(call.path)
            count = len(call.slots)
            if chosen is None or row in chosen:
                own = judged[place : place + count]
                self.calls.append(self._call(step, row, call, own, links))
            place += count

    def _call(
        self, step: int, row: int, call: CallView, held: bytes, links: _ValueLinks
    ) -> dict[str, Any]:
        node, timing = call.node, call.node.time
        detail: dict[str, Any] = {
            "m": row,
            "t": step,
            "p": call.phase.word,
            "r": node.ranks_text,
            "us": [_tenth(timing.min_us), _tenth(timing.max_us), timing.slowest],
        }
        if call.micro_batch is not None:
            detail["b"] = call.micro_batch
        if call.ordinal:
            detail["o"] = call.ordinal
        if node.wrappers:
            detail["w"] = visible(", ".join(node.wrappers))
        if not node.has_returned:
            detail["end"] = [
                [ranks_text(o.ranks), o.status, visible(o.error)[:_MOST_ERROR]]
                for o in node.outcomes
            ]
        if node.errors:
            detail["err"] = [
                [ranks_text(e.ranks), visible(e.error)[:_MOST_ERROR]] for e in node.errors
            ]
        if node.collectives:
            detail["co"] = [_collective(ranks, facts) for ranks, facts in node.collectives]
        marked = self._marked.get(row, ())
        slots = []
        for (slot, values), is_held in zip(call.slots.items(), held):
            if values.dtype == "python":
                slots.append(python_detail(values.views[0]))
                continue
            made = slot_detail(values, marked)
            if is_held:
                made["held"] = 1
            producer = links.producer(call, slot)
            if producer is not None:
                made["from"] = self._end(producer)
            takers = links.consumers(call, slot)
            if takers:
                made["to"] = [self._end(taker) for taker in takers]
            slots.append(made)
        if slots:
            detail["s"] = slots
        return detail

    def _end(self, end: _ValueEnd) -> list[Any]:
        return [self._rows.of(end.call.path), end.call.phase.word, visible(end.slot)]


def _collective(ranks: str, facts: Mapping[str, Any]) -> str:
    """Return what some ranks issued, in words."""
    reduce = f"({facts['reduce']})" if facts.get("reduce") else ""
    words = [f"{facts.get('op', 'collective')}{reduce}"]
    ends = (("src", "from rank"), ("dst", "to rank"), ("peer", "with rank"), ("group", "in group"))
    words += [f"{word} {facts[name]}" for name, word in ends if facts.get(name) not in (None, "")]
    words.append(f"over {ranks_named(facts.get('members', ())[:_MOST_MEMBERS])}")
    words += ["async"] if facts.get("async") else []
    after = (("issuer", "issued by"), ("at", "at"))
    words += [f"{word} {facts[name]}" for name, word in after if facts.get(name)]
    return f"{ranks_named(ranks)}: {visible(' '.join(words))}"


def _tenth(us: float | None) -> float | None:
    return None if us is None else round(us, 1)


class _ValueEnd(NamedTuple):
    """One end of a link."""

    call: CallView
    slot: str


class _ValueLinks:
    """Where the values of one step came from and who took them: those with the same bytes on one
    rank.

    A call's input that has the bytes of an earlier call's output came from it, as far as bytes can
    tell. Values that hold one number alone tell nothing, and are left out.
    """

    def __init__(self, step_view: StepView) -> None:
        self._from: dict[tuple[int, str], _ValueEnd] = {}
        self._to: defaultdict[tuple[int, str], list[_ValueEnd]] = defaultdict(list)
        made: dict[tuple[Phase, int, int], list[_ValueEnd]] = {}
        for call in step_view.calls:
            if call.phase not in _LINKED:
                continue
            own = [(slot, _key(values)) for slot, values in call.slots.items()]
            for slot, key in own:
                if key is not None and is_input(slot, call.phase):
                    self._link(_ValueEnd(call, slot), made.get(key, []), key)
            for slot, key in own:
                if key is not None and is_output(slot, call.phase):
                    made.setdefault(key, []).append(_ValueEnd(call, slot))

    def _link(self, taker: _ValueEnd, makers: list[_ValueEnd], key: tuple[Phase, int, int]) -> None:
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
            maker = _ValueEnd(parent, handed[0])
        self._from[id(taker.call), taker.slot] = maker
        takers = self._to[id(maker.call), maker.slot]
        if len(takers) < _MOST_TAKERS:
            takers.append(taker)

    def producer(self, call: CallView, slot: str) -> _ValueEnd | None:
        """Return what made an input, or the call that handed it down; None where bytes do not
        tell."""
        return self._from.get((id(call), slot))

    def consumers(self, call: CallView, slot: str) -> list[_ValueEnd]:
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
