"""Which values of two runs are bitwise equal, and which is the first that is not: by hashes alone.

For yesterday's commit beside today's. Where ranks hold a value in the same way in both traces, each
rank's is compared with its own. Where they do not, a hash tells something only of values that ranks
hold whole; the others are counted with the reason, and nothing is said of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import AlignedValue, PathMap, align, in_order
from rankscope.diagnosis.comparison.difference import Batches
from rankscope.diagnosis.comparison.preflight import run_lines, step_line
from rankscope.diagnosis.comparison.tracesides import TraceSide, two_sides
from rankscope.diagnosis.comparison.unpaired import Partners, Tally
from rankscope.diagnosis.stepview import Array, SlotValues, StepView
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.finding import NAMED_VICTIMS, Finding, Kind, Report, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named
from rankscope.record.value import ValueFlag
from rankscope.run.filenames import Progress
from rankscope.tree.reader import TraceLike
from rankscope.tree.summary import counted

_ADVICE: Final = (
    "What was computed before it is bitwise equal. If only rounding should differ from here on, "
    "ask rankscope diff without --exact."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitwiseReport:
    """How far two runs are bitwise equal."""

    report: Report
    """In the form of `diff`'s own: its one finding is the first value that is not equal."""
    equal: int
    """Of the values compared."""
    by_phase: Mapping[Phase, tuple[int, int]]
    """{phase: (equal, compared)}, in order of execution."""
    equal_before: int
    """Values compared before the first that is not equal; all of them where there is none."""

    @property
    def first(self) -> Finding | None:
        """The first value in order of execution that is not equal; None where all are."""
        return self.report.findings[0] if self.report.findings else None


def diff_bitwise(
    ref: TraceLike,
    test: TraceLike,
    *,
    paths: PathMap | Iterable[str] = (),
    layouts: LayoutFile | None = None,
    progress: Progress | None = None,
) -> BitwiseReport:
    """Say which values of two runs are bitwise equal, by their hashes, and which is the first that
    is not.

    Arguments and errors are those of `diff`; the finding carries path and ranks of the test.
    """
    rules = PathMap.of(paths)
    with two_sides(ref, test, layouts) as sides:
        search = _Search(*sides, rules)
        if sides[0].setup is not None and sides[1].setup is not None:
            search.take(sides[0].setup, sides[1].setup)
        common = [key for key in sides[0].steps if key in sides[1].steps]
        for number, key in enumerate(common):
            if progress is not None:
                progress("comparing", number / len(common))
            search.take(sides[0].view((key,)), sides[1].view((key,)))
        return search.report()


