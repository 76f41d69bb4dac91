"""The bytes of a spool: 64-byte cells, and the records made of them.

A spool is an append-only stream of records; a record is one or more cells, committed as one:

    offset 0   u32  crc     CRC-32 of bytes 4..64 of this cell
    offset 4   u8   kind    RecordKind, the same in every cell of a record
    offset 5   u8   flags   bit 0: first cell of its record
    offset 6   u16  left    cells of this record that follow this one
    offset 8   56 bytes     payload

The writer fills the following cells first and the first cell last; a cell half written fails its
crc, unwritten space is zero and a zero cell is never valid, so a reader that finds every cell of a
record valid has the whole record, and any other record is not committed yet. All numbers are
little-endian. Records never cross a segment: the rest of a segment is one FILLER record, and every
segment but the first begins with one that says whose it is. ENTER,
EXIT and VALUE fill their cells to the last byte, which spares the writer the padding.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable

import numpy as np

from rankscope.record.statistics import ADDED, MEASURED, MOST_ADDED, Statistic
from rankscope.record.streams import EndReason

FORMAT_VERSION = 1
CELL_BYTES = 64
HEADER_BYTES = 8
PAYLOAD_BYTES = CELL_BYTES - HEADER_BYTES
FIRST = 1
"""Flag of a record's first cell."""
MAX_RECORD_CELLS = 1 << 16
LATEST_NS = 1 << 62
"""The year 2116: sums and differences of two times below it fit in 64 bits."""

HEADER = struct.Struct("<IBBH")
"""crc, kind, flags, left."""


class RecordKind(enum.IntEnum):
    """What a record says. Never renumber."""

    DEFINITION = 1
    """u32 byte length, then msgpack: a name, shape ... that later records refer to by number."""
    ENTER = 2
    """A call began (or an event of a root: setup, grads, params)."""
    EXIT = 3
    """A call ended."""
    VALUE = 4
    """One tensor in one slot: VALUE_HEAD alone (one cell), or with its digest (VALUE_CELLS)."""
    SAMPLES = 5
    """Per-sample sketches of the value before it: SAMPLES, then count x K float32."""
    STEP = 6
    """A step began or ended."""
    GAP = 7
    """Records were dropped because the spool was full."""
    END = 8
    """The last record of a stream."""
    FILLER = 9
    """Nothing: the rest of a segment. One at the begin of a segment may say whose it is: STAMP."""
    ERROR = 10
    """Something inside rankscope failed while it watched a call; the user's program went on."""
    TENSOR = 11
    """The bytes of a value are whole in a chunk: written after them, before what refers to them."""


class StepEvent(enum.IntEnum):
    """What a STEP record marks. Never renumber."""

    BEGIN = 0
    END = 1
    NOTE = 2
    """Something to know about a step that runs."""


NO_SEQUENCE = 0xFFFF_FFFF_FFFF_FFFF
"""Parent of a call that has none."""
NO_MICRO_BATCH = 0xFFFF_FFFF

ENTER = struct.Struct("<QQqIIIIBBHIII")
"""sequence, parent sequence, time_ns, module definition, step, micro_batch, ordinal, phase, mode,
thread, root definition; then, 0 for a module, the definition of a collective, and how many of its
kind its group had before it in this step."""
ENTER_DTYPE = np.dtype(
    [
        ("sequence", "<u8"), ("parent", "<u8"), ("time_ns", "<i8"), ("module", "<u4"),
        ("step", "<u4"), ("micro_batch", "<u4"), ("ordinal", "<u4"), ("phase", "u1"),
        ("mode", "u1"), ("thread", "<u2"), ("root", "<u4"), ("collective", "<u4"),
        ("number", "<u4"),
    ]
)  # fmt: skip

EXIT = struct.Struct("<QqIBQ27x")
"""sequence, time_ns, text definition of the error (0 for none), CallStatus, and of a collective
which of its group's it was by torch's own count, from 1 (0 where that is not known)."""
EXIT_DTYPE = np.dtype(
    [
        ("sequence", "<u8"), ("time_ns", "<i8"), ("text", "<u4"), ("status", "u1"),
        ("issued", "<u8"), ("pad", "V27"),
    ]
)  # fmt: skip

VALUE_HEAD = struct.Struct("<QqIIIBxHQQQ")
"""sequence of the call, time_ns, slot definition, meta definition, ValueFlag, phase, ordinal (of
the backward pass, 0 elsewhere), count, hash, reference to kept bytes (0 for none)."""
_MEASURED = [s for s in MEASURED if s.name != "count"]
_SPARE = 8 * (MOST_ADDED - len(ADDED))


def _codes(statistics: Iterable[Statistic]) -> str:
    return "".join("Q" if s.is_count else "d" for s in statistics)


