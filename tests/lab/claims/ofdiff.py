"""What `diff` says of distances, factors and agreement with the reference, recomputed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.lab.claims.claim import Case, Claim, Finding, Place, Recompute, is_estimate, is_near
from tests.lab.claims.held import (
    ByRank,
    best_factor,
    distance,
    numbers,
    pairs,
    ranks_in,
    same_bytes,
)

_AGREES = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 0.2, "float16": 2e-2}
"""Relative distance up to which "agrees" is no false word: the tolerance of gradients, and what a
call may make of it."""
_SAME = 2e-3
"""Relative: an exact distance, printed with three digits."""
_STATISTICS = {"l2": "l2", "mean": "mean", "least": "min", "greatest": "max"}


def ref_place(case: Case, place: Place) -> Place:
    """Return where the reference has a value: its micro-batches may be others."""
    return replace(place, path=case.ref_path(place.path), micro_batch=None)


def both(case: Case, place: Place) -> list[tuple[str, Tensor, Tensor]]:
    """Return everything of the test that may stand beside something of the reference there."""
    refs = case.ref.all_of(ref_place(case, place)) if case.ref is not None else []
    found: list[tuple[str, Tensor, Tensor]] = []
    for held in case.test.all_of(replace(place, micro_batch=None)):
        for ref in refs:
            found += pairs(held, ref)
    return found


def is_in_pieces(case: Case, place: Place) -> bool:
    """True where ranks hold parts of the value: how they make a whole was tried, not known."""
    shapes = {
        tuple(t.shape)
        for side, there in ((case.test, place), (case.ref, ref_place(case, place)))
        for held in (side.all_of(replace(there, micro_batch=None)) if side is not None else ())
        for t in held.values()
    }
    return len(shapes) > 1


def by_layout(case: Case, place: Place) -> list[float]:
    """Return how far the wholes that layouts make of pieces are from the reference."""
    refs = case.ref.all_of(ref_place(case, place)) if case.ref is not None else []
    return [
        distance(whole, ref)
        for whole in case.test.fulls(place)
        for by_rank in refs
        for ref in by_rank.values()
        if whole.shape == ref.shape
    ]


def is_update(finding: Finding) -> bool:
    """True where a finding speaks of what a step added to a parameter."""
    texts = ("its update is", "all updates are", "its update has", "updates differ")
    is_owned = finding["phase"] == "params"
    return is_owned and any(text in finding["message"] for text in texts)


def of_update(case: Case, place: Place) -> list[tuple[str, Tensor, Tensor]]:
    """Return what a step added to a parameter, in both runs."""
    if case.ref is None:
        return []
    there = ref_place(case, place)
    olds, ref_olds = case.test.before(place), case.ref.before(there)
    updates = {r: t - olds[r] for r, t in case.test.one(place).items() if r in olds}
    refs = {r: t - ref_olds[r] for r, t in case.ref.one(there).items() if r in ref_olds}
    return pairs(updates, refs)


def told(case: Case, finding: Finding) -> list[tuple[str, Tensor, Tensor]]:
    """Return the pairs that a finding speaks of."""
    place = Place.of(finding)
    found = of_update(case, place) if is_update(finding) else both(case, place)
    divisors = finding["evidence"].get("divided_by", [1.0])
    return [
        (how, test / d if d != 1.0 else test, ref) for how, test, ref in found for d in divisors
    ]


# ---- evidence ------------------------------------------------------------------------------------


def relative_error(case: Case, finding: Finding, said: Any) -> Iterator[Claim]:
    """How far the worst part is from the reference."""
    number, found = float(said), told(case, finding)
    measured = finding["evidence"]["measured"]
    text = f"relative error {said} ({measured})"
    if not finding["slot"]:
        yield Claim(text, None, "of the first of all gradients, which is not named")
        return
    if not found:
        yield Claim(text, None, "no piece has the reference's shape")
        return
    errors = [distance(test, ref) for _, test, ref in found]
    answer: bool | None = _is_told(number, errors, measured)
    if not answer and is_in_pieces(case, Place.of(finding)):
        errors = by_layout(case, Place.of(finding))
        answer = _is_told(number, errors, measured) if errors else None
    if math.isinf(number):
        answer = any(
            not bool(torch.isfinite(t).all()) or float(ref.norm()) == 0 for _, t, ref in found
        )
    why = (
        "full tensors: " if answer is False else "pieces in a layout that nothing tells; as tried: "
    )
    yield Claim(text, answer, f"{why}{_few(errors)}")


def _is_told(number: float, errors: Sequence[float], measured: str) -> bool:
    if measured == "full tensors":
        return any(is_near(number, error, 0.0, 3 * _SAME) for error in errors)
    if measured == "statistics":
        return any(number <= error * 1.01 + 1e-6 for error in errors)
    return any(is_estimate(number, error) for error in errors)


def _few(errors: Sequence[float]) -> str:
    return ", ".join(f"{error:.3g}" for error in sorted(set(errors))[:6])


def statistics(name: str) -> Recompute:
    """Return what checks `{"ref": ..., "test": ...}`."""

    def check(case: Case, finding: Finding, said: Mapping[str, Any]) -> Iterator[Claim]:
        place = Place.of(finding)
        if not finding["slot"] or is_update(finding) or case.ref is None:
            yield Claim(f"{name} of both", None, "of the first of all, or of an update")
            return
        sides = {
            "ref": case.ref.all_of(ref_place(case, place)),
            "test": case.test.all_of(replace(place, micro_batch=None)),
        }
        for side, found in sides.items():
            if not found:
                yield Claim(f"{name} of {side}", None, "not kept")
                continue
            possible = [numbers(t) for t in _possible(found, sides["ref"])]
            number = float(said[side])
            answer = any(
                is_near(number, p.get(_STATISTICS[name], math.nan), p.get("rms", 0), 1e-3)
                for p in possible
            )
            text = f"{name} of {side} {number:.6g}"
            if answer or len(possible) < 2 or not _is_in_parts(found):
                values = [f"{p.get(_STATISTICS[name], math.nan):.6g}" for p in possible[:4]]
                yield Claim(text, answer, f"full tensors: {', '.join(values)}")
            else:
                yield Claim(text, None, "of pieces whose whole nothing tells")

    return check


def _possible(found: Sequence[ByRank], refs: Sequence[ByRank]) -> Iterator[Tensor]:
    """Yield what one call's ranks, and all calls together, may hold as one."""
    every: list[Tensor] = []
    for by_rank in found:
        pieces = [t.reshape(-1) for t in by_rank.values()]
        yield from pieces
        distinct = [
            p for n, p in enumerate(pieces) if not any(same_bytes(p, o) for o in pieces[:n])
        ]
        every += distinct
        if len(distinct) > 1:
            yield torch.cat(distinct)
        if len(pieces) > 1:
            yield torch.cat(pieces)
    if len(every) > 1:
        yield torch.cat(every)
    for by_rank in found:
        for ref in refs:
            yield from (test.reshape(-1) for _, test, _ in pairs(by_rank, ref))


