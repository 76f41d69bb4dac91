"""What `diff` says: what two runs had in common before any number was computed, and of every origin
what kind it is, how much, and on which ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.comparison.alignment import whole_shape
from rankscope.diagnosis.comparison.datasamples import Batches
from rankscope.diagnosis.comparison.difference import (
    CHI_SQUARE_RANGE,
    ComparedValue,
    Difference,
    Measured,
)
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.tracesides import StepKey, StepPair
from rankscope.diagnosis.comparison.valueflow import Origin
from rankscope.diagnosis.rules.batches import BATCHES_ADVICE
from rankscope.diagnosis.rules.structure import LEFT_OUT_ADVICE, MODES_ADVICE
from rankscope.record.call import Mode
from rankscope.record.finding import NAMED_VICTIMS, Finding, Kind, Severity
from rankscope.record.notes import NoteKind, read_options
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import counted
from rankscope.tree.jsontext import statistic
from rankscope.tree.views import Step, Trace

# ---- before any number ---------------------------------------------------------------------------


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
    ref_versions, test_versions = ref["versions"], test["versions"]
    if not (ref_versions or test_versions):
        return [PreflightLine("versions", None, "the versions of both runs")]
    names = sorted({*ref_versions, *test_versions}, key=lambda name: (name not in _TELLING, name))
    differ = [
        f"{name} {ref_versions.get(name, 'absent')} and {test_versions.get(name, 'absent')}"
        for name in names
        if ref_versions.get(name) != test_versions.get(name)
    ]
    agreement = f"the same versions (torch {ref_versions.get('torch', 'unknown')})"
    return [PreflightLine("versions", not differ, _listed(differ, "; ") or agreement)]


def _listed(words: list[str], between: str) -> str:
    return between.join(words[:_MOST] + ["..."] * (len(words) > _MOST))


def step_line(ref: Collection[StepKey], test: Collection[StepKey]) -> PreflightLine:
    """Return which steps both traces have."""
    shared = Counter(mode for mode, step in ref if (mode, step) in test)
    ref_counts, test_counts = (Counter(mode for mode, _ in steps) for steps in (ref, test))
    parts = []
    for mode in Mode:
        if ref_counts[mode] == test_counts[mode] == shared[mode]:
            parts += [counted(shared[mode], f"{mode.word} step")] if shared[mode] else []
        else:
            counts = f"{ref_counts[mode]} and {test_counts[mode]} {mode.word} steps"
            parts.append(f"{counts}, {shared[mode]} in common")
    return PreflightLine(
        "steps", ref_counts == test_counts == shared, ", ".join(parts) or "no step"
    )


def optimizer_lines(
    ref: Mapping[StepKey, Step], test: Mapping[StepKey, Step]
) -> list[PreflightLine]:
    """Return whether optimizers stepped with the same options; nothing where no trace tells.

    Optimizers of another class with the same options, such as one that wraps another, are alike.
    """
    lines: list[PreflightLine] = []
    for key in sorted(ref.keys() & test.keys(), key=lambda key: key[1]):
        ref_options, test_options = _options_of(ref[key]), _options_of(test[key])
        if not ref_options or not test_options:
            continue
        names = [
            n
            for n in dict.fromkeys((*ref_options, *test_options))
            if ref_options.get(n) != test_options.get(n)
        ]
        if any(name != "class" for name in names):
            differ = [
                f"{name} {test_options.get(name, 'absent')} for {ref_options.get(name, 'absent')}"
                for name in names
            ]
            text = f"{key[0].word} step {key[1]}: the optimizer steps with {_listed(differ, ', ')}"
            return [PreflightLine("optimizer", False, text)]
        lines = [PreflightLine("optimizer", True, "the same optimizer options")]
    return lines


def _options_of(step: Step) -> dict[str, str]:
    """Return the options of a step's optimizers by name, `class` among them. Several optimizers are
    told as one: a pipeline or a group of parameters may have one of its own."""
    options: dict[str, set[str]] = {}
    for noted in step.notes:
        if noted.note.kind is NoteKind.OPTIMIZER_OPTIONS:
            fields = noted.note.fields
            options.setdefault("class", set()).add(str(fields["optimizer"]))
            for name, values in read_options(str(fields["options"])).items():
                options.setdefault(name, set()).update(values)
    return {name: " | ".join(sorted(values)) for name, values in options.items()}


def forward_line(pairs: Iterable[StepPair]) -> PreflightLine | None:
    """Return which steps were held to other ones, so that forwards alone compare; else None."""
    forward_pairs = [pair for pair in pairs if pair.is_of_forwards and not pair.is_of_passes]
    if not forward_pairs:
        return None
    sides = [
        counted(len(keys), f"{keys[0][0].word} step") + (" together" if len(keys) > 1 else "")
        for keys in (forward_pairs[0].test, forward_pairs[0].ref)
    ]
    text = f"forwards alone: {sides[0]} beside {sides[1]} of the reference"
    times = len(forward_pairs) - 1
    more = f", {'once' if times == 1 else f'{times} times'} more" if times else ""
    return PreflightLine("steps", False, text + more)


def start_line(setup: StepDifferences | None) -> PreflightLine:
    """Return how many parameters and buffers began alike."""
    if setup is None:
        return PreflightLine("start", None, "what the runs began with is not in both traces")
    judged = [c for c in setup.compared if c.difference is not None]
    others = [c for c in setup.compared if c.is_of_other_shape]
    unlike = [*others, *(c for c in judged if c.error > c.allowed)]
    if unlike:
        count = len(judged) + len(others)
        text = f"{len(unlike)} of {counted(count, 'initial value')} differ"
        return PreflightLine("start", False, text)
    return PreflightLine("start", True, f"{counted(len(judged), 'initial value')} agree")


def dtype_line(steps: Iterable[StepDifferences]) -> PreflightLine:
    """Return which dtypes stand beside which other ones."""
    values = [compared.value for differences in steps for compared in differences.compared]
    pairs = Counter((value.first_ref.dtype, value.first_test.dtype) for value in values)
    listed = [
        f"{test_dtype} for {ref_dtype} in {counted(count, 'value')}"
        for (ref_dtype, test_dtype), count in pairs.most_common()
        if ref_dtype != test_dtype
    ]
    return PreflightLine("dtypes", not listed, "; ".join(listed[:_MOST]) or "the same dtypes")


def batch_line(batches: Batches, mode: Mode, step: int) -> PreflightLine:
    """Return whether a step worked on the same samples, and how they were split."""
    ref, test = batches.ref, batches.test
    split = _split(test)
    split += f", the reference {_split(ref)}" if _split(ref) != split else " in both runs"
    if batches.is_by_order:
        cut = f" ({split})" if ref.sizes and test.sizes else ""
        text = f"whether both runs had the same samples in this order{cut}"
        return PreflightLine("samples", None, text)
    where = f"{mode.word} step {step}"
    if batches.are_apart:
        return PreflightLine("samples", False, f"{where}: {_APART}")
    if batches.are_of_other_samples:
        parts = (
            (batches.unknown, f"of {test.total} samples are not in the reference's step"),
            (batches.lost, f"of the reference's {ref.total} samples are missing"),
            (batches.repeated, f"of {test.total} samples come once more"),
        )
        problems = ", ".join(f"{count} {text}" for count, text in parts if count)
        return PreflightLine("samples", False, f"{where}: {problems} ({split})")
    is_one = len(ref.sizes) == len(test.sizes) == 1
    agreement = f"the same {counted(ref.total, 'sample')}"
    if is_one and not batches.is_in_order:
        return PreflightLine("samples", False, f"{where}: {agreement} in another order")
    return PreflightLine("samples", True, f"{agreement} ({split})")


_APART: Final = (
    "ranks that share a layer were handed different samples: together they have the reference's"
)


def _split(samples: Any) -> str:
    if len(samples.sizes) <= 1:
        return "in one batch"
    cut = f"in {counted(samples.micro_batches, 'micro-batch', 'micro-batches')}"
    if samples.place_count == 1:
        return cut
    return f"{cut} on {counted(samples.place_count, 'data-parallel rank')}"


# ---- findings ------------------------------------------------------------------------------------


class Degrees:
    """Numbers of the two jobs that a factor may equal, by name."""

    def __init__(self, ref: Trace, test: Trace) -> None:
        self._by_name: dict[str, int] = {}
        for trace in (test, ref):
            for mesh in trace.run["meshes"]:
                for axis, size in zip(mesh["axes"], mesh["shape"]):
                    self._by_name[f"{axis}={size}"] = size
        for trace, whose in ((test, ""), (ref, "the reference's ")):
            world = int(trace.run["world_size"])
            self._by_name[f"{whose}number of ranks, {world}"] = world

    def take(self, batches: Batches) -> None:
        """Add what a step shows: data-parallel ranks and micro-batches."""
        for samples, whose in ((batches.test, ""), (batches.ref, "the reference's ")):
            places, micro_batches = samples.place_count, samples.micro_batches
            self._by_name[f"{whose}data-parallel ranks, {places}"] = places
            self._by_name[f"{whose}micro-batches, {micro_batches}"] = micro_batches

    def named(self, factor: float) -> list[str]:
        """Return the degrees above 1 that a factor, or one over it, equals."""
        if factor == 0:
            return []
        size = max(abs(factor), 1 / abs(factor))
        degrees = self._by_name.items()
        return [name for name, degree in degrees if degree > 1 and abs(size / degree - 1) < 0.02]


_PASSES_ADVICE: Final = (
    "Look for what leaves out optimizer.step() on these ranks, or for another number of "
    "micro-batches a step: what differs from here on follows."
)
_LEAST_FACTOR: Final = 0.02
"""Nearer values are not called scaled: constants inside a module leave such differences."""
_LEAST_PERMUTED: Final = 0.01
"""Relative distance from which equal norm, mean and extrema are no consequence of being near."""
_CLEARLY_SCALED: Final = 0.2
"""A factor explains a difference where it leaves no more than this part of it, and of what is
scaled."""
_ADVICE: Final = {
    Kind.DIVERGENCE: "What this module was given agrees with the reference: compare its code, its "
    "constants and its options with the reference's.",
    Kind.SCALE: "Look for a sum where an average belongs, or an average where a sum does, and for "
    "a division by a number of ranks, micro-batches or tokens.",
    Kind.PERMUTATION: "The same numbers stand in other places: look at transposed weights, at the "
    "order of shards, experts, heads or positions.",
}


def finding_of(origin: Origin, degrees: Degrees) -> Finding:
    """Return what is to be said of an origin."""
    compared = origin.compared
    key, difference = compared.key, compared.difference
    value = compared.value
    if origin.is_left_out_step:  # the value itself may be right
        difference = None
    evidence = {} if difference is None else _evidence(origin, difference)
    kind, text = _described(origin, degrees, evidence)
    text += f"; {origin.modes}" if origin.modes else ""
    path, slot = value.first_test.call.node.path, value.first_test.slot
    if path != key.path:
        evidence["ref_path"] = key.path
    ranks = origin.holder_ranks
    slot = "" if compared.unlike_passes else slot
    if origin.is_of_all:
        if not (origin.family or origin.agreed_before or origin.is_apart):
            path, slot = "", ""
        victims = [v for v in origin.victims if v.key.phase is key.phase]
        ranks = np.unique(np.concatenate([v.value.test_ranks for v in (compared, *victims)]))
    if len(ranks) > 1 and not origin.has_rank_resolution:
        evidence["rank_resolution"] = "none"
    names = dict.fromkeys(v.value.first_test.name for v in origin.victims)
    units = [] if difference is None else difference.units
    wrong = [unit[0] for unit, is_bad in zip(units, origin.bad_parts.tolist()) if is_bad]
    has_micro_batch = key.phase.facts.has_micro_batches
    severity = Severity.WARNING if origin.is_legal else Severity.FAULT
    finding = Finding(
        kind=kind,
        severity=severity,
        phase=key.phase,
        mode=origin.mode,
        step=origin.step,
        micro_batch=min(wrong, default=0) if has_micro_batch else None,
        path=path,
        slot=slot,
        ranks=tuple(sorted(int(rank) for rank in ranks)),
        is_origin=severity is Severity.FAULT,
        victims=len(origin.victims),
        victim_names=tuple(names)[:NAMED_VICTIMS],
        evidence=evidence,
        message=text,
        advice=_advice(origin, kind),
    )
    return replace(finding, message=f"{finding.place}: {text}")


def _advice(origin: Origin, kind: Kind) -> str:
    if origin.modes:
        return MODES_ADVICE
    if origin.is_random:
        return (
            "Runs that draw other random numbers cannot be compared behind them: switch dropout "
            "off, or give both runs the same generator state."
        )
    if origin.is_choice:
        return "Compare in float32: then routers choose alike, and what lies behind is judged."
    if origin.is_of_batch:
        return (
            "Split the batch alike, or normalize over all ranks: what lies behind statistics of "
            "another batch cannot be compared."
        )
    phase = origin.compared.key.phase
    if origin.compared.unlike_passes:
        return _PASSES_ADVICE
    if origin.is_left_out_step:
        return LEFT_OUT_ADVICE
    if origin.compared.is_of_other_shape:
        return "The models are of other sizes: compare what they were built from."
    is_unknown = origin.not_compared and not origin.is_of_all
    if is_unknown and kind in (Kind.DIVERGENCE, Kind.PERMUTATION):
        return _of_unknown(origin)
    difference = origin.compared.difference
    is_empty = difference is not None and difference.is_zero(origin.bad_parts)
    if phase is Phase.SETUP and is_empty and origin.compared.key.slot.startswith("buffer:"):
        return (
            "Look at what fills it on these ranks: a checkpoint holds no buffer that is not "
            "persistent, and what sends parameters may send no buffers."
        )
    if kind is Kind.NONFINITE and phase is Phase.BACKWARD and origin.compared.value.is_input:
        return (
            "Look at what uses this module's output on these ranks, such as the loss: a division "
            "by the number of its labels, or a logarithm."
        )
    if origin.compared.is_late:
        return "Training had begun when this was first called: look at what wrote it until then."
    if phase is Phase.SETUP and kind is not Kind.PERMUTATION:
        return "The runs begin with other weights: load the same checkpoint, or give both the seed."
    if origin.compared.is_left_behind:
        return (
            "Look whether it is frozen, detached from the loss, or missing in the optimizer: its "
            "gradient tells."
        )
    if origin.compared.is_moved_alone:
        return "Look at requires_grad, and at which parameters the optimizer was given."
    if origin.is_of_most and origin.compared.is_update:
        return (
            "The optimizer steps from other numbers than the model has, or with another state: "
            "look at copies that it took before weights were loaded, at what its state was loaded "
            "from, and at its options."
        )
    if origin.compared.is_update:
        return (
            "The gradient agrees and its update does not: compare the optimizers' options, such as "
            "learning rate and weight decay."
        )
    if phase.facts.is_activation and origin.compared.value.is_input and kind is Kind.DIVERGENCE:
        if phase is Phase.BACKWARD:
            balance = (
                " Where a loss balances the tokens of each rank's own batch, which may be meant, "
                "it is another one than that of the reference's batch."
            )
            return (
                "What the reference's backward computed before it agrees: look at what uses this "
                "module's output, such as the loss, a sum of branches or a detach."
                f"{balance if origin.is_at_router else ''}"
            )
        if origin.compared.are_samples_apart:
            return BATCHES_ADVICE
        if not origin.compared.key.path:
            return "The runs were handed other data: compare sampler, seed, order and preparation."
        return (
            "What the reference computed before it agrees: look at the code that makes this input, "
            "between the modules before it and this one, and at the order of the modules."
        )
    if origin.is_isolated and kind in (Kind.DIVERGENCE, Kind.PERMUTATION):
        guilty = "This module is at fault, and nothing before it"
        compare = _ADVICE[Kind.DIVERGENCE].partition(": ")[2].capitalize()
        return f"{guilty}: its inputs are the reference's to the bit. {compare}"
    if kind is Kind.SCALE and phase is Phase.FORWARD:
        return f"{_ADVICE[kind]} A factor near 1 may come of a constant, such as a norm's eps."
    if origin.family:
        return (
            "Look at what is done to these gradients alone between backward and the step: a "
            "reduction over ranks that hold other parameters, a missing one, a scale."
        )
    if origin.agreed_before or (
        not origin.is_fed and kind is Kind.DIVERGENCE and not origin.is_of_all
    ):
        return (
            "What backward gave this module was not compared: look at it, at what lies between it "
            "and the modules called behind it, and at what changes gradients behind backward. "
            "Trace backward too, or give --layout a file that describes these gradients when the "
            "run is traced."
        )
    if origin.is_blind:
        return (
            "Activations lie on ranks in a way that nothing describes: give --layout a file that "
            "does when the run is traced, and what came before gradients is compared."
        )
    if origin.is_apart:
        return (
            "Look at what reduces gradients over ranks: whether all hand over the same elements in "
            "one order."
        )
    if origin.is_of_most:
        return "Look between backward and the step: at accumulation, scaling and reduction."
    if origin.is_of_all:
        return f"{_ADVICE[kind]} Compare the clipping of gradients too."
    if phase is Phase.GRADS and kind is Kind.DIVERGENCE:
        return (
            "What this gradient is made of agrees: look at what changes it behind backward ("
            "clipping, scaling, a hook, a reduction), and at the backward of its module."
        )
    return kind.advice or _ADVICE.get(kind, "") or phase.facts.unequal


def _of_unknown(origin: Origin) -> str:
    """Return what to look at where values before an origin were not compared."""
    nodes = (c.value.first_test.call.node for c in origin.not_compared)
    names = dict.fromkeys(node.path or "(root)" for node in nodes)
    names.pop(origin.compared.value.first_test.call.node.path, None)
    also = f"Look at {_listed(list(names), ', ')} too, or give" if names else "Give"
    reasons = Counter(c.reason for c in origin.not_compared)
    ((reason, _),) = reasons.most_common(1)
    since = f"Since {origin.agreed.value.first_test.name}, which agrees, " if origin.agreed else ""
    these = counted(len(origin.not_compared), "value")
    begin = f"{since}{these} before this one" if since else f"{these.capitalize()} before this one"
    was = "was" if len(origin.not_compared) == 1 else "were"
    extent = "not compared" if reason else "compared by statistics alone, which no order changes"
    why = f" ({reason})" if reason else ""
    return (
        f"{begin} {was} {extent}{why}: it may have come in with them. {also} "
        "--layout a file that says how they lie when the run is traced."
    )


def _described(origin: Origin, degrees: Degrees, evidence: dict[str, Any]) -> tuple[Kind, str]:
    """Return kind and sentence; add to the evidence what they rest on."""
    compared, difference = origin.compared, origin.compared.difference
    if compared.is_of_other_shape:
        values = compared.value.first_test, compared.value.first_ref
        test_shape, ref_shape = (list(whole_shape(side)) for side in values)
        evidence["shapes"] = {"ref": ref_shape, "test": test_shape}
        return Kind.DIVERGENCE, f"its shape is {test_shape}, and {ref_shape} in the reference"
    if compared.unlike_passes:
        return Kind.STRUCTURE, compared.unlike_passes
    if origin.is_left_out_step:
        ranks = ranks_named(origin.holder_ranks.tolist())
        return (
            Kind.STRUCTURE,
            f"another model is stepped here on {ranks}, this one in the reference",
        )
    if difference is None:
        return Kind.DIVERGENCE, "has no gradient here, and has one in the reference"
    if origin.is_random:
        return Kind.DIVERGENCE, "drew other random numbers than the reference"
    if any(compared.other_samples):
        lost, unknown = compared.other_samples
        if compared.are_samples_apart:
            return Kind.DIVERGENCE, _APART
        evidence |= {"missing_samples": lost, "unknown_samples": unknown}
        if unknown:
            count, earlier = compared.earlier_samples
            text = f"{_are(unknown, 'sample')} not in the reference's step"
            if not count:
                return Kind.DIVERGENCE, text
            evidence["earlier_samples"] = {"count": count, "step": earlier}
            return Kind.DIVERGENCE, f"{text}; {count} came before, in its {earlier}"
        missing = f"{lost} of the reference's samples {'is' if lost == 1 else 'are'} missing"
        if compared.is_repeated:
            return Kind.DUPLICATE, f"{missing}, and others were handed out twice"
        return Kind.DIVERGENCE, missing
    if origin.is_legal or origin.is_of_most:
        return Kind.DIVERGENCE, _of_legal_or_most(origin, difference, evidence)
    if compared.is_left_behind:
        more = _alike(origin, "parameter")
        return Kind.PARAMETER, f"stays as it was, and the reference's is updated{more}"
    if origin.is_reordered:
        text = (
            "the reference's norm, mean, least and greatest, in another order: this module has the "
            "reference's parameters, and what it makes of these differs"
        )
        return Kind.PERMUTATION, text
    if difference.partial:
        word = "sum" if difference.partial == "sum" else "average"
        text = (
            f"the {word} over ranks is the reference's, but each rank uses its own part: a "
            f"reduction is missing{_alike(origin)}"
        )
        return Kind.GRADIENT if compared.key.phase is Phase.GRADS else Kind.REPLICA, text
    return _scaled(origin, difference, degrees, evidence) or _off(origin, difference, evidence)


def _of_legal_or_most(origin: Origin, difference: Difference, evidence: dict[str, Any]) -> str:
    if origin.is_of_batch:
        verb = "is made of all samples" if difference.is_of_local_batch else "has statistics"
        return f"{verb} of its local batch, which the reference splits in another way"
    if origin.is_choice and origin.compared.is_of_choices:
        return f"{_flips(origin.compared, difference, evidence)}, as rounding can flip them"
    if origin.is_choice:
        return "may have sent some tokens to other experts than the reference, as rounding can"
    if origin.compared.is_update:
        return f"{counted(origin.alike + 1, 'update')} differ, and the gradients they follow agree"
    on_ranks = ", not alike on all ranks" if origin.is_apart else ""
    gradients = counted(origin.alike + 1, "final gradient")
    text = f"{gradients} differ{on_ranks}, by no factor that they share"
    if origin.family:
        agreement = f"{origin.right} others agree" if origin.right > 1 else "other one agrees"
        text += f": all of {origin.family} that could be compared; the {agreement}"
    if origin.agreed_before:
        agree = "agrees" if origin.agreed_before == 1 else "agree"
        before = f"the {counted(origin.agreed_before, 'gradient')} that it makes before {agree}"
        return f"{text}; of these backward makes this one first, and {before}"
    if origin.is_blind and origin.family:
        return f"{text}; what these modules were handed could not be compared"
    if origin.is_blind:
        return f"{text}, and nothing that they follow from could be compared"
    return f"{text}, and what was compared of the gradients of activations before them agrees"


def _alike(origin: Origin, noun: str = "") -> str:
    if not origin.alike:
        return ""
    noun = noun or ("update" if origin.compared.is_update else "gradient")
    return f"; the same holds for {counted(origin.alike, f'other {noun}')}"


def _scaled(
    origin: Origin, difference: Difference, degrees: Degrees, evidence: dict[str, Any]
) -> tuple[Kind, str] | None:
    """Describe a value that is the reference's times a factor; None for other values."""
    compared = origin.compared
    if difference.has_other_nonfinite or (
        compared.value.is_discrete and difference.at_least is not None
    ):
        return None
    bad = origin.bad_parts
    fits = difference.fits()[bad]
    factors = fits[:, 0] if compared.is_update else difference.factors()[bad]
    factors = factors / np.broadcast_to(np.asarray(compared.scales, np.float64), len(bad))[bad]
    residual = float(fits[:, 1].max())
    factor = float(np.median(factors))
    if not np.isfinite(factors).all():
        return None
    if (abs(factors - factor) > 0.05 * abs(factor)).any():
        if residual > 3 * compared.allowed or compared.key.phase is not Phase.BACKWARD:
            return None
        evidence["factors"] = [statistic(f) for f in (factors.min(), factors.max())]
        text = (
            f"{_noun(origin)} is {factors.min():.4g} to {factors.max():.4g} times the reference's, "
            f"by another factor in each micro-batch or on each rank{_divided(compared)}"
        )
        return Kind.SCALE, text
    # where a factor explains it, the rest is small beside what it changes, and what is scaled
    is_scaled = factor != 0 and residual <= _CLEARLY_SCALED * min(abs(factor - 1), 1.0)
    if difference.at_least is not None:  # what is left is at least so much
        is_scaled &= residual <= 3 * compared.allowed
    is_factor = abs(factor - 1) > max(compared.allowed, _LEAST_FACTOR)
    names = degrees.named(factor)
    # any number is another one times some factor
    if not (is_scaled and is_factor) or (difference.ref.count == 1 and not names):
        return None
    evidence["factor"] = statistic(factor)
    if names:
        evidence["equals"] = names
    counts = " = ".join(f"{name.replace(', ', ' (')})" if ", " in name else name for name in names)
    share = "" if factor > 1 else "1 / "
    times = f"{factor:.4g} times the reference's{f', {share}{counts}' if names else ''}"
    if origin.is_of_all and compared.is_update:
        return Kind.SCALE, f"all updates are {times}"
    if origin.is_of_all:
        alone = "gradients of activations have no such factor"
        return Kind.SCALE, f"all final gradients are {times}; {alone}"
    if difference.at_least is not None:
        noun = f"{_noun(origin)} has norm, mean, least and greatest"
        return Kind.SCALE, f"{noun} {times}{_alike(origin)}{_divided(compared)}"
    return Kind.SCALE, f"{_noun(origin)} is {times}{_alike(origin)}{_divided(compared)}"


