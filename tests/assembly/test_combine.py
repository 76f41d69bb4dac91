"""Global statistics from shards, against numpy on the whole tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.errors import LayoutError
from rankscope.layout.placement import Layout, LayoutSource, Mesh, global_ranges, parse_placement
from rankscope.layout.plan import Piece, plan_assemblies, plan_assembly
from rankscope.record.notes import NoteKind
from rankscope.record.statistics import Combined
from rankscope.spool.recordformat import VALUE_DTYPE
from rankscope.tree.assembly.combine import apply_to_all, plan_rows
from tests.tree.ranks_on_paper import digest, take


def rows_of(pieces):
    rows = np.zeros(len(pieces), VALUE_DTYPE)
    for row, (piece, box) in zip(rows, pieces):
        for name, number in digest(piece, box).items():
            row[name] = number
    return rows


def combine(mesh, texts, whole, value_of, *, without=(), offsets=True) -> Combined:
    placements = tuple(parse_placement(text) for text in texts)
    layout = Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=placements)
    held, pieces = [], []
    for rank in mesh.ranks:
        if rank not in without:
            box = global_ranges(whole.shape, mesh.shape, mesh.coordinate(rank), placements)
            piece = take(value_of(rank), box)
            ranges = box if offsets else None
            described = Piece(
                shape=piece.shape, layout=layout, global_shape=whole.shape, ranges=ranges
            )
            held.append((rank, described))
            pieces.append((piece, box))
    plan = plan_rows(held)
    return (
        Combined(ranks=(), note=plan)
        if isinstance(plan, str)
        else apply_to_all(plan, rows_of(pieces)[None])[0]
    )


def assert_is(combined, whole):
    wanted = digest(whole)
    for name in ("count", "nan", "posinf", "neginf", "zero"):
        assert getattr(combined, name) == wanted[name], name
    for name in ("min", "max", "mean", "std", "l2"):
        expected = wanted[name]
        scale = max(
            abs(expected), 1e-300 if name in ("min", "max") else wanted["l2"] * 1e-3 + 1e-300
        )
        both_nan = math.isnan(getattr(combined, name)) and math.isnan(expected)
        assert both_nan or abs(getattr(combined, name) - expected) <= 1e-6 * scale, name
    assert np.allclose(
        combined.sketch, wanted["sketch"], atol=1e-5 * max(wanted["l2"], 1e-30), rtol=0
    )


AXES = st.lists(st.integers(1, 3), min_size=1, max_size=2)
SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.data(), AXES, SHAPES, st.integers(0, 2**31))
def test_shards_of_any_placement_give_the_statistics_of_the_whole(data, axes, shape, seed):
    placement = st.one_of(
        st.just("Replicate()"),
        st.builds("Shard({})".format, st.integers(0, len(shape) - 1)),
        st.builds(
            "StridedShard({}, split_factor={})".format,
            st.integers(0, len(shape) - 1),
            st.integers(1, 3),
        ),
    )
    texts = data.draw(st.lists(placement, min_size=len(axes), max_size=len(axes)))
    size = math.prod(axes)
    mesh = Mesh(
        axes=tuple(f"a{i}" for i in range(len(axes))),
        shape=tuple(axes),
        ranks=tuple(range(5, 5 + size)),
    )
    random = np.random.default_rng(seed)
    whole = random.normal(random.normal(), 1, shape).astype(np.float32)
    whole[random.random(shape) < data.draw(st.sampled_from([0, 0.2]))] = np.nan
    whole[random.random(shape) < 0.1] = np.inf
    whole[random.random(shape) < 0.1] = 0
    assert_is(combine(mesh, texts, whole, lambda _rank: whole), whole)


LINE = Mesh(axes=("tp",), shape=(4,), ranks=(0, 1, 2, 3))
GRID = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_numbers_are_added_over_the_ranks_whose_bytes_are_put_together(data, axes):
    """One plan says who holds which part: a tree and `rankscope tensor` cannot answer apart."""
    kinds = ["Replicate()", "Shard(0)", "Shard(1)", "Partial(sum)", "Partial(avg)"]
    texts = data.draw(st.lists(st.sampled_from(kinds), min_size=len(axes), max_size=len(axes)))
    ranks = data.draw(st.permutations(range(math.prod(axes))))
    mesh = Mesh(axes=tuple("abc"[: len(axes)]), shape=tuple(axes), ranks=tuple(ranks))
    layout = Layout(
        source=LayoutSource.DTENSOR, mesh=mesh, placements=tuple(map(parse_placement, texts))
    )
    held, whole = [], (27, 27)
    for rank in sorted(ranks):
        box = global_ranges(whole, mesh.shape, mesh.coordinate(rank), layout.placements)
        shape = tuple(sum(stop - start for start, stop in dim) for dim in box)
        held.append((rank, Piece(shape=shape, layout=layout, global_shape=whole, ranges=box)))
    numbers = plan_rows(held)
    (of_bytes,) = plan_assemblies(dict(held))
    wanted = {frozenset(ranks) for box in of_bytes.boxes for ranks in box.summands}
    empty = {rank for rank, piece in held if 0 in piece.shape}  # there are no bytes to put together
    added = [frozenset(numbers.ranks[row] for row in rows) for rows in numbers.index]
    added = [ranks for ranks in added if not ranks <= empty]
    assert set(added) == wanted
    assert numbers.summands == len(of_bytes.boxes[0].summands)
    assert len(added) == len(of_bytes.boxes) * numbers.summands
    averaged = [r.size for r in of_bytes.boxes[0].reductions if r.op == "avg"]
    assert numbers.divisor == math.prod(averaged)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_of_a_partial_the_mean_and_the_sketch_are_those_of_the_reduced_tensor(op):
    whole = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    parts = [np.random.default_rng(r).normal(size=(3, 5)).astype(np.float32) for r in range(1, 4)]
    last = whole * (4 if op == "avg" else 1) - sum(parts)
    parts.append(last.astype(np.float32))
    found = combine(LINE, [f"Partial({op})"], whole, lambda rank: parts[rank])
    assert found.count == 15
    assert found.mean == pytest.approx(whole.mean(), abs=1e-6)
    assert np.allclose(found.sketch, digest(whole)["sketch"], atol=1e-5)
    assert (found.std, found.min, found.l2, found.nan) == (None, None, None, None)
    assert "reduced later" in str(found.note)


def test_a_partial_over_shards_composes_over_both_axes():
    whole = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    half = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    found = combine(
        GRID, ["Shard(0)", "Partial(sum)"], whole, lambda rank: half if rank % 2 else whole - half
    )
    assert found.mean == pytest.approx(whole.mean(), abs=1e-6)
    assert np.allclose(found.sketch, digest(whole)["sketch"], atol=1e-4)


def test_a_partial_that_is_not_finite_everywhere_has_no_mean():
    whole = np.ones((2, 2), np.float32)
    found = combine(LINE, ["Partial(sum)"], whole, lambda r: whole * (np.nan if r == 2 else 1))
    assert math.isnan(found.mean)
    assert "not every summand is finite" in str(found.note)


@pytest.mark.parametrize("text", ["Partial(max)", "MaskPartial(offset=3)", "Partial(product)"])
def test_a_placement_that_does_not_compose_says_so(text):
    found = combine(LINE, [text], np.ones((4, 4)), lambda _rank: np.ones((4, 4), np.float32))
    assert not found.is_known
    assert "does not compose" in str(found.note)


def test_replicas_that_differ_are_not_combined_and_are_named():
    whole = np.ones((4, 4), np.float32)
    found = combine(
        GRID, ["Replicate()", "Shard(0)"], whole, lambda rank: whole * (2 if rank == 3 else 1)
    )
    assert not found.is_known
    assert str(found.note) == "replicas differ: ranks 1,3 should hold the same values"
    assert found.note.kind is NoteKind.REPLICAS_DIFFER


def test_a_rank_that_is_missing_is_named_instead_of_guessed():
    whole = np.ones((4, 4), np.float32)
    found = combine(LINE, ["Shard(0)"], whole, lambda _rank: whole, without=(1, 2))
    assert str(found.note) == "no value from ranks 1-2"


def test_shards_without_offsets_give_statistics_but_no_sketch():
    whole = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    found = combine(LINE, ["Shard(0)"], whole, lambda _rank: whole, offsets=False)
    assert found.mean == pytest.approx(whole.mean())
    assert found.sketch is None
    assert "no offsets" in str(found.note)


def shards(whole, ranges, *, shape):
    layout = Layout(
        source=LayoutSource.DTENSOR, mesh=LINE, placements=(parse_placement("Shard(0)"),)
    )
    return [
        (rank, Piece(shape=shape, layout=layout, global_shape=whole, ranges=own))
        for rank, own in enumerate(ranges)
    ]


def test_shards_that_do_not_add_up_to_the_whole_are_not_combined():
    assert plan_rows(shards((6, 4), [None] * 4, shape=(1, 4))) == (
        "the shards hold 16 elements, the whole tensor 24"
    )
    overlapping = [((start, start + 2),) for start in (0, 2, 3, 6)]
    words = "dim 0: the pieces leave out or repeat what lies around 3"
    held = shards((8,), [(runs,) for runs in overlapping], shape=(2,))
    assert plan_rows(held) == words
    shapes = {rank: piece.shape for rank, piece in held}
    ranges = {rank: piece.ranges for rank, piece in held}
    with pytest.raises(LayoutError, match=words):  # as of bytes
        plan_assembly((8,), held[0][1].layout, shapes, ranges)


def test_the_l2_norm_of_huge_values_does_not_overflow():
    whole = np.full((4, 2), 1e30, np.float64)
    assert combine(LINE, ["Shard(0)"], whole, lambda _rank: whole).l2 == pytest.approx(
        1e30 * math.sqrt(8)
    )
