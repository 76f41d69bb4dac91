"""What `check` says of replicas, gradients, parameters and collectives, recomputed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.lab.claims.claim import (
    SKETCH,
    ByRank,
    Case,
    Claim,
    Finding,
    Place,
    Recompute,
    any_call,
    at_place,
    is_estimate,
    is_near,
)
from tests.lab.claims.held import agree, best_factor, numbers, ranks_in, same_bytes

_NUMBERS = ("mean", "std", "l2", "min", "max", "nan", "posinf", "neginf")
_INPUT = re.compile(r"input(\.|$)|grad_output|args|kwargs")


def members_of(finding: Finding) -> list[int]:
    """Return the ranks that a finding compares: its sides', or its own."""
    listed = finding["evidence"].get("values") or ()
    told = {r for side in listed if "ranks" in side for r in ranks_in(side["ranks"])}
    return sorted(told | set(finding["ranks"]))


# ---- evidence ------------------------------------------------------------------------------------


def sides(case: Case, finding: Finding, listed: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    """The numbers of each side; ranks of one side hold the same bytes, other hashes other ones."""
    place = Place.of(finding)
    of_phase = [side for side in listed if "rank" in side]
    for side in of_phase:
        there = replace(place, phase=side["phase"])
        text = f"rank {side['rank']} in {side['phase']}: its statistics"
        yield from at_place(case, there, text, lambda by, side=side: _is_side(by, side))
    if of_phase or not any("ranks" in side for side in listed):
        return
    if any("l2" not in side and "digested" not in side for side in listed):
        yield Claim("what each side declares", None, "no numbers: dtypes, shapes or placements")
        return
    for side in listed:
        yield from at_place(case, place, f"ranks {side['ranks']} hold one value", _equal([side]))
        text = f"ranks {side['ranks']} hold it with these statistics"
        yield from at_place(case, place, text, _with_numbers(side))
    if len(listed) > 1:
        yield from at_place(case, place, "what has another hash is another value", _equal(listed))


def _with_numbers(side: Mapping[str, Any]) -> Any:
    return lambda by_rank: _is_side(by_rank, {**side, "rank": ranks_in(side["ranks"])[0]})


def _equal(listed: Sequence[Mapping[str, Any]]) -> Any:
    def test(by_rank: ByRank) -> bool | None:
        firsts: list[tuple[str, Tensor]] = []
        for side in listed:
            ranks = ranks_in(side["ranks"])
            if any(rank not in by_rank for rank in ranks):
                return None
            if "hash" not in side:
                continue
            held = [by_rank[rank] for rank in ranks]
            if not same_bytes(*held):
                return False
            firsts.append((side["hash"], held[0]))
        return all(
            (one == other) == same_bytes(first, second)
            for (one, first), (other, second) in itertools.combinations(firsts, 2)
        )

    return test


def _is_side(by_rank: ByRank, side: Mapping[str, Any]) -> bool | None:
    if side["rank"] not in by_rank:
        return None
    true = numbers(by_rank[side["rank"]])
    scale = true.get("rms", 0.0)
    return all(
        is_near(float(side[name]), true.get(name, math.nan), scale)
        for name in _NUMBERS
        if name in side and side[name] is not None
    )


def relative_distance(case: Case, finding: Finding, said: float | None) -> Iterator[Claim]:
    """How far the replicas lie apart, by sketches."""
    ranks = members_of(finding)

    def test(by_rank: ByRank) -> bool | None:
        held = [by_rank[rank].to(torch.float64) for rank in ranks if rank in by_rank]
        if len(held) < 2 or len({t.shape for t in held}) > 1:
            return None
        if said is None:
            return any(not bool(torch.isfinite(t).all()) for t in held) or None
        largest = max(float(t.norm()) for t in held)
        apart = [float((a - b).norm()) / max(largest, 1e-30)
                 for a, b in itertools.combinations(held, 2)]  # fmt: skip
        nonzero = [d for d in apart if d] or [0.0]
        return any(is_estimate(said, d) for d in nonzero) or (
            SKETCH[0] * min(nonzero) <= said <= SKETCH[1] * max(nonzero)
        )

    yield from at_place(case, Place.of(finding), f"relative distance {said}", test)


def same_on(case: Case, finding: Finding, lines: Sequence[str]) -> Iterator[Claim]:
    """Each of these lines of ranks holds the same."""
    for line in lines:
        text = f"ranks {line} hold the same"
        ranks = ranks_in(line)
        yield from at_place(case, Place.of(finding), text, lambda by, r=ranks: agree(by, r))


def equal_inputs(case: Case, finding: Finding, slots: Sequence[str]) -> Iterator[Claim]:
    """What the value was made of is bitwise equal."""
    place, ranks = Place.of(finding), members_of(finding)
    for slot in slots:
        there = replace(place, slot=slot)
        if slot.startswith("grad:"):
            there = replace(there, phase="grads")
        text = f"{slot} is bitwise equal"
        yield from at_place(case, there, text, lambda by: _has_twins(by, ranks))


def _has_twins(by_rank: ByRank, ranks: Sequence[int]) -> bool | None:
    """True where each of these ranks holds what another one does: groups are not told."""
    held = [by_rank[rank] for rank in ranks if rank in by_rank]
    if len(held) < 2:
        return None
    return all(sum(same_bytes(one, other) for other in held) > 1 for one in held)


def agree_elsewhere(case: Case, finding: Finding, paths: Sequence[str]) -> Iterator[Claim]:
    """The same slot of siblings agrees."""
    place = Place.of(finding)
    groups = [ranks_in(g) for g in finding["evidence"].get("groups", ())] or [members_of(finding)]
    for path in paths:
        text = f"{path}:{place.slot} agrees"
        yield from at_place(
            case,
            place.at(path, place.slot),
            text,
            lambda by: any(agree(by, group) is not False for group in groups),
        )


def scaled(case: Case, finding: Finding, _: bool) -> Iterator[Claim]:
    """The replicas are multiples of each other."""
    ranks = members_of(finding)

    def test(by_rank: ByRank) -> bool | None:
        held = [by_rank[rank] for rank in ranks if rank in by_rank]
        longest = max(held, key=lambda t: float(t.to(torch.float64).norm()))
        return all(best_factor(t, longest)[1] < 0.05 for t in held)

    yield from at_place(case, Place.of(finding), "they are multiples of each other", test)


def random_numbers(case: Case, finding: Finding, path: str) -> Iterator[Claim]:
    """A module was handed the same and drew other numbers."""
    place, ranks = Place.of(finding), members_of(finding)
    forward = replace(place, path=path, phase="forward", slot="", micro_batch=None)
    slots = case.test.slots(forward)
    for slot in slots:
        wanted = slot.startswith("input")
        if wanted or slot.startswith("output"):
            text = f"{path}:{slot} is {'equal' if wanted else 'unlike'} on these ranks"
            yield from at_place(
                case,
                replace(forward, slot=slot),
                text,
                lambda by, wanted=wanted: (
                    None if (answer := agree(by, ranks)) is None else answer is wanted
                ),
            )


def gradient_rms(case: Case, finding: Finding, said: float) -> Iterator[Claim]:
    """Root mean square of the gradient of a parameter that stayed."""
    place = Place.of(finding)
    there = replace(place, phase="grads", slot=f"grad:{place.slot[6:]}")

    def test(by_rank: ByRank) -> bool | None:
        sizes = [numbers(t).get("rms", 0.0) for r, t in by_rank.items() if r in finding["ranks"]]
        return is_near(said, max(sizes), 0.0) if sizes else None

    yield from at_place(case, there, f"gradient's rms {said:.4g}", test)


def moved(case: Case, finding: Finding, text: str) -> Iterator[Claim]:
    """The step moved the parameter on these ranks, and left it on the finding's."""
    place = Place.of(finding)
    before, after = case.test.before(place), case.test.one(place)
    wanted = {**dict.fromkeys(ranks_in(text) if text else (), True),
              **dict.fromkeys(finding["ranks"], False)}  # fmt: skip
    for rank, has_moved in wanted.items():
        verb = "moved" if has_moved else "stayed"
        said = f"the parameter {verb} on rank {rank}"
        if rank not in before or rank not in after:
            yield Claim(said, None, "not kept before and after the step")
        else:
            is_moved = not same_bytes(before[rank], after[rank])
            yield Claim(said, is_moved is has_moved, "the tensors say otherwise")


def equal_to(case: Case, finding: Finding, name: str) -> Iterator[Claim]:
    """The gradient is that of another parameter, bit by bit."""
    place, own = Place.of(finding), case.test.one(Place.of(finding))
    other = case.test.one(place.named(name))
    ranks = [rank for rank in finding["ranks"] if rank in own and rank in other]
    answer = all(same_bytes(own[r].reshape(-1), other[r].reshape(-1)) for r in ranks)
    yield Claim(f"equal to {name}", answer if ranks else None, "not kept, or not equal")


def collective_sides(
    case: Case, finding: Finding, listed: Sequence[Mapping[str, Any]], begin: str
) -> Iterator[Claim]:
    """The numbers of what a collective took or gave, on each side."""
    if not listed:
        return
    place = Place.of(finding)
    slots = [slot for slot in case.test.slots(replace(place, slot="")) if slot.startswith(begin)]
    found = [by for slot in slots for by in case.test.all_of(replace(place, slot=slot))]
    for side in listed:
        text = f"{begin} of ranks {side['ranks']}: equal, with these statistics"
        answers = [any_call(found, test) for test in (_equal([side]), _with_numbers(side))]
        answer = None if None in answers else all(answers)
        yield Claim(text, answer, "no such value was kept in this collective")


def spoiled_values(case: Case, finding: Finding, names: Sequence[str]) -> Iterator[Claim]:
    """Each of these values of the step is not finite on some rank."""
    place = Place.of(finding)
    phases = ("setup", "forward", "recompute", "backward", "grads", "params", "collective")
    for name in names:
        there = [place.named(name, phase=phase, micro_batch=None) for phase in phases]
        held = [t for p in there for by in case.test.all_of(p) for t in by.values()]
        answer = any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in held)
        yield Claim(f"{name} is not finite", answer if held else None, "not kept, or finite")


