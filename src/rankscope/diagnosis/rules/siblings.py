"""What is computed in several places comes out alike: by sibling modules, and when recomputed.

**Lost reductions.** Ranks had the same root inputs. An output of `layers.1.attn.o_proj` that agrees
bit by bit on them, though its inputs or weights differ, is replicated by a reduction; so one of
`layers.*.attn.o_proj` that is not has lost its reduction. Of an output that agrees by itself (same
inputs, same weights) this is said only where two siblings or more agree and one does not: random
numbers of their own look alike. Constants prove nothing.

**Recomputation.** A recomputed call is held to the forward call of its path and micro-batch that
had the same inputs on a rank (a module called twice is recomputed last call first). Calls that the
recomputation did not reach are no fault: checkpointing stops once it has what backward needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import (
    is_within_rounding,
    rounding_of,
    sides,
    sides_text,
)
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, sibling_path
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.tree.jsontext import statistic

_FEWEST: Final = 2


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
        outputs = [h for h in call.outputs if not _is_described(step_view, h) and not h.is_constant]
        if not outputs:
            continue
        inputs = _inputs_agree(call, groups)
        own = f"{call.path}." if call.path else ""
        meshes = _meshes_inside(call)
        is_cut = any(p == call.path or p.startswith(own) for p in sharded) or bool(meshes)
        for values in outputs:
            key = (
                sibling_path(call.path), call.node.class_name, values.slot, call.phase,
                call.micro_batch, call.ordinal, meshes,
            )  # fmt: skip
            by_itself = (inputs != 0) & (not is_cut)
            sibling = _Sibling(values, values.agreements(groups), inputs, by_itself)
            families.setdefault(key, []).append(sibling)
    return families.values()


def _is_described(step_view: JudgedStep, values: SlotValues) -> bool:
    return values.source != "unknown" or step_view.context.layouts.same(values) is not None


def _inputs_agree(call: CallView, groups: Array) -> Array:
    every = [values.agreements(groups) for values in call.inputs]
    return np.stack(every).min(0) if every else np.full(len(groups), -1, np.int8)


def _meshes_inside(call: CallView) -> frozenset[str]:
    """Return the meshes of DTensors inside a call: siblings on other meshes do otherwise."""
    meshes: set[str] = set()
    waiting = [call]
    while waiting:
        each = waiting.pop()
        waiting.extend(each.children)
        dtensors = (values for values in each.slots.values() if values.source == "dtensor")
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
        for like in (1, 0, -1):
            rows = np.flatnonzero(inputs[:, column] == like)
            agreeing = rows[agrees[rows, column] == 1]
            lost = rows[agrees[rows, column] == 0]
            if not _is_telling(agreeing, lost, bool(by_itself[agreeing, column].any())):
                continue
            group = groups[column]
            for row in lost.tolist():
                if not is_within_rounding(members[row], [group]):
                    paths = [members[other].call.path for other in agreeing.tolist()]
                    lost_by_row.setdefault(row, []).append((group, paths))
    for row, lost_on in lost_by_row.items():
        apart = [group for group, _ in lost_on]
        yield _candidate(step_view, members[row], apart, lost_on[0][1])


def _is_telling(agreeing: Array, lost: Array, is_by_itself: bool) -> bool:
    if not len(agreeing) or not len(lost):
        return False
    if is_by_itself:
        return len(lost) == 1 and len(agreeing) >= _FEWEST
    return len(lost) <= len(agreeing)


def _candidate(
    step_view: JudgedStep, values: SlotValues, groups: list[Array], paths: list[str]
) -> Candidate:
    ranks = np.unique(np.concatenate(groups))
    texts = [ranks_text(group) for group in groups]
    return step_view.candidate(
        values,
        Kind.REPLICA,
        ranks,
        f"{ranks_named(ranks)} hold different values"
        f"{' within their groups' if len(groups) > 1 else ''}, though in {paths[0]} they hold "
        f"the same ({sides_text(values, groups[0])})",
        evidence=lambda: {
            "layout": "inferred",
            "values": sides(values, ranks),
            "siblings_that_agree": paths[:4],
            "rank_resolution": "none",
            **({"groups": texts} if len(groups) > 1 else {}),
        },
        priority=1,
    )


# ---- recomputation -------------------------------------------------------------------------------


_FEW: Final = 4


def changed_recomputations(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every output that came out otherwise when it was recomputed."""
    for again in step_view.of(Phase.RECOMPUTE):
        firsts = [
            call
            for call in step_view.named(again.path)
            if call.phase is Phase.FORWARD and call.micro_batch == again.micro_batch
        ]
        for values in again.outputs:
            firsts_of = [
                (call, call.slots[values.slot]) for call in firsts if values.slot in call.slots
            ]
            answers = np.array(
                [_compared(again, call, values, old) for call, old in firsts_of], np.int8
            ).reshape(-1, len(values.ranks))
            is_compared = (answers >= 0).any(axis=0)
            if is_compared.any():
                step_view.context.coverage.applied(values)
            wrong = np.flatnonzero(is_compared & ~(answers == 1).any(axis=0))
            if len(wrong):
                _, first = firsts_of[int((answers[:, wrong[-1]] >= 0).argmax())]
                yield _recompute_candidate(step_view, values, first, values.ranks[wrong])


def _compared(again: CallView, call: CallView, values: SlotValues, old: SlotValues) -> Array:
    """Return for every rank what `_alike` does, and -1 where the inputs were others."""
    has_inputs = np.ones(len(values.ranks), bool)
    for given in again.inputs:
        if given.slot in call.slots:
            has_inputs &= _alike(given, call.slots[given.slot], values.ranks) != 0
    return np.where(has_inputs, _alike(values, old, values.ranks), -1)


@np.errstate(invalid="ignore", over="ignore")
def _alike(values: SlotValues, old: SlotValues, ranks: Array) -> Array:
    """Return for every rank 1: alike within rounding, 0: not, -1: one is not known."""
    at, there = values.at(ranks), old.at(ranks)
    is_known = (at >= 0) & (there >= 0) & values.is_known[at] & old.is_known[there]
    between = values.column("sketch")[at] - old.column("sketch")[there]
    apart = np.sqrt(np.mean(between**2, axis=1))
    norms = np.maximum(values.column("l2")[at], old.column("l2")[there])
    is_near = np.isfinite(apart) & (apart <= rounding_of(values.dtype) * norms)
    is_same = (values.hashes[at] == old.hashes[there]) | is_near
    return np.where(is_known, is_same & (values.counts[at] == old.counts[there]), -1)


def _recompute_candidate(
    step_view: JudgedStep, values: SlotValues, first: SlotValues, wrong: Array
) -> Candidate:
    def numbers(value: SlotValues, rank: int) -> dict[str, Any]:
        place = int(value.at(np.array([rank]))[0])
        return {
            "rank": rank,
            "phase": value.call.phase.word,
            **{n: statistic(float(value.column(n)[place])) for n in ("mean", "std", "l2")},
            "hash": f"{int(value.hashes[place]):016x}",
        }

    few = wrong.tolist()[:_FEW]
    return step_view.candidate(
        values,
        Kind.RECOMPUTE,
        wrong,
        f"{ranks_named(wrong)} recomputed another value than forward had, from the same inputs",
        evidence=lambda: {
            "values": [numbers(value, rank) for rank in few for value in (first, values)]
        },
    )
