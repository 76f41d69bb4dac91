"""The read side: records as columns (where they are, what they say, which make sense, definitions
decoded), and the committed records of a stream, while it is written and freed.

    batch = records(buffer)                 committed records of a replica, nothing copied
    batch.columns(RecordKind.ENTER)         positions among all records, and a structured array
    batch.values()                          the same for values; a column is taken when asked for
    batch.definitions()                     msgpack maps, checked; what does not decode is left out

A valid crc says that the bytes are those which were written, not that a rank wrote them. So what
all later code counts on is checked here, once: times that can be added, known phases and modes,
counts that fit each other. Other records are set aside, and counted with the reason.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.record.statistics import COUNTS, NONFINITE
from rankscope.run.files import piece_of
from rankscope.run.folders import segment_indexes, segment_path
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
    LATEST_NS,
    LONGEST_RECORD,
    NO_SEQUENCE,
    PAYLOAD_BYTES,
    STAMP,
    STEP_DTYPE,
    TENSOR_DTYPE,
    UNKNOWN,
    VALUE_CELLS,
    VALUE_DTYPE,
    RecordKind,
    decode_definition,
    keep_origin,
    kept_origin,
    origin_of,
    record_bytes,
)
from rankscope.spool.replicas import (
    Cells,
    as_cells,
    cell_crcs,
    cell_heads,
    committed_heads,
    valid_prefix,
)

Rows = Any
"""Records by column: a structured array, or `ValueRows`."""
Mask = NDArray[np.bool_]

_MOST: Final = 1 << 48
"""More bytes, records or elements than any rank has."""
_NUMBERS: Final = np.arange(256)
# tables by number: one lookup in numpy for all rows, in place of a comparison for each member
KNOWN_PHASES: Final[Mask] = np.isin(_NUMBERS, [int(phase) for phase in Phase])
KNOWN_MODES: Final[Mask] = np.isin(_NUMBERS, [int(mode) for mode in Mode])
"""Modes by number; a newer rankscope may have added some."""


def _below_most(*names: str) -> Callable[[Rows], Mask]:
    return lambda rows: np.logical_and.reduce([rows[name] < _MOST for name in names])


_TIME: Final = (
    "time out of range",
    lambda rows: (rows["time_ns"] >= 0) & (rows["time_ns"] < LATEST_NS),
)
_MODE: Final = ("unknown mode", lambda rows: KNOWN_MODES[rows["mode"]])
_PHASE: Final = ("unknown phase", lambda rows: KNOWN_PHASES[rows["phase"]])
_RULES: Final[Mapping[RecordKind, tuple[tuple[str, Callable[[Rows], Mask]], ...]]] = {
    RecordKind.ENTER: (_TIME, _MODE, _PHASE),
    RecordKind.EXIT: (_TIME,),
    RecordKind.VALUE: (_TIME, _PHASE, ("element count out of range", _below_most("count"))),
    RecordKind.STEP: (_TIME, _MODE),
    RecordKind.ERROR: (_TIME,),
    RecordKind.TENSOR: (("place out of range", _below_most("offset", "nbytes")),),
    RecordKind.GAP: (
        _TIME,
        _MODE,
        ("counts out of range", _below_most("records", "bytes")),
        ("steps in the wrong order", lambda rows: rows["first_step"] <= rows["last_step"]),
    ),
    RecordKind.END: (_TIME, ("counts out of range", _below_most("records", "dropped"))),
}


def sound_mask(kind: RecordKind, rows: Rows) -> tuple[Mask | None, Counter[str]]:
    """Return which rows of a kind of record are sound, [rows], None if all are, and how many rows
    break which rule, each counted for the first it breaks. Not for definitions and samples."""
    is_sound: Mask | None = None
    broken_rules: Counter[str] = Counter()
    for reason, rule in _RULES.get(kind, ()):
        holds = rule(rows)
        if holds.all():
            continue
        # counted for the first rule alone: the sum over the reasons is the number of records set
        # aside
        remaining = np.ones(len(rows), bool) if is_sound is None else is_sound
        broken = int((remaining & ~holds).sum())
        if broken:
            broken_rules[f"{kind.name} with {reason}"] = broken
        is_sound = remaining & holds
    return is_sound, broken_rules


def sound_rows(kind: RecordKind, rows: Rows) -> tuple[Rows, Counter[str]]:
    """Return the sound rows (`sound_mask`), the same array if all are, and the others."""
    is_sound, broken_rules = sound_mask(kind, rows)
    return (rows if is_sound is None else rows[is_sound]), broken_rules


def sound_digests(rows: Rows) -> Mask:
    """Return [rows] which digests, whole records of values, have counts that fit each other."""
    remaining = rows["count"]
    fits = np.ones(len(rows), bool)
    for name in NONFINITE:
        fits &= rows[name] <= remaining
        # unsigned: what does not fit is not subtracted, or it would wrap round to a huge rest
        remaining = remaining - np.where(fits, rows[name], 0)
    for name in set(COUNTS) - {"count", *NONFINITE}:
        fits &= rows[name] <= remaining
    return fits


COLUMNS: Mapping[RecordKind, np.dtype[Any]] = {
    RecordKind.ENTER: ENTER_DTYPE,
    RecordKind.EXIT: EXIT_DTYPE,
    RecordKind.STEP: STEP_DTYPE,
    RecordKind.ERROR: ERROR_DTYPE,
    RecordKind.TENSOR: TENSOR_DTYPE,
    RecordKind.GAP: GAP_DTYPE,
    RecordKind.END: END_DTYPE,
}
VALUE_COLUMNS = tuple(name for name in VALUE_DTYPE.names or () if name not in ("pad", "spare"))
Positions = npt.NDArray[np.int64]
Structured = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the END and GAP records of a buffer say; the time is the rank's monotonic clock."""

    reason: EndReason | None
    dropped_records: int
    time_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Committed records of one buffer: their cells [N, 64], and of each record [R] its first cell,
    the number of its cells and its kind. A position is a record's number among them."""

    cells: Cells
    start: Positions
    size: Positions
    kind: npt.NDArray[np.uint8]

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
        positions = self.positions(kind)
        rows = self.rows_at(positions, kind)
        is_sound, _ = sound_mask(kind, rows)
        return (positions, rows) if is_sound is None else (positions[is_sound], rows[is_sound])

    def rows_at(self, positions: Positions, kind: RecordKind) -> Structured:
        """Return the fields of records of a kind, senseless ones included (`soundness`)."""
        # taken once: the cells of one kind lie apart in the map, and each field would walk over
        # them
        cells = self.cells.take(self.start[positions], axis=0)
        # the fields as they lie in the cells that were taken: no second copy
        fields = cells[:, HEADER_BYTES : HEADER_BYTES + COLUMNS[kind].itemsize]
        return fields.view(COLUMNS[kind])[:, 0]

    def values(self) -> tuple[Positions, ValueRows]:
        """Positions and columns of the values that make sense."""
        positions = self.positions(RecordKind.VALUE)
        rows = self.values_at(positions)
        is_sound, _ = sound_mask(RecordKind.VALUE, rows)
        return (
            (positions, rows) if is_sound is None else (positions[is_sound], rows.chosen(is_sound))
        )

    def values_at(self, positions: Positions) -> ValueRows:
        """Return the columns of values, also of those that make no sense."""
        has_digest = self.size[positions] == VALUE_CELLS
        return ValueRows(self.cells, self.start[positions], has_digest)

    def payload(self, position: int) -> bytes:
        """All payload bytes of one record, its padding included."""
        first = int(self.start[position])
        return self.cells[first : first + int(self.size[position]), HEADER_BYTES:].tobytes()

    def cells_of(self, positions: Positions) -> Cells:
        """Cells of some records one after the other, [N, 64]: a copy."""
        starts, sizes = self.start[positions], self.size[positions]
        firsts = np.cumsum(sizes) - sizes
        indexes = np.repeat(starts - firsts, sizes) + np.arange(int(sizes.sum()))
        return self.cells.take(indexes, axis=0)

    def definitions(self) -> list[dict[str, Any]]:
        """Decode the definitions in the order of their commits; damaged ones are left out."""
        definitions = []
        for position in self.positions(RecordKind.DEFINITION):
            with contextlib.suppress(SpoolError):
                definitions.append(decode_definition(self.payload(int(position))))
        return definitions


