"""`diff`: two traces of one model, of any two topologies, and where the second went wrong first.

One walk over the steps that both have serves two measures: distances, which have tolerances, and
hashes, which have none. Where ranks hold a value in the same way in both traces, each rank's hash
is compared with its own; elsewhere a hash tells something only of values that ranks hold whole, and
the others are counted with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.causes import verdict_of
from rankscope.diagnosis.comparison.alignment import (
    PathMap,
    SlotKey,
    Tally,
    in_order,
    paired_models,
)
from rankscope.diagnosis.comparison.datasamples import Batches, StepSamples
from rankscope.diagnosis.comparison.difference import Measured, Tolerances
from rankscope.diagnosis.comparison.findings import (
    Degrees,
    PreflightLine,
    batch_line,
    dtype_line,
    finding_of,
    forward_line,
    optimizer_lines,
    preflight_order,
    run_lines,
    start_line,
    step_line,
)
from rankscope.diagnosis.comparison.fulltensors import FullTensors
from rankscope.diagnosis.comparison.origins import OriginSearch
from rankscope.diagnosis.comparison.pieces import SeenCuts
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences, renumbered_modules
from rankscope.diagnosis.comparison.tracesides import (
    PairedStep,
    StepKey,
    TraceSide,
    aligned_by_pass,
    paired_steps,
    two_sides,
)
from rankscope.diagnosis.events import alike, told_once
from rankscope.diagnosis.evidence.stepview import Array, SlotValues
from rankscope.errors import SettingError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.finding import NAMED_VICTIMS, Finding, Kind, Report, Severity, Skipped
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import counted
from rankscope.record.value import ValueFlag
from rankscope.run.folders import Progress
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.views import Trace

# ---- hashes --------------------------------------------------------------------------------------


_ADVICE: Final = (
    "What was computed before it is bitwise equal. If only rounding should differ from here on, "
    "ask rankscope diff without --exact."
)
_OTHER_HASHES: Final = "hashed on an accelerator in one trace, and on the host in the other"


class BitwiseMeasure:
    """Compares hashes, in the reference's order of execution."""

    aligns: Final = False
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
        # what has to be equal for two traces to hold a value in the same way on each rank
        forms = [
            [(v.ranks, v.dtype, v.global_shape, v.mesh_name, v.placements, v.shapes())
             for v in values.views]
            for values in (ref, test)
        ]  # fmt: skip
        is_alike = forms[0] == forms[1]
        unequal = _rank_by_rank(ref, test) if is_alike else _by_wholes(ref, test, step)
        if isinstance(unequal, str):
            tally.skipped[unequal] += 1
            return
        equal, compared = self.equal.get(key.phase, (0, 0))
        self.equal[key.phase] = equal + (not len(unequal)), compared + 1
        if len(unequal) and self._first is None:
            self._first = _bitwise_finding(key, test, step, unequal, tally.compared)
        elif len(unequal):
            self._victims.append(test.name)
        tally.compared += 1

    def excused(self) -> int:
        """Return 0: no other byte is left uncounted."""
        return 0

    def findings(self) -> list[Finding]:
        """Return the first value that is not equal; nothing where all are."""
        if self._first is None:
            return []
        names = tuple(dict.fromkeys(self._victims))[:NAMED_VICTIMS]
        return [replace(self._first, victims=len(self._victims), victim_names=names)]

    def preflight_lines(self) -> list[PreflightLine]:
        """Return what was looked at before any number: nothing of its own."""
        return []

    def notes(self, compared: int) -> list[str]:
        """Return what must be known to read the findings: nothing of its own."""
        return []


def _bitwise_finding(
    key: SlotKey, values: SlotValues, step: PairedStep, ranks: Array, before: int
) -> Finding:
    path = values.call.node.path
    wrong = tuple(sorted(ranks.tolist()))
    equal = sorted({*values.ranks.tolist()} - {*wrong})
    evidence: dict[str, Any] = {"equal_before": before}
    if path != key.path:
        evidence["ref_path"] = key.path
    if key.ordinal:
        evidence["ordinal"] = key.ordinal
    on_others = f"; equal on {ranks_named(equal)}" if equal else ""
    return Finding(
        kind=Kind.DIVERGENCE,
        severity=Severity.FAULT,
        phase=key.phase,
        mode=Mode.TRAIN if step.test.is_setup else step.test.mode,
        step=step.test.step,
        micro_batch=values.call.micro_batch,
        path=path,
        slot=values.slot,
        ranks=wrong,
        is_origin=True,
        victims=0,
        evidence=evidence,
        message=f"{values.name}: not bitwise the reference's{on_others}",
        advice=_ADVICE,
    )


