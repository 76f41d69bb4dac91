"""Records as columns: where they are, what they say, definitions decoded.

found = records(buffer)                 committed records of a replica, nothing copied
found.columns(RecordKind.ENTER)         positions among all records, and a structured array
found.values()                          the same for values, with or without their digests
found.definitions()                     msgpack maps, checked; what does not decode is set aside
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError
from rankscope.record.streams import EndReason
from rankscope.spool.definitions import decode_definition
from rankscope.spool.recordformat import (
    CELL_BYTES,
    END_DTYPE,
    END_REASONS,
    ENTER_DTYPE,
    ERROR_DTYPE,
    EXIT_DTYPE,
    FIRST,
    GAP_DTYPE,
    HEADER_BYTES,
    PAYLOAD_BYTES,
    SAMPLES_DTYPE,
    STEP_DTYPE,
    TENSOR_DTYPE,
    VALUE_CELLS,
    VALUE_DTYPE,
    VALUE_HEAD_DTYPE,
    RecordKind,
)
from rankscope.spool.settledprefix import read_replica
from rankscope.spool.soundness import judged
from rankscope.spool.validprefix import Cells, as_cells, cell_heads, committed_heads

__all__ = [
    "DefinitionsRead",
    "Ending",
    "Records",
    "ending",
    "open_replica",
    "records",
    "step_codes",
]

COLUMNS: Mapping[RecordKind, np.dtype[Any]] = {
    RecordKind.ENTER: ENTER_DTYPE,
    RecordKind.EXIT: EXIT_DTYPE,
    RecordKind.STEP: STEP_DTYPE,
    RecordKind.ERROR: ERROR_DTYPE,
    RecordKind.TENSOR: TENSOR_DTYPE,
    RecordKind.GAP: GAP_DTYPE,
    RecordKind.END: END_DTYPE,
}
"""Record kinds of one cell each."""
_BLOCK = 1024
"""Records of several cells copied at a time."""
Positions = npt.NDArray[np.int64]
Structured = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionsRead:
    """The definitions of a buffer, in the order they were committed."""

    found: tuple[dict[str, Any], ...]
    rejected: tuple[str, ...]
    """One line for each record that is no definition of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the END and GAP records of a buffer say."""

    reason: EndReason | None
    """None where there is no END record."""
    dropped_records: int
    time_ns: int = 0
    """Of the END record, by the rank's monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Committed records of one buffer. A position is a record's number among them."""

    cells: Cells
    """[N, 64], the committed ones only."""
    start: Positions
    """First cell of each record, [R]."""
    size: Positions
    """Cells of each record, [R]."""
    kind: npt.NDArray[np.uint8]
    """[R]"""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def committed_bytes(self) -> int:
        """Length of the committed prefix."""
        return self.cells.size

    def positions(self, kind: RecordKind) -> Positions:
        """Positions of the records of one kind."""
        return np.flatnonzero(self.kind == kind)

    def columns(self, kind: RecordKind) -> tuple[Positions, Structured]:
        """Positions and fields of the records of a kind in `COLUMNS` that make sense."""
        return _sound(kind, *self.all_columns(kind))

    def all_columns(self, kind: RecordKind) -> tuple[Positions, Structured]:
        """The same with those that make no sense (`soundness`)."""
        return self._one_cell(self.positions(kind), COLUMNS[kind])

    def values(self) -> tuple[Positions, Structured, npt.NDArray[np.bool_]]:
        """Positions, VALUE_DTYPE rows, and which have a digest (else its fields are 0), of the
        values that make sense."""
        positions, rows, has_digest = self.all_values()
        is_sound, _ = judged(RecordKind.VALUE, rows)
        if is_sound is None:
            return positions, rows, has_digest
        return positions[is_sound], rows[is_sound], has_digest[is_sound]

    def all_values(self) -> tuple[Positions, Structured, npt.NDArray[np.bool_]]:
        """The same with those that make no sense."""
        positions = self.positions(RecordKind.VALUE)
        has_digest = self.size[positions] == VALUE_CELLS
        rows = np.zeros(len(positions), VALUE_DTYPE)
        flat = rows.view(np.uint8).reshape(len(rows), VALUE_CELLS, PAYLOAD_BYTES)
        starts = self.start[positions]
        assert VALUE_HEAD_DTYPE.itemsize == PAYLOAD_BYTES
        if has_digest.all():  # the usual case, without a copy more
            _copy_payloads(self.cells, starts, flat)
            return positions, rows, has_digest
        digested = np.empty((int(has_digest.sum()), *flat.shape[1:]), np.uint8)
        _copy_payloads(self.cells, starts[has_digest], digested)
        flat[has_digest] = digested
        flat[~has_digest, 0] = self.cells.take(starts[~has_digest], axis=0)[:, HEADER_BYTES:]
        return positions, rows, has_digest

    def value_heads(self) -> tuple[Positions, Structured]:
        """Positions of the values that make sense, and VALUE_HEAD_DTYPE rows: what stands before a
        digest."""
        found = self._one_cell(self.positions(RecordKind.VALUE), VALUE_HEAD_DTYPE)
        return _sound(RecordKind.VALUE, *found)

    def samples(self) -> tuple[Positions, Structured, list[npt.NDArray[np.float32]]]:
        """Positions, SAMPLES_DTYPE heads, and the [count, size] sketches of each."""
        positions = self.positions(RecordKind.SAMPLES)
        _, heads = self._one_cell(positions, SAMPLES_DTYPE)
        kept, tables = [], []
        for number, (position, head) in enumerate(zip(positions, heads)):
            body = self.payload(int(position))[SAMPLES_DTYPE.itemsize :]
            wanted = int(head["count"]) * int(head["size"])
            if wanted * 4 <= len(body):
                table = np.frombuffer(body, "<f4", wanted)
                tables.append(table.reshape(int(head["count"]), int(head["size"])))
                kept.append(number)
        return positions[kept], heads[kept], tables

    def payload(self, position: int) -> bytes:
        """All payload bytes of one record, its padding included."""
        first = int(self.start[position])
        return self.cells[first : first + int(self.size[position]), HEADER_BYTES:].tobytes()

    def cells_of(self, positions: Positions) -> Cells:
        """Cells of some records one after the other, [N, 64]: a copy."""
        starts, sizes = self.start[positions], self.size[positions]
        firsts = np.cumsum(sizes) - sizes
        wanted = np.repeat(starts - firsts, sizes) + np.arange(int(sizes.sum()))
        return self.cells.take(wanted, axis=0)

    def definitions(self) -> DefinitionsRead:
        """Decode the definitions; what is none of its kind is set aside."""
        found, rejected = [], []
        for position in self.positions(RecordKind.DEFINITION):
            try:
                found.append(decode_definition(self.payload(int(position))))
            except SpoolError as error:
                rejected.append(f"definition in cell {self.start[position]}: {error}")
        return DefinitionsRead(found=tuple(found), rejected=tuple(rejected))

    def _one_cell(self, positions: Positions, dtype: np.dtype[Any]) -> tuple[Positions, Structured]:
        cell = np.dtype(
            {
                "names": ["fields"],
                "formats": [dtype],
                "offsets": [HEADER_BYTES],
                "itemsize": CELL_BYTES,
            }
        )
        taken = self.cells.take(self.start[positions], axis=0)
        # the fields as they lie in the cells that were taken: no second copy
        return positions, taken.view(cell).reshape(-1)["fields"]


def _sound(
    kind: RecordKind, positions: Positions, rows: Structured
) -> tuple[Positions, Structured]:
    is_sound, _ = judged(kind, rows)
    return (positions, rows) if is_sound is None else (positions[is_sound], rows[is_sound])


def _copy_payloads(cells: Cells, starts: Positions, flat: npt.NDArray[np.uint8]) -> None:
    """Copy the payloads of records of as many cells as `flat`, [N, cells, 56], has, in the cache's
    size."""
    count = flat.shape[1]
    of_record = np.arange(count)
    for at in range(0, len(starts), _BLOCK):
        taken = cells.take(starts[at : at + _BLOCK, None] + of_record, axis=0)
        flat[at : at + _BLOCK].view(np.uint64)[:] = taken.view(np.uint64)[:, :, 1:]


def records(buffer: bytes | memoryview | Cells, *, is_verified: bool = False) -> Records:
    """Index the committed records of a buffer that begins at a record boundary.

    Args:
        buffer: a replica, or a piece of one.
        is_verified: the buffer is known to be whole valid records: leave the crcs alone.
    """
    cells = as_cells(buffer)
    heads = cell_heads(cells) if is_verified else committed_heads(cells)
    cells = cells[: len(heads)]
    octets = heads.view(np.uint8).reshape(-1, 4)
    start = np.flatnonzero(octets[:, 1] == FIRST)
    size = np.diff(start, append=len(cells))
    return Records(cells=cells, start=start, size=size, kind=octets[start, 0])


def open_replica(path: Path) -> Records:
    """Map a replica and index its committed records, as far as they are still there.

    Raises:
        SpoolError: the file cannot be read.
    """
    return records(read_replica(path)[0])


def ending(found: Records) -> Ending:
    """Read the END record, and the GAP records where there is none."""
    _, ends = found.columns(RecordKind.END)
    if len(ends):
        code = int(ends[-1]["reason"])
        reason = END_REASONS[code] if code < len(END_REASONS) else EndReason.EXIT
        dropped, time_ns = int(ends[-1]["dropped"]), int(ends[-1]["time_ns"])
        return Ending(reason=reason, dropped_records=dropped, time_ns=time_ns)
    _, gaps = found.columns(RecordKind.GAP)
    return Ending(reason=None, dropped_records=int(gaps["records"].sum()))


def step_codes(modes: npt.NDArray[Any], steps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return one number for each step of a mode: its number in the low 32 bits, [len(steps)]."""
    return modes.astype(np.int64) << 32 | steps.astype(np.int64)
