"""Plans of data-parallel peers as one: batches laid behind each other, replicas side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from rankscope.errors import LayoutError
from rankscope.layout.placement import Mesh
from rankscope.layout.plan import AssemblyPlan, Box, ranks_words


def join_batches(
    mesh: Mesh, axes: Sequence[str], plans: Sequence[AssemblyPlan], dim: int = 0
) -> AssemblyPlan:
    """Return the plan of all data-parallel batches in one tensor, in rank order along the batch
    dim.

    Args:
        mesh: mesh of the run that has the data axes.
        axes: names of the data axes.
        plans: one per place along them, in any order, as `plan_assemblies` gives them.
        dim: the batch dim; the batches may differ in size along it and in nothing else.

    Raises:
        LayoutError: they are no batches of one another; says why.
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
            raise LayoutError(
                f"{ranks_words(plan.ranks)} hold one value, but are not one data-parallel peer"
            )
        if place in by_place:
            both = ranks_words({*by_place[place].ranks, *plan.ranks})
            raise LayoutError(f"{both} are one data-parallel peer, but hold several values")
        by_place[place] = plan
    absent = [
        rank for at, rank in mesh.places() if tuple(at[axis] for axis in wanted) not in by_place
    ]
    if absent:
        raise LayoutError(f"no batch was recorded on {ranks_words(absent)}")
    return _concatenated([by_place[place] for place in sorted(by_place)], dim)


def join_replicas(plans: Sequence[AssemblyPlan]) -> AssemblyPlan:
    """Return the plan of one tensor that several sets of ranks hold each. Raises LayoutError where
    they cut it differently."""
    first = plans[0]
    parts = [{(box.ranges, box.reductions): box for box in plan.boxes} for plan in plans]
    for plan, own in zip(plans, parts):
        is_alike = plan.global_shape == first.global_shape and own.keys() == parts[0].keys()
        if not is_alike or any(
            len(own[key].summands) != len(box.summands) for key, box in parts[0].items()
        ):
            raise LayoutError(
                f"{ranks_words(plan.ranks)} and {ranks_words(first.ranks)} cut it differently"
            )
    boxes = tuple(
        replace(
            box,
            summands=tuple(
                tuple(sorted(itertools.chain.from_iterable(same)))
                for same in zip(*(own[key].summands for own in parts))
            ),
        )
        for key, box in parts[0].items()
    )
    return _of_all(plans, first.global_shape, boxes)


def _concatenated(plans: Sequence[AssemblyPlan], dim: int) -> AssemblyPlan:
    first = plans[0].global_shape
    for plan in plans:
        shape = plan.global_shape
        if dim >= len(shape):
            raise LayoutError(f"a value of shape {list(shape)} has no batch dim {dim}")
        if (shape[:dim], shape[dim + 1 :]) != (first[:dim], first[dim + 1 :]):
            raise LayoutError(
                f"batches of shapes {list(first)} and {list(shape)} differ beyond dim {dim}"
            )
    boxes: list[Box] = []
    offset = 0
    for plan in plans:
        for box in plan.boxes:
            moved = tuple((start + offset, stop + offset) for start, stop in box.ranges[dim])
            boxes.append(replace(box, ranges=(*box.ranges[:dim], moved, *box.ranges[dim + 1 :])))
        offset += plan.global_shape[dim]
    return _of_all(plans, (*first[:dim], offset, *first[dim + 1 :]), tuple(boxes))


def _of_all(
    plans: Sequence[AssemblyPlan], shape: tuple[int, ...], boxes: tuple[Box, ...]
) -> AssemblyPlan:
    return AssemblyPlan(
        global_shape=shape,
        boxes=boxes,
        ranks=tuple(sorted({rank for plan in plans for rank in plan.ranks})),
        missing=tuple(sorted({rank for plan in plans for rank in plan.missing})),
    )
