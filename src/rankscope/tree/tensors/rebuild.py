"""Kept bytes as torch tensors: global ones from the ranks' pieces, and how far two are apart.

The one file of this room that needs torch; import it where a tensor is asked for, not before. No
process group is used. A piece is read when its turn comes, and dropped right after.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rankscope.errors import LayoutError, TraceError, os_errors_as
from rankscope.layout.placement import Ranges
from rankscope.layout.plan import AssemblyPlan, Box, Reduction
from rankscope.spool.chunks.tensorfiles import StoredTensor

Load = Callable[[int], torch.Tensor]
"""Returns a rank's piece, perhaps a view of mapped memory; never written to."""

_REDUCE: Final[dict[str, Callable[..., torch.Tensor]]] = {
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
    """Ranks that should hold the same values of a part of the global tensor (`ranges`, per dim) and
    do not; `groups` has those with the same bytes together, by lowest rank."""

    ranges: tuple[Ranges, ...]
    groups: tuple[tuple[int, ...], ...]
    used: tuple[int, ...]
    """The group whose values stand in the result: a strict majority, else the lowest rank's."""
    is_majority: bool
    is_in_value: bool
    """False where only signs of zero or payloads of NaN differ."""

    def __str__(self) -> str:
        where = " x ".join("+".join(f"{a}:{b}" for a, b in dim) for dim in self.ranges)
        groups = " | ".join(",".join(map(str, group)) for group in self.groups)
        chosen = "the majority" if self.is_majority else "the lowest rank; there is no majority"
        degree = "" if self.is_in_value else " (only signs of zero or payloads of NaN)"
        return (
            f"replicas of [{where}] differ{degree}: ranks {groups}; "
            f"used {','.join(map(str, self.used))}, {chosen}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A global tensor, the ranks whose pieces it is made of, the replicas that differ (one entry
    per part and summand), and what was declared or inferred."""

    tensor: torch.Tensor
    """Where one piece is the whole it is what was loaded, not a copy."""
    mismatches: tuple[Mismatch, ...] = ()
    ranks: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that there is to say."""
        return (*map(str, self.mismatches), *self.notes)


def tensor_of(stored: StoredTensor) -> torch.Tensor:
    """Return a kept tensor over its bytes in the file, mapped (a copy only where they are not
    aligned). Writing to it changes neither the file nor another such tensor. TraceError: the file
    is gone."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.data.size:
        return torch.empty(stored.shape, dtype=dtype)
    with os_errors_as(TraceError, f"{stored.path}: cannot be mapped"):
        data = np.memmap(stored.path, np.uint8, "c", stored.offset, stored.data.shape)
    buffer = data.view(np.ndarray)
    if data.ctypes.data % dtype.itemsize:
        buffer = buffer.copy()
    return torch.from_numpy(buffer).view(dtype).reshape(stored.shape)


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a host tensor's bytes in row-major order."""
    content: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def assemble(plan: AssemblyPlan, load: Load) -> Whole:
    """Return the global tensor, with every replica compared.

    Beside the result, two pieces are in memory at a time, and one sum per axis that is reduced.
    `load` is called once per rank in the order of `plan.reads`, once more only where replicas
    differ and the majority is not the first of them. LayoutError: pieces of other shapes or dtypes
    than planned, or a reduction that torch does not define for their dtype.
    """
    reader = _BoxReader(load)
    if not plan.boxes:
        like = load(plan.ranks[0]).detach()
        return Whole(tensor=like.new_empty(plan.global_shape), ranks=plan.ranks)
    result: torch.Tensor | None = None
    for box in plan.boxes:
        value = reader.value(box)
        if all(ranges == ((0, size),) for ranges, size in zip(box.ranges, plan.global_shape)):
            result = value
        else:
            result = value.new_empty(plan.global_shape) if result is None else result
            for target, source in _runs(box.ranges):
                result[target] = value[source]
        del value  # before the next is read
    assert result is not None
    return Whole(tensor=result, mismatches=tuple(reader.mismatches), ranks=plan.ranks)


class _BoxReader:
    """Reads, compares and reduces, one box at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._first_rank: int | None = None
        self._dtype = torch.float32
        self._defined: set[str] = set()
        self.mismatches: list[Mismatch] = []

    def value(self, box: Box) -> torch.Tensor:
        # map, unlike a generator expression, keeps nothing of one summand while the next is read
        summands = map(functools.partial(self._agreed, box), box.summands)
        if not box.reductions:
            return next(summands)
        return _reduced(box.reductions, map(_widened, summands)).to(self._dtype)

    def _agreed(self, box: Box, ranks: Sequence[int]) -> torch.Tensor:
        first = self._read(box, ranks[0])
        if len(ranks) == 1:
            return first
        groups = {_fingerprint(first): [ranks[0]]}
        is_in_value = False
        for rank in ranks[1:]:
            piece = self._read(box, rank)
            members = groups.setdefault(_fingerprint(piece), [])
            members.append(rank)
            is_in_value |= ranks[0] not in members and not _same_values(first, piece)
            del piece
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
        if self._first_rank is None:
            self._first_rank, self._dtype = rank, piece.dtype
        if piece.dtype is not self._dtype:
            raise LayoutError(
                f"rank {self._first_rank} has {self._dtype}, rank {rank} {piece.dtype}: one tensor "
                "has one dtype"
            )
        for reduction in box.reductions:
            if reduction.op not in self._defined:
                _must_be_defined(reduction, piece.dtype)
                self._defined.add(reduction.op)
        return piece


def _must_be_defined(reduction: Reduction, dtype: torch.dtype) -> None:
    """Try a reduction on single elements: torch knows what it defines."""
    element = _widened(torch.ones(1, dtype=dtype, device="cpu"))
    try:
        _reduced([replace(reduction, size=2)], iter([element, element]))
    except (RuntimeError, TypeError) as error:  # TypeError: torch 2.15
        raise LayoutError(
            f"Partial({reduction.op}) of {dtype} is not defined in torch: {error}"
        ) from error


def _reduced(reductions: Sequence[Reduction], summands: Iterator[torch.Tensor]) -> torch.Tensor:
    """Take from `summands` what these reductions need, and return what they make of it."""
    if not reductions:
        return next(summands)
    *inner, last = reductions
    step = _REDUCE[last.op]
    # a tensor of our own from here on: what was loaded is never written to
    total = step(_reduced(inner, summands), _reduced(inner, summands))
    for _ in range(last.size - 2):
        step(total, _reduced(inner, summands), out=total)
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
        yield tuple(target for target, _ in block), tuple(source for _, source in block)


def _fingerprint(piece: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(bytes_of(piece.cpu()).data)


def _widened(piece: torch.Tensor) -> torch.Tensor:
    """Return float8 as float32: torch on the host neither adds nor compares it."""
    is_float8 = piece.dtype.is_floating_point and piece.dtype.itemsize == 1
    return piece.float() if is_float8 else piece


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = _widened(a), _widened(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


_CHUNK: Final = 1 << 22  # elements that are held as float64 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactDistance:
    """Distance of two tensors; elements that are not finite in one are left out of the sums."""

    cross: float
    """Sum of the products, element by element."""
    first_square: float
    """Sums of squares: of the first, of the second, and (`square`) of the differences."""
    second_square: float
    square: float
    greatest: float
    at: tuple[int, ...]
    """Place of the greatest difference; the first of what is not finite and differs, where any
    is."""
    unequal: int
    """Elements that are not the same; -0 is 0, and NaN is NaN."""
    other_nonfinite: int
    """Elements that differ where one is NaN or infinite."""

    @property
    def relative(self) -> float:
        """L2 norm of the difference over that of the first; inf where nonfinite elements differ."""
        if self.other_nonfinite:
            return math.inf
        if not self.unequal:
            return 0.0
        return math.sqrt(self.square / self.first_square) if self.first_square > 0 else math.inf


def exact_distance(first: torch.Tensor, second: torch.Tensor) -> ExactDistance:
    """Hold one tensor to another of any dtype and device. Raises ValueError where shapes differ."""
    if first.shape != second.shape:
        raise ValueError(f"shapes {list(first.shape)} and {list(second.shape)} differ")
    cross = first_square = second_square = square = 0.0
    greatest, where, nonfinite, unequal = -1.0, 0, 0, 0
    first_other = -1
    flat = _flat(first), _flat(second)
    is_complex = first.is_complex() or second.is_complex()
    for start in range(0, len(flat[0]), _CHUNK):
        a, b = (_numbers(elements[start : start + _CHUNK], is_complex) for elements in flat)
        is_finite = a.isfinite() & b.isfinite()
        is_other = ~(is_finite | (a == b) | (a.isnan() & b.isnan()))
        count = int(is_other.any(-1).sum())
        if count and first_other < 0:
            first_other = start + int(is_other.any(-1).to(torch.uint8).argmax())
        nonfinite += count
        unequal += count + int((is_finite & (a != b)).any(-1).sum())
        a, b = a.where(is_finite, 0.0), b.where(is_finite, 0.0)
        squares = (a - b).square()
        cross += float((a * b).sum())
        first_square += float(a.square().sum())
        second_square += float(b.square().sum())
        square += float(squares.sum())
        by_element = squares.sum(-1)
        greatest_at = int(by_element.argmax())
        if float(by_element[greatest_at]) > greatest:
            greatest, where = float(by_element[greatest_at]), start + greatest_at
    place, shape = where if first_other < 0 else first_other, tuple(first.shape)
    return ExactDistance(
        cross=cross,
        first_square=first_square,
        second_square=second_square,
        square=square,
        greatest=math.sqrt(max(greatest, 0.0)),
        at=tuple(map(int, np.unravel_index(place, shape))) if len(flat[0]) else (0,) * len(shape),
        unequal=unequal,
        other_nonfinite=nonfinite,
    )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one behind the other along their first dim."""
    return torch.cat([*tensors])


def row_matches(first: torch.Tensor, second: torch.Tensor) -> NDArray[np.int64] | None:
    """Return [n] which row of the first tensor has the bytes of each row of the second, None where
    they are not the same rows in some order. Equal rows keep their order."""
    rows_of: dict[bytes, list[int]] = {}
    for index in range(len(first) - 1, -1, -1):
        rows_of.setdefault(bytes_of(first[index]).tobytes(), []).append(index)
    matches = [rows.pop() for row in second if (rows := rows_of.get(bytes_of(row).tobytes()))]
    return np.array(matches, np.int64) if len(matches) == len(first) == len(second) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _numbers(flat: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """Return [n, 1] float64 on the host, [n, 2] of complex numbers."""
    host = flat.cpu()
    if is_complex:
        return torch.view_as_real(host.to(torch.complex128))
    if host.dtype.is_floating_point and host.dtype.itemsize == 1:  # torch converts it in one step
        host = host.float()
    return host.to(torch.float64).unsqueeze(-1)
