"""A CPU tensor's elements as a numpy array over the same memory, without one torch operation.

The array is made from address, shape and strides, so nothing that watches torch operations can see
it, and nothing is copied. Each dtype says how its stored words become floating-point values and how
they are normalized for the hash (-0 becomes +0, every NaN one NaN).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How one torch dtype is stored and read."""

    dtype: np.dtype[np.generic]
    """Type of the stored words; a complex element is two."""
    floats: np.dtype[np.floating]
    """Type its values are computed in: float32 where that holds them exactly, else float64."""
    is_complex: bool = False
    is_native: bool = False
    widen: Callable[[Array], Floats] | None = None
    """Converts stored words to values; None where a plain conversion does."""
    kernel_kind: str = ""
    """Name of the stored words in `rankscope.capture.kernel`; "" where it does not read them."""
    table: npt.NDArray[np.float32] | None = None
    normalize: Callable[[Array], Array] | None = None
    """Copies stored words without -0 and NaN payloads; None for dtypes that have neither."""

    def values(self, words: Array) -> Floats:
        """Return the values of flat stored words: the same array for native dtypes."""
        if self.is_native:
            return words
        values: Floats = self.widen(words) if self.widen else words.astype(self.floats)
        return values


def _normalize_floats(words: Array) -> Array:
    copy: Array = words.copy()
    copy[copy == 0] = 0
    copy[np.isnan(copy)] = np.nan
    return copy


def _widen_bfloat16(words: Array) -> Floats:
    wide = np.left_shift(words, 16, dtype=np.uint32)
    values: Floats = wide.view(np.float32)
    return values


def _widen_float16(words: Array) -> Floats:
    """Return float16 as float32; numpy's own conversion takes five times as long without AVX512."""
    bits = words.view(np.uint16)
    # exponent and mantissa moved into place are the value divided by 2**112
    wide = np.left_shift(bits & np.uint16(0x7FFF), 13, dtype=np.uint32)
    values: Floats = wide.view(np.float32)
    # exact, subnormals too: a power of two moves the exponent alone
    values *= np.float32(2.0**112)
    if np.maximum.reduce(values) >= 65536.0:  # infinities and NaN came out as 65536 and more
        beyond = values >= 65536.0
        values[beyond] = words[beyond]
    wide |= np.left_shift(bits & np.uint16(0x8000), 16, dtype=np.uint32)
    return values


def _normalize_bfloat16(words: Array) -> Array:
    copy: Array = words.copy()
    magnitude = words & np.uint16(0x7FFF)
    copy[magnitude == 0] = 0
    copy[magnitude > 0x7F80] = 0x7FC0
    return copy