def _off(origin: Origin, difference: Difference, evidence: dict[str, Any]) -> tuple[Kind, str]:
    compared, bad = origin.compared, origin.bad_parts
    if difference.has_other_nonfinite:
        nan = sum(difference.test.nonfinite)
        ref_count = sum(difference.ref.nonfinite)
        text = f"{_are(nan, 'element')} NaN or infinite, {ref_count} in the reference"
        return Kind.NONFINITE if nan else Kind.DIVERGENCE, text
    if compared.is_moved_alone:
        text = "is trained here, and stays as it was in the reference, where it has no gradient"
        return Kind.DIVERGENCE, text
    noun = _noun(origin)
    if difference.is_zero(bad) and not compared.is_update:
        never = ", as what was never loaded is" if compared.key.phase is Phase.SETUP else ""
        return _beside_others(origin, difference, f"{noun} is all zeros{never}")
    if difference.at_least is not None:
        text = f"{noun} has a relative error of at least {compared.error:.3g}, by its statistics"
        return Kind.DIVERGENCE, text
    low, high = (compared.error * times for times in CHI_SQUARE_RANGE)
    is_exact = difference.measured == Measured.TENSORS
    sure = "exactly, by full tensors" if is_exact else f"{low:.2g} to {high:.2g}"
    off = f"{noun} has a relative error of {compared.error:.3g} ({sure}){_divided(compared)}"
    is_far = compared.error > _LEAST_PERMUTED and not compared.is_update
    if is_far and difference.is_permuted(bad):
        text = f"the same numbers in another order: norm, mean, least and greatest agree, and {off}"
        return Kind.PERMUTATION, text
    if compared.is_of_choices:
        off = _flips(compared, difference, evidence)
    return _beside_others(origin, difference, off)


