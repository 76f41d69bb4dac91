"""The bytes of a spool: 64-byte cells, the records made of them, whose they are, and what their
definitions say.

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

A record whose cells are valid may still hold anything (damaged memory, another program).
`decode_definition` is the one place where the bytes of a DEFINITION record become a map and every
field gets the type and the bounds that all later code counts on. A definition that does not keep to
them is refused with a reason, and the caller sets it aside. Left out: fields that no reader knows,
and all fields of a kind that only a newer rankscope writes.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
import struct
from collections.abc import Callable, Mapping
from mmap import mmap
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # ships no annotations
import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError
from rankscope.record.ranks import MAX_INCARNATIONS, MAX_RANKS, EndReason
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


# ---- definitions ---------------------------------------------------------------------------------

Decoded = dict[bytes, "dict[str, Any] | str"]
"""Definitions by their bytes; for a refused definition the reason."""

_NUMBERS: Final = 1 << 32
_INTEGERS: Final = 1 << 63
_MOST_DIMS: Final = 64
"""Most dims of a tensor or a mesh; torch has no more."""
_SHOWN: Final = 60

Check = Callable[[Any], bool]


def _of_type(kind: type) -> Check:
    # the exact type: True is an int to `isinstance`, and no count
    return lambda value: type(value) is kind


def _within(low: int, end: int) -> Check:
    return lambda value: type(value) is int and low <= value < end


_text = _of_type(str)
_flag = _of_type(bool)
_number = _within(0, _NUMBERS)
_integer = _within(-_INTEGERS, _INTEGERS)
_size = _within(0, _INTEGERS)
_rank = _within(0, MAX_RANKS)
_time = _within(0, LATEST_NS)


def _list(check: Check, limit: int | None = None) -> Check:
    return lambda value: (
        type(value) is list and (limit is None or len(value) <= limit) and all(map(check, value))
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _run_of_steps(value: Any) -> bool:
    return type(value) is list and len(value) == 3 and value[0] in (0, 1) and _pair(value[1:])


def _by_name(*kinds: type) -> Check:
    return lambda value: (
        type(value) is dict and all(type(k) is str and type(v) in kinds for k, v in value.items())
    )


def _distinct_ranks(value: Any) -> bool:
    return type(value) is list and all(map(_rank, value)) and len(set(value)) == len(value)


def _pair(value: Any) -> bool:
    return (
        type(value) is list and len(value) == 2 and all(map(_size, value)) and value[0] <= value[1]
    )


_shape = _list(_size, _MOST_DIMS)
_texts = _list(_text)
_texts_by_name = _by_name(str)
_fact = _by_name(str, int, bool, float, type(None))
"""Fields of any note; a note of a newer rankscope stays a text."""

_FIELDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "rank": {
        "rank": _rank, "world_size?": _within(1, MAX_RANKS + 1), "local_rank?": _rank,
        "local_world_size?": _within(0, MAX_RANKS + 1),
        "incarnation?": _within(0, MAX_INCARNATIONS), "host?": _text, "pid?": _size,
        "format?": _number, "run_id?": _text, "wall_ns?": _time, "monotonic_ns?": _time,
        "versions?": _texts_by_name, "argv?": _texts, "settings?": _texts_by_name,
        "environment?": _texts_by_name,
    },
    "root": {"class": _text, "parameters": _size, "preferred?": _flag},
    "inside": {"root": _number, "in": _number, "path": _text},
    "module": {
        "root": _number, "path": _text, "raw_path?": _text, "class": _text, "wrappers?": _texts,
        "opaque?": _flag,
    },
    "mark": {
        "module": _number, "name": _text, "axis": _text, "placement": _text,
        "members?": _or_none(_distinct_ranks), "activation?": _flag,
    },
    "slot": {"name": _text},
    "meta": {
        "dtype": _text, "device?": _text, "shape": _shape, "global_shape?": _or_none(_shape),
        "source?": _text, "mesh?": _number, "placements?": _texts,
        "ranges?": _or_none(_list(_list(_pair), _MOST_DIMS)), "note?": _or_none(_text),
        "requires_grad?": _flag,
    },
    "mesh": {
        "axes": _texts, "shape": _list(_within(1, MAX_RANKS + 1), _MOST_DIMS),
        "ranks": _distinct_ranks, "device?": _text,
    },
    "text": {"text": _text, "fact?": _fact},
    "group": {
        "name": _text, "ranks": _distinct_ranks, "backend?": _text, "description?": _or_none(_text),
    },
    "collective": {
        "op": _text, "group": _text, "members": _distinct_ranks, "async": _flag, "issuer": _text,
        "reduce?": _or_none(_text), "src?": _or_none(_integer), "dst?": _or_none(_integer),
        "peer?": _or_none(_integer), "tag?": _or_none(_integer), "object?": _flag, "since?": _text,
        "at?": _text,
    },
    "layout": {"file?": _text, "text?": _text},
    "raised": {"error?": _text, "causes?": _texts, "where?": _text},
    "not_kept": {"reason?": _text, "text?": _text},
    "asked": {
        "event": _text, "mode": lambda value: value in ("train", "eval"), "first": _size,
        "last": _size, "text": _text,
    },
    "untold": {"entry": _text},
    "copied": {
        "kept?": _size, "ring?": _integer, "high?": _size, "step": _integer,
        "copied": _list(_run_of_steps), "gone": _list(_run_of_steps),
        "torn": _list(_run_of_steps), "hole?": _integer, "mode?": _within(0, 2),
        "dropping?": _list(_size, 2),
        "calls?": _list(_pair), "windows?": _number, "noted?": _number, "numbers?": _number,
        "is_done": _flag, "is_taken?": _flag,
    },
}  # fmt: skip
"""Type of each field of a kind; lists of ranks are in the order of their group. Fields without a
question mark are required; spools of an older rankscope lack some of the others."""
_KINDS: Final = {
    kind: ({name.rstrip("?"): check for name, check in fields.items()},
           {name for name in fields if not name.endswith("?")})
    for kind, fields in _FIELDS.items()
}  # fmt: skip


def decode_definition(payload: bytes) -> dict[str, Any]:
    """Return the definition in the payload of a DEFINITION record. Raises SpoolError for anything
    else, or a field of another type than its kind requires."""
    start = DEFINITION_LENGTH.size
    (length,) = DEFINITION_LENGTH.unpack_from(payload)
    if not 0 < length <= len(payload) - start:
        raise SpoolError("its length is not that of its record")
    fields_here = unpack_map(payload[start : start + length])
    number, kind = fields_here.get("id"), fields_here.get("kind")
    if type(number) is not int or not 0 < number < _NUMBERS:
        raise SpoolError(f"its id is {_shown(number)}")
    if type(kind) is not str:
        raise SpoolError(f"its kind is {_shown(kind)}")
    version = fields_here.get("format")
    if kind == "rank" and type(version) is int and FORMAT_VERSION < version < _NUMBERS:
        return {"id": number, "kind": kind, "format": version}  # its reader refuses that version
    # of a newer rankscope: passed over by its number, its fields are nobody's business here
    if kind not in _KINDS:
        return {"id": number, "kind": kind}
    fields, needed = _KINDS[kind]
    definition: dict[str, Any] = {"id": number, "kind": kind}
    for name, check in fields.items():
        if name in fields_here:
            value = definition[name] = fields_here[name]
            if not check(value):
                raise SpoolError(f"{name} of a {kind} is {_shown(value)}")
    missing = needed - definition.keys()
    if missing:
        raise SpoolError(f"a {kind} has no {', '.join(sorted(missing))}")
    if kind == "rank" and definition["rank"] >= definition.get("world_size", MAX_RANKS):
        raise SpoolError(f"rank {definition['rank']} in a world of {definition['world_size']}")
    if kind == "mesh":
        axes, shape, ranks = definition["axes"], definition["shape"], definition["ranks"]
        if len(axes) != len(shape) or math.prod(shape) != len(ranks):
            raise SpoolError(f"a mesh of {len(axes)} axes has {len(ranks)} ranks")
    return definition


def _shown(value: Any) -> str:
    """Return a few words of a value, however large it is."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:_SHOWN] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def unpack_map(packed: bytes) -> dict[str, Any]:
    """Decode one msgpack map: text keys, no extension types. Raises SpoolError for others."""
    size = len(packed)
    # nothing in it can be longer than the bytes: msgpack would reserve what a damaged length asks
    # for
    lengths = dict.fromkeys(("str", "bin", "array", "map"), size) | {"ext": 0}
    limits = {f"max_{kind}_len": limit for kind, limit in lengths.items()}
    try:
        decoded = msgpack.unpackb(packed, raw=False, strict_map_key=True, use_list=True, **limits)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise SpoolError(f"{size} bytes are not a msgpack map: {error}") from error
    if not isinstance(decoded, dict) or not all(isinstance(key, str) for key in decoded):
        raise SpoolError(f"expected a msgpack map with text keys, found {type(decoded).__name__}")
    return decoded