def _is_in_parts(found: Sequence[ByRank]) -> bool:
    return len(found) > 1 or any(
        not same_bytes(*by_rank.values()) for by_rank in found if len(by_rank) > 1
    )


def factor(case: Case, finding: Finding, said: float) -> Iterator[Claim]:
    """The factor by which the test's value is the reference's."""
    text = f"{said:.4g} times the reference's"
    if not finding["slot"]:
        kind = "param:" if finding["phase"] == "params" else "grad:"
        yield from _factor_of_all(case, finding, said, kind)
        return
    fits = [best_factor(test, ref) for _, test, ref in told(case, finding)]
    if not fits:
        yield Claim(text, None, "no piece has the reference's shape")
        return
    answer = any(abs(f - said) <= 0.05 * abs(said) and rest < 0.35 for f, rest in fits)
    yield Claim(text, answer, f"best factors: {_few([f for f, _ in fits])}")


def _factor_of_all(case: Case, finding: Finding, said: float, kind: str) -> Iterator[Claim]:
    place, wrong, count = Place.of(finding), [], 0
    for there in case.test.owned(place, kind):
        found = of_update(case, there) if kind == "param:" else both(case, there)
        fits = [best_factor(test, ref) for _, test, ref in found if float(ref.norm()) > 1e-6]
        count += bool(fits)
        if fits and not any(abs(f - said) <= 0.05 * abs(said) and rest < 0.35 for f, rest in fits):
            wrong.append(f"{there.path}.{there.slot}: {_few([f for f, _ in fits])}")
    text = f"all {count} of this step are {said:.4g} times the reference's"
    yield Claim(text, not wrong if count else None, f"not {'; '.join(wrong[:3])}")