def inputs_are_finite(case: Case, finding: Finding, said: bool) -> Iterator[Claim]:
    """What a call that made NaN was handed is finite."""
    place = Place.of(finding)
    if not said or place.phase == "setup":
        return
    slots = [s for s in case.test.slots(place) if _is_input(s, place.phase)]
    held = [
        t
        for slot in slots
        for by in case.test.all_of(replace(place, slot=slot))
        for r, t in by.items()
        if r in finding["ranks"] and t.is_floating_point()
    ]
    answer = all(not bool(torch.isnan(t).any()) for t in held) if held else None
    yield Claim("its inputs were finite", answer, "not kept, or an input has NaN")


def _is_input(slot: str, phase: str) -> bool:
    return slot.startswith("grad_output" if phase == "backward" else "input")


def siblings_rms(case: Case, finding: Finding, usual: float) -> Iterator[Claim]:
    """The same parameter of siblings is of this size."""
    place = Place.of(finding)
    pattern = re.compile(re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(place.path)))
    sizes = [
        numbers(tensor).get("rms", 0.0)
        for there in case.test.owned(place, place.slot)
        if there.path != place.path and pattern.fullmatch(there.path)
        for tensor in case.test.one(there).values()
    ]
    near = [size for size in sizes if usual / 100 <= size <= usual * 100]
    yield Claim(f"siblings have an rms of {usual:.3g}", len(near) > 0 if sizes else None, "none")


