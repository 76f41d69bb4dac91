"""Tensors put together from pieces, against an oracle that cuts them apart with torch itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rankscope.errors import LayoutError
from rankscope.layout.layoutfile import declared_pieces
from rankscope.layout.placement import (
    Layout,
    LayoutSource,
    Mesh,
    Placement,
    parse_placement,
)
from rankscope.layout.plan import AssemblyPlan, join_batches, plan_assemblies, plan_assembly
from rankscope.tree.tensors.rebuild import Whole, assemble
from tests.tree.cutting import cases, spread


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def planned(
    whole: torch.Tensor,
    mesh: Mesh,
    placements: Sequence[Placement],
    held: Mapping[int, torch.Tensor],
) -> AssemblyPlan:
    layout = Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=tuple(placements))
    return plan_assembly(whole.shape, layout, {r: tuple(t.shape) for r, t in held.items()})


def put_together(
    text: str, held: Mapping[int, torch.Tensor], shape: Sequence[int], extents: Sequence[int] = ()
) -> Whole:
    """Assemble pieces of ranks 0 ... placed as `text` says, axis by axis."""
    mesh_shape = tuple(extents) or (len(held),)
    placements = tuple(parse_placement(part) for part in text.split(" x "))
    axes = tuple(f"axis{i}" for i in range(len(mesh_shape)))
    mesh = Mesh(axes=axes, shape=mesh_shape, ranks=tuple(range(torch.Size(mesh_shape).numel())))
    found = plan_assembly(
        shape,
        Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=placements),
        {rank: tuple(t.shape) for rank, t in held.items()},
    )
    return assemble(found, held.__getitem__)


# ---- shards and replicas -------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(cases(is_partial=False))
def test_whatever_way_a_tensor_was_cut_it_comes_back_bit_for_bit(
    case: tuple[torch.Tensor, Mesh, list[Placement]],
) -> None:
    whole, mesh, placements = case
    held = spread(whole, mesh, placements)
    before = {rank: as_bytes(local) for rank, local in held.items()}
    read: list[int] = []

    def load(rank: int) -> torch.Tensor:
        read.append(rank)
        return held[rank]

    plan = planned(whole, mesh, placements, held)
    assembled = assemble(plan, load)
    assert assembled.tensor.dtype is whole.dtype
    assert assembled.tensor.shape == whole.shape
    assert as_bytes(assembled.tensor) == as_bytes(whole)
    assert assembled.mismatches == ()
    if whole.numel():
        assert read == list(plan.reads)
        assert sorted(read) == sorted(rank for rank in held if held[rank].numel())
    assert {rank: as_bytes(local) for rank, local in held.items()} == before


@settings(max_examples=150, deadline=None)
@given(cases(is_partial=False), st.data())
def test_one_replica_that_differs_in_one_bit_is_named_and_only_that_one(
    case: tuple[torch.Tensor, Mesh, list[Placement]], data: st.DataObject
) -> None:
    whole, mesh, placements = case
    held = spread(whole, mesh, placements)
    solid = sorted(rank for rank, local in held.items() if local.numel())
    plan = planned(whole, mesh, placements, held)
    assume(solid and whole.dtype is not torch.bool)
    culprit = data.draw(st.sampled_from(solid))
    wrong = held[culprit].clone().contiguous()
    wrong.view(-1).view(torch.uint8)[-1] ^= 1 << data.draw(st.integers(0, 7))
    held[culprit] = wrong
    peers = next(s for box in plan.boxes for s in box.summands if culprit in s)
    assembled = assemble(plan, held.__getitem__)
    if len(peers) == 1:
        assert assembled.mismatches == ()
        return
    (mismatch,) = assembled.mismatches
    assert sorted(mismatch.groups) == sorted([(culprit,), tuple(r for r in peers if r != culprit)])
    assert mismatch.is_majority == (len(peers) > 2)
    if len(peers) > 2 or culprit != peers[0]:
        assert culprit not in mismatch.used
        assert as_bytes(assembled.tensor) == as_bytes(whole)


def test_a_majority_is_believed_and_otherwise_the_lowest_rank_and_it_is_said() -> None:
    a, b, c = torch.ones(3), torch.zeros(3), torch.full((3,), 2.0)
    by_majority = put_together("Replicate()", dict(enumerate([b, a, a])), (3,))
    assert by_majority.tensor.equal(a)
    assert by_majority.mismatches[0].groups == ((0,), (1, 2))
    assert str(by_majority.mismatches[0]) == (
        "replicas of [0:3] differ: ranks 0 | 1,2; used 1,2, the majority"
    )
    for pieces in ([a, b], [a, b, c], [a, b, b, a], [a, b, b, c]):
        tied = put_together("Replicate()", dict(enumerate(pieces)), (3,))
        assert tied.tensor.equal(a)
        assert not tied.mismatches[0].is_majority
        assert "there is no majority" in str(tied.mismatches[0])


@pytest.mark.parametrize(
    ("a", "b", "is_in_value"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1e-8]), torch.tensor([2e-8]), True),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), True),
        (
            torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32),
            torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
            False,
        ),
        (
            torch.tensor([0x00, 1], dtype=torch.uint8).view(torch.float8_e5m2),
            torch.tensor([0x80, 1], dtype=torch.uint8).view(torch.float8_e5m2),
            False,
        ),
    ],
)
def test_bits_that_differ_without_a_difference_in_value_are_told_apart(
    a: torch.Tensor, b: torch.Tensor, is_in_value: bool
) -> None:
    (mismatch,) = put_together("Replicate()", {0: a, 1: b}, a.shape).mismatches
    assert mismatch.is_in_value == is_in_value
    assert ("only signs of zero" in str(mismatch)) != is_in_value
    assert put_together("Replicate()", {0: a, 1: a.clone()}, a.shape).mismatches == ()


# ---- partials ------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(cases(is_partial=True))
def test_partials_of_integers_reduce_to_the_whole_bit_for_bit(
    case: tuple[torch.Tensor, Mesh, list[Placement]],
) -> None:
    whole, mesh, placements = case
    held = spread(whole, mesh, placements)
    before = {rank: as_bytes(local) for rank, local in held.items()}
    plan = planned(whole, mesh, placements, held)
    assembled = assemble(plan, held.__getitem__)
    assert assembled.tensor.dtype is whole.dtype
    assert assembled.tensor.shape == whole.shape
    assert torch.equal(assembled.tensor, whole)  # a sum may leave -0 where the whole has 0
    assert assembled.mismatches == ()
    assert {rank: as_bytes(local) for rank, local in held.items()} == before


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("avg", torch.int64),
        ("avg", torch.bool),
        ("min", torch.complex64),
        ("band", torch.float32),
        ("sum", torch.uint16),
    ],
)
def test_what_torch_does_not_define_is_refused_and_not_made_up(op: str, dtype: torch.dtype) -> None:
    held = {rank: torch.zeros(2, dtype=dtype) for rank in range(2)}
    with pytest.raises(LayoutError, match=rf"Partial\({op}\) of {dtype} is not defined in torch"):
        put_together(f"Partial({op})", held, (2,))


# ---- reading -------------------------------------------------------------------------------------


def test_a_tensor_without_elements_has_shape_and_dtype() -> None:
    held = {rank: torch.zeros(0, 3, dtype=torch.float16) for rank in range(2)}
    for text in ("Shard(0)", "Replicate()", "Partial(sum)"):
        found = put_together(text, held, (0, 3))
        assert found.tensor.shape == (0, 3)
        assert found.tensor.dtype is torch.float16


def test_pieces_that_are_not_what_was_recorded_are_refused() -> None:
    layout = Layout(
        source=LayoutSource.DTENSOR,
        mesh=Mesh(axes=("tp",), shape=(2,), ranks=(0, 1)),
        placements=(parse_placement("Shard(0)"),),
    )
    plan = plan_assembly((4,), layout, {0: (2,), 1: (2,)})
    with pytest.raises(
        LayoutError, match=r"rank 1 has a tensor of shape \[3\], its plan says \[2\]"
    ):
        assemble(plan, lambda rank: torch.zeros(2 + rank))
    with pytest.raises(LayoutError, match=r"rank 0 has torch.float32, rank 1 torch.int64"):
        assemble(plan, lambda rank: torch.zeros(2, dtype=(torch.float32, torch.int64)[rank]))


# ---- declared layouts and batches ----------------------------------------------------------------


@st.composite
def uneven(
    draw: st.DrawFn,
) -> tuple[list[torch.Tensor], Mesh, dict[str, Placement], list[torch.Tensor]]:
    """Plain tensors cut at any indices along two axes, one value per place of a third."""
    rows, tp, ep = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    first, second = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    by_tp, by_ep = (st.lists(st.integers(0, 4), min_size=n, max_size=n) for n in (tp, ep))
    whole_rows = []
    held: list[torch.Tensor] = []
    for row in range(rows):
        if first == second:
            inner = [draw(by_ep) for _ in range(tp)]
            sizes = [sum(each) for each in inner]
        else:
            sizes, inner = draw(by_tp), [draw(by_ep)] * tp
        shape = [3, 3]
        shape[first] = sum(sizes)
        if first != second:
            shape[second] = sum(inner[0])
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1000 * row
        whole_rows.append(whole)
        for outer, of_outer in zip(whole.split(sizes, first), inner):
            held += outer.split(of_outer, second)
    mesh = Mesh(axes=("dp", "tp", "ep"), shape=(rows, tp, ep), ranks=tuple(range(len(held))))
    placements = {
        "tp": parse_placement(f"Shard({first})"),
        "ep": parse_placement(f"Shard({second})"),
    }
    return whole_rows, mesh, placements, held


@settings(max_examples=200, deadline=None)
@given(uneven())
def test_plain_tensors_split_anywhere_come_back_by_rank_order_and_local_sizes(
    case: tuple[list[torch.Tensor], Mesh, dict[str, Placement], list[torch.Tensor]],
) -> None:
    wholes, mesh, placements, held = case
    pieces = declared_pieces(mesh, placements, {r: tuple(t.shape) for r, t in enumerate(held)})
    plans = plan_assemblies(pieces)
    assert len(plans) == len(wholes)
    for plan, whole in zip(plans, wholes):
        found = assemble(plan, held.__getitem__).tensor
        assert found.numel() == whole.numel()
        if whole.numel():
            assert found.equal(whole)


def test_data_parallel_batches_are_joined_in_rank_order() -> None:
    """dp is not the outermost axis, batches differ in size, and tp shards each of them."""
    mesh = Mesh(axes=("tp", "dp"), shape=(2, 3), ranks=(4, 1, 2, 3, 0, 5))
    batches = [torch.arange(8.0).reshape(2, 4), torch.zeros(0, 4), torch.ones(3, 4)]
    held = {
        mesh.ranks[3 * tp + dp]: batch.chunk(2, 1)[tp]
        for (dp, batch), tp in itertools.product(enumerate(batches), range(2))
    }
    pieces = declared_pieces(
        mesh, {"tp": parse_placement("Shard(1)")}, {r: tuple(t.shape) for r, t in held.items()}
    )
    plans = plan_assemblies(pieces)
    joined = join_batches(mesh, ["dp"], plans[::-1])
    assert assemble(joined, held.__getitem__).tensor.equal(torch.cat(batches))
