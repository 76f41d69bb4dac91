"""Which values of two runs are bitwise equal, and which is the first that is not: by hashes alone.

For yesterday's commit beside today's. Where ranks hold a value in the same way in both traces, each
rank's is compared with its own. Where they do not, a hash tells something only of values that ranks
hold whole; the others are counted with the reason, and nothing is said of them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import PathMap, SlotKey, align, in_order
from rankscope.diagnosis.comparison.difference import Batches
from rankscope.diagnosis.comparison.preflight import run_lines, step_line
from rankscope.diagnosis.comparison.tracesides import TraceSide, two_sides
from rankscope.diagnosis.comparison.unpaired import Tally
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView
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
    by_phase: Mapping[Phase, tuple[int, int]]
    """{phase: (equal, compared)}, in order of execution."""

    @property
    def equal(self) -> int:
        """How many of the values compared are."""
        return sum(equal for equal, _ in self.by_phase.values())

    @property
    def equal_before(self) -> int:
        """Values compared before the first that is not equal; all of them where there is none."""
        return self.equal if self.first is None else int(self.first.evidence["equal_before"])

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
        self._tally = Tally(ref, test, paths)
        self._by_phase = dict.fromkeys(Phase, (0, 0))
        self._first: Finding | None = None
        self._victims: list[str] = []
        """Further values that are not equal."""

    def take(self, ref: StepView, test: StepView) -> None:
        """Compare two steps, or setups."""
        aligned = align(ref, test, self._paths)
        self._tally.take(aligned)
        partners: defaultdict[SlotKey, list[dict[int, SlotValues]]] = defaultdict(list)
        for value in aligned.values:
            partners[value.key].append(value.test)
            self._tally.unpaired += len(value.ref.keys() ^ value.test.keys())
        # who worked on which samples is asked only where topologies differ
        batches = functools.cache(
            lambda: Batches.of(self._ref.samples(ref), self._test.samples(test))
        )
        for key, ours in in_order(ref):
            for by_micro_batch in partners[key]:
                theirs = by_micro_batch.get(ours.call.micro_batch or 0)
                if theirs is not None:
                    self._judge(key, ours, theirs, test, batches)

    def _judge(
        self,
        key: SlotKey,
        ref: SlotValues,
        test: SlotValues,
        step: StepView,
        batches: Callable[[], Batches],
    ) -> None:
        unequal = self._unequal(ref, test, batches)
        if isinstance(unequal, str):
            self._tally.skipped[unequal] += 1
            return
        equal, compared = self._by_phase[key.phase]
        self._by_phase[key.phase] = equal + (not len(unequal)), compared + 1
        if len(unequal) and self._first is None:
            self._first = _finding(key, test, step, unequal, self._tally.compared)
        elif len(unequal):
            self._victims.append(test.name)
        self._tally.compared += 1

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

    def report(self) -> BitwiseReport:
        """Return what was found."""
        tally, findings = self._tally, []
        if self._first is not None:
            names = tuple(dict.fromkeys(self._victims))[:NAMED_VICTIMS]
            findings = [replace(self._first, victims=len(self._victims), victim_names=names)]
        report = tally.report(
            findings,
            reasons=tally.skipped.most_common(),
            lacks=tally.lacks or self._too_few(),
            notes=tally.notes(),
            lines=[
                step_line(self._ref.steps, self._test.steps),
                *run_lines(self._ref.trace.run, self._test.trace.run),
            ],
        )
        return BitwiseReport(
            report=report, by_phase={p: both for p, both in self._by_phase.items() if both[1]}
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


def _finding(key: SlotKey, held: SlotValues, step: StepView, ranks: Array, before: int) -> Finding:
    path = held.call.path
    who = tuple(sorted(int(rank) for rank in ranks))
    others = sorted({int(rank) for rank in held.ranks} - set(who))
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
        mode=Mode.TRAIN if step.is_setup else step.mode,
        step=step.step,
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
    kinds = np.concatenate([ref.flags, test.flags]) & int(ValueFlag.MIX64)
    return bool((kinds != kinds[0]).any())
