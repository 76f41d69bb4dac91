"""The bytes of a spool: 64-byte cells, the records made of them, and whose they are.

A spool is an append-only stream of records; a record is one or more cells, committed as one:

    offset 0   u32  crc     CRC-32 of bytes 4..64 of this cell
    offset 4   u8   kind    RecordKind, the same in every cell of a record
    offset 5   u8   flags   bit 0: first cell of its record
    offset 6   u16  left    cells of this record that follow this one
    offset 8   56 bytes     payload

The writer fills the first cell last. A cell half written fails its crc, and unwritten space (zeros)
is never valid: a record whose every cell is valid is whole, and any other is not committed yet. All
numbers are little-endian. Records never cross a segment: the rest of a segment is one FILLER
record, and every segment but the first begins with a FILLER that says whose it is.

The *origin* of a stream tells it from another of the same rank and life: a node that was replaced
starts the same rank in the same life again. It is the hash of the first record, which says which
process wrote it, and when; a file beside the segments keeps it when the first segment goes.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
import struct
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError
from rankscope.record.ranks import EndReason
from rankscope.record.statistics import ADDED, MEASURED, MOST_ADDED
from rankscope.run.files import write_by_rename

FORMAT_VERSION = 1
CELL_BYTES = 64
HEADER_BYTES = 8
PAYLOAD_BYTES = CELL_BYTES - HEADER_BYTES
FIRST = 1
MAX_RECORD_CELLS = 1 << 16
LONGEST_RECORD = MAX_RECORD_CELLS * CELL_BYTES
LATEST_NS = 1 << 62
"""The year 2116: sums and differences of two times below it fit in 64 bits."""


class RecordKind(enum.IntEnum):
    """Kind of a record. Never renumber."""

    DEFINITION = 1
    """u32 byte length, then msgpack: a name, shape ... that later records refer to by number."""
    ENTER = 2
    """A call began (or an event of a root: setup, grads, params)."""
    EXIT = 3
    VALUE = 4
    """One tensor in one slot: VALUE_HEAD alone (one cell), or with its digest (VALUE_CELLS)."""
    SAMPLES = 5
    """Per-sample sketches of the value before it: SAMPLES, then count x K float32."""
    STEP = 6
    GAP = 7
    """Records were dropped because the spool was full."""
    END = 8
    FILLER = 9
    """The unused rest of a segment; at the begin of a segment it may hold a STAMP."""
    ERROR = 10
    """Something inside rankscope failed while it watched a call; the user's program went on."""
    TENSOR = 11
    """All bytes of a value are in a chunk. Written after the bytes, before records that refer to
    them."""


class StepEvent(enum.IntEnum):
    """What a STEP record marks. Never renumber."""

    BEGIN = 0
    END = 1
    NOTE = 2


NO_SEQUENCE = 0xFFFF_FFFF_FFFF_FFFF
"""Parent of a call that has no parent."""
NO_MICRO_BATCH = 0xFFFF_FFFF


def record_bytes(head: bytes) -> int:
    """Return the bytes of the record whose first cell begins with `head`; 0 if nothing was written
    yet, or `head` is shorter than a cell's header."""
    if len(head) < HEADER_BYTES or head[4] == 0:
        return 0
    return (int.from_bytes(head[6:8], "little") + 1) * CELL_BYTES


_CODES = {"<u8": "Q", "<i8": "q", "<u4": "I", "<u2": "H", "|u1": "B", "<f8": "d"}


def _packing(dtype: np.dtype[Any]) -> struct.Struct:
    """Return what packs the fields of a record in their order; void ones are padding."""
    codes = "<"
    for name in dtype.names or ():
        field = dtype[name]
        is_void = field.kind == "V" and not field.shape
        count = field.itemsize if is_void else math.prod(field.shape)
        code = "x" if is_void else _CODES[field.base.str]
        codes += code if count == 1 else f"{count}{code}"
    return struct.Struct(codes)


ENTER_DTYPE = np.dtype(
    [
        ("sequence", "<u8"), ("parent", "<u8"), ("time_ns", "<i8"), ("module", "<u4"),
        ("step", "<u4"), ("micro_batch", "<u4"), ("ordinal", "<u4"), ("phase", "u1"),
        ("mode", "u1"), ("thread", "<u2"), ("root", "<u4"), ("collective", "<u4"),
        ("number", "<u4"),
    ]
)  # fmt: skip
"""module, root and collective are definitions. number: how many collectives of this kind the group
had before in this step. Both are 0 for a module's call."""
ENTER = _packing(ENTER_DTYPE)

EXIT_DTYPE = np.dtype(
    [
        ("sequence", "<u8"), ("time_ns", "<i8"), ("text", "<u4"), ("status", "u1"),
        ("issued", "<u8"), ("pad", "V27"),
    ]
)  # fmt: skip
"""text: definition of the error (0 for none); status: CallStatus; issued: the collective's place in
its group by torch's own count, from 1 (0 where that is not known)."""
EXIT = _packing(EXIT_DTYPE)

