"""Tensors put together from pieces: arithmetic, memory and order of what is loaded."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch

from rankscope.layout.placement import (
    Layout,
    LayoutSource,
    Mesh,
    parse_placement,
)
from rankscope.layout.plan import plan_assembly
from rankscope.tree.tensors.rebuild import assemble
from tests.tensors.test_rebuild import put_together


def test_equal_replicas_in_another_memory_layout_are_equal() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    assert put_together("Replicate()", {0: a, 1: a.t().contiguous().t()}, (3, 4)).mismatches == ()
    z = torch.complex(a, -a)
    assert (
        put_together("Replicate()", {0: z, 1: z.conj().resolve_conj().conj()}, (3, 4)).mismatches
        == ()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_partial_sums_are_taken_in_their_own_arithmetic(dtype: torch.dtype) -> None:
    """256 + 1 + 1 is 256 in bfloat16, whose step there is 2: what a rank of the job got."""
    edge = 256.0 if dtype is torch.bfloat16 else 2048.0
    held = {
        0: torch.tensor([edge]).to(dtype),
        1: torch.ones(1, dtype=dtype),
        2: torch.ones(1, dtype=dtype),
    }
    assert put_together("Partial(sum)", held, (1,)).tensor.item() == edge


def test_float8_partials_are_reduced_in_float32_and_rounded_once() -> None:
    held = {r: torch.tensor([1.0, 16.0, -3.0]).to(torch.float8_e4m3fn) for r in range(3)}
    total = put_together("Partial(sum)", held, (3,)).tensor
    assert total.dtype is torch.float8_e4m3fn
    assert total.float().tolist() == [3.0, 48.0, -9.0]
    assert put_together("Partial(avg)", held, (3,)).tensor.float().tolist() == [1.0, 16.0, -3.0]


def test_a_nan_of_any_rank_is_kept_by_minimum_and_maximum() -> None:
    for op, at in itertools.product(("min", "max"), range(3)):
        held = {r: torch.tensor([float("nan") if r == at else 1.0]) for r in range(3)}
        assert put_together(f"Partial({op})", held, (1,)).tensor.isnan().all()


def test_an_error_of_the_loader_stays_what_it_is() -> None:
    class Unreadable(dict[int, torch.Tensor]):
        def __getitem__(self, rank: int) -> torch.Tensor:
            if rank == 2:
                raise RuntimeError("cannot read rank 2")
            return super().__getitem__(rank)

    held = Unreadable({rank: torch.ones(2) for rank in range(3)})
    with pytest.raises(RuntimeError, match="cannot read rank 2"):
        put_together("Partial(sum)", held, (2,))


def test_replicas_of_every_summand_are_compared_before_they_are_added() -> None:
    held = {r: torch.full((2,), float(r // 2)) for r in range(4)}
    held[3] = torch.full((2,), 5.0)
    found = put_together("Partial(sum) x Replicate()", held, (2,), (2, 2))
    assert found.tensor.tolist() == [1.0, 1.0]
    assert [m.groups for m in found.mismatches] == [((2,), (3,))]


@pytest.mark.parametrize(
    ("text", "extents", "most"),
    [
        ("Replicate()", (8,), 2),
        ("Shard(0)", (8,), 1),
        ("Partial(sum)", (8,), 2),
        ("Partial(sum) x Replicate()", (4, 2), 3),
        ("Partial(max) x Partial(max) x Replicate()", (2, 2, 2), 3),
    ],
)
def test_pieces_are_loaded_when_needed_and_dropped_right_after(
    text: str, extents: tuple[int, ...], most: int
) -> None:
    alive, peak, count = 0, 0, torch.Size(extents).numel()

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def load(rank: int) -> torch.Tensor:
        nonlocal alive, peak
        memory = np.ones(4, np.float32)
        weakref.finalize(memory, gone)
        alive += 1
        peak = max(peak, alive)
        return torch.from_numpy(memory)

    placements = tuple(parse_placement(part) for part in text.split(" x "))
    mesh = Mesh(
        axes=tuple(f"axis{i}" for i in range(len(extents))),
        shape=extents,
        ranks=tuple(range(count)),
    )
    whole = (4 * count,) if text == "Shard(0)" else (4,)
    plan = plan_assembly(
        whole,
        Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=placements),
        dict.fromkeys(range(count), (4,)),
    )
    found = assemble(plan, load)
    assert found.tensor.numel() == whole[0]
    assert peak == most


def test_the_majority_is_read_again_where_the_lowest_rank_differs() -> None:
    held = {0: torch.zeros(2), 1: torch.ones(2), 2: torch.ones(2)}
    read: list[int] = []
    mesh = Mesh(axes=("dp",), shape=(3,), ranks=(0, 1, 2))
    layout = Layout(
        source=LayoutSource.DTENSOR, mesh=mesh, placements=(parse_placement("Replicate()"),)
    )
    plan = plan_assembly((2,), layout, dict.fromkeys(held, (2,)))
    assemble(plan, lambda rank: (read.append(rank), held[rank])[1])
    assert read == [0, 1, 2, 1]


def test_a_piece_that_is_the_whole_is_not_copied() -> None:
    piece = torch.ones(4)
    alone = plan_assembly((), Layout(source=LayoutSource.UNKNOWN), {5: (4,)})
    assert assemble(alone, {5: piece}.__getitem__).tensor.data_ptr() == piece.data_ptr()


def test_values_that_need_a_gradient_come_back_without_a_graph() -> None:
    held = {rank: torch.ones(2, requires_grad=True) for rank in range(2)}
    for text, shape in (("Shard(0)", (4,)), ("Partial(sum)", (2,)), ("Replicate()", (2,))):
        assert not put_together(text, held, shape).tensor.requires_grad
