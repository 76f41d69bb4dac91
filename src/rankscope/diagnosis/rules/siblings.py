"""What is computed in several places comes out alike: by sibling modules, and when recomputed.

An output of `layers.1.attn.o_proj` that agrees bit by bit on ranks with the same root inputs,
though its inputs or weights differ, is replicated by a reduction; a sibling that does not agree has
lost its reduction. Of an output that agrees by itself this is said only where two siblings or more
agree and one does not: random numbers of their own look alike.

Replicas that evaluate on the same rows answer alike, and so do ranks behind a reduction inside a
module: a strict majority that does, bit by bit, is right, and the others hold something else.

A module that gathers parts over ranks and hands out as many elements follows from the gather alone:
where its outputs are multiples of each other and not equal, each rank has read them with a scale of
its own. Ranks may put gathered parts in an order of their own, or change them otherwise.

A recomputed call is held to the forward call of its path and micro-batch that had the same inputs.
Checkpointing stops once it has what backward needs, so calls that are missing are no fault; as far
as it came, what a module hands to those inside it is held to what it handed them in forward: masks
that it draws itself are in no output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import (
    inferred_evidence,
    is_fine,
    is_multiple,
    is_within_rounding,
    minority,
    rounding_of,
    sides_text,
)
from rankscope.diagnosis.evidence.issuedcollectives import issues_in, known_collectives
from rankscope.diagnosis.evidence.replicas import clusters
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    is_below,
    sibling_path,
)
from rankscope.record.call import Mode
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.tree.jsontext import statistic

_FEWEST: Final = 2
_FEWEST_VOTERS: Final = 3


class _Sibling(NamedTuple):
    """One output of one of several sibling calls, over groups of ranks of one size."""

    values: SlotValues
    agrees: Array
    """[groups]: 1 the same bytes, 0 not, -1 unknown."""
    inputs_agree: Array
    """[groups]; -1 also where there are no tensor inputs."""
    is_by_itself: Array
    """[groups]: nothing that goes in differs, it would agree without a reduction."""


def lost_reductions(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every output that is not replicated where its siblings' are."""
    handed = step_view.same_inputs
    for size in sorted({len(group) for group in handed}):
        groups = np.stack([group for group in handed if len(group) == size])
        for family in _families(step_view, groups):
            yield from _judged(step_view, family, groups)


def _families(step_view: JudgedStep, groups: Array) -> Iterable[list[_Sibling]]:
    sharded = step_view.life.replicas.sharded_paths
    families: dict[tuple[Any, ...], list[_Sibling]] = {}
    for call in step_view.of(Phase.FORWARD, Phase.BACKWARD):
        outputs = [
            values
            for values in call.outputs
            if values.source == "unknown"
            and not values.is_constant
            and step_view.context.layouts.same(values) is None
        ]
        if not outputs:
            continue
        agreements = [values.agreements(groups) for values in call.inputs]
        unknown = np.full(len(groups), -1, np.int8)
        inputs = np.stack(agreements).min(0) if agreements else unknown
        below = f"{call.path}." if call.path else ""
        meshes = _meshes_inside(call)
        is_cut = any(p == call.path or p.startswith(below) for p in sharded) or bool(meshes)
        for values in outputs:
            key = (
                sibling_path(call.path), call.node.class_name, values.slot, call.phase,
                call.micro_batch, call.ordinal, meshes,
            )  # fmt: skip
            by_itself = (inputs != 0) & (not is_cut)
            sibling = _Sibling(values, values.agreements(groups), inputs, by_itself)
            families.setdefault(key, []).append(sibling)
    return families.values()


def _meshes_inside(call: CallView) -> frozenset[str]:
    """Return the meshes of DTensors inside a call: siblings on other meshes do otherwise."""
    meshes: set[str] = set()
    waiting = [call]
    while waiting:
        inner = waiting.pop()
        waiting.extend(inner.children)
        dtensors = (values for values in inner.slots.values() if values.source == "dtensor")
        meshes.update(view.mesh_name for values in dtensors for view in values.views)
    return frozenset(meshes)


