"""What a plan says, and what it refuses, without a tensor anywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankscope.errors import LayoutError
from rankscope.layout.placement import Layout, LayoutSource, Mesh, Ranges, parse_placement
from rankscope.layout.plan import (
    Box,
    Piece,
    Reduction,
    pieces_of,
    plan_assemblies,
    plan_assembly,
)

SQUARE = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))
ROW = Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
CUBE = Mesh(axes=("a", "b", "c"), shape=(2, 2, 2), ranks=tuple(range(8)))
UNKNOWN = Layout(source=LayoutSource.UNKNOWN)


def laid(mesh: Mesh, *texts: str) -> Layout:
    placements = tuple(parse_placement(text) for text in texts)
    return Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=placements)


def everywhere(mesh: Mesh, *shape: int) -> dict[int, tuple[int, ...]]:
    return dict.fromkeys(mesh.ranks, shape)


def test_the_ranks_of_each_part_are_known_before_anything_is_recorded() -> None:
    pieces = pieces_of(CUBE, laid(CUBE, "Partial(sum)", "Shard(0)", "Replicate()").placements)
    assert pieces.parts == {(0, 0, 0): ((0, 1), (4, 5)), (0, 1, 0): ((2, 3), (6, 7))}
    assert pieces.reductions == (Reduction(op="sum", size=2, axis="a"),)


def test_replicas_of_a_shard_are_compared_and_summands_reduced() -> None:
    halves: tuple[tuple[Ranges, ...], ...] = ((((0, 2),),), (((2, 4),),))
    shards = laid(SQUARE, "Replicate()", "Shard(0)")
    assert plan_assembly((4,), shards, everywhere(SQUARE, 2)).boxes == (
        Box(ranges=halves[0], summands=((0, 2),)),
        Box(ranges=halves[1], summands=((1, 3),)),
    )
    sums = plan_assembly((4,), laid(SQUARE, "Partial(sum)", "Shard(0)"), everywhere(SQUARE, 2))
    by_dp = (Reduction(op="sum", size=2, axis="dp"),)
    assert sums.boxes == (
        Box(ranges=halves[0], summands=((0,), (2,)), reductions=by_dp),
        Box(ranges=halves[1], summands=((1,), (3,)), reductions=by_dp),
    )
    assert list(sums.reads) == [0, 2, 1, 3]


def test_partial_axes_are_reduced_in_torchs_order() -> None:
    """Mesh order, and from the last axis where the value is sharded too."""
    whole = laid(CUBE, "Partial(avg)", "Replicate()", "Partial(sum)")
    (box,) = plan_assembly((4,), whole, everywhere(CUBE, 4)).boxes
    assert [(r.axis, r.op) for r in box.reductions] == [("a", "avg"), ("c", "sum")]
    assert box.summands == ((0, 2), (4, 6), (1, 3), (5, 7))
    cut = laid(CUBE, "Partial(sum)", "Shard(0)", "Partial(sum)")
    box = plan_assembly((4,), cut, everywhere(CUBE, 2)).boxes[0]
    assert [r.axis for r in box.reductions] == ["c", "a"]
    assert box.summands == ((0,), (1,), (4,), (5,))


def test_an_axis_of_one_rank_reduces_nothing() -> None:
    mesh = Mesh(axes=("dp", "tp"), shape=(1, 2), ranks=(0, 1))
    layout = laid(mesh, "Partial(avg)", "Replicate()")
    (box,) = plan_assembly((3,), layout, everywhere(mesh, 3)).boxes
    assert box == Box(ranges=(((0, 3),),), summands=((0, 1),))


def test_a_strided_shard_goes_to_several_ranges() -> None:
    layout = laid(SQUARE, "StridedShard(0, split_factor=2)", "Shard(0)")
    boxes = plan_assembly((8,), layout, everywhere(SQUARE, 2)).boxes
    assert [(box.summands[0][0], box.ranges[0]) for box in boxes] == [
        (0, ((0, 2),)),
        (1, ((4, 6),)),
        (2, ((2, 4),)),
        (3, ((6, 8),)),
    ]
    alone = laid(ROW, "StridedShard(0, split_factor=2)")
    boxes = plan_assembly((8,), alone, everywhere(ROW, 4)).boxes
    assert boxes[0].ranges == (((0, 2), (4, 6)),)
    assert boxes[0].shape == (4,)


def test_the_shape_of_an_empty_shard_means_nothing() -> None:
    """FSDP2 over a tensor-parallel shard of no width leaves (0, 0)."""
    layout = laid(SQUARE, "Shard(0)", "Shard(0)")
    plan = plan_assembly((1, 3), layout, {0: (1, 3), 1: (0, 3), 2: (0, 0), 3: (0,)})
    assert [box.summands for box in plan.boxes] == [((0,),)]
    without = plan_assembly((1, 3), layout, {0: (1, 3)})
    assert without.missing == (), "nobody misses a rank that holds nothing"


def test_a_missing_replica_is_said_and_a_missing_part_is_refused() -> None:
    layout = laid(SQUARE, "Replicate()", "Shard(0)")
    plan = plan_assembly((4,), layout, dict.fromkeys((0, 1, 3), (2,)))
    assert plan.missing == (2,)
    assert [box.summands for box in plan.boxes] == [((0,),), ((1, 3),)]
    with pytest.raises(LayoutError, match="no value was recorded on ranks 1, 3"):
        plan_assembly((4,), layout, dict.fromkeys((0, 2), (2,)))


BLOCK = laid(SQUARE, "Shard(0)", "Shard(1)")


@pytest.mark.parametrize(
    ("layout", "shape", "shapes", "words"),
    [
        (
            laid(ROW, "MaskPartial(reduce_op=sum, offset_dim=0)"),
            (4,),
            everywhere(ROW, 4),
            r"MaskPartial\(.*reduced in a way of its own",
        ),
        (
            laid(ROW, "_NormPartial(reduce_op=sum, norm_type=2)"),
            (4,),
            everywhere(ROW, 4),
            "of its own",
        ),
        (
            laid(ROW, "Partial(premul_sum)"),
            (4,),
            everywhere(ROW, 4),
            "of its own",
        ),
        (
            laid(SQUARE, "Partial(sum)", "Partial(max)"),
            (4,),
            everywhere(SQUARE, 4),
            r"Partial\(max\) and Partial\(sum\) have no defined order",
        ),
        (
            laid(SQUARE, "Partial(sum)", "Replicate()"),
            (4,),
            {0: (4,), 1: (4,)},
            "no value was recorded on ranks 2, 3",
        ),
        (BLOCK, (4, 4), {}, "ranks 0, 1, 2, 3"),
        (
            BLOCK,
            (4, 4),
            {**everywhere(SQUARE, 2, 2), 3: (2, 3)},
            r"rank 3 holds shape \[2, 3\], its layout says \[2, 2\]",
        ),
        (
            BLOCK,
            (4, 4),
            {**everywhere(SQUARE, 2, 2), 3: (0, 0)},
            r"rank 3 holds shape \[0, 0\]",
        ),
        (
            laid(ROW, "Replicate()"),
            (4,),
            {0: (4,), 1: (2,)},
            "rank 1 holds",
        ),
        (
            laid(ROW, "Shard(0)"),
            (0, 3),
            {0: (1, 3), 1: (0, 3)},
            "rank 0 holds",
        ),
        (
            laid(ROW, "Shard(1)"),
            (4,),
            everywhere(ROW, 2),
            "cannot cut a tensor of 1 dims",
        ),
        (
            laid(ROW, "Shard(0)"),
            (4,),
            {**everywhere(ROW, 2), 7: (2,)},
            "rank 7 hold.* not in its mesh",
        ),
        (UNKNOWN, (), {0: (4,), 1: (4,)}, "nothing says how"),
        (UNKNOWN, (), {}, r"rank.* \(none\)"),
    ],
)
def test_what_cannot_be_put_together_says_why_and_whom_it_concerns(
    layout: Layout,
    shape: tuple[int, ...],
    shapes: dict[int, tuple[int, ...]],
    words: str,
) -> None:
    with pytest.raises(LayoutError, match=words):
        plan_assembly(shape, layout, shapes)


def test_a_rank_outside_the_mesh_that_holds_nothing_is_left_out() -> None:
    plan = plan_assembly((4,), laid(ROW, "Shard(0)"), {0: (2,), 1: (2,), 3: (0,)})
    assert plan.ranks == (0, 1)


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "words"),
    [
        (((0, 2),), ((1, 4),), "leave out or repeat what lies around 1"),
        (((0, 2),), ((2, 3), (5, 6)), "leave out or repeat what lies around 5"),
        (((0, 2),), ((0, 2),), "pieces end at 2, the whole tensor at 4"),
        (((0, 2),), ((2, 5),), "pieces end at 5"),
        (((-1, 1),), ((1, 4),), "around -1"),
        (((0, 2), (2, 1), (1, 2)), ((2, 4),), "around 1|around 2"),
    ],
)
def test_recorded_ranges_are_believed_only_where_they_tile_the_whole(
    of_rank_0: Ranges, of_rank_1: Ranges, words: str
) -> None:
    def length(ranges: Ranges) -> int:
        return sum(stop - start for start, stop in ranges)

    shapes = {0: (length(of_rank_0),), 1: (length(of_rank_1),)}
    with pytest.raises(LayoutError, match=words):
        plan_assembly((4,), laid(ROW, "Shard(0)"), shapes, {0: (of_rank_0,), 1: (of_rank_1,)})


def test_recorded_ranges_win_over_mesh_order() -> None:
    """A shard order of its own: tp cuts before dp."""
    layout = laid(SQUARE, "Shard(0)", "Shard(0)")
    starts = {0: 0, 1: 4, 2: 2, 3: 6}
    ranges = {rank: (((start, start + 2),),) for rank, start in starts.items()}
    plan = plan_assembly((8,), layout, everywhere(SQUARE, 2), ranges)
    assert {box.summands[0][0]: box.ranges[0][0][0] for box in plan.boxes} == starts


def test_replicas_that_claim_different_parts_are_refused() -> None:
    layout = laid(ROW, "Replicate()")
    ranges: dict[int, tuple[Ranges, ...]] = {0: (((0, 2),),), 1: (((2, 4),),)}
    with pytest.raises(LayoutError, match="claim different parts"):
        plan_assembly((4,), layout, everywhere(ROW, 2), ranges)


# ---- families ------------------------------------------------------------------------------------


def test_every_mesh_of_a_family_has_a_value_of_its_own() -> None:
    other = Mesh(axes=("tp",), shape=(2,), ranks=(2, 3))
    pieces = {
        rank: Piece(shape=(2,), layout=laid(mesh, "Shard(0)"), global_shape=(4,))
        for mesh in (other, ROW)
        for rank in mesh.ranks
    }
    assert [plan.ranks for plan in plan_assemblies(pieces)] == [(0, 1), (2, 3)]


def test_a_value_held_by_one_rank_only_is_whole_and_by_several_is_not() -> None:
    (alone,) = plan_assemblies({5: Piece(shape=(2, 3), layout=UNKNOWN)})
    assert alone.global_shape == (2, 3)
    assert list(alone.reads) == [5]
    with pytest.raises(LayoutError, match="nothing says how"):
        plan_assemblies(dict.fromkeys(range(2), Piece(shape=(2,), layout=UNKNOWN)))
    known = Piece(shape=(2,), layout=laid(ROW, "Replicate()"), global_shape=(2,))
    with pytest.raises(LayoutError, match="rank 2 have no layout"):  # it is not whole
        plan_assemblies({0: known, 1: known, 2: Piece(shape=(2,), layout=UNKNOWN)})


def test_ranks_of_one_mesh_that_record_different_layouts_are_refused() -> None:
    pieces = {
        0: Piece(shape=(4,), layout=laid(ROW, "Replicate()"), global_shape=(4,)),
        1: Piece(shape=(4,), layout=laid(ROW, "Shard(0)"), global_shape=(4,)),
    }
    with pytest.raises(LayoutError, match="record different layouts"):
        plan_assemblies(pieces)


def test_planning_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from rankscope.layout import layoutfile, infer, plan\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