def _rank_by_rank(ref: SlotValues, test: SlotValues) -> Array | str:
    """Return the ranks whose value is not bitwise the reference's, or why hashes do not tell."""
    ref_absent, test_absent = ((v.flags & int(ValueFlag.ABSENT)) != 0 for v in (ref, test))
    if not ((ref.is_known | ref_absent) & (test.is_known | test_absent)).all():
        return "not digested"
    if (ref_absent & test_absent).all():
        return "no tensor was there"
    if len(np.unique(np.concatenate([ref.flags, test.flags]) & int(ValueFlag.MIX64))) > 1:
        return _OTHER_HASHES
    is_same = (ref.hashes == test.hashes) & (ref.counts == test.counts)
    unequal: Array = test.ranks[(ref_absent != test_absent) | ~(ref_absent | is_same)]
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
    wholes = [w.of(v, at) for w, v, at in zip(step.wholes, (ref, test), places)]
    for wholes_of_side in wholes:
        if isinstance(wholes_of_side, str):
            return wholes_of_side
        if not wholes_of_side.is_hashed.all():
            return "spread over ranks in another way: a hash is that of one piece"
    ref_wholes, test_wholes = wholes
    assert not isinstance(ref_wholes, str) and not isinstance(test_wholes, str)
    if len(np.unique(np.concatenate([ref.flags, test.flags]) & int(ValueFlag.MIX64))) > 1:
        return _OTHER_HASHES
    values_at: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for place, row in zip(ref_wholes.places.tolist(), ref_wholes.rows):
        values_at[place].add((int(row["hash"]), int(row["count"])))
    wrong = [np.zeros(0, np.int64)]
    for place, row, members in zip(
        test_wholes.places.tolist(), test_wholes.rows, test_wholes.members
    ):
        if len(values_at[place]) != 1:
            return "the reference's ranks hold different values"
        ((number, count),) = values_at[place]
        if int(row["count"]) != count:
            return "of another size than the reference's"
        if int(row["hash"]) != number:
            wrong.append(members)
    return np.unique(np.concatenate(wrong))


# ---- the two traces ------------------------------------------------------------------------------


_LATE: Final = 1e-3
"""How far parameters may be off that are first seen behind a step, which made them."""
_LATE_VECTOR: Final = 2.0
"""The same of vectors, which steps may have made from zero with other signs."""
EachStep = Callable[["StepKey | None", StepDifferences, "Collection[int]"], None]
_Noise = dict[StepKey, Mapping[SlotKey, float]]
"""{(mode, step): {value: relative distance}}."""


def diff(
    ref: TraceLike,
    test: TraceLike,
    *,
    paths: PathMap | Sequence[str] = (),
    layouts: LayoutFile | None = None,
    noise: TraceLike | None = None,
    tensors: bool = True,
    exact: bool = False,
    progress: Progress | None = None,
    each_step: EachStep | None = None,
) -> Report:
    """Say where a run first differs from a reference, whatever the topologies of both.

    Args:
        ref: the trace that is right: open, its folder, or what `with rankscope.trace(...)` gave.
        test: the trace in question; findings carry its paths and ranks.
        paths: how its paths become those of the reference: rules `regex=replacement`.
        layouts: declared layouts, for values that no DTensor describes; used for each trace that
            has the file's number of ranks.
        noise: the reference once more, with inputs that are off by one rounding: how far its values
            are from the reference's is the unit in which the test is judged.
        tensors: read the full tensors that both traces kept, for exact distances.
        exact: compare hashes in place of distances. `equal` of the report says how many values are
            bitwise equal, and its one finding is the first that is not.
        progress: told how far it is.
        each_step: handed the differences of setup (under None) and of every step, under the test's
            mode and number, and the `id` of those of the values that are a fault or follow from
            one; it keeps none of them. Not called where hashes are compared.

    Raises:
        SettingError: a rule for paths is not `regex=replacement`, or `noise` is no second run of
            the reference, or given with `exact`.
        LayoutError: the layout file contradicts itself.
        FolderError, TraceError: no trace is there, or a damaged one.
    """
    rules = PathMap.of(paths)
    if exact and noise is not None:
        raise SettingError("--exact compares hashes, --noise is about distances: give one of both")
    with two_sides(ref, test, layouts) as sides:
        if exact:
            return _compared(sides, rules, BitwiseMeasure(), progress)
        errors: _Noise = {}
        note = ""
        if noise is not None:
            with opened_trace(noise, takes_golden=True) as second:
                errors, note = _noise_of(sides[0], second, layouts, progress)
        measure = _DistanceMeasure(sides, errors, note, each_step, reads_tensors=tensors)
        return _compared(sides, rules, measure, progress)


