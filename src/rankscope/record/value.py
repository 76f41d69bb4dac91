"""One tensor in one slot on one rank: its digest, its layout, and how modules, tensors and dtypes
are written down.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from rankscope.layout.placement import Layout, Ranges
from rankscope.record.statistics import ADDED, MEASURED

SKETCH_SIZE = 8
"""K of the sketch: random projections kept per value."""
MAX_SAMPLES = 64
"""A batch dim of at most this many samples also keeps one sketch per sample."""


def is_form(slot: str) -> bool:
    """True for `form:input` and `form:output`: how the slots of a call were nested, no values."""
    return slot.startswith("form:")


class ValueFlag(enum.IntFlag):
    """Facts about a value that are no numbers. Written in spools: never renumber."""

    NONE = 0
    AFTER_CALL = 1
    """Read later than the call's place in the order: code in between may have changed it."""
    SCALED = 2
    """A gradient still multiplied by the loss scale."""
    ABSENT = 4
    """No tensor was there (`.grad is None`)."""
    PENDING = 8
    """A collective on it may be incomplete: never waited for, not digested."""
    STRUCTURE_ONLY = 16
    """Recorded without a digest (meta, functorch, sparse, quantized, or not asked for)."""
    UNSEEN = 32
    """An expected gradient whose hook never fired."""
    REUSED = 64
    """Statistics and sketch copied from an earlier value: same address, same hash."""
    PYTHON = 128
    """Not a tensor: the meta definition holds a bounded repr."""
    MIX64 = 512
    """The hash is mix64, computed on an accelerator; hashes of two kinds never compare."""
    SUPERSEDES = 1024
    """Replaces the earlier record of the same call and slot."""
    HAS_SAMPLES = 256
    SKIPPED = 2048
    """Of an optimizer step that a GradScaler skipped: inf or NaN in the gradients."""
    UNHELD = 4096
    """Gradient of a parameter that is in no group of any optimizer alive."""
    NOT_KEPT = 8192
    """Its bytes were to be kept and could not be: unstorable type, no room, no budget."""
    CARRIED = 16384
    """Gradient of a parameter that had a nonzero one before the step's first backward."""
    NO_SYNC = 32768
    """Gradient that its data-parallel wrapper was told not to reduce, both when the last backward
    pass ended and when the optimizer stepped; of phase `accumulated` when that pass ended."""
    RESTARTED = 65536
    """Of phase `accumulated`: when that backward pass began there was no gradient, or zeros, though
    an earlier pass of the step had left one, which no optimizer has taken."""
    AS_LEFT = 131072
    """Of phase `grads`: bit by bit what the last backward pass left; on accelerators, no later
    write was seen."""
    SAME_LINES = 262144
    """Of phase `accumulated`, beside RESTARTED: the same lines of the program called this pass's
    forward and the previous pass's, whose gradient was gone."""


UNFOLDED_FLAGS: Final = int(
    ValueFlag.REUSED
    | ValueFlag.HAS_SAMPLES
    | ValueFlag.SUPERSEDES
    | ValueFlag.NOT_KEPT
    | ValueFlag.AS_LEFT
    | ValueFlag.SAME_LINES
)
"""How a value was obtained, not what it is: no reason to list ranks apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The numbers kept for a value instead of its bytes (`rankscope.record.statistics`). Statistics
    are over the finite elements. Without one, `min`, `max` and `mean` are NaN and l2 is 0; with
    fewer than two, `std` (divisor n - 1, as in torch) is NaN."""

    count: int
    """Elements, finite or not. A complex element counts as two, real and imaginary part."""
    nan: int
    posinf: int
    neginf: int
    zero: int
    min: float
    max: float
    mean: float
    std: float
    l2: float
    hash: int
    """Order-sensitive 64-bit hash of the element bytes, ±0 and NaN payloads normalized."""
    sketch: tuple[float, ...]
    """SKETCH_SIZE separable projections over global indices (docs/how-it-works/digest.md)."""
    added: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: Mapping[str, Any], hash: int, sketch: tuple[float, ...]) -> Digest:
        """Return the digest with these statistics, by name."""
        added = {s.name: numbers[s.name] for s in ADDED}
        measured = {s.name: numbers[s.name] for s in MEASURED}
        return cls(**measured, hash=hash, sketch=sketch, added=added)

    def number(self, name: str) -> float | int:
        """Return a statistic by its name in the table."""
        value: float | int = self.added[name] if name in self.added else getattr(self, name)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Sketches of the single samples of a value whose batch dim is small."""

    dim: int
    rows: tuple[tuple[float, ...], ...]
    """One row of SKETCH_SIZE numbers a sample, the batch dim's own factor left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueMeta:
    """What a value is, without its numbers: interned once per rank in the spool."""

    dtype: str
    """torch's name without the prefix: "float32", "bfloat16", "int64" ... or "python"."""
    device: str
    """"cpu", "cuda:0", "meta" ..."""
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    layout: Layout
    ranges: tuple[Ranges, ...] | None
    """Per dim the global indices this rank holds, None where the layout is unknown."""
    note: str | None = None
    """Bounded repr of a value that is no tensor, or why a tensor was not digested."""


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
"""Types by torch's name without the prefix; complex32, complex128 and packed types are not
storable."""
TORCH_NAMES: Final[Mapping[str, str]] = {stored.name: name for name, stored in STORED_TYPES.items()}


