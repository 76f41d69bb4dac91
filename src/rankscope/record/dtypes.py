"""Which dtypes a safetensors file can hold, by torch's names and by its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final, NamedTuple


class StoredType(NamedTuple):
    """How a safetensors file spells a dtype."""

    name: str
    item_bytes: int

    def nbytes(self, shape: Iterable[int]) -> int:
        """Return the bytes of a tensor of this shape."""
        return prod(shape, start=self.item_bytes)


STORED_TYPES: Final[Mapping[str, StoredType]] = {
    "bool": StoredType("BOOL", 1),
    "uint8": StoredType("U8", 1),
    "int8": StoredType("I8", 1),
    "int16": StoredType("I16", 2),
    "uint16": StoredType("U16", 2),
    "int32": StoredType("I32", 4),
    "uint32": StoredType("U32", 4),
    "int64": StoredType("I64", 8),
    "uint64": StoredType("U64", 8),
    "float16": StoredType("F16", 2),
    "bfloat16": StoredType("BF16", 2),
    "float32": StoredType("F32", 4),
    "float64": StoredType("F64", 8),
    "complex64": StoredType("C64", 8),
    "float8_e4m3fn": StoredType("F8_E4M3", 1),
    "float8_e4m3fnuz": StoredType("F8_E4M3FNUZ", 1),
    "float8_e5m2": StoredType("F8_E5M2", 1),
    "float8_e5m2fnuz": StoredType("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": StoredType("F8_E8M0", 1),
}
"""By torch's name without the prefix. complex32, complex128 and packed types have no name there."""
TORCH_NAMES: Final[Mapping[str, str]] = {stored.name: name for name, stored in STORED_TYPES.items()}


def is_whole_number(dtype: str) -> bool:
    """True for torch's name of a dtype of integers or of bool."""
    return dtype.startswith(("int", "uint", "bool"))