def _noise_of(
    ref: TraceSide, noise: Trace, layouts: LayoutFile | None, progress: Progress | None
) -> tuple[_Noise, str]:
    """Return how far a second run is from the reference, and the note that says so.

    Raises:
        SettingError: that trace is no second run of the reference, or nothing in it is off.
    """
    measured: _Noise = {}

    def measure(step: StepKey | None, differences: StepDifferences, _: object) -> None:
        if step is not None:
            measured[step] = differences.errors

    sides = ref, TraceSide(noise, layouts, "TEST")
    report = _compared(sides, PathMap(), _DistanceMeasure(sides, each_step=measure), progress)
    errors = [e for by_value in measured.values() for e in by_value.values() if np.isfinite(e)]
    problem = "" if any(errors) else "nothing in it is off from the reference"
    if report.lacks:
        problem = f"it cannot be measured: {report.lacks}"
    for aspect, is_same, text in reversed(report.preflight):
        if aspect in ("samples", "start") and is_same is False:
            problem = f"it is not the reference's: {text}"
    if problem:
        remedy = (
            "give a run of the reference whose inputs are off by one rounding, and nothing else"
        )
        raise SettingError(f"noise {noise.path}: {problem}", remedy)
    note = (
        f"tolerances are measured: four times the distance of the reference and {noise.path} "
        f"(median {np.median(errors):.1e}, largest {max(errors):.1e} of the norm)"
    )
    if report.origins:
        note += f"; by the table it would be a fault itself: {report.origins[0].message}"
    return measured, note


# ---- the walk over both traces -------------------------------------------------------------------


