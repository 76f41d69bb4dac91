"""What two runs had in common before any number was computed: said first, whatever follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from rankscope.diagnosis.comparison.datasamples import Batches
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.tracesides import StepKey, StepPair
from rankscope.record.call import Mode
from rankscope.record.notes import NoteKind, read_options
from rankscope.tree.summary import counted
from rankscope.tree.views import Step

_TELLING: Final = ("torch", "cuda", "nccl", "transformers", "numpy")
_MOST: Final = 4


_WHATS: Final = ("samples", "steps", "start", "dtypes", "optimizer", "versions")


class PreflightLine(NamedTuple):
    """One thing that was looked at before any number."""

    what: str
    """One of `_WHATS`."""
    is_same: bool | None
    """None where the traces do not tell."""
    text: str


def preflight_order(line: PreflightLine) -> tuple[int, int]:
    """Return where a line stands among others: what differs first."""
    return (False, None, True).index(line.is_same), _WHATS.index(line.what)


def run_lines(ref: Mapping[str, Any], test: Mapping[str, Any]) -> list[PreflightLine]:
    """Return whether both runs had the same versions."""
    ours, theirs = ref["versions"], test["versions"]
    if not (ours or theirs):
        return [PreflightLine("versions", None, "the versions of both runs")]
    names = sorted({*ours, *theirs}, key=lambda name: (name not in _TELLING, name))
    differ = [
        f"{name} {ours.get(name, 'absent')} and {theirs.get(name, 'absent')}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    same = f"the same versions (torch {ours.get('torch', 'unknown')})"
    return [PreflightLine("versions", not differ, _listed(differ, "; ") or same)]


def _listed(words: list[str], between: str) -> str:
    return between.join(words[:_MOST] + ["..."] * (len(words) > _MOST))


def step_line(ref: Collection[StepKey], test: Collection[StepKey]) -> PreflightLine:
    """Return which steps both traces have."""
    shared = Counter(mode for mode, step in ref if (mode, step) in test)
    ours, theirs = (Counter(mode for mode, _ in steps) for steps in (ref, test))
    parts = []
    for mode in Mode:
        if ours[mode] == theirs[mode] == shared[mode]:
            parts += [counted(shared[mode], f"{mode.word} step")] if shared[mode] else []
        else:
            own = f"{ours[mode]} and {theirs[mode]} {mode.word} steps"
            parts.append(f"{own}, {shared[mode]} in common")
    return PreflightLine("steps", ours == theirs == shared, ", ".join(parts) or "no step")


def optimizer_lines(
    ref: Mapping[StepKey, Step], test: Mapping[StepKey, Step]
) -> list[PreflightLine]:
    """Return whether optimizers stepped with the same options; nothing where no trace tells.

    Optimizers of another class with the same options, such as one that wraps another, are alike.
    """
    lines: list[PreflightLine] = []
    for key in sorted(ref.keys() & test.keys(), key=lambda key: key[1]):
        ours, theirs = _options_of(ref[key]), _options_of(test[key])
        if not ours or not theirs:
            continue
        names = [n for n in dict.fromkeys((*ours, *theirs)) if ours.get(n) != theirs.get(n)]
        if any(name != "class" for name in names):
            differ = [
                f"{name} {theirs.get(name, 'absent')} for {ours.get(name, 'absent')}"
                for name in names
            ]
            text = f"{key[0].word} step {key[1]}: the optimizer steps with {_listed(differ, ', ')}"
            return [PreflightLine("optimizer", False, text)]
        lines = [PreflightLine("optimizer", True, "the same optimizer options")]
    return lines


def _options_of(step: Step) -> dict[str, str]:
    """Return the options of a step's optimizers by name, `class` among them. Several optimizers are
    told as one: a pipeline or a group of parameters may have one of its own."""
    found: dict[str, set[str]] = {}
    for each in step.notes:
        if each.note.kind is NoteKind.OPTIMIZER_OPTIONS:
            fields = each.note.fields
            found.setdefault("class", set()).add(str(fields["optimizer"]))
            for name, values in read_options(str(fields["options"])).items():
                found.setdefault(name, set()).update(values)
    return {name: " | ".join(sorted(values)) for name, values in found.items()}


def forward_line(pairs: Iterable[StepPair]) -> PreflightLine | None:
    """Return which steps were held to other ones, so that forwards alone compare; None where all
    are of the same mode and number."""
    others = [pair for pair in pairs if pair.is_of_forwards]
    if not others:
        return None
    sides = [
        counted(len(own), f"{own[0][0].word} step") + (" together" if len(own) > 1 else "")
        for own in (others[0].test, others[0].ref)
    ]
    text = f"forwards alone: {sides[0]} beside {sides[1]} of the reference"
    times = len(others) - 1
    more = f", {'once' if times == 1 else f'{times} times'} more" if times else ""
    return PreflightLine("steps", False, text + more)


def start_line(setup: StepDifferences | None) -> PreflightLine:
    """Return how many parameters and buffers began alike."""
    if setup is None:
        return PreflightLine("start", None, "what the runs began with is not in both traces")
    known = [c for c in setup.compared if c.difference is not None]
    other = [c for c in known if c.error > c.allowed]
    if other:
        text = f"{len(other)} of {counted(len(known), 'initial value')} differ"
        return PreflightLine("start", False, text)
    return PreflightLine("start", True, f"{counted(len(known), 'initial value')} agree")


def dtype_line(found: Iterable[StepDifferences]) -> PreflightLine:
    """Return which dtypes stand beside which other ones."""
    values = [compared.value for each in found for compared in each.compared]
    pairs = Counter((value.first_ref.dtype, value.first_test.dtype) for value in values)
    listed = [
        f"{theirs} for {ours} in {counted(count, 'value')}"
        for (ours, theirs), count in pairs.most_common()
        if ours != theirs
    ]
    return PreflightLine("dtypes", not listed, "; ".join(listed[:_MOST]) or "the same dtypes")


def batch_line(batches: Batches, mode: Mode, step: int) -> PreflightLine:
    """Return whether a step worked on the same samples, and how they were split."""
    ref, test = batches.ref, batches.test
    split = f"{_split(test)}, the reference {_split(ref)}"
    if batches.is_by_order:
        text = f"whether both runs had the same samples in this order ({split})"
        return PreflightLine("samples", None, text)
    where = f"{mode.word} step {step}"
    if batches.are_of_other_samples:
        parts = (
            (batches.unknown, f"of {test.total} samples are not in the reference"),
            (batches.lost, f"of the reference's {ref.total} samples are missing"),
            (batches.repeated, f"of {test.total} samples come once more"),
        )
        told = ", ".join(f"{count} {text}" for count, text in parts if count)
        return PreflightLine("samples", False, f"{where}: {told} ({split})")
    is_one = len(ref.sizes) == len(test.sizes) == 1
    same = f"the same {counted(ref.total, 'sample')}"
    if is_one and not batches.is_in_order:
        return PreflightLine("samples", False, f"{where}: {same} in another order")
    return PreflightLine("samples", True, f"{same} ({split})")


def _split(samples: Any) -> str:
    if len(samples.sizes) <= 1:
        return "in one batch"
    cut = f"in {counted(samples.micro_batches, 'micro-batch', 'micro-batches')}"
    if samples.place_count == 1:
        return cut
    return f"{cut} on {counted(samples.place_count, 'data-parallel rank')}"
