"""How far two full tensors of one shape are apart: exact sums over all elements, in float64; and
which rows of one are those of the other.

Needs torch, as `tree/tensors/rebuild.py` does; import it where tensors are compared, not before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from rankscope.tree.tensors.rebuild import bytes_of

_CHUNK: Final = 1 << 22  # elements that are held as float64 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactDistance:
    """What two tensors have in common and what not. Elements that are not finite in one of them are
    left out of the sums."""

    cross: float
    """Sum of the products of both, element by element."""
    own: float
    """Sum of squares of the first; `theirs` of the second, `square` of the differences."""
    theirs: float
    square: float
    greatest: float
    at: tuple[int, ...]
    """Place of the greatest difference; the first of what is not finite and differs, where any
    is."""
    unequal: int
    """Elements that are not the same; -0 is 0, and NaN is NaN."""
    other_nonfinite: int
    """Elements of which one is NaN or infinite and the other is not the same."""

    @property
    def relative(self) -> float:
        """L2 norm of the difference over that of the first tensor; inf where what is not finite
        differs."""
        if self.other_nonfinite:
            return math.inf
        if not self.unequal:
            return 0.0
        return math.sqrt(self.square / self.own) if self.own > 0 else math.inf


def exact_distance(first: torch.Tensor, second: torch.Tensor) -> ExactDistance:
    """Hold one tensor to another of any dtype and device. Raises ValueError where shapes differ."""
    if first.shape != second.shape:
        raise ValueError(f"shapes {list(first.shape)} and {list(second.shape)} differ")
    cross = own = theirs = square = 0.0
    greatest, where, other, unequal = -1.0, 0, 0, 0
    first_other = -1
    flat = _flat(first), _flat(second)
    is_complex = first.is_complex() or second.is_complex()
    for start in range(0, len(flat[0]), _CHUNK):
        a, b = (_numbers(each[start : start + _CHUNK], is_complex) for each in flat)
        is_finite = a.isfinite() & b.isfinite()
        is_other = ~(is_finite | (a == b) | (a.isnan() & b.isnan()))
        count = int(is_other.any(-1).sum())
        if count and first_other < 0:
            first_other = start + int(is_other.any(-1).to(torch.uint8).argmax())
        other += count
        unequal += count + int((is_finite & (a != b)).any(-1).sum())
        a, b = a.where(is_finite, 0.0), b.where(is_finite, 0.0)
        apart = (a - b).square()
        cross += float((a * b).sum())
        own += float(a.square().sum())
        theirs += float(b.square().sum())
        square += float(apart.sum())
        by_element = apart.sum(-1)
        most = int(by_element.argmax())
        if float(by_element[most]) > greatest:
            greatest, where = float(by_element[most]), start + most
    place, shape = where if first_other < 0 else first_other, tuple(first.shape)
    return ExactDistance(
        cross=cross,
        own=own,
        theirs=theirs,
        square=square,
        greatest=math.sqrt(max(greatest, 0.0)),
        at=tuple(map(int, np.unravel_index(place, shape))) if len(flat[0]) else (0,) * len(shape),
        unequal=unequal,
        other_nonfinite=other,
    )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one behind the other along their first dim."""
    return torch.cat([*tensors])


def same_rows(first: torch.Tensor, second: torch.Tensor) -> NDArray[np.int64] | None:
    """Return [n] which row of the first tensor has the bytes of each row of the second, None where
    they are not the same rows in some order. Equal rows keep their order."""
    known: dict[bytes, list[int]] = {}
    for index in range(len(first) - 1, -1, -1):
        known.setdefault(bytes_of(first[index]).tobytes(), []).append(index)
    found = [rows.pop() for row in second if (rows := known.get(bytes_of(row).tobytes()))]
    return np.array(found, np.int64) if len(found) == len(first) == len(second) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _numbers(flat: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """Return [n, 1] float64 on the host, [n, 2] of complex numbers."""
    own = flat.cpu()
    if is_complex:
        return torch.view_as_real(own.to(torch.complex128))
    if own.dtype.is_floating_point and own.dtype.itemsize == 1:  # torch converts it in one step
        own = own.float()
    return own.to(torch.float64).unsqueeze(-1)