def parameters(case: Case, finding: Finding, named: Any) -> Iterator[Claim]:
    """Each of the parameters that one origin stands for is as the origin's is."""
    place = Place.of(finding)
    kind, _, _ = place.slot.partition(":")
    if isinstance(named, int):
        yield Claim(f"{named} parameters", None, "counted, not named")
        return
    if finding["kind"] not in ("replica-mismatch", "gradient-not-reduced", "parameter-not-updated"):
        yield Claim(f"{len(named)} parameters are like it", None, f"of a {finding['kind']}")
        return
    ranks = members_of(finding)
    for name in named:
        path, _, leaf = name.rpartition(".")
        there = place.at(path, f"{kind}:{leaf}")
        if finding["kind"] == "parameter-not-updated":
            before, after = case.test.before(there), case.test.one(there)
            both = [r for r in finding["ranks"] if r in before and r in after]
            answer = all(same_bytes(before[r], after[r]) for r in both) if both else None
            yield Claim(f"{name} stayed", answer, "not kept, or it moved")
        else:
            text = f"{name} differs on ranks {ranks}"
            yield from at_place(
                case,
                there,
                text,
                lambda by: None if (told := _some(by, ranks)) is None else not told,
            )


def _some(by_rank: ByRank, ranks: Sequence[int]) -> bool | None:
    return agree(by_rank, [rank for rank in ranks if rank in by_rank])