def is_whole_number(dtype: str) -> bool:
    """True for torch's name of a dtype of integers or of bool."""
    return dtype.startswith(("int", "uint", "bool"))


_Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleName:
    """One rank's name for one module."""

    path: str
    raw_path: str
    class_name: str
    wrappers: tuple[str, ...]
    opaque: bool

    def as_fields(self) -> dict[str, Any]:
        """Return how a step says it; the path stands in the node."""
        return {
            "class": self.class_name,
            "raw_path": self.raw_path,
            "wrappers": list(self.wrappers),
            "opaque": self.opaque,
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ModuleName:
        """Return the name of `as_fields`, without a path. Raises KeyError, TypeError or
        ValueError."""
        return cls(
            path="",
            raw_path=str(fields["raw_path"]),
            class_name=str(fields["class"]),
            wrappers=tuple(map(str, fields["wrappers"])),
            opaque=bool(fields["opaque"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What one rank holds in a slot, without its numbers."""

    dtype: str
    """torch's name without the prefix, or "python"."""
    device: str
    """Kind of device, without its index."""
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    source: str
    """Source of the layout: word of a `LayoutSource`."""
    mesh: str = ""
    """Kind of mesh, as the run header names it; "" where the layout is unknown."""
    placements: tuple[tuple[str, str], ...] = ()
    ranges: tuple[_Ranges, ...] | None = None
    note: str | None = None
    """Bounded repr of a value that is no tensor, or why a tensor was not digested."""
    requires_grad: bool = False

    @property
    def shared(self) -> dict[str, object]:
        """What the ranks of a slot agree on, unless they hold different things."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "global_shape": self.global_shape,
            "source": self.source,
            "mesh": self.mesh,
            "placements": self.placements,
        }

    @property
    def local(self) -> tuple[object, ...]:
        """Ranks that differ in this hold different pieces of the same thing."""
        return self.shape, self.ranges, self.note, self.requires_grad

    def as_fields(self) -> dict[str, Any]:
        """Return how a step says it: what does not apply is left out."""
        fields: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "shape": list(self.shape),
            "global_shape": None if self.global_shape is None else list(self.global_shape),
            "source": self.source,
        }
        if self.mesh:
            fields |= {"mesh": self.mesh, "placements": dict(self.placements)}
        if self.ranges is not None:
            fields["ranges"] = [[list(span) for span in dim] for dim in self.ranges]
        if self.note is not None:
            fields["note"] = self.note
        if self.requires_grad:
            fields["requires_grad"] = True
        return fields

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> TensorFacts:
        """Return the facts of `as_fields`. Raises KeyError, TypeError, ValueError or
        AttributeError."""
        global_shape = fields["global_shape"]
        ranges, note = fields.get("ranges"), fields.get("note")
        return cls(
            dtype=str(fields["dtype"]),
            device=str(fields["device"]),
            shape=tuple(map(int, fields["shape"])),
            global_shape=None if global_shape is None else tuple(map(int, global_shape)),
            source=str(fields["source"]),
            mesh=str(fields.get("mesh", "")),
            placements=tuple((str(a), str(p)) for a, p in fields.get("placements", {}).items()),
            ranges=None if ranges is None else read_ranges(ranges),
            note=None if note is None else str(note),
            requires_grad=bool(fields.get("requires_grad", False)),
        )


def read_ranges(data: Any) -> tuple[_Ranges, ...]:
    """Return ranges as JSON holds them. Raises TypeError, ValueError: they are none."""
    return tuple(tuple((int(a), int(b)) for a, b in dim) for dim in data)