class ValueRows:
    """Values of one buffer, [rows]; a column of VALUE_DTYPE is taken when it is asked for."""

    __slots__ = ("_cells", "_start", "has_digest")

    def __init__(self, cells: Cells, start: Positions, has_digest: npt.NDArray[np.bool_]) -> None:
        """Hold the values whose records begin at `start` in `cells` ([N, 64], without a hole);
        columns of values without a digest are 0."""
        self._cells, self._start, self.has_digest = cells, start, has_digest

    def __len__(self) -> int:
        return len(self._start)

    def chosen(self, rows: npt.NDArray[np.bool_]) -> ValueRows:
        """Return a selection of the rows."""
        return ValueRows(self._cells, self._start[rows], self.has_digest[rows])

    def without_digest(self, rows: npt.NDArray[np.bool_]) -> ValueRows:
        """Return them without the numbers of some."""
        return ValueRows(self._cells, self._start, self.has_digest & ~rows)

    def __getitem__(self, name: str) -> Structured:
        field, offset = VALUE_DTYPE.fields[name][:2]  # type: ignore[index]
        kind, shape = field.subdtype or (field, ())
        if not len(self):
            return np.empty((0, *shape), kind)
        places = offset + np.arange(int(np.prod(shape, dtype=int))) * kind.itemsize
        # a field that lies in the payload of a later cell has that cell's header before it
        cell, within = np.divmod(places, PAYLOAD_BYTES)
        at = (cell * CELL_BYTES + HEADER_BYTES + within) // kind.itemsize
        flat = self._cells.reshape(-1).view(kind)
        # a value without a digest is one cell: fields of later cells would be those of the next
        # record
        is_there = cell[-1] == 0 or bool(self.has_digest.all())
        start = self._start if is_there else self._start[self.has_digest]
        first = start * (CELL_BYTES // kind.itemsize)
        numbers: Structured = flat.take(first[:, None] + at if shape else first + at[0])
        if is_there:
            return numbers
        column = np.zeros((len(self), *shape), kind)
        column[self.has_digest] = numbers
        return column


def records(buffer: bytes | memoryview | Cells, *, is_verified: bool = False) -> Records:
    """Index the committed records of a buffer that begins at a record boundary. `is_verified`: it
    has only whole valid records, so their crcs are not checked."""
    cells = as_cells(buffer)
    heads = cell_heads(cells) if is_verified else committed_heads(cells)
    cells = cells[: len(heads)]
    octets = heads.view(np.uint8).reshape(-1, 4)
    start = np.flatnonzero(octets[:, 1] == FIRST)
    size = np.diff(start, append=len(cells))
    return Records(cells=cells, start=start, size=size, kind=octets[start, 0])


def records_at(path: Path, offset: int, size: int) -> Records:
    """Index the whole records in about `size` bytes of a replica from a record boundary on; the
    first may be longer. Raises OSError where the replica cannot be read."""
    piece = piece_of(path, offset, size)
    batch = records(piece)
    # nothing whole in a full piece: its first record may be longer than the piece
    if not batch.committed_bytes and len(piece) == size < LONGEST_RECORD:
        batch = records(piece_of(path, offset, LONGEST_RECORD))
    return batch


def read_ending(batch: Records) -> Ending:
    """Read the END record, or the GAP records without one."""
    _, ends = batch.columns(RecordKind.END)
    if len(ends):
        code = int(ends[-1]["reason"])
        reason = END_REASONS[code] if code < len(END_REASONS) else EndReason.EXIT
        dropped, time_ns = int(ends[-1]["dropped"]), int(ends[-1]["time_ns"])
        return Ending(reason=reason, dropped_records=dropped, time_ns=time_ns)
    _, gaps = batch.columns(RecordKind.GAP)
    return Ending(reason=None, dropped_records=int(gaps["records"].sum()))


_WITH_CALL = (
    *(RecordKind.ENTER, RecordKind.EXIT, RecordKind.VALUE, RecordKind.SAMPLES),
    RecordKind.ERROR,
)
"""Records that begin with the sequence number of their call."""


def call_sequences(batch: Records) -> npt.NDArray[np.uint64]:
    """Return the sequence number of each record's call, NO_SEQUENCE for none, [R]."""
    heads = batch.cells.take(batch.start, axis=0)[:, HEADER_BYTES : HEADER_BYTES + 8]
    numbers: npt.NDArray[np.uint64] = np.ascontiguousarray(heads).view("<u8").reshape(-1)
    return np.where(np.isin(batch.kind, _WITH_CALL), numbers, np.uint64(NO_SEQUENCE))


def step_codes(modes: npt.NDArray[Any], steps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return [len(steps)] one number for each step of a mode, the step in its low 32 bits."""
    return modes.astype(np.int64) << 32 | steps.astype(np.int64)


class Sequences:
    """Finds rows by a number that each of them has."""

    def __init__(self, numbers: npt.NDArray[Any]) -> None:
        """Sort the numbers, unless they follow on each other, as those of a rank's calls do."""
        numbers = np.ascontiguousarray(numbers)
        self._count = len(numbers)
        # numbers that follow on each other are found by subtraction, without a search
        is_dense = self._count > 0 and bool((np.diff(numbers) == 1).all())
        self._first = numbers[0] if is_dense else None
        self._order = None if is_dense else np.argsort(numbers, kind="stable")
        self._sorted = numbers if self._order is None else numbers[self._order]

    def find(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the row of each number, -1 for one that no row has."""
        if not self._count:
            return np.full(len(numbers), -1, np.int64)
        if self._order is None:
            at = (numbers - self._first).astype(np.int64)
            return np.where((at >= 0) & (at < self._count), at, -1)
        at = np.minimum(np.searchsorted(self._sorted, numbers), self._count - 1)
        return np.where(self._sorted[at] == numbers, self._order[at], -1)


# ---- a stream ------------------------------------------------------------------------------------

_CHUNK = 4 << 20
_FIRST_CHUNK = 128 << 10


class StreamReader:
    """Committed records of a stream folder, while it is written and while segments are freed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open_index = -1
        self._descriptor = -1
        self._segment_bytes = 0
        self._origin = UNKNOWN

    @property
    def segment_bytes(self) -> int:
        """Size of every segment, 0 without one. Raises SpoolError for parts of a cell."""
        if not self._segment_bytes:
            for index in segment_indexes(self.folder):
                try:
                    size = segment_path(self.folder, index).stat().st_size
                except FileNotFoundError:
                    continue
                # all segments have one size: offsets are found by division, so a wrong size would
                # read other records
                if size == 0 or size % CELL_BYTES:
                    raise SpoolError(
                        f"{segment_path(self.folder, index)}: {size} bytes are not a segment; "
                        f"set the file aside and recover from the replica"
                    )
                self._segment_bytes = size
                break
        return self._segment_bytes

    def origin(self) -> int:
        """Return the origin of this stream, UNKNOWN while it is empty. Raises SpoolError if the
        first record cannot be read, or was freed and its origin not kept."""
        if self._origin == UNKNOWN:
            self._origin = kept_origin(self.folder) or origin_of(self.read_from(0, CELL_BYTES))
        return self._origin

    def lowest(self) -> int:
        """First stream offset that has not been freed; 0 while the stream has no segment."""
        indexes = segment_indexes(self.folder)
        return indexes[0] * self.segment_bytes if indexes else 0

    def read_from(self, offset: int, max_bytes: int) -> bytes:
        """Return whole committed records from `offset` on, b"" if there are none yet: at most
        `max_bytes`, more only if the first record is longer; never across a segment's end. Raises
        SpoolError if the segment was freed, or cannot be read."""
        size = self.segment_bytes
        if not size:
            return b""
        index, at = divmod(offset, size)
        if not self._open(index):
            return b""
        # 0 also for a segment that is there and empty: the writer is about to fill it
        first = record_bytes(self._pread(CELL_BYTES, at))
        if not first:
            return b""
        # whole cells, and the first record whole: its length is in its first cell
        size_to_read = min(max(max_bytes - max_bytes % CELL_BYTES, first), size - at)
        chunk = self._pread(size_to_read, at)
        return chunk[: valid_prefix(chunk)]

    def _pread(self, size: int, at: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, at)
        except OSError as error:
            raise SpoolError(f"{self.folder}: cannot be read: {error.strerror}") from error

    def ends_record(self, offset: int) -> bool:
        """True if a whole record ends at `offset`, or if nothing before it exists any more. Raises
        SpoolError if the segment before it cannot be read."""
        if offset <= self.lowest():
            return True
        size = self.segment_bytes
        if not size or offset % CELL_BYTES:
            return False
        index, at = divmod(offset - CELL_BYTES, size)
        if not self._open(index):
            return False
        cell = self._pread(CELL_BYTES, at)
        # no cell follows: the last of its record, so a record ends here
        if len(cell) < CELL_BYTES or cell[4] == 0 or cell[6:8] != bytes(2):
            return False
        return int.from_bytes(cell[:4], "little") == int(cell_crcs(as_cells(cell))[0])

    def committed(self, offset: int | None = None) -> int:
        """Stream offset where the committed records end, walking from `offset` (or the lowest)."""
        end = self.lowest() if offset is None else offset
        for chunk in self.chunks(end):
            end += len(chunk)
        return end

    def end_reason(self, offset: int) -> EndReason | None:
        """How a stream whose last record ends at `offset` ended; None if that is no END record.
        Raises SpoolError if the record was freed or cannot be read."""
        if offset < CELL_BYTES or offset - CELL_BYTES < self.lowest():
            return None  # a segment is freed only once a later one exists, so that was not the last
        last = self.read_from(offset - CELL_BYTES, CELL_BYTES)
        if len(last) != CELL_BYTES or last[4] != RecordKind.END:
            return None
        return read_ending(records(last)).reason or END_REASONS[0]

    def chunks(self, offset: int | None = None, max_bytes: int = _CHUNK) -> Iterator[bytes]:
        """Yield all committed records from `offset` (default: lowest) on, in pieces: small ones
        first, because megabytes of nothing lie behind the last record."""
        at, size = self.lowest() if offset is None else offset, min(_FIRST_CHUNK, max_bytes)
        while chunk := self.read_from(at, size):
            yield chunk
            at, size = at + len(chunk), min(2 * size, max_bytes)

    def free_below(self, offset: int) -> int:
        """Unlink segments that lie wholly below `offset`, never the newest one; return their
        number. Raises SpoolError for a damaged segment, or if the origin of the records is
        unknown."""
        indexes = segment_indexes(self.folder)
        freed = 0
        # never the newest: its rank writes it, or it holds how the stream ended
        for index in indexes[:-1]:
            if (index + 1) * self.segment_bytes > offset:
                break
            if index == 0 and not keep_origin(self.folder, self.origin()):
                break  # the disk is full: asked again with the next acknowledgement
            segment_path(self.folder, index).unlink(missing_ok=True)
            freed += 1
        return freed

    def close(self) -> None:
        """Close the open segment."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = self._open_index = -1

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def is_own(self, index: int) -> bool:
        """False where a segment says that it is another one; older ones say nothing."""
        if not index:
            return True
        with contextlib.suppress(SpoolError, OSError):
            expected = self.origin(), index
            with segment_path(self.folder, index).open("rb") as file:
                cell = file.read(CELL_BYTES)
            if valid_prefix(cell) == CELL_BYTES and cell[4] == RecordKind.FILLER:
                return STAMP.unpack_from(cell, HEADER_BYTES) in ((UNKNOWN, 0), expected)
        return True

    def _open(self, index: int) -> bool:
        if self._open_index == index:
            return True
        # a segment renamed by hand would be taken for the records between its neighbours
        if not self.is_own(index):
            raise SpoolError(
                f"{segment_path(self.folder, index)}: says that it is of another stream, or "
                f"another segment of this one; it was moved or renamed"
            )
        path = segment_path(self.folder, index)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            indexes = segment_indexes(self.folder)
            if indexes and indexes[0] > index:
                raise SpoolError(
                    f"{path}: was freed; the stream begins with segment {indexes[0]} now"
                ) from None
            return False
        except OSError as error:
            raise SpoolError(f"{path}: cannot be opened: {error.strerror}") from error
        self.close()
        self._descriptor, self._open_index = descriptor, index
        return True