def factors_of_ranks(case: Case, finding: Finding, said: Any) -> Iterator[Claim]:
    """Factors by which ranks scaled their gradients: what backward left is kept as a digest."""
    yield Claim(f"factors {said}", None, "gradients as backward left them are not kept")


EVIDENCE: dict[str, Recompute] = {
    "values": sides,
    "relative_distance": relative_distance,
    "same_on": same_on,
    "equal_inputs": equal_inputs,
    "siblings_that_agree": agree_elsewhere,
    "scaled": scaled,
    "random_numbers": random_numbers,
    "gradient_rms": gradient_rms,
    "moved": moved,
    "equal_to": equal_to,
    "inputs": lambda c, f, listed: collective_sides(c, f, listed, "input"),
    "outputs": lambda c, f, listed: collective_sides(c, f, listed, "output"),
    "spoiled_values": spoiled_values,
    "inputs_are_finite": inputs_are_finite,
    "siblings_rms": siblings_rms,
    "parameters": parameters,
    "factors": factors_of_ranks,
}
NO_CLAIM = {
    "layout", "rank_resolution", "notes", "incarnation", "groups", "unordered", "op", "reduce",
    "group", "members", "axis", "data_axis", "sides", "summed_in", "gathered_by", "options",
    "collective", "caught_through", "tied_to", "stalls", "passes", "stages", "called", "not_called",
    "sender", "receiver", "micro_batch",
}  # fmt: skip
"""Evidence that names places, records of collectives or settings, and no value."""


# ---- sentences -----------------------------------------------------------------------------------


