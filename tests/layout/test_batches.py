"""Batches of data-parallel peers, laid behind each other without a tensor anywhere."""

from __future__ import annotations

import pytest

from rankscope.errors import LayoutError
from rankscope.layout.placement import Layout, LayoutSource, Mesh, parse_placement
from rankscope.layout.plan import AssemblyPlan, join_batches, join_replicas, plan_assembly

SQUARE = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))
UNKNOWN = Layout(source=LayoutSource.UNKNOWN)


def batch(rank: int, *shape: int) -> AssemblyPlan:
    return plan_assembly((), UNKNOWN, {rank: shape})


def test_batches_lie_behind_each_other_in_rank_order_along_the_batch_dim() -> None:
    mesh = Mesh(axes=("dp",), shape=(3,), ranks=(7, 3, 5))
    joined = join_batches(mesh, ["dp"], [batch(3, 4, 1), batch(5, 4, 0), batch(7, 4, 2)], 1)
    assert joined.global_shape == (4, 3)
    assert joined.ranks == (3, 5, 7)
    assert [(box.summands, box.ranges) for box in joined.boxes] == [
        (((7,),), (((0, 4),), ((0, 2),))),
        (((3,),), (((0, 4),), ((2, 3),))),
    ]


def test_two_data_axes_join_in_mesh_order() -> None:
    mesh = Mesh(axes=("replicate", "shard"), shape=(2, 2), ranks=(0, 1, 2, 3))
    plans = [batch(rank, 2) for rank in (3, 1, 0, 2)]
    joined = join_batches(mesh, ["replicate", "shard"], plans)
    assert [box.summands[0][0] for box in joined.boxes] == [0, 1, 2, 3]


OVER_DP = Layout(
    source=LayoutSource.DTENSOR,
    mesh=SQUARE,
    placements=(parse_placement("Shard(0)"), parse_placement("Replicate()")),
)
"""A value that is global over the data axis already."""


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ([batch(0, 2)], "no batch was recorded on ranks 2, 3"),
        ([batch(0, 2), batch(1, 2), batch(2, 2)], "hold several values"),
        ([batch(0), batch(2)], r"shape \[\] has no batch dim 0"),
        ([batch(0, 2, 3), batch(2, 2, 4)], "differ beyond dim 0"),
        ([batch(0, 2), batch(2, 2, 1)], "differ beyond dim 0"),
        ([batch(0, 2), batch(9, 2)], "not one data-parallel peer"),
        (
            [plan_assembly((4,), OVER_DP, dict.fromkeys(range(4), (2,)))],
            "not one data-parallel peer",
        ),
    ],
)
def test_values_that_are_not_batches_of_one_another_are_refused(
    plans: list[AssemblyPlan], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        join_batches(SQUARE, ["dp"], plans)


def row(first: int, *placements: str) -> AssemblyPlan:
    mesh = Mesh(axes=("tp",), shape=(2,), ranks=(first, first + 1))
    placed = tuple(map(parse_placement, placements))
    layout = Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=placed)
    shape = (2,) if placements == ("Shard(0)",) else (4,)
    return plan_assembly((4,), layout, {first: shape, first + 1: shape})


def test_replicas_are_read_together_part_by_part_and_summand_by_summand() -> None:
    joined = join_replicas([row(2, "Shard(0)"), row(0, "Shard(0)")])
    assert joined.ranks == (0, 1, 2, 3) and joined.global_shape == (4,)
    assert [box.summands for box in joined.boxes] == [((0, 2),), ((1, 3),)]
    joined = join_replicas([row(0, "Partial(sum)"), row(2, "Partial(sum)")])
    assert [box.summands for box in joined.boxes] == [((0, 2), (1, 3))]


@pytest.mark.parametrize("other", [row(2, "Replicate()"), row(2, "Partial(sum)"), batch(2, 5)])
def test_what_is_cut_otherwise_is_no_replica(other: AssemblyPlan) -> None:
    with pytest.raises(LayoutError, match="cut it differently"):
        join_replicas([row(0, "Shard(0)"), other])