def _judged(step_view: JudgedStep, family: list[_Sibling], groups: Array) -> Iterator[Candidate]:
    members, *rows_of = zip(*family)
    agrees, inputs, by_itself = map(np.stack, rows_of)
    if not (agrees == 1).any():
        return
    step_view.context.coverage.applied(*members)
    lost_by_row: dict[int, list[tuple[Array, list[str]]]] = {}
    for column in np.flatnonzero((agrees == 1).any(0) & (agrees == 0).any(0)).tolist():
        for answer in (1, 0, -1):
            rows = np.flatnonzero(inputs[:, column] == answer)
            agreeing = rows[agrees[rows, column] == 1]
            lost = rows[agrees[rows, column] == 0]
            is_telling = 0 < len(lost) <= len(agreeing)
            if by_itself[agreeing, column].any():
                is_telling = len(lost) == 1 and len(agreeing) >= _FEWEST
            group = groups[column]
            for row in lost.tolist() if is_telling else ():
                if not is_within_rounding(members[row], [group]):
                    paths = [members[index].call.path for index in agreeing.tolist()]
                    lost_by_row.setdefault(row, []).append((group, paths))
    for row, lost_on in lost_by_row.items():
        values, paths, is_one = members[row], lost_on[0][1], len(lost_on) == 1
        ranks = np.unique(np.concatenate([group for group, _ in lost_on]))
        listed: dict[str, Any] = {}
        if not is_one:
            listed["groups"] = [ranks_text(group) for group, _ in lost_on]
        yield step_view.candidate(
            values,
            Kind.REPLICA,
            ranks,
            f"{ranks_named(ranks)} hold different values"
            f"{'' if is_one else ' within their groups'}, though in {paths[0]} they hold "
            f"the same ({sides_text(values, lost_on[0][0])})",
            evidence=partial(
                inferred_evidence, values, ranks, siblings_that_agree=paths[:4], **listed
            ),
            priority=1,
        )


# ---- outputs that most replicas give -------------------------------------------------------------

_OUTVOTED_ADVICE: Final = (
    "Look at what this rank holds there when it evaluates: a parameter or buffer that it did not "
    "take up, train mode (dropout), random numbers of its own."
)
_OWN_PART_ADVICE: Final = (
    "The module reduces over these ranks, and most hand out one value behind it: this rank goes on "
    "with a part of its own where the others take what the reduction gave."
)


