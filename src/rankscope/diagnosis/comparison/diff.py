"""`diff`: two traces of one model, of any two topologies, and where the second went wrong first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import COMPARED, FORWARDS, PathMap, SlotKey, align
from rankscope.diagnosis.comparison.datasamples import places_by_inputs, samples_of_step
from rankscope.diagnosis.comparison.difference import Batches, Measured
from rankscope.diagnosis.comparison.findings import Degrees, finding_of
from rankscope.diagnosis.comparison.fulltensors import FullTensors
from rankscope.diagnosis.comparison.origins import OriginSearch
from rankscope.diagnosis.comparison.preflight import (
    PreflightLine,
    batch_line,
    dtype_line,
    forward_line,
    optimizer_lines,
    run_lines,
    start_line,
    step_line,
)
from rankscope.diagnosis.comparison.rollouts import StepPair, paired_steps, wholes_of
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences, renumbered_modules
from rankscope.diagnosis.comparison.tolerances import Tolerances
from rankscope.diagnosis.comparison.tracesides import StepKey, TraceSide, two_sides
from rankscope.diagnosis.comparison.unpaired import Tally
from rankscope.diagnosis.comparison.wholevalues import WholeValues
from rankscope.diagnosis.evidence.stepview import Array, StepView
from rankscope.errors import SettingError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.finding import Report
from rankscope.run.filenames import Progress
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.summary import counted
from rankscope.tree.views import Trace

__all__ = ["EachStep", "diff"]

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
        progress: told how far it is.
        each_step: handed the differences of setup (under None) and of every step, under the test's
            mode and number, and the `id` of those of the values that are a fault or follow from
            one; it keeps none of them.

    Raises:
        SettingError: a rule for paths is none, or `noise` is no second run of the reference.
        LayoutError: the layout file contradicts itself.
        FolderError, TraceError: no trace is there, or a damaged one.
    """
    rules = PathMap.of(paths)
    measured: _Noise = {}
    origin = ""
    with two_sides(ref, test, layouts) as (ours, theirs):
        if noise is not None:
            with opened_trace(noise, takes_golden=True) as second:
                again = _Comparison(ours, TraceSide(second, layouts, "TEST"), PathMap())

                def measure(step: StepKey | None, found: StepDifferences, _: object) -> None:
                    if step is not None:
                        measured[step] = found.errors

                origin = _measured_by(second, again.report(progress, measure), measured)
        made = _Comparison(ours, theirs, rules, measured, origin, reads_tensors=tensors)
        return made.report(progress, each_step)


def _measured_by(noise: Trace, report: Report, measured: _Noise) -> str:
    """Return where measured tolerances come from.

    Raises:
        SettingError: that trace is no second run of the reference, or nothing in it is off.
    """
    remedy = "give a run of the reference whose inputs are off by one rounding, and nothing else"
    for what, is_same, text in report.preflight:
        if what in ("samples", "start") and is_same is False:
            raise SettingError(f"noise {noise.path}: it is not the reference's: {text}", remedy)
    if report.lacks:
        raise SettingError(f"noise {noise.path}: it cannot be measured: {report.lacks}", remedy)
    errors = [e for of_step in measured.values() for e in of_step.values() if np.isfinite(e)]
    if not any(errors):
        raise SettingError(f"noise {noise.path}: nothing in it is off from the reference", remedy)
    told = (
        f"tolerances are measured: four times the distance of the reference and {noise.path} "
        f"(median {np.median(errors):.1e}, largest {max(errors):.1e} of the norm)"
    )
    if report.origins:
        told += f"; by the table it would be a fault itself: {report.origins[0].message}"
    return told