_MEASURED = [s for s in MEASURED if s.name != "count"]
_VALUE_HEAD_FIELDS = [
    ("sequence", "<u8"), ("time_ns", "<i8"), ("slot", "<u4"), ("meta", "<u4"), ("flags", "<u4"),
    ("phase", "u1"), ("pad", "V1"), ("ordinal", "<u2"), ("count", "<u8"), ("hash", "<u8"),
    ("reference", "<u8"),
]  # fmt: skip
"""slot and meta are definitions; flags: ValueFlag; ordinal: of the backward pass, 0 elsewhere;
reference: to kept bytes, 0 for none."""
VALUE_HEAD = _packing(np.dtype(_VALUE_HEAD_FIELDS))
VALUE_DTYPE = np.dtype(
    [
        *_VALUE_HEAD_FIELDS,
        *((s.name, "<u8" if s.is_count else "<f8") for s in _MEASURED),
        ("sketch", "<f8", (8,)),
        *((s.name, "<f8") for s in ADDED),
        ("spare", f"V{8 * (MOST_ADDED - len(ADDED))}"),
    ]
)
"""Head, measured statistics (`rankscope.record.statistics`; count is in the head), sketch, added
statistics; VALUE_CELLS cells. A statistic added after the spool was written is 0 there."""
VALUE = _packing(VALUE_DTYPE)
VALUE_CELLS = 4

SAMPLES_DTYPE = np.dtype(
    [
        ("sequence", "<u8"), ("slot", "<u4"), ("ordinal", "<u2"), ("phase", "u1"), ("pad", "V1"),
        ("count", "<u4"), ("size", "<u4"), ("dim", "<u2"), ("spare", "<u2"), ("spare2", "<u4"),
        ("spare3", "<u4"),
    ]
)  # fmt: skip
"""count: samples; size: numbers per sample; dim: the batch dim."""
SAMPLES = _packing(SAMPLES_DTYPE)

STEP_DTYPE = np.dtype(
    [
        ("time_ns", "<i8"), ("step", "<u4"), ("mode", "u1"), ("event", "u1"), ("pad", "V2"),
        ("text", "<u4"),
    ]
)  # fmt: skip
"""event: StepEvent; text: definition of a note, 0 for none."""
STEP = _packing(STEP_DTYPE)

ERROR_DTYPE = np.dtype([("sequence", "<u8"), ("time_ns", "<i8"), ("text", "<u4"), ("spare", "<u4")])
"""sequence: of the call, NO_SEQUENCE for none; text is a definition."""
ERROR = _packing(ERROR_DTYPE)

TENSOR_DTYPE = np.dtype(
    [
        ("reference", "<u8"), ("chunk", "<u4"), ("index", "<u4"), ("offset", "<u8"),
        ("nbytes", "<u8"), ("checksum", "<u8"), ("meta", "<u4"), ("pad", "V12"),
    ]
)  # fmt: skip
"""index: in the chunk; offset: in its data; checksum: xxh3_64 of the bytes; meta: definition with
dtype and local shape. A later record of the same place in the same chunk gives those bytes another
reference; the key in the chunk is the first one."""
TENSOR = _packing(TENSOR_DTYPE)

TO_ITS_END = (1 << 32) - 1
GAP_DTYPE = np.dtype(
    [
        ("time_ns", "<i8"), ("records", "<u8"), ("bytes", "<u8"), ("first_step", "<u4"),
        ("last_step", "<u4"), ("mode", "u1"), ("pad", "V3"),
    ]
)  # fmt: skip
"""What was dropped. A gap that counts nothing and has `TO_ITS_END` as its last step marks where
dropping began; the next gap counts what was dropped."""
GAP = _packing(GAP_DTYPE)

END_DTYPE = np.dtype(
    [("time_ns", "<i8"), ("records", "<u8"), ("dropped", "<u8"), ("text", "<u4"), ("reason", "<u4")]
)
"""records: number committed; text: 0; reason: index in END_REASONS."""
END = _packing(END_DTYPE)
STAMP = struct.Struct("<QQ")
"""Origin of the stream and number of the segment, from 1. The first segment has its origin in its
first record; spools of an older rankscope have zeros here."""

END_REASONS = (EndReason.EXIT, EndReason.CLOSED, EndReason.SWITCHED_OFF, EndReason.RAISED)
"""Meanings of the number in an END record. Never reorder."""

DEFINITION_LENGTH = struct.Struct("<I")
"""Byte length of the msgpack that follows."""

# these fill their cells to the last byte, which spares the writer the padding
assert VALUE_HEAD.size == TENSOR.size == ENTER.size == EXIT.size == PAYLOAD_BYTES
assert VALUE.size == VALUE_CELLS * PAYLOAD_BYTES
assert max(each.size for each in (SAMPLES, STEP, ERROR, GAP, END)) <= PAYLOAD_BYTES


UNKNOWN = 0
"""Origin of a stream that has no record, or whose first record no longer exists."""
_NAME = "origin"


def first_record(stream: bytes | mmap | npt.NDArray[np.uint8]) -> bytes:
    """Return the cells of the record these bytes begin with, b"" where it is not whole."""
    size = record_bytes(bytes(stream[:CELL_BYTES]))
    record = bytes(stream[:size])
    return record if len(record) == size else b""


def origin_of(stream: bytes | mmap | npt.NDArray[np.uint8]) -> int:
    """Return the origin of a stream that begins with these bytes, whose cells were checked."""
    record = first_record(stream)
    if not record:
        return UNKNOWN
    return int.from_bytes(hashlib.blake2b(record, digest_size=8).digest(), "little") or 1


def origin_text(origin: int) -> str:
    """Return an origin as files and the tree spell it: 16 hexadecimal digits."""
    return f"{origin:016x}"


def keep_origin(folder: Path, origin: int) -> bool:
    """Note the origin before the first segment goes; False where the segment has to stay."""
    with contextlib.suppress(SpoolError):
        if origin != UNKNOWN:
            write_by_rename(folder / _NAME, origin_text(origin))
            return True
    return False


def kept_origin(folder: Path) -> int:
    """Return the origin noted in a stream folder, UNKNOWN where none is."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _NAME).read_text()[:16], 16)
    return UNKNOWN