def factors(case: Case, finding: Finding, said: Sequence[float]) -> Iterator[Claim]:
    """The range of factors over ranks and micro-batches."""
    fits = [f for f, rest in (best_factor(t, r) for _, t, r in told(case, finding)) if rest < 0.05]
    answer = all(any(abs(f - s) <= 0.05 * abs(s) for f in fits) for s in said) if fits else None
    yield Claim(f"factors {said}", answer, f"of parts: {_few(fits)}")


def agrees(case: Case, finding: Finding, name: str) -> Iterator[Claim]:
    """A value before the finding agrees with the reference."""
    place = Place.of(finding)
    yield agreement(case, place.named(name), f"{name} agrees", by_scale=place.phase == "backward")


def agreement(case: Case, place: Place, text: str, *, by_scale: bool = False) -> Claim:
    """Return the claim that a value is the reference's; of backward up to a factor of all."""
    found = both(case, place)
    if not found:
        return Claim(text, None, "no piece has the reference's shape, or none was kept")
    errors = [distance(test, ref) for _, test, ref in found]
    dtype = str(found[0][1].dtype).removeprefix("torch.")
    allowed = _AGREES.get(dtype, 0.0)
    if not found[0][1].is_floating_point():
        return Claim(text, min(errors) == 0, f"off by {_few(errors)}")
    if by_scale and min(errors) > allowed:
        rests = [best_factor(test, ref)[1] for _, test, ref in found]
        if min(rests) <= allowed:
            return Claim(f"{text} up to the factor of backward", True)
    is_true = min(errors) <= allowed
    if not is_true and is_in_pieces(case, place):
        errors = by_layout(case, place)
        if not errors:
            return Claim(text, None, "pieces in a layout that nothing tells")
        is_true = min(errors) <= allowed
    return Claim(text, is_true, f"off by {_few(errors)}")


def inputs_equal(case: Case, finding: Finding, said: Any) -> Iterator[Claim]:
    """The inputs of the module are the reference's to the bit."""
    place = Place.of(finding)
    begin = "grad_output" if place.phase == "backward" else "input"
    for slot in case.test.slots(replace(place, slot="")):
        if slot.startswith(begin):
            found = both(case, place.at(place.path, slot))
            answer = any(same_bytes(t.contiguous(), r.contiguous()) for _, t, r in found)
            yield Claim(
                f"{slot} is the reference's to the bit", answer if found else None, "unlike"
            )


def error_of_their(how: str) -> Recompute:
    """Return what checks that the sum or average of all ranks is the reference's."""

    def check(case: Case, finding: Finding, said: float) -> Iterator[Claim]:
        errors = [distance(t, r) for way, t, r in told(case, finding) if way == how]
        answer = min(errors) <= max(5 * float(said), 1e-4) if errors else None
        yield Claim(f"their {how} is the reference's ({said})", answer, _few(errors) or "not kept")

    return check


def shapes(case: Case, finding: Finding, said: Mapping[str, Sequence[int]]) -> Iterator[Claim]:
    """Shapes on both sides; of cut parameters the whole's."""
    place = Place.of(finding)
    held = case.test.one(place)
    ref = case.ref.one(ref_place(case, place)) if case.ref else {}
    for side, by_rank in (("test", held), ("ref", ref)):
        found = {tuple(t.shape) for t in by_rank.values()}
        answer = tuple(said[side]) in found if found else None
        yield Claim(f"shape of {side} {said[side]}", answer, f"{found}")