VALUE = struct.Struct(f"{VALUE_HEAD.format}{_codes(_MEASURED)}8d{_codes(ADDED)}{_SPARE}x")
"""VALUE_HEAD, then the measured statistics (`rankscope.record.statistics`; count is in the head),
sketch, added statistics; VALUE_CELLS cells. A spool that is older than an added one has 0 there."""
_VALUE_HEAD_FIELDS = [
    ("sequence", "<u8"), ("time_ns", "<i8"), ("slot", "<u4"), ("meta", "<u4"), ("flags", "<u4"),
    ("phase", "u1"), ("pad", "V1"), ("ordinal", "<u2"), ("count", "<u8"), ("hash", "<u8"),
    ("reference", "<u8"),
]  # fmt: skip
VALUE_DTYPE = np.dtype(
    [
        *_VALUE_HEAD_FIELDS,
        *((s.name, "<u8" if s.is_count else "<f8") for s in _MEASURED),
        ("sketch", "<f8", (8,)),
        *((s.name, "<f8") for s in ADDED),
        ("spare", f"V{_SPARE}"),
    ]
)
VALUE_CELLS = 4

SAMPLES = struct.Struct("<QIHBxIIHHII")
"""sequence of the call, slot definition, ordinal, phase, samples, K, batch dim, three spares."""
SAMPLES_DTYPE = np.dtype(
    [
        ("sequence", "<u8"), ("slot", "<u4"), ("ordinal", "<u2"), ("phase", "u1"), ("pad", "V1"),
        ("count", "<u4"), ("size", "<u4"), ("dim", "<u2"), ("spare", "<u2"), ("spare2", "<u4"),
        ("spare3", "<u4"),
    ]
)  # fmt: skip

STEP = struct.Struct("<qIBBxxI")
"""time_ns, step, mode, StepEvent, note (text definition, 0 for none)."""
STEP_DTYPE = np.dtype(
    [
        ("time_ns", "<i8"), ("step", "<u4"), ("mode", "u1"), ("event", "u1"), ("pad", "V2"),
        ("text", "<u4"),
    ]
)  # fmt: skip

ERROR = struct.Struct("<QqII")
"""sequence of the call (NO_SEQUENCE for none), time_ns, text definition, spare."""
ERROR_DTYPE = np.dtype([("sequence", "<u8"), ("time_ns", "<i8"), ("text", "<u4"), ("spare", "<u4")])

TENSOR = struct.Struct("<QIIQQQI12x")
"""reference, chunk, index in the chunk, offset in its data, bytes, xxh3_64 of them, meta definition
(dtype and local shape), spare. A later record of the same place in the same chunk gives those bytes
another reference; the key in the chunk is the first one."""
TENSOR_DTYPE = np.dtype(
    [
        ("reference", "<u8"), ("chunk", "<u4"), ("index", "<u4"), ("offset", "<u8"),
        ("nbytes", "<u8"), ("checksum", "<u8"), ("meta", "<u4"), ("pad", "V12"),
    ]
)  # fmt: skip

GAP = struct.Struct("<qQQIIBxxx")
"""time_ns, records dropped, bytes dropped, first step, last step, mode.

One that has dropped nothing and `TO_ITS_END` as its last step says that dropping began; the next
one says what was dropped.
"""
TO_ITS_END = (1 << 32) - 1

GAP_DTYPE = np.dtype(
    [
        ("time_ns", "<i8"), ("records", "<u8"), ("bytes", "<u8"), ("first_step", "<u4"),
        ("last_step", "<u4"), ("mode", "u1"), ("pad", "V3"),
    ]
)  # fmt: skip

END = struct.Struct("<qQQII")
"""time_ns, records committed, records dropped, text definition of a note (0 for none), index in
END_REASONS."""
END_DTYPE = np.dtype(
    [("time_ns", "<i8"), ("records", "<u8"), ("dropped", "<u8"), ("text", "<u4"), ("reason", "<u4")]
)
STAMP = struct.Struct("<QQ")
"""Origin of the stream (`spool.origin`) and number of the segment, from 1: the first segment says
whose it is with its first record. Zeros in a spool that is older."""

END_REASONS = (EndReason.EXIT, EndReason.CLOSED, EndReason.SWITCHED_OFF, EndReason.RAISED)
"""What the number in an END record means. Never reorder."""

DEFINITION_LENGTH = struct.Struct("<I")
"""Byte length of the msgpack that follows."""

assert ENTER.size == ENTER_DTYPE.itemsize <= PAYLOAD_BYTES
assert EXIT.size == EXIT_DTYPE.itemsize <= PAYLOAD_BYTES
assert VALUE_HEAD.size == PAYLOAD_BYTES
assert VALUE.size == VALUE_DTYPE.itemsize == VALUE_CELLS * PAYLOAD_BYTES
assert SAMPLES.size == SAMPLES_DTYPE.itemsize <= PAYLOAD_BYTES
assert STEP.size == STEP_DTYPE.itemsize <= PAYLOAD_BYTES
assert ERROR.size == ERROR_DTYPE.itemsize <= PAYLOAD_BYTES
assert TENSOR.size == TENSOR_DTYPE.itemsize == PAYLOAD_BYTES
assert GAP.size == GAP_DTYPE.itemsize <= PAYLOAD_BYTES
assert END.size == END_DTYPE.itemsize <= PAYLOAD_BYTES
