"""Where plain tensors lie whose layout a user declared: rank order and local sizes say it."""

from __future__ import annotations

import itertools

import pytest

from rankscope.errors import LayoutError
from rankscope.layout.layoutfile import declared_pieces
from rankscope.layout.placement import (
    LayoutSource,
    Mesh,
    Placement,
    Ranges,
    global_ranges,
    parse_placement,
)
from rankscope.layout.plan import plan_assemblies

TP = Mesh(axes=("dp", "tp"), shape=(2, 3), ranks=(0, 1, 2, 3, 4, 5))


def along(**axes: str) -> dict[str, Placement]:
    return {axis: parse_placement(text) for axis, text in axes.items()}


def columns(widths: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    return {rank: (4, width) for rank, width in enumerate(widths)}


def test_offsets_follow_from_rank_order_and_local_sizes() -> None:
    pieces = declared_pieces(TP, along(tp="Shard(1)"), columns((3, 3, 2, 1, 0, 5)))
    places = {rank: piece.ranges[1] for rank, piece in pieces.items() if piece.ranges}
    expected: dict[int, Ranges] = {
        0: ((0, 3),),
        1: ((3, 6),),
        2: ((6, 8),),
        3: ((0, 1),),
        4: (),
        5: ((1, 6),),
    }
    assert places == expected
    assert [pieces[rank].global_shape for rank in (0, 3)] == [(4, 8), (4, 6)]
    assert pieces[0].layout.source is LayoutSource.DECLARED


def test_axes_left_out_are_not_described_so_every_row_is_a_value_of_its_own() -> None:
    pieces = declared_pieces(TP, along(tp="Replicate()"), columns((3,) * 6))
    plans = plan_assemblies(pieces)
    assert [plan.ranks for plan in plans] == [(0, 1, 2), (3, 4, 5)]
    assert [plan.boxes[0].summands for plan in plans] == [
        ((0, 1, 2),),
        ((3, 4, 5),),
    ]


def test_nothing_described_is_nothing_known() -> None:
    with pytest.raises(LayoutError, match="nothing says how"):
        plan_assemblies(declared_pieces(TP, {}, columns((3,) * 6)))
    (alone,) = plan_assemblies(declared_pieces(TP, {}, {2: (3,)}))
    assert alone.ranks == (2,), "a value held by one rank only is whole"


def test_even_and_ceil_sized_splits_lie_where_torch_puts_them() -> None:
    """Both ways to the ranges agree wherever both apply, strided shards included."""
    compared = 0
    kinds = [
        "Replicate()",
        "Partial(sum)",
        "Shard(0)",
        "Shard(1)",
        "StridedShard(0, split_factor=2)",
    ]
    shapes = [(8, 6), (7, 5), (1, 3), (3, 1)]
    for shape, texts in itertools.product(shapes, itertools.product(kinds, repeat=2)):
        placements = [parse_placement(text) for text in texts]
        expected = {
            rank: global_ranges(shape, TP.shape, TP.coordinate(rank) or (), placements)
            for rank in TP.ranks
        }
        lengths = {
            rank: tuple(sum(b - a for a, b in dim) for dim in ranges)
            for rank, ranges in expected.items()
        }
        pieces = declared_pieces(TP, along(dp=texts[0], tp=texts[1]), lengths)
        assert {rank: piece.ranges for rank, piece in pieces.items()} == expected, texts
        assert {piece.global_shape for piece in pieces.values()} == {shape}
        compared += 1
    assert compared == 100


def test_a_missing_replica_does_not_matter_and_a_missing_shard_does() -> None:
    both = along(dp="Replicate()", tp="Shard(1)")
    shapes = columns((3, 3, 2, 3, 3, 2))
    del shapes[4]
    (plan,) = plan_assemblies(declared_pieces(TP, both, shapes))
    assert plan.missing == (4,)
    rows = declared_pieces(TP, along(tp="Shard(1)"), shapes)
    assert {rank for rank, piece in rows.items() if piece.refusal} == {3, 5}
    with pytest.raises(LayoutError, match="rank 4 recorded nothing"):
        plan_assemblies(rows)


@pytest.mark.parametrize(
    ("texts", "shapes", "words"),
    [
        (
            {"dp": "Replicate()", "tp": "Shard(1)"},
            columns((3, 3, 2, 3, 1, 2)),
            r"hold \[1, 3\] of it",
        ),
        ({"tp": "Replicate()"}, columns((3, 2, 3, 3, 3, 3)), r"hold \[2, 3\] of it"),
        (
            {"tp": "StridedShard(1, split_factor=2)"},
            columns((5, 1, 2, 4, 4, 4)),
            "strided shard of 8",
        ),
        ({"tp": "Shard(2)"}, columns((3,) * 6), r"Shard\(2\) cannot cut a value of 2 dims"),
        ({"tp": "Shard(0)"}, {0: (2,), 1: (2, 2), 2: (2,)}, "different numbers of dims"),
    ],
)
def test_sizes_that_contradict_the_declaration_are_refused(
    texts: dict[str, str], shapes: dict[int, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        plan_assemblies(declared_pieces(TP, along(**texts), shapes))


def test_the_shape_of_an_empty_piece_counts_only_where_there_is_no_other() -> None:
    mesh = Mesh(axes=("a", "b"), shape=(2, 2), ranks=(0, 1, 2, 3))
    shapes = {0: (2, 3), 1: (2, 1), 2: (0, 0), 3: (0, 7)}
    (plan,) = plan_assemblies(declared_pieces(mesh, along(a="Shard(0)", b="Shard(1)"), shapes))
    assert plan.global_shape == (2, 4)
    assert [box.summands for box in plan.boxes] == [((0,),), ((1,),)]


def test_axes_and_ranks_that_were_not_declared_are_errors() -> None:
    with pytest.raises(LayoutError, match=r"no axis \['ep'\]"):
        declared_pieces(TP, along(ep="Shard(0)"), {0: (2,)})
    with pytest.raises(LayoutError, match="rank 9 is not on the declared axes"):
        declared_pieces(TP, along(tp="Shard(0)"), {9: (2,)})
