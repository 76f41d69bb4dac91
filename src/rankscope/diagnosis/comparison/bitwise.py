"""The exact measure of `diff`: which values are bitwise equal, and which is the first that is not.

Where ranks hold a value in the same way in both traces, each rank's is compared with its own. Where
they do not, a hash tells something only of values that ranks hold whole; the others are counted
with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import SlotKey, in_order
from rankscope.diagnosis.comparison.preflight import PreflightLine
from rankscope.diagnosis.comparison.tracesides import PairedStep
from rankscope.diagnosis.comparison.unpaired import Tally
from rankscope.diagnosis.evidence.stepview import Array, SlotValues
from rankscope.record.call import Mode
from rankscope.record.finding import NAMED_VICTIMS, Finding, Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.value import ValueFlag

_ADVICE: Final = (
    "What was computed before it is bitwise equal. If only rounding should differ from here on, "
    "ask rankscope diff without --exact."
)
_OTHER_HASHES: Final = "hashed on an accelerator in one trace, and on the host in the other"


class BitwiseMeasure:
    """Compares hashes, in the reference's order of execution."""

    too_few: Final = (
        "{compared:,} of {both} could be compared by hashes; {count:,}: {reason}: ask rankscope "
        "diff without --exact"
    )

    def __init__(self) -> None:
        self.equal: dict[Phase, tuple[int, int]] = {}
        self._first: Finding | None = None
        self._victims: list[str] = []

    def take(self, step: PairedStep, tally: Tally) -> bool:
        """Compare the values of two steps, or setups; no step is left out."""
        tally.take(step.aligned)
        partners: defaultdict[SlotKey, list[dict[int, SlotValues]]] = defaultdict(list)
        for value in step.aligned.values:
            partners[value.key].append(value.test)
            tally.unpaired += len(value.ref.keys() ^ value.test.keys())
        for key, ref in in_order(step.ref):
            for by_micro_batch in partners[key]:
                test = by_micro_batch.get(ref.call.micro_batch or 0)
                if test is not None:
                    self._judge(key, ref, test, step, tally)
        return True

    def _judge(
        self, key: SlotKey, ref: SlotValues, test: SlotValues, step: PairedStep, tally: Tally
    ) -> None:
        if _form_of(ref) == _form_of(test):
            unequal = _rank_by_rank(ref, test)
        else:
            unequal = _by_wholes(ref, test, step)
        if isinstance(unequal, str):
            tally.skipped[unequal] += 1
            return
        equal, compared = self.equal.get(key.phase, (0, 0))
        self.equal[key.phase] = equal + (not len(unequal)), compared + 1
        if len(unequal) and self._first is None:
            self._first = _finding(key, test, step, unequal, tally.compared)
        elif len(unequal):
            self._victims.append(test.name)
        tally.compared += 1

    def findings(self) -> list[Finding]:
        """Return the first value that is not equal; nothing where all are."""
        if self._first is None:
            return []
        names = tuple(dict.fromkeys(self._victims))[:NAMED_VICTIMS]
        return [replace(self._first, victims=len(self._victims), victim_names=names)]

    def lines(self) -> list[PreflightLine]:
        """Return what was looked at before any number: nothing of its own."""
        return []

    def notes(self, compared: int) -> list[str]:
        """Return what must be known to read the findings: nothing of its own."""
        return []


def _finding(
    key: SlotKey, held: SlotValues, step: PairedStep, ranks: Array, before: int
) -> Finding:
    path = held.call.path
    who = tuple(sorted(ranks.tolist()))
    others = sorted({*held.ranks.tolist()} - {*who})
    beside = f"; equal on {ranks_named(others)}" if others else ""
    evidence: dict[str, Any] = {"equal_before": before}
    if path != key.path:
        evidence["ref_path"] = key.path
    if key.ordinal:
        evidence["ordinal"] = key.ordinal
    return Finding(
        kind=Kind.DIVERGENCE,
        severity=Severity.FAULT,
        phase=key.phase,
        mode=Mode.TRAIN if step.test.is_setup else step.test.mode,
        step=step.test.step,
        micro_batch=held.call.micro_batch,
        path=path,
        slot=held.slot,
        ranks=who,
        is_origin=True,
        victims=0,
        evidence=evidence,
        message=f"{held.name}: not bitwise the reference's{beside}",
        advice=_ADVICE,
    )


def _form_of(values: SlotValues) -> list[object]:
    """Return what has to be equal for two traces to hold a value in the same way on each rank."""
    return [
        (view.ranks, view.dtype, view.global_shape, view.mesh_name, view.placements, view.shapes())
        for view in values.views
    ]


def _rank_by_rank(ref: SlotValues, test: SlotValues) -> Array | str:
    """Return the ranks whose value is not bitwise the reference's, or why hashes do not tell."""
    ours, theirs = ((each.flags & int(ValueFlag.ABSENT)) != 0 for each in (ref, test))
    if not ((ref.is_known | ours) & (test.is_known | theirs)).all():
        return "not digested"
    if (ours & theirs).all():
        return "no tensor was there"
    if _is_mixed(ref, test):
        return _OTHER_HASHES
    same = (ref.hashes == test.hashes) & (ref.counts == test.counts)
    unequal: Array = test.ranks[(ours != theirs) | ~(ours | same)]
    return unequal


def _by_wholes(ref: SlotValues, test: SlotValues, step: PairedStep) -> Array | str:
    """Return the same of values that ranks hold in other ways, where they hold them whole."""
    if ref.dtype != test.dtype:
        return f"of another dtype ({ref.dtype} and {test.dtype})"
    places: tuple[Array | None, Array | None] = None, None
    if ref.call.phase.facts.is_activation:
        if not step.batches.are_the_same:
            return "of other batches: the runs split them in another way"
        places = step.batches.ref.places, step.batches.test.places
    ours = step.wholes[0].of(ref, places[0])
    theirs = step.wholes[1].of(test, places[1])
    for whole in (ours, theirs):
        if isinstance(whole, str):
            return whole
        if not whole.is_hashed.all():
            return "spread over ranks in another way: a hash is that of one piece"
    assert not isinstance(ours, str) and not isinstance(theirs, str)
    if _is_mixed(ref, test):
        return _OTHER_HASHES
    known: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for place, row in zip(ours.places.tolist(), ours.rows):
        known[place].add((int(row["hash"]), int(row["count"])))
    wrong = [np.zeros(0, np.int64)]
    for place, row, members in zip(theirs.places.tolist(), theirs.rows, theirs.members):
        if len(known[place]) != 1:
            return "the reference's ranks hold different values"
        ((number, count),) = known[place]
        if int(row["count"]) != count:
            return "of another size than the reference's"
        if int(row["hash"]) != number:
            wrong.append(members)
    return np.unique(np.concatenate(wrong))


def _is_mixed(ref: SlotValues, test: SlotValues) -> bool:
    kinds = np.concatenate([ref.flags, test.flags]) & int(ValueFlag.MIX64)
    return bool((kinds != kinds[0]).any())