def _decode(word: int, exponent_bits: int, bias: int, is_fnuz: bool, has_inf: bool) -> float:
    """Return the value of one 8-bit float (OCP FP8 1.0; fnuz: one zero, one NaN)."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if word & 0x80 else 1.0
    exponent, mantissa = (word & 0x7F) >> mantissa_bits, word & ((1 << mantissa_bits) - 1)
    if is_fnuz and word == 0x80:
        return math.nan
    if has_inf and exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if not is_fnuz and not has_inf and word & 0x7F == 0x7F:
        return math.nan
    significand = mantissa / (1 << mantissa_bits) + (1 if exponent else 0)
    return sign * math.ldexp(significand, max(exponent, 1) - bias)


def _eight_bits(**parameters: Any) -> Storage:
    return _tabled([_decode(word, **parameters) for word in range(256)])


def _tabled(values: list[float]) -> Storage:
    """Return the storage of an 8-bit float type: its 256 values say everything about it."""
    table = np.array(values, dtype=np.float32)
    normal = np.arange(256, dtype=np.uint8)
    for is_equal in (np.isnan(table), table == 0):
        if is_equal.any():
            # all words of one value become the first of them: -0 is +0, and every NaN the same one
            normal[is_equal] = np.flatnonzero(is_equal)[0]
    return Storage(
        dtype=np.dtype(np.uint8),
        floats=np.dtype(np.float32),
        kernel_kind="table",
        table=table,
        widen=lambda words: table[words],
        normalize=lambda words: normal[words],
    )


def _integer(dtype: str, floats: str, **more: Any) -> Storage:
    word = np.dtype(dtype)
    kernel_kind = "" if word.name == "uint64" else word.name
    return Storage(dtype=word, floats=np.dtype(floats), kernel_kind=kernel_kind, **more)


def _floating(dtype: str, floats: str, **more: Any) -> Storage:
    is_native = dtype == floats
    return _integer(dtype, floats, is_native=is_native, normalize=_normalize_floats, **more)


_STORAGES: Final[dict[torch.dtype, Storage]] = {
    torch.float32: _floating("<f4", "<f4"),
    torch.float64: _floating("<f8", "<f8"),
    torch.float16: _floating("<f2", "<f4", widen=_widen_float16),
    torch.bfloat16: Storage(
        dtype=np.dtype("<u2"),
        floats=np.dtype("<f4"),
        kernel_kind="bfloat16",
        widen=_widen_bfloat16,
        normalize=_normalize_bfloat16,
    ),
    torch.complex64: _floating("<f4", "<f4", is_complex=True),
    torch.complex128: _floating("<f8", "<f8", is_complex=True),
    torch.complex32: _floating("<f2", "<f4", is_complex=True, widen=_widen_float16),
    torch.bool: _integer("u1", "<f4"),
    torch.uint8: _integer("u1", "<f4"),
    torch.int8: _integer("i1", "<f4"),
    torch.int16: _integer("<i2", "<f4"),
    torch.int32: _integer("<i4", "<f8"),
    torch.int64: _integer("<i8", "<f8"),
    torch.uint16: _integer("<u2", "<f4"),
    torch.uint32: _integer("<u4", "<f8"),
    torch.uint64: _integer("<u8", "<f8"),
    torch.float8_e4m3fn: _eight_bits(exponent_bits=4, bias=7, is_fnuz=False, has_inf=False),
    torch.float8_e4m3fnuz: _eight_bits(exponent_bits=4, bias=8, is_fnuz=True, has_inf=False),
    torch.float8_e5m2: _eight_bits(exponent_bits=5, bias=15, is_fnuz=False, has_inf=True),
    torch.float8_e5m2fnuz: _eight_bits(exponent_bits=5, bias=16, is_fnuz=True, has_inf=False),
    torch.float8_e8m0fnu: _tabled([*(2.0 ** (word - 127) for word in range(255)), math.nan]),
}


def storage_of(dtype: torch.dtype) -> Storage | None:
    """Return how a dtype is stored, None for one without a digest (quantized, packed)."""
    return _STORAGES.get(dtype)


def storage_of_digested(dtype: torch.dtype) -> Storage:
    """Return how a dtype is stored that `describe` said can be digested, else raise TypeError."""
    storage = storage_of(dtype)
    if storage is None:
        raise TypeError(f"{dtype} tensors have no digest: ask capture.describe before reading one")
    return storage


def memory_type(count: int, storage: Storage) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the ctypes type of the memory of a contiguous tensor of `count` elements."""
    return ctypes.c_char * (count * storage.dtype.itemsize * (1 + storage.is_complex))


def stored_words(tensor: torch.Tensor, storage: Storage) -> Array:
    """Return the memory of a non-empty strided CPU tensor as an array of its shape and strides (a
    complex one has a last dim of 2 more), conjugate and negative bits left alone.

    The array keeps nothing alive: use it while the tensor is.
    """
    size = storage.dtype.itemsize
    shape = list(tensor.shape)
    strides = [step * size * (1 + storage.is_complex) for step in tensor.stride()]
    if storage.is_complex:
        shape.append(2)
        strides.append(size)
    extent = size + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_char * extent).from_address(tensor.data_ptr())
    array: Array = np.ndarray(shape, storage.dtype, memory, 0, strides)
    return array


def elements(tensor: torch.Tensor, storage: Storage) -> Array:
    """Return `stored_words`, conjugate and negative bits resolved in a copy."""
    array = stored_words(tensor, storage)
    if tensor.is_neg():
        array = np.negative(array)
    if storage.is_complex and tensor.is_conj():
        array = array.copy()
        np.negative(array[..., 1], out=array[..., 1])
    return array


def number_on_host(tensor: torch.Tensor) -> float | None:
    """Return the one number a plain CPU tensor holds, None for any other tensor."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.numel() != 1:
        return None
    storage = storage_of(tensor.dtype)
    if storage is None or storage.is_complex or tensor.layout is not torch.strided:
        return None
    return float(storage.values(elements(tensor, storage).reshape(-1))[0])
