"""Global tensors from the ranks' pieces: what a plan of `record/assembly.py` says, done.

The one file of this room that needs torch; import it where a tensor is asked for, not before. No
process group is used, and a piece is read only when its turn has come and dropped right after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash

from rankscope.errors import LayoutError
from rankscope.record.assembly import AssemblyPlan, Box, Reduction
from rankscope.record.placement import Ranges

__all__ = ["Assembled", "Mismatch", "assemble"]

Load = Callable[[int], torch.Tensor]
"""Returns a rank's piece; it may be a view of mapped memory, and is never written to."""

_REDUCE: Final[dict[str, Callable[..., Any]]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    # unlike gloo's, these keep a NaN of any rank, whatever the order
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks that should hold the same values and do not."""

    ranges: tuple[Ranges, ...]
    """Which part of the global tensor, per dim."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks with the same bytes together, by lowest rank."""
    used: tuple[int, ...]
    """The group whose values stand in the result: a strict majority, else the lowest rank's."""
    is_majority: bool
    is_in_value: bool
    """False where only signs of zero or payloads of NaN differ."""

    def __str__(self) -> str:
        where = " x ".join("+".join(f"{a}:{b}" for a, b in dim) for dim in self.ranges)
        held = " | ".join(",".join(map(str, group)) for group in self.groups)
        chosen = "the majority" if self.is_majority else "the lowest rank; there is no majority"
        degree = "" if self.is_in_value else " (only signs of zero or payloads of NaN)"
        return (
            f"replicas of [{where}] differ{degree}: ranks {held}; "
            f"used {','.join(map(str, self.used))}, {chosen}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A global tensor, and what there is to say about it."""

    tensor: torch.Tensor
    """Where one piece is the whole it is what was loaded, not a copy."""
    mismatches: tuple[Mismatch, ...]
    """Replicas that differ; one entry per part and summand."""


def assemble(plan: AssemblyPlan, load: Load) -> Assembled:
    """Return the global tensor, with every replica compared.

    Beside the result, two pieces are in memory at a time, and one more per reduced axis.

    Args:
        plan: what `plan_assembly` made.
        load: called once per rank in the order of `plan.reads`; once more only where replicas
            differ and the majority is not the first of them.

    Raises:
        LayoutError: pieces of other shapes or dtypes than planned, or a reduction that torch does
            not define for their dtype.
    """
    pieces = _Pieces(plan, load)
    if not plan.boxes:
        like = load(plan.ranks[0]).detach()
        return Assembled(tensor=like.new_empty(plan.global_shape), mismatches=())
    whole: torch.Tensor | None = None
    for box in plan.boxes:
        value = pieces.value(box)
        if all(held == ((0, size),) for held, size in zip(box.ranges, plan.global_shape)):
            whole = value
        else:
            whole = value.new_empty(plan.global_shape) if whole is None else whole
            for there, here in _runs(box.ranges):
                whole[there] = value[here]
    assert whole is not None
    return Assembled(tensor=whole, mismatches=tuple(pieces.mismatches))


class _Pieces:
    """Reads, compares and reduces, one box at a time."""

    def __init__(self, plan: AssemblyPlan, load: Load) -> None:
        self._plan = plan
        self._load = load
        self._first: tuple[int, torch.dtype] | None = None
        self.mismatches: list[Mismatch] = []

    def value(self, box: Box) -> torch.Tensor:
        summands = (self._agreed(box, ranks) for ranks in box.summands)
        if not box.reductions:
            return next(summands)
        first = next(summands)
        is_narrow = _has_no_arithmetic(first.dtype)
        widened = (s.float() if is_narrow else s for s in itertools.chain([first], summands))
        try:
            return _reduced(box.reductions, widened).to(first.dtype)
        except RuntimeError as error:  # NotImplementedError included
            names = ", ".join(sorted({f"Partial({r.op})" for r in box.reductions}))
            raise LayoutError(f"{names} of {first.dtype} is not defined: {error}") from error

    def _agreed(self, box: Box, ranks: Sequence[int]) -> torch.Tensor:
        """Return the value of ranks that should all hold the same."""
        first = self._read(box, ranks[0])
        if len(ranks) == 1:
            return first
        groups = {_fingerprint(first): [ranks[0]]}
        is_in_value = False
        for rank in ranks[1:]:
            other = self._read(box, rank)
            members = groups.setdefault(_fingerprint(other), [])
            members.append(rank)
            is_in_value |= ranks[0] not in members and not _same_values(first, other)
            del other
        if len(groups) == 1:
            return first
        largest = max(groups.values(), key=len)
        is_majority = 2 * len(largest) > len(ranks)
        used = largest if is_majority else next(iter(groups.values()))
        self.mismatches.append(
            Mismatch(
                ranges=box.ranges,
                groups=tuple(map(tuple, groups.values())),
                used=tuple(used),
                is_majority=is_majority,
                is_in_value=is_in_value,
            )
        )
        return first if used[0] == ranks[0] else self._read(box, used[0])

    def _read(self, box: Box, rank: int) -> torch.Tensor:
        piece = self._load(rank).detach().resolve_conj().resolve_neg()
        if tuple(piece.shape) != box.shape:
            raise LayoutError(
                f"rank {rank} has a tensor of shape {list(piece.shape)}, its plan says "
                f"{list(box.shape)}"
            )
        self._first = self._first or (rank, piece.dtype)
        if piece.dtype is not self._first[1]:
            raise LayoutError(
                f"rank {self._first[0]} has {self._first[1]}, rank {rank} {piece.dtype}: one "
                "tensor has one dtype"
            )
        return piece


def _reduced(reductions: Sequence[Reduction], summands: Iterator[torch.Tensor]) -> torch.Tensor:
    """Take what the last reduction needs from `summands`, reduced by those before it."""
    *inner, last = reductions
    step = _REDUCE[last.op]
    total: torch.Tensor | None = None
    for _ in range(last.size):
        part = _reduced(inner, summands) if inner else next(summands)
        # the first sum makes a tensor of our own, the others add to it; what was loaded is not ours
        if total is None:
            total, is_ours = part, False
        else:
            total = step(total, part, out=total) if is_ours else step(total, part)
            is_ours = True
    assert total is not None
    return total.div_(last.size) if last.op == "avg" else total


def _runs(ranges: Sequence[Ranges]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield (where in the whole, where in the piece) of every block without a gap."""
    by_dim = []
    for dim in ranges:
        stops = itertools.accumulate(stop - start for start, stop in dim)
        by_dim.append(
            [
                (slice(start, stop), slice(end - (stop - start), end))
                for (start, stop), end in zip(dim, stops)
            ]
        )
    for block in itertools.product(*by_dim):
        yield tuple(there for there, _ in block), tuple(here for _, here in block)


def _fingerprint(piece: torch.Tensor) -> bytes:
    """Return a 128-bit hash of the elements' bytes."""
    flat = piece.cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(flat.numpy().data)


def _has_no_arithmetic(dtype: torch.dtype) -> bool:
    """True for float8: torch on the host neither adds nor compares it, so it is widened."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    if _has_no_arithmetic(a.dtype):
        a, b = a.float(), b.float()
    return bool(((a == b) | ((a != a) & (b != b))).all())