def _compared(
    sides: tuple[TraceSide, TraceSide],
    paths: PathMap,
    measure: BitwiseMeasure | _DistanceMeasure,
    progress: Progress | None,
) -> Report:
    ref, test = sides
    is_alike = (ref.lost.world, ref.lost.untraced) == (test.lost.world, test.lost.untraced)
    for side in sides:
        side.lost.is_partial = bool(side.lost.untraced) and not is_alike
    heads = {} if paths else paired_models(ref, test)
    paths = paths or PathMap(heads=heads)
    test.rename(paths)
    tally = Tally(ref.trace, test.trace, paths)
    # no name holds a step: it is gone before the next one is read
    if ref.setup is not None and test.setup is not None:
        measure.take(PairedStep(sides, None), tally)
    pairs = paired_steps(ref, test)
    cut: list[str] = []
    unaligned, number, is_by_number = "", 0, True
    while number < len(pairs):
        if progress is not None:
            progress("comparing", number / len(pairs))
        step = PairedStep(sides, pairs[number])
        if measure.aligns and is_by_number and step.has_other_passes:
            is_by_number, why = False, step.unlike_passes[0]
            by_pass = aligned_by_pass(sides, pairs[number:])
            if by_pass:
                pairs[number:] = by_pass
                continue
            if why:
                step_name = f"train step {step.test.step}"
                unaligned = f"train steps behind {step_name} were not compared: {why}"
                del pairs[number + 1 :]
        if not measure.take(step, tally):
            mode, index = pairs[number].test[0]
            cut.append(f"{mode.word} step {index}")
        number += 1
        del step
    lines: list[PreflightLine] = [
        *measure.preflight_lines(),
        forward_line(pairs) or step_line(ref.steps, test.steps),
        *optimizer_lines(ref.steps, test.steps),
        *run_lines(ref.trace.run, test.trace.run),
    ]
    lines.sort(key=preflight_order)
    notes = [note for side in sides for note in side.lost.notes(side.name)]
    if heads:
        named = [[head or "(root)" for head in pair] for pair in heads.items() if len({*pair}) > 1]
        these = ", ".join(f"{head} for {ref_head}" for head, ref_head in named)
        notes.append(f"models are paired by their parameters: {these} of the reference")
    if unaligned:
        notes.append(unaligned)
    if cut:
        notes.append(f"left out: {', '.join(cut)}, before whose end a run broke off")
    findings = measure.findings()
    # why nothing can be said of the runs, or of how they ended
    problem = "; ".join(filter(None, (side.lost.lacks(side.name) for side in sides)))
    shared = next((key for key in ref.steps if key in test.steps), None)
    if not pairs and shared is not None:
        counts = " and ".join(str(side.tokens(shared)) for side in sides)
        problem = (
            f"{shared[0].word} step {shared[1]} worked on samples of {counts} tokens: hand both "
            "runs the same inputs"
        )
    elif not pairs and ref.steps:
        listed = [
            ", ".join(f"{mode.word} {step}" for mode, step in [*side.steps][:4]) or "none"
            for side in sides
        ]
        problem = (
            f"the traces have no step in common ({' and '.join(listed)}): trace the same steps "
            "(--rs-steps)"
        )
    elif not any(side.lost.is_partial for side in sides):
        problem = tally.lacks(measure.too_few) or problem
    tally.leave_out(_BEHIND_LEGAL, measure.excused())
    is_complete = ref.trace.is_complete and test.trace.is_complete
    return Report(
        command="diff",
        verdict=verdict_of(findings, problem, is_complete=is_complete),
        compared=tally.compared,
        skipped=tuple(Skipped(reason=r, count=n) for r, n in sorted(tally.skipped.items())),
        recorded=tally.in_both + tally.unpaired,
        unpaired=tally.unpaired,
        alone=0,
        findings=tuple(findings),
        notes=(*notes, *tally.notes(), *measure.notes(tally.compared)),
        lacks=problem,
        preflight=tuple(lines),
        equal=None if measure.equal is None else dict(sorted(measure.equal.items())),
    )


_BEHIND_LEGAL: Final = (
    "they lie behind random numbers, choices or statistics in which a right program may differ"
)


# ---- distances -----------------------------------------------------------------------------------


