"""What relay and collector say to each other: pure functions between messages and frames.

    relay                                        collector
    Hello(version, host)               ->
    Open(stream)                       ->  <-    At(stream, offset it holds)
    Frame(stream, offset, crc) + body  ->  <-    At(stream, offset after writing)
    Ended(stream, committed, ...)      ->  <-    EndedSeen(stream), once the end marker is written
    Beat(alive, known, job, restarts)  ->  <-    BeatSeen()
                                           <-    Refused(stream, reason): do not send it again
                                           <-    Done(): the tree is built
    Bye()                              ->

A header is a msgpack array: verb, then whole numbers and short texts. Every number is checked
against its range; what does not fit is a WireError and changes nothing. A lost message costs time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]  # ships no annotations

from rankscope.errors import WireError
from rankscope.gather.roster import JobState
from rankscope.record.run import EndReason, StreamId
from rankscope.spool.cells import CELL_BYTES, MAX_RECORD_CELLS

__all__ = [
    "FRAME_BYTES",
    "LONGEST_MESSAGE",
    "PROTOCOL_VERSION",
    "WINDOW_BYTES",
    "At",
    "Beat",
    "BeatSeen",
    "Bye",
    "Done",
    "Ended",
    "EndedSeen",
    "Frame",
    "Hello",
    "Message",
    "Open",
    "Refused",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 1
FRAME_BYTES = 64 << 10
"""Records in one frame, more only where a single record is longer."""
WINDOW_BYTES = 1 << 20
"""Unacknowledged bytes a relay keeps in flight, all its streams together."""
LONGEST_BODY = MAX_RECORD_CELLS * CELL_BYTES
LONGEST_MESSAGE = LONGEST_BODY + 1024
_LONGEST_HEADER = 1024
_LONGEST_TEXT = 256
_LARGEST_OFFSET = 1 << 48
_REASONS = tuple(EndReason)


@dataclass(frozen=True, slots=True)
class Hello:
    """A relay presents itself."""

    version: int
    host: str


@dataclass(frozen=True, slots=True)
class Open:
    """Which offset of this stream do you hold?"""

    stream: StreamId


@dataclass(frozen=True, slots=True)
class Frame:
    """Whole records of a stream, from `offset` on."""

    stream: StreamId
    offset: int
    crc: int
    """CRC-32 of the body."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """Everything this stream committed was acknowledged, and no more will come."""

    stream: StreamId
    committed: int
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Beat:
    """A relay is alive; what it watches."""

    alive: int
    """Streams whose rank still lives."""
    known: int
    job: JobState
    max_restarts: int
    """As a `PeerState` has it."""


@dataclass(frozen=True, slots=True)
class Bye:
    """A relay ends, having been told Done."""


@dataclass(frozen=True, slots=True)
class At:
    """The replica of this stream is `offset` bytes long."""

    stream: StreamId
    offset: int


@dataclass(frozen=True, slots=True)
class EndedSeen:
    """The end marker of this stream is on disk."""

    stream: StreamId


@dataclass(frozen=True, slots=True)
class BeatSeen:
    """The collector is alive."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The collector takes no more of this stream."""

    stream: StreamId
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The run is finished."""


Message = Hello | Open | Frame | Ended | Beat | Bye | At | EndedSeen | BeatSeen | Refused | Done


def encode(message: Message) -> list[bytes]:
    """Return the parts of a message: a header, and the body of a frame."""
    match message:
        case Hello(version, host):
            return _header(1, version, host[:_LONGEST_TEXT])
        case Open(stream):
            return _header(2, stream.rank, stream.incarnation)
        case Frame(stream, offset, crc, body):
            return [*_header(3, stream.rank, stream.incarnation, offset, crc), body]
        case Ended(stream, committed, reason):
            number = _REASONS.index(reason)
            return _header(4, stream.rank, stream.incarnation, committed, number)
        case Beat(alive, known, job, max_restarts):
            return _header(5, alive, known, int(job), max_restarts)
        case Bye():
            return _header(6)
        case At(stream, offset):
            return _header(10, stream.rank, stream.incarnation, offset)
        case EndedSeen(stream):
            return _header(11, stream.rank, stream.incarnation)
        case BeatSeen():
            return _header(12)
        case Refused(stream, reason_text):
            return _header(13, stream.rank, stream.incarnation, reason_text[:_LONGEST_TEXT])
        case Done():
            return _header(14)


def decode(parts: Sequence[bytes]) -> Message:
    """Return the message these parts are.

    Raises:
        WireError: they are no message of this protocol, or a number is out of range.
    """
    if not 1 <= len(parts) <= 2 or not 0 < len(parts[0]) <= _LONGEST_HEADER:
        raise WireError(f"a message of {len(parts)} parts, expected a header and at most a body")
    fields = _unpack(parts[0])
    verb, rest = fields[0], fields[1:]
    if (verb == 3) != (len(parts) == 2):
        raise WireError(f"verb {verb} with {len(parts)} parts")
    match verb, len(rest):
        case 1, 2:
            return Hello(_number(rest[0], 1 << 16), _text(rest[1]))
        case 2, 2:
            return Open(_stream(rest))
        case 3, 4:
            return _frame(rest, parts[1])
        case 4, 4:
            reason = _REASONS[_number(rest[3], len(_REASONS))]
            return Ended(_stream(rest), _offset(rest[2]), reason)
        case 5, 4:
            counts = _number(rest[0], 1 << 24), _number(rest[1], 1 << 24)
            job = JobState(_number(rest[2], len(JobState)))
            return Beat(*counts, job, _number(rest[3], 1 << 24))
        case 6, 0:
            return Bye()
        case 10, 3:
            return At(_stream(rest), _offset(rest[2]))
        case 11, 2:
            return EndedSeen(_stream(rest))
        case 12, 0:
            return BeatSeen()
        case 13, 3:
            return Refused(_stream(rest), _text(rest[2]))
        case 14, 0:
            return Done()
    raise WireError(f"verb {verb} with {len(rest)} fields, unknown to protocol {PROTOCOL_VERSION}")


def _header(*fields: int | str) -> list[bytes]:
    return [msgpack.packb(fields)]


def _unpack(header: bytes) -> list[object]:
    try:
        fields = msgpack.unpackb(
            header,
            max_ext_len=0,
            max_array_len=8,
            max_map_len=0,
            max_bin_len=0,
            max_str_len=_LONGEST_TEXT * 4,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header of {len(header)} bytes that is no msgpack array") from error
    if not isinstance(fields, list) or not fields:
        raise WireError("a header that is no array")
    return fields


def _number(value: object, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise WireError(f"{value!r} is no whole number below {limit}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise WireError(f"expected a text of at most {_LONGEST_TEXT} characters")
    return value


def _stream(fields: list[object]) -> StreamId:
    return StreamId(rank=_number(fields[0], 1 << 24), incarnation=_number(fields[1], 1 << 16))


def _offset(value: object) -> int:
    offset = _number(value, _LARGEST_OFFSET)
    if offset % CELL_BYTES:
        raise WireError(f"offset {offset} is no multiple of a cell")
    return offset


def _frame(fields: list[object], body: bytes) -> Frame:
    stream, offset = _stream(fields), _offset(fields[2])
    crc = _number(fields[3], 1 << 32)
    if not body or len(body) % CELL_BYTES or len(body) > LONGEST_BODY:
        # The crc of no bytes is 0 and would pass: an empty frame is refused by its length.
        raise WireError(f"a frame of {len(body)} bytes: expected 1 to {MAX_RECORD_CELLS} cells")
    if zlib.crc32(body) != crc:
        raise WireError(f"a frame of {stream.name} at {offset} whose crc is wrong")
    return Frame(stream, offset, crc, body)