def flips(case: Case, finding: Finding, said: int) -> Iterator[Claim]:
    """How many elements of indices or a mask are other ones."""
    counts = [int((t != r).sum()) for _, t, r in both(case, Place.of(finding))]
    answer = any(0.1 * c <= said <= 10 * max(c, 1) for c in counts) if counts else None
    yield Claim(f"about {said} choices are other ones", answer, f"{counts[:6]}")


def choices(case: Case, finding: Finding, said: int) -> Iterator[Claim]:
    """How many elements there are."""
    refs = case.ref.all_of(ref_place(case, Place.of(finding))) if case.ref else []
    count = sum(next(iter(by.values())).numel() for by in refs)
    yield Claim(f"{said} choices", said == count if refs else None, f"{count}")


def samples(case: Case, finding: Finding, said: int, *, is_missing: bool) -> Iterator[Claim]:
    """Rows of the root's input that one of the runs alone has."""
    place = Place.of(finding)
    sides = [
        [
            row
            for by in side.all_of(replace(there, micro_batch=None))
            for _, t in sorted(by.items())
            for row in (t if t.dim() else [t])
        ]
        for side, there in ((case.test, place), (case.ref, ref_place(case, place)))
        if side is not None
    ]
    test_rows, ref_rows = sides if len(sides) == 2 else ([], [])
    ours, others = (ref_rows, test_rows) if is_missing else (test_rows, ref_rows)
    alone = [row for row in ours if not any(same_bytes(row, o) for o in others)]
    distinct = [r for n, r in enumerate(alone) if not any(same_bytes(r, o) for o in alone[:n])]
    answer = int(said) in (len(alone), len(distinct)) if ours and others else None
    word = "missing" if is_missing else "unknown"
    yield Claim(f"{said} samples are {word}", answer, f"{len(alone)}, {len(distinct)} distinct")


EVIDENCE: dict[str, Recompute] = {
    "relative_error": relative_error,
    **{name: statistics(name) for name in _STATISTICS},
    "factor": factor,
    "factors": factors,
    "agrees": agrees,
    "inputs": inputs_equal,
    "error_of_their_sum": error_of_their("sum"),
    "error_of_their_avg": error_of_their("average"),
    "shapes": shapes,
    "flips": flips,
    "choices": choices,
    "missing_samples": lambda c, f, n: samples(c, f, n, is_missing=True),
    "unknown_samples": lambda c, f, n: samples(c, f, n, is_missing=False),
}
NO_CLAIM = {
    "tolerance", "inherited_error", "measured", "range", "not_compared", "equals", "ref_path",
    "rank_resolution", "earlier_samples", "parameters", "divided_by",
}  # fmt: skip
"""Evidence that is no value, or told by another entry."""


# ---- sentences -----------------------------------------------------------------------------------