class _DistanceMeasure:
    """Compares distances, and searches where they began."""

    equal: Final = None
    aligns: Final = True
    """Steps that went through the same samples stand beside each other, whatever their numbers."""
    too_few: Final = (
        "{compared:,} of the {both} that both traces hold could be compared; {count:,}: {reason}"
    )

    def __init__(
        self,
        sides: tuple[TraceSide, TraceSide],
        noise: _Noise | None = None,
        measured_by: str = "",
        each_step: EachStep | None = None,
        *,
        reads_tensors: bool = True,
    ) -> None:
        ref, test = sides
        self._ref, self._test = ref, test
        self._noise, self._measured_by = noise or {}, measured_by
        self._each_step, self._reads_tensors = each_step, reads_tensors
        lengths = {test.tokens(key) for key in test.steps if key[0] is Mode.EVAL}
        self._search = OriginSearch(is_generating=len(lengths) > 1)
        self._tensors = FullTensors((ref.trace, test.trace), (ref.wholes, test.wholes))
        self._exact = self._below_resolution = self._by_statistics = 0
        """Values that are bitwise the reference's, and that agree as far as sketches tell."""
        self._degrees = Degrees(ref.trace, test.trace)
        self._before: dict[tuple[str, str], tuple[Array, Array]] = {}
        self._printed = [side.printed_digits for side in sides if side.printed_digits]
        self._samples: dict[StepKey, StepSamples] = {}
        """The reference's, by step."""
        self._cuts = SeenCuts()
        self._last_step = -1
        self._left_out: frozenset[str] = frozenset()
        self._batch_lines: list[PreflightLine] = []
        self._start = start_line(None)
        self._shown: list[StepDifferences] = []
        """What was compared first, and last: those whose dtypes are said."""

    def take(self, step: PairedStep, tally: Tally) -> bool:
        """Compare the values of two steps, or setups; False where a run broke off in the step."""
        if step.pair is None:
            key, differences = None, self._of_setup(step)
        else:
            key = mode, number = step.pair.test[0]
            if mode is Mode.TRAIN:
                if number != self._last_step + 1:
                    self._before.clear()
                self._last_step = -2 if step.pair.is_of_passes else number
            if step.is_cut:
                return False
            differences = self._differences(step)
            self._take_earlier(differences, step.batches, step.pair.ref[0])
            self._search.step(differences, mode, number)
            self._degrees.take(step.batches)
            line = batch_line(step.batches, mode, number)
            if not self._batch_lines or not line.is_same:
                self._batch_lines.append(line)
        self._shown = [*self._shown[:1], differences]
        tally.take(step.aligned)
        judged = [(c, d) for c in differences.compared if (d := c.difference) and not c.reason]
        by_elements = [c for c, d in judged if d.measured != Measured.STATISTICS]
        tally.compared += len(judged)
        tally.skipped.update(c.reason for c in differences.compared if c.reason)
        self._exact += differences.exact
        self._by_statistics += len(judged) - len(by_elements)
        self._below_resolution += sum(c.error <= Tolerances.resolution for c in by_elements)
        if self._each_step is not None:
            self._each_step(key, differences, self._search.wrong())
        return True

    def _take_earlier(self, differences: StepDifferences, batches: Batches, key: StepKey) -> None:
        """Look for samples that the reference's step has not in its earlier ones."""
        inputs = [c for c in differences.compared if c.other_samples[1]]
        for (mode, number), samples in self._samples.items() if inputs else ():
            count = batches.unknown_in(samples)
            for compared in inputs:
                if mode is key[0] and count > compared.earlier_samples[0]:
                    compared.earlier_samples = count, f"{mode.word} step {number}"
        self._samples[key] = batches.ref

    def _of_setup(self, step: PairedStep) -> StepDifferences:
        differences = self._differences(step)
        self._left_out = renumbered_modules(differences.compared, step.ref, step.wholes[0])
        if self._left_out:
            self._before.clear()
            differences = self._differences(step)
        for compared in differences.compared:
            if compared.error > compared.allowed and self._ref.is_late(compared.value.call):
                compared.is_late = True
                compared.allowed = _LATE_VECTOR if compared.value.is_vector else _LATE
        self._search.setup(differences)
        self._start = start_line(differences)
        return differences

    def _differences(self, step: PairedStep) -> StepDifferences:
        return StepDifferences(
            step,
            self._before,
            {} if step.pair is None else self._noise.get(step.pair.ref[0], {}),
            self._left_out,
            self._tensors if self._reads_tensors and not step.is_joined else None,
            self._test.stages,
            sum(0.5 * 10.0**-digits for digits in self._printed),
            self._cuts,
        )

    def findings(self) -> list[Finding]:
        origins = [origin for origin in self._search.origins if not origin.is_legal]
        legal = [origin for origin in self._search.origins if origin.is_legal]
        findings = [finding_of(origin, self._degrees) for origin in (*origins, *legal[:1])]
        return [
            replace(
                told_once(self._test.trace, event),
                victims=sum(finding.victims for finding in event) + len(event) - 1,
            )
            for event in alike(findings)
        ]

    def excused(self) -> int:
        """Return how many values differ behind what a right program may do otherwise."""
        legal = (origin for origin in self._search.origins if origin.is_legal)
        return len({id(victim) for origin in legal for victim in origin.victims})

    def preflight_lines(self) -> list[PreflightLine]:
        return [*self._batch_lines, self._start, dtype_line(self._shown)]

    def notes(self, compared: int) -> Iterator[str]:
        if self._measured_by:
            yield self._measured_by
        more = max(self._below_resolution - self._exact, 0)  # an exact one's update may be off
        yield (
            f"{self._exact:,} of {counted(compared, 'value')} are equal to the reference's to the "
            f"bit, {more:,} more as far as sketches can tell"
        )
        if self._printed:
            yield (
                f"no element of {counted(self._by_statistics, 'value')} was compared: only mean, "
                f"std, min and max, as they were printed, to {min(self._printed)} digits"
            )
        yield from self._tensors.notes()
