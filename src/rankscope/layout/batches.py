"""Plans of data-parallel peers as one: batches laid behind each other, replicas side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from rankscope.layout.placement import Mesh
from rankscope.layout.plan import AssemblyPlan, Box, Obstacle, Refusal, ranks_words


def join_batches(
    mesh: Mesh, axes: Sequence[str], plans: Sequence[AssemblyPlan], dim: int = 0
) -> AssemblyPlan | Refusal:
    """Return the plan of all data-parallel batches in one tensor, in rank order along the batch
    dim.

    Args:
        mesh: mesh of the run that has the data axes.
        axes: names of the data axes.
        plans: one per place along them, in any order, as `plan_assemblies` gives them.
        dim: the batch dim; the batches may differ in size along it and in nothing else.
    """
    wanted = [mesh.axes.index(axis) for axis in axes]
    by_place: dict[tuple[int, ...], AssemblyPlan] = {}
    for plan in plans:
        places = set()
        for rank in plan.ranks:
            at = mesh.coordinate(rank)
            places.add(tuple(at[axis] for axis in wanted) if at else None)
        place = places.pop()
        if places or place is None:
            text = f"{ranks_words(plan.ranks)} hold one value, but are not one data-parallel peer"
            return Refusal.about(plan.ranks, Obstacle.BATCH, text)
        if place in by_place:
            both = {*by_place[place].ranks, *plan.ranks}
            text = f"{ranks_words(both)} are one data-parallel peer, but hold several values"
            return Refusal.about(both, Obstacle.BATCH, text)
        by_place[place] = plan
    every = list(itertools.product(*(range(mesh.shape[axis]) for axis in wanted)))
    absent = [
        rank for at, rank in mesh.places() if tuple(at[axis] for axis in wanted) not in by_place
    ]
    if absent:
        text = f"no batch was recorded on {ranks_words(absent)}"
        return Refusal.about(absent, Obstacle.MISSING_RANK, text)
    return _concatenated([by_place[place] for place in every], dim)


def join_replicas(plans: Sequence[AssemblyPlan]) -> AssemblyPlan | Refusal:
    """Return the plan of one tensor that several sets of ranks hold each, so that all are compared.

    Args:
        plans: one per set, as `plan_assemblies` gives them.
    """
    first = plans[0]
    ranks = sorted({rank for plan in plans for rank in plan.ranks})
    parts = [{(box.ranges, box.reductions): box for box in plan.boxes} for plan in plans]
    for plan, own in zip(plans, parts):
        is_alike = plan.global_shape == first.global_shape and own.keys() == parts[0].keys()
        if not is_alike or any(
            len(own[key].summands) != len(box.summands) for key, box in parts[0].items()
        ):
            text = f"{ranks_words(plan.ranks)} and {ranks_words(first.ranks)} cut it differently"
            return Refusal.about(ranks, Obstacle.DISAGREEMENT, text)
    boxes = [
        replace(
            box,
            summands=tuple(
                tuple(sorted(itertools.chain.from_iterable(same)))
                for same in zip(*(own[key].summands for own in parts))
            ),
        )
        for key, box in parts[0].items()
    ]
    return AssemblyPlan(
        global_shape=first.global_shape,
        boxes=tuple(boxes),
        ranks=tuple(ranks),
        missing=tuple(sorted({rank for plan in plans for rank in plan.missing})),
    )


def _concatenated(plans: Sequence[AssemblyPlan], dim: int) -> AssemblyPlan | Refusal:
    ranks = sorted({rank for plan in plans for rank in plan.ranks})
    first = plans[0].global_shape
    for plan in plans:
        shape = plan.global_shape
        if dim >= len(shape):
            text = f"a value of shape {list(shape)} has no batch dim {dim}"
            return Refusal.about(plan.ranks, Obstacle.BATCH, text)
        if len(shape) != len(first) or _without(shape, dim) != _without(first, dim):
            text = f"batches of shapes {list(first)} and {list(shape)} differ beyond dim {dim}"
            return Refusal.about(ranks, Obstacle.BATCH, text)
    boxes: list[Box] = []
    offset = 0
    for plan in plans:
        for box in plan.boxes:
            moved = tuple((start + offset, stop + offset) for start, stop in box.ranges[dim])
            boxes.append(replace(box, ranges=(*box.ranges[:dim], moved, *box.ranges[dim + 1 :])))
        offset += plan.global_shape[dim]
    return AssemblyPlan(
        global_shape=(*first[:dim], offset, *first[dim + 1 :]),
        boxes=tuple(boxes),
        ranks=tuple(ranks),
        missing=tuple(sorted({rank for plan in plans for rank in plan.missing})),
    )


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