def printed_sides(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`(ranks 0,2: mean 0.1; rank 1: l2 0.2)`."""
    for ranks, name, number in re.findall(
        r"ranks? ([\d,-]+): (\w+) (-?[\d.]+(?:e[+-]?\d+)?|nan|-?inf)", match[0]
    ):
        said = float(number)

        def test(by: ByRank, ranks: str = ranks, name: str = name, said: float = said) -> Any:
            listed = ranks_in(ranks)
            if any(rank not in by for rank in listed):
                return None
            held = [numbers(by[rank]) for rank in listed]
            return all(is_near(said, h.get(name, math.nan), h.get("rms", 0), 1e-3) for h in held)

        yield from at_place(case, Place.of(finding), f"ranks {ranks}: {name} {number}", test)


def differ(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Ranks hold unlike values."""
    ranks = members_of(finding)
    yield from at_place(
        case,
        Place.of(finding),
        f"{match[0]}: ranks {ranks} differ",
        lambda by: None if (told := _some(by, ranks)) is None else not told,
    )


def other_than_the_rest(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Some ranks hold another value than all others, which agree: within their groups at least."""
    odd = finding["ranks"]
    rest = [rank for rank in members_of(finding) if rank not in odd]

    def test(by: ByRank) -> bool | None:
        held = [rank for rank in rest if rank in by]
        if not held or any(rank not in by for rank in odd):
            return None
        equal = [[r for r in held if same_bytes(by[r], by[rank])] for rank in held]
        # of several groups each has a majority of its own
        return all(not same_bytes(by[r], by[o]) for r in held for o in odd) and (
            len(equal[0]) == len(held) or all(len(group) > 1 for group in equal)
        )

    yield from at_place(case, Place.of(finding), f"{match[0]} (others: {rest})", test)


def agrees_there(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`though in layers.0 they hold the same`."""
    yield from agree_elsewhere(case, finding, [match[1]])


def reduced_over(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """A parameter begins unlike, and its first gradient is one."""
    ranks, place = ranks_in(match[1]), Place.of(finding)
    steps = [step for step in case.test.trace.steps if step.mode.word == "train"]
    for step in steps:
        there = replace(
            place, phase="grads", step=step.step, mode="train", slot=f"grad:{place.slot[6:]}"
        )
        if case.test.all_of(there):
            yield from at_place(case, there, match[0], lambda by: agree(by, ranks))
            return
    yield Claim(match[0], None, "no gradient was kept")


def changed_apart(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """A buffer was equal before the step, and each rank changed it in another way."""
    place, ranks = Place.of(finding), members_of(finding)
    before, after = case.test.before(place), case.test.one(place)
    was, has = agree(before, ranks), agree(after, ranks)
    answer = None if was is None or has is None else was and not has
    yield Claim("held the same before, and not now", answer, "the tensors say otherwise")


def other_changed_and_agrees(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`while codes:buffer:sums changed and agrees on them`."""
    place, ranks = Place.of(finding).named(match[1]), members_of(finding)
    before, after = case.test.before(place), case.test.one(place)
    if agree(after, ranks) is None or any(rank not in before for rank in ranks):
        yield Claim(match[0], None, "not kept")
        return
    is_changed = not same_bytes(before[ranks[0]], after[ranks[0]])
    yield Claim(match[0], is_changed and agree(after, ranks), "the tensors say otherwise")


def other_parameters(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`all 3 other parameters of these ranks are replicas or placed by DTensors`."""
    place, ranks = Place.of(finding), members_of(finding)
    others = [
        there
        for there in case.test.owned(place, "param:")
        if (there.path, there.slot) != (place.path, place.slot)
    ]
    held = [by for there in others for by in case.test.all_of(there)[:1]]
    yield Claim(f"{match[1]} other parameters", len(held) == int(match[1]), f"{len(held)}")
    unlike = [by for by in held if _some(by, ranks) is False]
    yield Claim("the others are replicas", not unlike or None, "some differ: are they DTensors?")


def recomputed_otherwise(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Forward and recomputation had the same inputs and gave other values."""
    place = replace(Place.of(finding), phase="recompute")
    slots = [s for s in case.test.slots(place) if s.startswith("input")]
    for slot in [*slots, *([place.slot] if place.slot else [])]:
        is_input = slot.startswith("input")
        news, olds = (
            case.test.all_of(replace(place, slot=slot, phase=phase))
            for phase in ("recompute", "forward")
        )
        answers = [
            same_bytes(new[rank], old[rank])
            for new in news
            for old in olds
            for rank in finding["ranks"]
            if rank in new and rank in old
        ]
        text = f"{slot} of the recomputation is {'that' if is_input else 'not that'} of forward"
        answer = (any(answers) if is_input else not all(answers)) if answers else None
        yield Claim(text, answer, "not kept, or the tensors say otherwise")


def closer_than_backward(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """What backward left is kept as a digest alone."""
    yield Claim(match[0], None, "gradients as backward left them are not kept")


def counted(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """`all 20 gradients of the step`, `6 of 20 parameters that it begins with`."""
    place = Place.of(finding)
    kind, _, _ = place.slot.partition(":")
    owned = [case.test.all_of(there) for there in case.test.owned(place, f"{kind}:")]
    ranks = set(finding["ranks"])
    total = sum(any(not ranks.isdisjoint(by) for by in found) for found in owned)
    named = len(finding["evidence"].get("parameters", ()))
    said = int(match["total"])
    yield Claim(f"{said} in all", said == total if total else None, f"there are {total}")
    if match["part"]:
        yield Claim(f"{match['part']} of them", int(match["part"]) == named, f"named: {named}")
    else:
        yield Claim("all of them", named == total if total else None, f"named: {named}")


def no_gradient(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Ranks have no gradient of a parameter that others have."""
    place = Place.of(finding)
    there = replace(place, phase="grads", slot=f"grad:{place.slot.partition(':')[2]}")
    held = case.test.one(there)
    answer = not set(finding["ranks"]) & set(held) and bool(held)
    yield Claim(match[0], answer if held else None, "a gradient was kept there")


def did_not_move(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """The parameter is what it was before."""
    yield from moved(case, finding, "")


def same_everywhere(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """What a sum in backward was handed is bitwise equal on its ranks."""
    place, ranks = Place.of(finding), ranks_in(match["ranks"])
    there = [replace(place, slot=s) for s in case.test.slots(replace(place, slot=""))]
    found = [by for p in there if p.slot.startswith("input") for by in case.test.all_of(p)]
    yield Claim(match[0], any_call(found, lambda by: agree(by, ranks)), "not kept")


def same_forward(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Ranks were handed the same batch and made the same output of it."""
    place, ranks = Place.of(finding), members_of(finding)
    root = replace(place, path="", slot="", phase="forward", micro_batch=None)
    wanted = ("input", "output") if "forward" in match[0] else ("input",)
    for slot in case.test.slots(root):
        if slot.startswith(wanted):
            yield from at_place(
                case, replace(root, slot=slot), f"{slot} is equal", lambda by: agree(by, ranks)
            )


def share_rows(case: Case, finding: Finding, match: re.Match[str]) -> Iterator[Claim]:
    """Rows of the batch that other ranks have as well."""
    held = case.test.one(Place.of(finding))
    rows = [(rank, row) for rank, t in held.items() for row in t]
    shared = sum(any(r != rank and same_bytes(row, o) for r, o in rows) for rank, row in rows)
    said = tuple(int(n.replace(",", "")) for n in (match[1], match[2]))
    yield Claim(match[0], said == (shared, len(rows)) if rows else None, f"{shared}, {len(rows)}")


SENTENCES: list[tuple[str, Recompute]] = [
    (r"\((?:ranks? [\d,-]+: \w+ [^;()]+(?:; |))+(?:\.\.\.)?\)", printed_sides),
    (r"should hold the same and do not", differ),
    (r"holds? another value than the other replicas", other_than_the_rest),
    (
        r"calls? optimizer\.step\(\) with gradients that (?:no reduction made equal|are one on)",
        differ,
    ),
    (r"each with gradients of their own data", differ),
    (r"hold different values", differ),
    (r"though in (\S+) they hold the same", agrees_there),
    (r"though the gradient is reduced over ranks? ([\d,-]+)", reduced_over),
    (r"held the same before this step, and each changed it in another way", changed_apart),
    (r"while (\S+) changed and agrees on them", other_changed_and_agrees),
    (r"all (\d+) other parameters of these ranks are replicas", other_parameters),
    (r"from the same inputs", recomputed_otherwise),
    (r"lie closer than what backward left", closer_than_backward),
    (r"was not moved by the optimizer step|did not move", did_not_move),
    (r"no optimizer holds it", did_not_move),
    (r"had no gradient of it, the other replicas had one", no_gradient),
    (r"of ranks (?P<ranks>[\d,-]+): adds up what all of them hold alike", same_everywhere),
    (r"had the same (?:forward|inputs), but not the same", same_forward),
    (r"share ([\d,]+) of the ([\d,]+) rows", share_rows),
    (
        r"the same kind of fault: (?:all|(?P<part>\d+) of the) (?P<total>\d+) "
        r"(?:gradients|parameters|buffers)",
        counted,
    ),
]


def of_report(case: Case) -> Iterator[Claim]:
    """How many values the trace holds, and how many can be held to other ranks at the most."""
    values = {
        (id(view.step), node.row, view.slot)
        for node in case.test.order
        for view in node.slots
        if view.dtype != "python" and node.phase.word != "accumulated"
    }  # what backward left is beside the step
    said = case.report["recorded"]
    yield Claim(f"{said} values", said == len(values), f"{len(values)}")
    told = case.report["held_to_others"] + case.report["held_to_finite_only"]
    yield Claim("no more were judged than there are", told <= said, f"{told} of {said}")