def _beside_others(origin: Origin, difference: Difference, off: str) -> tuple[Kind, str]:
    """Return kind and sentence, with the ranks that hold the reference's value of the same."""
    bad = origin.bad_parts
    if not bad.all() and len(set(difference.units)) < len(bad):
        other_ranks = ranks_named(difference.ranks(~bad).tolist())
        return Kind.REPLICA, f"{off}; that of {other_ranks} agrees"
    return Kind.DIVERGENCE, off


def _flips(compared: ComparedValue, difference: Difference, evidence: dict[str, Any]) -> str:
    is_mask = compared.value.is_mask
    flips = max(round(difference.flips(is_mask=is_mask)), 1)
    evidence |= {"flips": flips, "choices": difference.ref.count}
    noun = "elements of the mask" if is_mask else "choices"
    return f"about {flips:,} of {difference.ref.count:,} {noun} are other ones"


def _divided(compared: ComparedValue) -> str:
    """Return by what the test's value was divided before it was held to the reference's."""
    factors = [f"{factor:.4g}" for factor in compared.divisors]
    if not factors:
        return ""
    listed = " to ".join(dict.fromkeys((factors[0], factors[-1])))
    return f"; after division by {listed}, which backward as a whole has"


def _noun(origin: Origin) -> str:
    return "its update" if origin.compared.is_update else "the value"