def outvoted_outputs(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for the first innermost module that most replicas answer alike and some do
    not: handed the same in an evaluation, or behind a reduction inside it, where ranks that were
    handed unlike values answer alike. What each draws for itself has no majority."""
    life = step_view.life
    lines = [*life.data_parallel_lines, *(life.replicas.lines if life.averages else ())]
    is_eval = step_view.mode is Mode.EVAL
    fed_alike = [
        group
        for group in (step_view.same_inputs if is_eval else ())
        if any(np.isin(group, line).all() for line in lines)
    ]
    outvoted: dict[int, tuple[SlotValues, Array]] = {}
    for call in step_view.of(Phase.FORWARD):
        groups = [
            group
            for group in fed_alike
            if np.isin(group, call.ranks).all() and call.is_given_the_same(group)
        ]
        for group, values in itertools.product([*groups, *_reduced_over(call)], call.outputs):
            if len(group) < _FEWEST_VOTERS or not values.has(group):
                continue
            if values.agree(group) is not False or step_view.context.layouts.is_own(values):
                continue
            odd = minority(group, values.hashes[values.at(group)])
            if len(odd) == len(group) or is_within_rounding(values, [group]):
                continue
            if is_fine(values, values.place(int(np.setdiff1d(group, odd)[0]))):
                outvoted.setdefault(id(call), (values, odd))
                outvoted.pop(id(call.parent), None)
    for values, odd in [*outvoted.values()][:1]:
        verb = "gives" if len(odd) == 1 else "give"
        members = np.sort(np.concatenate([odd, *clusters(values)]))
        yield step_view.candidate(
            values,
            Kind.REPLICA,
            odd,
            f"{ranks_named(odd)} {verb} another output than the other replicas "
            f"({sides_text(values, values.ranks)})",
            advice=_OUTVOTED_ADVICE if is_eval else _OWN_PART_ADVICE,
            evidence=partial(inferred_evidence, values, values.ranks, is_resolved=True),
            members=members,
        )


def _reduced_over(call: CallView) -> Iterator[Array]:
    """Yield the ranks of a reduction that a call itself makes, where unlike values went in."""
    for child in call.children:
        for issue in issues_in(child) if child.phase is Phase.COLLECTIVE else ():
            ranks = issue.ranks
            is_whole = issue.op == "all_reduce" and len(ranks) == len(issue.members)
            is_unlike = any(values.agree(ranks) is False for values in issue.call.inputs)
            if is_whole and is_unlike and all(v.agree(ranks) for v in issue.call.outputs):
                yield ranks


# ---- behind gathers ------------------------------------------------------------------------------

_GATHERS: Final = frozenset({"all_gather", "all_gather_into_tensor"})
_SCALE_ADVICE: Final = (
    "Each rank reads what all gathered with a number of its own: take its maximum, or its mean, "
    "over these ranks before the parts are made, or gather the numbers with the parts."
)


def scales_behind_gathers(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every module that gathered the same on its ranks and hands out what
    differs between them by a factor alone."""
    replicas = step_view.life.replicas
    for issue in known_collectives(step_view):
        call, ranks = issue.call.parent, issue.ranks
        is_whole = len(ranks) == len(issue.members) > 1
        if issue.op not in _GATHERS or call is None or call.phase is not Phase.FORWARD:
            continue
        parts = [part for part in issue.call.outputs if part.are_known(ranks)]
        if not is_whole or not parts or not all(part.agree(ranks) for part in parts):
            continue
        total = sum(int(part.counts[0]) for part in parts)
        owners = (path for path in replicas.sharded_paths if is_below(path, call.path))
        for values in () if any(owners) else call.outputs:
            is_gathered = values.are_known(ranks) and set(values.counts.tolist()) == {total}
            if not is_gathered or step_view.context.layouts.same(values) is not None:
                continue
            step_view.context.coverage.applied(values)
            is_unlike = values.agree(ranks) is False and not is_within_rounding(values, [ranks])
            if not is_unlike or not is_multiple(values, values.at(ranks)):
                continue
            buffers = _unlike_buffers(step_view, call.path, ranks)
            more = f"; {', '.join(buffers)} of it differs on them as well" if buffers else ""
            yield step_view.candidate(
                values,
                Kind.REPLICA,
                minority(ranks, values.hashes[values.at(ranks)]),
                f"{ranks_named(ranks)} gathered the same and hand out the same up to a factor of "
                f"their own ({sides_text(values, ranks)}){more}",
                advice=_SCALE_ADVICE,
                evidence=partial(inferred_evidence, values, ranks, gathered_by=issue.slot),
                members=ranks,
                priority=1,
            )


def _unlike_buffers(step_view: JudgedStep, path: str, ranks: Array) -> list[str]:
    calls = [call for call in step_view.named(path) if call.phase is Phase.PARAMS]
    slots = [values for call in calls for values in call.slots.values()]
    return [v.slot for v in slots if v.slot.startswith("buffer:") and v.agree(ranks) is False]


# ---- recomputation -------------------------------------------------------------------------------


_FEW: Final = 4


def changed_recomputations(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every output that came out otherwise when it was recomputed, and for
    the first input that a checkpointed module handed on otherwise."""
    for recomputed in step_view.of(Phase.RECOMPUTE):
        firsts = [
            call
            for call in step_view.named(recomputed.path)
            if call.phase is Phase.FORWARD and call.micro_batch == recomputed.micro_batch
        ]
        for values in recomputed.outputs:
            olds = [
                (first, first.slots[values.slot]) for first in firsts if values.slot in first.slots
            ]
            wrong, first = _changed(step_view, recomputed, values, olds)
            if first is not None:
                text = "recomputed another value than forward had, from the same inputs"
                yield _recomputed(step_view, values, first, wrong, text)
        for values in _handed_on(recomputed) if any(recomputed.inputs) else ():
            olds = [
                (first, call.slots[values.slot])
                for first in firsts
                for call in first.children
                if call.path == values.call.path and values.slot in call.slots
            ]
            wrong, first = _changed(step_view, recomputed, values, olds)
            if first is not None:
                text = f"handed {values.name} another value in its recomputation than in forward"
                of_block = replace(
                    _recomputed(step_view, values, first, wrong, f"{text}, from the same inputs"),
                    path=recomputed.path,
                    slot="",
                )
                yield of_block
                break


def _handed_on(call: CallView) -> Iterator[SlotValues]:
    """Yield what modules inside a call were handed that none of them had made."""
    made = [output for child in call.children for output in child.outputs]
    for values in (values for child in call.children for values in child.inputs):
        if not any(output.equals(values, values.ranks) for output in made):
            yield values


def _changed(
    step_view: JudgedStep,
    recomputed: CallView,
    values: SlotValues,
    olds: Sequence[tuple[CallView, SlotValues]],
) -> tuple[Array, SlotValues | None]:
    """Return the ranks on which a recomputed value equals no old value of a call with the same
    inputs, and one of these old values."""
    ranks = values.ranks
    answers = np.full((len(olds), len(ranks)), -1, np.int8)
    for answer, (call, old) in zip(answers, olds):
        has_inputs = np.ones(len(ranks), bool)
        for entered in recomputed.inputs:
            if entered.slot in call.slots:
                has_inputs &= _alike(entered, call.slots[entered.slot], ranks) != 0
        answer[has_inputs] = _alike(values, old, ranks)[has_inputs]
    is_compared = (answers >= 0).any(axis=0)
    if is_compared.any():
        step_view.context.coverage.applied(values)
    wrong = np.flatnonzero(is_compared & ~(answers == 1).any(axis=0))
    if not len(wrong):
        return ranks[:0], None
    return ranks[wrong], olds[int((answers[:, wrong[-1]] >= 0).argmax())][1]


def _recomputed(
    step_view: JudgedStep, values: SlotValues, first: SlotValues, ranks: Array, text: str
) -> Candidate:
    return step_view.candidate(
        values,
        Kind.RECOMPUTE,
        ranks,
        f"{ranks_named(ranks)} {text}",
        evidence=partial(_both_values, first, values, ranks),
    )


def _both_values(first: SlotValues, values: SlotValues, ranks: Array) -> dict[str, Any]:
    return {
        "values": [
            {
                "rank": rank,
                "phase": value.call.phase.word,
                **{n: statistic(float(value.column(n)[place])) for n in ("mean", "std", "l2")},
                "hash": f"{int(value.hashes[place]):016x}",
            }
            for rank in ranks.tolist()[:_FEW]
            for value in (first, values)
            for place in [value.place(rank)]
        ]
    }


@np.errstate(invalid="ignore", over="ignore")
def _alike(values: SlotValues, old: SlotValues, ranks: Array) -> Array:
    """Return for every rank 1: alike within rounding, 0: not, -1: one is not known."""
    at, old_places = values.at(ranks), old.at(ranks)
    is_known = (at >= 0) & (old_places >= 0) & values.is_known[at] & old.is_known[old_places]
    between = values.column("sketch")[at] - old.column("sketch")[old_places]
    distances = np.sqrt(np.mean(between**2, axis=1))
    norms = np.maximum(values.column("l2")[at], old.column("l2")[old_places])
    is_near = np.isfinite(distances) & (distances <= rounding_of(values.dtype) * norms)
    is_same = (values.hashes[at] == old.hashes[old_places]) | is_near
    return np.where(is_known, is_same & (values.counts[at] == old.counts[old_places]), -1)
