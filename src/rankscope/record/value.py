"""One tensor in one slot on one rank: the digest kept for it, and what is known of its layout."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
    """What to know about a value besides its numbers. Written in spools: never renumber."""

    NONE = 0
    AFTER_CALL = 1
    """Read later than its place in the call says: what ran since may have changed it."""
    SCALED = 2
    """A gradient still multiplied by the loss scale."""
    ABSENT = 4
    """No tensor was there (`.grad is None`)."""
    PENDING = 8
    """A collective on it was not known to be complete: never waited for, not digested."""
    STRUCTURE_ONLY = 16
    """Recorded without a digest (meta, functorch, sparse, quantized, or not asked for)."""
    UNSEEN = 32
    """A gradient that was expected and whose hook never fired."""
    REUSED = 64
    """Statistics and sketch copied from an earlier value: same object, same version, same hash."""
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
    """Its bytes were asked for and could not be kept: what cannot be stored, no room, no budget."""
    CARRIED = 16384
    """Gradient of a parameter that had one already, not zero, when backward of the step began."""
    NO_SYNC = 32768
    """Gradient that its data-parallel wrapper was told not to reduce, both when the last backward
    pass ended and when the optimizer stepped; of phase `accumulated` when that pass ended."""
    RESTARTED = 65536
    """Of phase `accumulated`: when that backward pass began there was no gradient, or zeros, though
    an earlier pass of the step had left one, which no optimizer has taken."""
    AS_LEFT = 131072
    """Of phase `grads`: what the last backward pass left, bit by bit; of an accelerator's, nothing
    was seen to write to it since."""
    SAME_LINES = 262144
    """Of phase `accumulated`, beside RESTARTED: the forward of this pass was called from the same
    lines of the program as that of the pass before, whose gradient was gone."""


UNFOLDED_FLAGS: Final = int(
    ValueFlag.REUSED
    | ValueFlag.HAS_SAMPLES
    | ValueFlag.SUPERSEDES
    | ValueFlag.NOT_KEPT
    | ValueFlag.AS_LEFT
    | ValueFlag.SAME_LINES
)
"""How a value was obtained, not what it is: no reason to tell ranks apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The numbers kept for a value instead of its bytes (`rankscope.record.statistics`). Statistics
    are over the finite elements. `min`, `max` and `mean` are NaN where there is none, `std`
    (divisor n - 1, as in torch) where there are fewer than two; l2 is then 0."""

    count: int
    """Elements, finite or not. A complex element counts as two, its real and imaginary part."""
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
        found: float | int = self.added[name] if name in self.added else getattr(self, name)
        return found


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
    """Bounded repr of what is not a tensor, or why a tensor was not digested."""