def _evidence(origin: Origin, difference: Difference) -> dict[str, Any]:
    compared = origin.compared
    evidence: dict[str, Any] = {
        "relative_error": _short(compared.error),
        "tolerance": _short(float(compared.allowed)),
        "inherited_error": _short(origin.inherited),
        "measured": difference.measured,
    }
    is_estimated = difference.measured in (Measured.SKETCHES, Measured.SAMPLES)
    if is_estimated and math.isfinite(compared.error):
        evidence["range"] = [_short(compared.error * times) for times in CHI_SQUARE_RANGE]
    if compared.divisors:
        evidence["divided_by"] = [statistic(factor) for factor in compared.divisors]
    if origin.is_isolated:
        evidence["inputs"] = "equal"
    if origin.not_compared:
        names = dict.fromkeys(c.value.first_test.name for c in origin.not_compared)
        evidence["not_compared"] = list(names)[:NAMED_VICTIMS]
    if origin.not_compared and origin.agreed is not None:
        evidence["agrees"] = origin.agreed.value.first_test.name
    if difference.partial:
        evidence[f"error_of_their_{difference.partial}"] = evidence.pop("relative_error")
    test_totals = difference.totals_with(origin.bad_parts)
    for name in ("l2", "mean", "least", "greatest"):
        ref_number, test_number = getattr(difference.ref, name), getattr(test_totals, name)
        if math.isfinite(ref_number) and math.isfinite(test_number):
            evidence[name] = {"ref": statistic(ref_number), "test": statistic(test_number)}
    return evidence


def _short(number: float) -> Any:
    """Return an estimate with the digits that it has."""
    return statistic(float(f"{number:.3g}"))


def _are(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"