def that_agrees(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`that of ranks 0,2 agrees`."""
    place, ranks = Place.of(finding), ranks_in(match[1])
    found = [
        distance(t, r) for how, t, r in both(case, place) if any(how == f"rank {n}" for n in ranks)
    ]
    dtypes = {str(t.dtype).removeprefix("torch.") for _, t, _ in both(case, place)}
    allowed = max((_AGREES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    answer = min(found) <= allowed if found else None
    yield Claim(match[0], answer, f"off by {_few(found)}")
    odd = [
        distance(t, r)
        for how, t, r in both(case, place)
        if any(how == f"rank {n}" for n in finding["ranks"])
    ]
    yield Claim("and that of the others does not", max(odd) > 1e-6 if odd else None, _few(odd))


def all_zeros(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """The value is all zeros on the ranks of the finding."""
    held = case.test.one(Place.of(finding))
    zero = [not bool(held[rank].any()) for rank in finding["ranks"] if rank in held]
    yield Claim(match[0], all(zero) if zero else None, "not kept, or not zero")


def stays(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """The parameter is as before, and the reference's is not."""
    place = Place.of(finding)
    if case.ref is None:
        return
    there = ref_place(case, place)
    before, after = case.test.before(place), case.test.one(place)
    olds, news = case.ref.before(there), case.ref.one(there)
    both_ranks = [r for r in finding["ranks"] if r in before and r in after]
    stayed = all(same_bytes(before[r], after[r]) for r in both_ranks)
    moved = any(not same_bytes(olds[r], news[r]) for r in olds.keys() & news.keys())
    yield Claim(match[0], stayed and moved if both_ranks and olds else None, "it moved, or both")


def many_differ(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`24 final gradients differ`."""
    place = Place.of(finding)
    kind = "grad:" if place.phase == "grads" else "param:"
    differing, compared = 0, 0
    for there in case.test.owned(place, kind):
        found = both(case, there) if kind == "grad:" else of_update(case, there)
        compared += bool(found)
        differing += bool(found) and min(distance(t, r) for _, t, r in found) > 1e-6
    said = int(match[1])
    yield Claim(match[0], said <= differing if compared else None, f"{differing} of {compared}")


def unlike_on_ranks(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Ranks hold the gradient that is named unlike."""
    first, *others = case.test.one(Place.of(finding)).values()
    yield Claim(match[0], not all(same_bytes(first, other) for other in others), str(len(others)))


def numbers_in_another_order(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """The sorted elements of both are the same."""
    found = [
        distance(t.reshape(-1).sort().values, r.reshape(-1).sort().values)
        for _, t, r in both(case, Place.of(finding))
    ]
    yield Claim(match[0], min(found) < 1e-4 if found else None, f"sorted: off by {_few(found)}")


def given_agrees(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """What the module was given agrees: inputs of forward, in backward the gradients of outputs."""
    place = Place.of(finding)
    begin = "grad_output" if place.phase == "backward" else "input"
    phase = place.phase if place.phase in ("forward", "backward") else "forward"
    there = replace(place, phase=phase, slot="", micro_batch=None)
    slots = [slot for slot in case.test.slots(there) if slot.startswith(begin)]
    for slot in slots:
        text = f"{match[0]}: {slot}"
        yield agreement(case, replace(there, slot=slot), text, by_scale=phase == "backward")
    if not slots:
        yield Claim(match[0], None, "no input was kept")


def before_agrees(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """What the reference computed before, in this phase of this step, agrees."""
    place, path = Place.of(finding), case.ref_path(finding["path"])
    here = {case.ref_path(node.path): node.path for node in case.test.order}
    for node in case.ref.order if case.ref is not None else ():
        when = (node.head.mode.word, node.head.step, node.phase.word)
        if node.head.is_setup or when != (place.mode, place.step, place.phase):
            continue
        if node.path == path:
            return
        # gradients of inputs are totals of a tensor on one side, of one use on the other
        slots = [v.slot for v in node.slots if v.slot.startswith(("output", "grad_output"))]
        for slot in slots if node.path in here and not _is_inside(node.path, path) else ():
            there = place.at(here[node.path], slot, micro_batch=None)
            text = f"{match[0]}: {there.path}:{slot}"
            yield agreement(case, there, text, by_scale=place.phase == "backward")


def _is_inside(outer: str, path: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def gradient_agrees(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """The gradient of a parameter agrees."""
    place = Place.of(finding)
    if not place.slot.startswith("param:"):
        yield Claim(match[0], None, "of many parameters")
        return
    there = replace(place, phase="grads", slot=f"grad:{place.slot[6:]}")
    yield agreement(case, there, match[0])


def made_of_agrees(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """What a final gradient is made of agrees: inputs, and gradients of outputs."""
    place = Place.of(finding)
    for phase, begin in (("forward", "input"), ("backward", "grad_output")):
        there = replace(place, phase=phase, slot="", micro_batch=None)
        for slot in case.test.slots(there):
            if slot.startswith(begin):
                yield agreement(
                    case,
                    replace(there, slot=slot),
                    f"{match[0]}: {slot}",
                    by_scale=phase == "backward",
                )


SENTENCES: list[tuple[str, Recompute]] = [
    (r"that of ranks? ([\d,-]+) agrees", that_agrees),
    (r"is all zeros", all_zeros),
    (r"stays as it was, and the reference's is updated", stays),
    (r"(\d+) (?:final gradient|update)s? differ", many_differ),
    (r"not alike on all ranks", unlike_on_ranks),
    (r"the same numbers in another order", numbers_in_another_order),
    (r"What this module was given agrees", given_agrees),
    (r"What the reference(?:'s backward)? computed before it agrees", before_agrees),
    (r"The gradient agrees and its update does not", gradient_agrees),
    (r"What this gradient is made of agrees", made_of_agrees),
    (r"its inputs are the reference's to the bit", inputs_equal),
]


def of_report(case: Case) -> Iterator[Claim]:
    """How many parameters and buffers begin alike, and how many samples both runs had."""
    texts = {line["what"]: line["text"] for line in case.report["preflight"]}
    counts = re.fullmatch(
        r"(?:(\d+) of )?(\d+) initial values? (?:agrees?|differs?)", texts["start"]
    )
    setup = Place(path="", slot="", phase="setup", mode="", step=0, micro_batch=None)
    if counts:
        found = {
            there: both(case, there)
            for begin in ("param:", "buffer:")
            for there in case.test.owned(setup, begin)
        }
        unlike = [p for p, held in found.items() if not held or not _begins_alike(held)]
        unknown = [p for p in unlike if not found[p] or is_in_pieces(case, p)]
        apart = [p for p in unlike if p not in unknown]
        low, high = len(apart), len(apart) + len(unknown)
        said = int(counts[1] or 0)
        listed = ", ".join(f"{p.path}.{p.slot}" for p in apart[:3])
        yield Claim(texts["start"], low <= said <= high, f"{low} to {high} differ: {listed}")
    same = re.match(r"the same (\d+) samples?", texts.get("samples", ""))
    if same and case.ref is not None:
        yield from _same_samples(case, int(same[1]), texts["samples"])


def _begins_alike(found: Sequence[tuple[str, Tensor, Tensor]]) -> bool:
    dtypes = {str(t.dtype).removeprefix("torch.") for _, *pair in found for t in pair}
    slack = 1e-2 if len(dtypes) > 1 else 1e-5
    # where each rank holds it whole, each has to
    whole = [distance(t, r) for how, t, r in found if re.fullmatch(r"rank \d+", how)]
    return (max(whole) if whole else min(distance(t, r) for _, t, r in found)) <= slack


def _same_samples(case: Case, count: int, text: str) -> Iterator[Claim]:
    """Each row of the reference's root inputs is one of the test's, and the other way round. Later
    stages of a pipeline are handed what another rank made, and no samples."""
    step = case.test.trace.steps[0]
    root = Place(path="", slot="", phase="forward", mode=step.mode.word, step=step.step,
                 micro_batch=None)  # fmt: skip
    made = [
        t
        for slot in case.test.slots(root)
        if slot.startswith("output")
        for by in case.test.all_of(replace(root, slot=slot))
        for t in by.values()
    ]
    later = {
        rank
        for slot in case.test.slots(root)
        if slot.startswith("input")
        for by in case.test.all_of(replace(root, slot=slot))
        for rank, t in by.items()
        if any(same_bytes(t, output) for output in made)
    }
    for slot in case.test.slots(root):
        scalars = [not t.dim() for by in case.test.all_of(replace(root, slot=slot))
                   for t in by.values()]  # fmt: skip
        if not slot.startswith("input") or any(scalars):
            continue  # a number of tokens is no sample
        sides = [
            [
                row
                for by in side.all_of(replace(root, slot=slot))
                for rank, t in by.items()
                if rank not in later or side is case.ref
                for row in (t if t.dim() else [t])
            ]
            for side in (case.test, case.ref)
            if side is not None
        ]
        kinds = {(tuple(row.shape), row.dtype) for rows in sides for row in rows}
        if len(kinds) != 1:
            yield Claim(f"{text}: {slot}", None, "rows of unlike shapes: cut along another dim")
            continue
        alone = [
            sum(not any(same_bytes(row, o) for o in others) for row in rows)
            for rows, others in (sides, sides[::-1])
        ]
        yield Claim(f"{text}: {slot}", alone == [0, 0], f"in one run alone: {alone}")