class _Comparison:
    """Two traces held to each other, step by step."""

    def __init__(
        self,
        ref: TraceSide,
        test: TraceSide,
        paths: PathMap,
        noise: _Noise | None = None,
        measured_by: str = "",
        *,
        reads_tensors: bool = True,
    ) -> None:
        self._ref, self._test, self._paths = ref, test, paths
        self._noise = noise or {}
        self._measured_by = measured_by
        is_alike = (ref.lost.world, ref.lost.untraced) == (test.lost.world, test.lost.untraced)
        for lost in (ref.lost, test.lost):
            lost.is_partial = bool(lost.untraced) and not is_alike
        self._search = OriginSearch()
        self._tensors = FullTensors((ref.trace, test.trace), (ref.wholes, test.wholes))
        self._reads_tensors = reads_tensors
        self._tally = Tally(ref, test, paths)
        self._exact = self._below_resolution = self._by_statistics = 0
        """Values that are bitwise the reference's, and that agree as far as sketches tell."""
        self._degrees = Degrees.of(ref.trace, test.trace)
        self._before: dict[tuple[str, str], tuple[Array, Array]] = {}
        self._lines: list[PreflightLine] = []
        self._cut: list[str] = []
        self._printed = [side.printed_digits for side in (ref, test) if side.printed_digits]
        self._last_step = -1
        self._left_out: frozenset[str] = frozenset()

    def report(self, progress: Progress | None, each_step: EachStep | None = None) -> Report:
        """Compare setup and every step that both have."""
        pairs = paired_steps(self._ref, self._test)
        setup = self._setup()
        if setup is not None and each_step is not None:
            each_step(None, setup, self._search.wrong())
        found = [setup] if setup else []
        for number, pair in enumerate(pairs):
            if progress is not None:
                progress("comparing", number / len(pairs))
            key = pair.test[0]
            compared = self._step(pair)
            if compared is None:
                self._cut.append(f"{key[0].word} step {key[1]}")
                continue
            if each_step is not None:
                each_step(key, compared, self._search.wrong())
            found = [*found[:1], compared]
        lines = [
            *self._lines,
            forward_line(pairs) or step_line(self._ref.steps, self._test.steps),
            start_line(setup),
            dtype_line(found),
            *optimizer_lines(self._ref.steps, self._test.steps),
            *run_lines(self._ref.trace.run, self._test.trace.run),
        ]
        origins = [origin for origin in self._search.origins if not origin.is_legal]
        legal = [origin for origin in self._search.origins if origin.is_legal]
        return self._tally.report(
            [finding_of(origin, self._degrees) for origin in (*origins, *legal[:1])],
            reasons=sorted(self._tally.skipped.items()),
            lacks=self._lacks(has_steps=bool(pairs)),
            notes=(*self._breaks(), *self._tally.notes(), *self._exactness()),
            lines=sorted(lines, key=lambda line: (False, None, True).index(line.is_same)),
        )

    def _setup(self) -> StepDifferences | None:
        """Compare what the runs began with, where both traces have it."""
        ref, test = self._ref.setup, self._test.setup
        if ref is None or test is None:
            return None
        found = self._compared(ref, test)
        self._left_out = renumbered_modules(found.compared, ref, self._ref.wholes)
        if self._left_out:
            self._before.clear()
            self._tally = Tally(self._ref, self._test, self._paths)
            self._exact = self._below_resolution = self._by_statistics = 0
            found = self._compared(ref, test)
        for each in found.compared:
            if each.error > each.allowed and self._ref.is_late(each.value.call):
                each.allowed = _LATE_VECTOR if each.value.is_vector else _LATE
        self._search.setup(found)
        return found

    def _step(self, pair: StepPair) -> StepDifferences | None:
        """Compare one step; None where a run broke off in it before it had all samples."""
        mode, step = pair.test[0]
        if mode is Mode.TRAIN:
            if step != self._last_step + 1:
                self._before.clear()
            self._last_step = step
        ref, test = self._ref.view(pair.ref), self._test.view(pair.test)
        wholes = wholes_of(self._ref, pair.ref, ref), wholes_of(self._test, pair.test, test)
        places = self._places(ref, test)
        batches = Batches.of(
            samples_of_step(ref, places[0], wholes[0]),
            samples_of_step(test, places[1], wholes[1]),
        )
        batches = self._with_places_by_inputs(batches, test)
        is_cut = any(self._ref.lost.is_cut(*key) for key in pair.ref)
        is_cut |= any(self._test.lost.is_cut(*key) for key in pair.test)
        if is_cut and (batches.match.lost or batches.match.unknown):
            return None
        found = self._compared(ref, test, pair, batches, wholes)
        self._search.step(found, mode, step)
        self._degrees.take(batches)
        line = batch_line(batches, mode, step)
        if not self._lines or not line.is_same:
            self._lines.append(line)
        return found

    def _places(self, ref: StepView, test: StepView) -> list[Array]:
        """Return the places of the ranks on both sides. What a trace of fewer options does not tell
        the other one does, where both are of one program."""
        sides, views = (self._ref, self._test), (ref, test)
        places = [side.places(view) for side, view in zip(sides, views)]
        can = [side.can_place(view) for side, view in zip(sides, views)]
        if can[0] != can[1] and self._ref.is_same_program(self._test):
            places[can.index(False)] = places[can.index(True)]
        return places

    def _with_places_by_inputs(self, batches: Batches, test: StepView) -> Batches:
        """Return the batches as ranks were handed them, where that explains missing samples."""
        if not batches.match.lost or batches.test.place_count > 1:
            return batches
        places = places_by_inputs(test, self._test.world)
        found = Batches.of(batches.ref, samples_of_step(test, places, self._test.wholes))
        is_better = found.match.lost < batches.match.lost and not found.match.unknown
        return found if is_better else batches

    def _compared(
        self,
        ref: StepView,
        test: StepView,
        pair: StepPair | None = None,
        batches: Batches | None = None,
        wholes: tuple[WholeValues, WholeValues] | None = None,
    ) -> StepDifferences:
        """Compare the values of two steps, or of two setups (without a pair)."""
        own = (self._ref.wholes, self._test.wholes)
        reads_tensors = self._reads_tensors and wholes in (None, own)  # each of one call
        is_of_forwards = pair is not None and pair.is_of_forwards
        aligned = align(ref, test, self._paths, FORWARDS if is_of_forwards else COMPARED)
        found = StepDifferences(
            aligned,
            wholes or own,
            batches,
            self._before,
            None if pair is None else self._noise.get(pair.ref[0]),
            self._left_out,
            self._tensors if reads_tensors else None,
            self._test.stages,
            sum(0.5 * 10.0**-digits for digits in self._printed),
        )
        known = [(c, d) for c in found.compared if (d := c.difference) and not c.reason]
        by_elements = [c for c, d in known if d.measured != Measured.STATISTICS]
        self._tally.take(aligned)
        self._tally.compared += len(known)
        self._tally.skipped.update(c.reason for c in found.compared if c.reason)
        self._exact += found.exact
        self._by_statistics += len(known) - len(by_elements)
        self._below_resolution += sum(1 for c in by_elements if c.error <= Tolerances.resolution)
        return found

    def _exactness(self) -> Iterator[str]:
        if self._measured_by:
            yield self._measured_by
        yield (
            f"{self._exact:,} of {counted(self._tally.compared, 'value')} are bitwise the "
            f"reference's, {self._below_resolution - self._exact:,} more agree as far as sketches "
            "tell"
        )
        if self._printed:
            yield (
                f"no element of {counted(self._by_statistics, 'value')} was compared: only mean, "
                f"std, min and max, as they were printed, to {min(self._printed)} digits"
            )
        yield from self._tensors.notes()

    def _lacks(self, *, has_steps: bool) -> str:
        if not has_steps and self._ref.steps:
            return (
                f"the traces have no step in common ({_listed(self._ref)} and "
                f"{_listed(self._test)}): trace the same steps (--rs-steps)"
            )
        sides = (self._ref, self._test)
        lost = "; ".join(filter(None, (side.lost.lacks(side.name) for side in sides)))
        if any(side.lost.is_partial for side in sides):
            return lost
        return self._tally.lacks or self._too_few() or lost

    def _breaks(self) -> Iterator[str]:
        """Yield how ranks ended that did not end in order, and what was left out for it."""
        for side in (self._ref, self._test):
            yield from side.lost.notes(side.name)
        if self._cut:
            yield f"left out: {', '.join(self._cut)}, before whose end a run broke off"

    def _too_few(self) -> str:
        """Return why values that both traces hold were not compared, where these are most; ""
        where enough were."""
        tally = self._tally
        if tally.is_enough:
            return ""
        if tally.in_both:
            reason, count = tally.skipped.most_common(1)[0]
            return (
                f"{tally.compared:,} of the {counted(tally.in_both, 'value')} that both traces "
                f"hold could be compared; {count:,}: {reason}"
            )
        return "the traces have no value in common: " + (
            self._tally.left_out() or "no value was recorded in one of them"
        )


def _listed(side: TraceSide) -> str:
    return ", ".join(f"{mode.word} {step}" for mode, step in list(side.steps)[:4]) or "none"