class _Search:
    """Goes through the values of both traces in the reference's order of execution."""

    def __init__(self, ref: TraceSide, test: TraceSide, paths: PathMap) -> None:
        self._ref, self._test, self._paths = ref, test, paths
        self._partners = Partners(ref.trace, test.trace, paths)
        self._tally = Tally()
        self._equal: Counter[Phase] = Counter()
        self._compared: Counter[Phase] = Counter()
        self._before = 0
        self._first: tuple[AlignedValue, SlotValues, StepView, Array] | None = None
        self._victims = 0
        self._names: dict[str, None] = {}

    def take(self, ref: StepView, test: StepView) -> None:
        """Compare two steps, or setups."""
        aligned = align(ref, test, self._paths)
        self._partners.take(aligned)
        self._tally.unpaired += len(aligned.only_ref) + len(aligned.only_test)
        by_key: dict[Any, list[AlignedValue]] = {}
        for value in aligned.values:
            by_key.setdefault(value.key, []).append(value)
        # who worked on which samples is asked only where topologies differ
        batches = functools.cache(
            lambda: Batches.of(self._ref.samples(ref), self._test.samples(test))
        )
        for key, call in in_order(ref):
            micro_batch = call.micro_batch or 0
            for value in by_key.get(key, ()):
                theirs = value.test.get(micro_batch)
                if theirs is None:
                    self._tally.unpaired += 1
                    continue
                self._judge(value, value.ref[micro_batch], theirs, test, batches)
        for value in aligned.values:
            self._tally.unpaired += len(value.test.keys() - value.ref.keys())

    def _judge(
        self,
        value: AlignedValue,
        ref: SlotValues,
        test: SlotValues,
        step: StepView,
        batches: Callable[[], Batches],
    ) -> None:
        unequal = self._unequal(ref, test, batches)
        if isinstance(unequal, str):
            self._tally.skipped[unequal] += 1
            return
        phase = value.key.phase
        self._tally.compared += 1
        self._compared[phase] += 1
        if not len(unequal):
            self._equal[phase] += 1
            self._before += self._first is None
        elif self._first is None:
            self._first = value, test, step, unequal
        else:
            self._victims += 1
            if len(self._names) < NAMED_VICTIMS:
                self._names[value.test_name] = None

    def _unequal(
        self, ref: SlotValues, test: SlotValues, batches: Callable[[], Batches]
    ) -> Array | str:
        """Return the ranks of the test whose value is not bitwise the reference's, or why hashes
        do not tell."""
        if _form_of(ref) == _form_of(test):
            return _rank_by_rank(ref, test)
        if ref.dtype != test.dtype:
            return f"of another dtype ({ref.dtype} and {test.dtype})"
        places: tuple[Array | None, Array | None] = None, None
        if ref.call.phase.facts.is_activation:
            if not batches().are_the_same:
                return "of other batches: the runs split them in another way"
            places = batches().ref.places, batches().test.places
        made = self._ref.wholes.of(ref, places[0]), self._test.wholes.of(test, places[1])
        for whole in made:
            if isinstance(whole, str):
                return whole
            if not whole.is_hashed.all():
                return "spread over ranks in another way: a hash is that of one piece"
        ours, theirs = made
        assert not isinstance(ours, str) and not isinstance(theirs, str)
        if _is_mixed(ref, test):
            return "hashed on an accelerator in one trace, and on the host in the other"
        known: dict[int, set[tuple[int, int]]] = {}
        for place, row in zip(ours.places.tolist(), ours.rows):
            known.setdefault(place, set()).add((int(row["hash"]), int(row["count"])))
        wrong = [np.zeros(0, np.int64)]
        for place, row, members in zip(theirs.places.tolist(), theirs.rows, theirs.members):
            there = known.get(place, set())
            if len(there) != 1:
                return "the reference's ranks hold different values"
            ((number, count),) = there
            if int(row["count"]) != count:
                return "of another size than the reference's"
            if int(row["hash"]) != number:
                wrong.append(members)
        return np.unique(np.concatenate(wrong))

    def report(self) -> BitwiseReport:
        """Return what was found."""
        finding = self._finding()
        report = self._tally.report(
            (self._ref, self._test),
            () if finding is None else (finding,),
            reasons=self._tally.skipped.most_common(),
            lacks=self._partners.lacks or self._too_few(),
            notes=self._partners.notes(),
            lines=[
                step_line(self._ref.steps, self._test.steps),
                *run_lines(self._ref.trace.run, self._test.trace.run),
            ],
        )
        phases = [phase for phase in Phase if self._compared[phase]]
        return BitwiseReport(
            report=report,
            equal=self._equal.total(),
            by_phase={phase: (self._equal[phase], self._compared[phase]) for phase in phases},
            equal_before=self._before,
        )

    def _too_few(self) -> str:
        tally = self._tally
        if tally.is_enough:
            return ""
        told = (
            f"{tally.compared:,} of {counted(tally.in_both, 'value')} could be compared by hashes"
        )
        if not tally.skipped:
            return f"{told}: the traces have no value in common"
        (reason, count), *_ = tally.skipped.most_common(1)
        return f"{told}; {count:,}: {reason}: ask rankscope diff without --exact"

    def _finding(self) -> Finding | None:
        if self._first is None:
            return None
        value, theirs, step, ranks = self._first
        key, path, slot = value.key, value.test_path, value.test_slot
        who = tuple(sorted(int(rank) for rank in ranks))
        others = sorted({int(rank) for rank in theirs.ranks} - set(who))
        beside = f"; equal on {ranks_named(others)}" if others else ""
        evidence: dict[str, Any] = {"equal_before": self._before}
        if path != key.path:
            evidence["ref_path"] = key.path
        if key.ordinal:
            evidence["ordinal"] = key.ordinal
        return Finding(
            kind=Kind.DIVERGENCE,
            severity=Severity.FAULT,
            phase=key.phase,
            mode=Mode.TRAIN if step.is_setup else step.mode,
            step=step.step,
            micro_batch=theirs.call.micro_batch,
            path=path,
            slot=slot,
            ranks=who,
            is_origin=True,
            victims=self._victims,
            victim_names=tuple(self._names),
            evidence=evidence,
            message=f"{value.test_name}: not bitwise the reference's{beside}",
            advice=_ADVICE,
        )


def _form_of(values: SlotValues) -> tuple[Any, ...]:
    """Return what has to be equal for two traces to hold a value in the same way on each rank."""
    return tuple(
        (
            view.ranks,
            view.dtype,
            view.global_shape,
            view.mesh_name,
            tuple(sorted((axis, str(place)) for axis, place in view.placements.items())),
            tuple(sorted(view.shapes().items())),
        )
        for view in values.views
    )


def _rank_by_rank(ref: SlotValues, test: SlotValues) -> Array | str:
    absent = int(ValueFlag.ABSENT)
    gone = [(each.flags & absent) != 0 for each in (ref, test)]
    is_told = (ref.is_known | gone[0]) & (test.is_known | gone[1])
    if not is_told.all():
        return "not digested"
    if (gone[0] & gone[1]).all():
        return "no tensor was there"
    if _is_mixed(ref, test):
        return "hashed on an accelerator in one trace, and on the host in the other"
    same = (ref.hashes == test.hashes) & (ref.counts == test.counts)
    found: Array = test.ranks[(gone[0] != gone[1]) | ~(gone[0] | same)]
    return found


def _is_mixed(ref: SlotValues, test: SlotValues) -> bool:
    mixed = int(ValueFlag.MIX64)
    kinds = {bool(flag) for each in (ref, test) for flag in (each.flags & mixed).tolist()}
    return len(kinds) > 1
