"""Tensors cut apart over meshes with torch itself, by what each placement means: an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from rankscope.layout.placement import Mesh, Placement, PlacementKind, parse_placement

Coordinate = tuple[int, ...]
ANY_DTYPE = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64),
]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8]
DTYPES_OF = {
    "sum": [*FLOATS, *INTEGERS, torch.complex64],
    "avg": [*FLOATS, torch.complex64],
    "min": [*FLOATS, *INTEGERS],
    "max": [*FLOATS, *INTEGERS],
    "product": [*FLOATS, *INTEGERS],
    "band": INTEGERS,
    "bor": INTEGERS,
    "bxor": INTEGERS,
}


def random_bits(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Every bit pattern there is: NaNs of any payload, infinities, subnormals."""
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).reshape(tuple(shape))


def summands(
    whole: torch.Tensor, op: str, count: int, rng: torch.Generator
) -> Sequence[torch.Tensor]:
    """Tensors of small integers whose reduction is `whole`."""

    def noise(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, whole.shape, generator=rng).to(whole.dtype)

    others = [noise(-2, 3) for _ in range(count - 1)]
    if op in ("sum", "avg"):
        scale = count if op == "avg" else 1
        return [*others, whole * scale - sum(others)]
    if op == "bxor":
        left = whole.clone()
        for other in others:
            left ^= other
        return [*others, left]
    if op == "product":
        signs = [noise(0, 2) * 2 - 1 for _ in range(count - 1)]
        left = whole.clone()
        for sign in signs:
            left = left * sign
        return [*signs, left]
    if op in ("band", "bor"):
        masks = [~others[0], *others] if others else []
        return [whole | m if op == "band" else whole & m for m in masks] or [whole]
    at = noise(0, count).real if count > 1 else torch.zeros(whole.shape)
    away = 1 if op == "min" else -1
    return [whole + away * noise(0, 3) * (at != i).to(whole.dtype) for i in range(count)]


def chunks(held: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    found = list(torch.chunk(held, count, dim)) if held.shape[dim] else []
    empty = held.narrow(dim, 0, 0)
    return found + [empty] * (count - len(found))


def cut(
    held: torch.Tensor,
    extents: Sequence[int],
    placements: Sequence[Placement],
    rng: torch.Generator,
) -> dict[Coordinate, torch.Tensor]:
    """Lay a tensor over a mesh, axis after axis, by what each placement means."""
    if not extents:
        return {(): held}
    extent, placement = extents[0], placements[0]
    if placement.kind is PlacementKind.REPLICATE:
        below = cut(held, extents[1:], placements[1:], rng)
        return {(index, *rest): below[rest] for index in range(extent) for rest in below}
    parts: Sequence[torch.Tensor]
    if placement.reduce_op is not None:
        parts = summands(held, placement.reduce_op, extent, rng)
    else:
        assert placement.dim is not None
        pieces = chunks(held, placement.dim, placement.split_factor)
        by_piece = [chunks(piece, placement.dim, extent) for piece in pieces]
        parts = [torch.cat([c[i] for c in by_piece], placement.dim) for i in range(extent)]
    return {
        (index, *rest): local
        for index, part in enumerate(parts)
        for rest, local in cut(part, extents[1:], placements[1:], rng).items()
    }


def axis_placement(dims: int, op: str | None) -> st.SearchStrategy[Placement]:
    texts = ["Replicate()"]
    for dim in range(dims):
        texts += [f"Shard({dim})", *(f"StridedShard({dim}, split_factor={n})" for n in (2, 3))]
    texts += [f"Partial({op})"] * dims if op else []
    return st.sampled_from(texts).map(parse_placement)


@st.composite
def cases(draw: st.DrawFn, *, is_partial: bool) -> tuple[torch.Tensor, Mesh, list[Placement]]:
    """A whole tensor, a mesh over any ranks in any order, and placements of its axes."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    op = draw(st.sampled_from(sorted(DTYPES_OF))) if is_partial else None
    # an average over three is exact in one order of the axes and rounded in another
    sizes = st.sampled_from([1, 2, 4]) if op == "avg" else st.integers(1, 4)
    extents = draw(
        st.lists(sizes, min_size=1, max_size=3).filter(
            lambda found: torch.Size(found).numel() <= 16
        )
    )
    shape = draw(st.lists(st.integers(0, 11), min_size=0, max_size=3))
    placements = [draw(axis_placement(len(shape), op)) for _ in extents]
    if op:
        dtype = draw(st.sampled_from(DTYPES_OF[op]))
        whole = torch.randint(-3, 4, tuple(shape), generator=rng).to(dtype)
    else:
        dtype = draw(st.sampled_from([*ANY_DTYPE, torch.bool]))
        if dtype is torch.bool:
            whole = torch.randint(0, 2, tuple(shape), generator=rng).bool()
        else:
            whole = random_bits(shape, dtype, rng)
    count = torch.Size(extents).numel()
    ranks = draw(st.permutations(range(count))) if draw(st.booleans()) else range(3, 3 + count)
    axes = tuple(f"axis{i}" for i in range(len(extents)))
    return whole, Mesh(axes=axes, shape=tuple(extents), ranks=tuple(ranks)), placements


def spread(
    whole: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]
) -> dict[int, torch.Tensor]:
    """{rank: local tensor}; empty shards in whatever shape a rank may leave them in."""
    rng = torch.Generator().manual_seed(7)
    by_coordinate = cut(whole, mesh.shape, placements, rng)
    held = {}
    for rank in mesh.ranks:
        at = mesh.coordinate(rank)
        assert at is not None
        local = by_coordinate[at]
        is_odd = local.numel() == 0 and whole.numel() and rank % 2
        held[rank] = local.new_empty((0,) * whole.ndim) if is_odd else local
    return held
