"""What relay and collector say to each other: pure functions between messages and frames.

    relay                                        collector
    Hello(version, host, run id)       ->  <-    Rejected(reason), where it gathers another run
    Open(stream)                       ->  <-    At(stream, offset it holds)
    Frame(stream, offset, crc) + body  ->  <-    At(stream, offset after writing)
    Sync(stream, origin)               ->  <-    Synced(stream, offset that is on disk)
    Ended(stream, committed, ...)      ->  <-    EndedSeen(stream), once the end marker is written
    HostState(alive, held, job, ..)    ->  <-    BeatSeen(note on a host that vanished)
    Happened(life, event)              ->  <-    Happened(life, event) of other hosts
    Stands(since, noticed, over, ..)   ->        with each of these, once this host stood still
                                           <-    Refused(stream, reason): do not send it again
                                           <-    Done(is quiet): the tree is built, or nothing is
    Bye()                              ->

Open, Frame, At, EndedSeen and Refused name a chunk where they are about one of the chunks of full
tensors of a stream, 0 where they are about its records; a chunk ends otherwise:

    ChunkEnded(.., size, checksum)     ->  <-    EndedSeen(stream, chunk), once it is whole there;
                                                 At(.., 0) where it is not: send it again

A header is a msgpack array: verb, then whole numbers and short texts, as the table at the end of
this file lists them; behind it stands its CRC-32, in 4 bytes. Every number is checked against its
range; what does not fit is a WireError and changes nothing. A lost message costs time. A collector
answers nobody who has not said Hello.

libzmq bounds a part of a message and counts whole messages, but keeps the parts of a message that
has not ended where nobody can see them: a peer that never ends its message fills the memory. So
`MemoryBound` watches what this process occupies. Where that is more than honest peers can have on
their way, it cuts the connections, and libzmq forgets what came over them. Honest peers connect
again and send what was not acknowledged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack  # type: ignore[import-untyped]  # ships no annotations
import zmq

from rankscope.companion.waitingrule import HostState, JobState
from rankscope.errors import WireError
from rankscope.record.ranks import MAX_INCARNATIONS, MAX_RANKS, EndReason, StreamId
from rankscope.run.jobstatus import Stall
from rankscope.run.messages import log
from rankscope.spool.recordformat import CELL_BYTES, MAX_RECORD_CELLS

PROTOCOL_VERSION = 7
FRAME_BYTES = 64 << 10
"""Records in one frame, more only where a single record is longer."""
WINDOW_BYTES = 1 << 20
"""Unacknowledged bytes a relay keeps in flight, all its streams together."""
CHUNK_FRAME_BYTES = 256 << 10
CHUNK_WINDOW_BYTES = 1 << 20
"""Unacknowledged bytes of chunks in flight, for each stream."""
LONGEST_BODY = MAX_RECORD_CELLS * CELL_BYTES
_LONGEST_HEADER = 4096
LONGEST_MESSAGE = LONGEST_BODY + _LONGEST_HEADER
"""Of one part of a message to a collector."""
LONGEST_ANSWER = _LONGEST_HEADER
"""Of one part of a message to a relay, which has no body."""
MOST_PARTS = 2
_HEADER_LIMITS = {"max_array_len": 8, "max_map_len": 0, "max_bin_len": 0, "max_ext_len": 0}
_CRC_BYTES = 4
_LONGEST_TEXT = 256
_LONGEST_ENTRY = 600
_LARGEST_OFFSET = 1 << 48


@dataclass(frozen=True, slots=True)
class Hello:
    """A relay presents itself."""

    version: int
    host: str
    run_id: str


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Which offset of this stream, or of one of its chunks, do you hold?"""

    stream: StreamId
    origin: int
    """Which process wrote it (`spool.recordformat`): a node that was replaced begins at 0."""
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Whole records of a stream, or bytes of a chunk, from `offset` on."""

    stream: StreamId
    origin: int
    offset: int
    crc: int
    body: bytes
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """See that what you hold of this stream is on disk: segments of it are to be freed here."""

    stream: StreamId
    origin: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The first `offset` bytes of this stream outlast a loss of power."""

    stream: StreamId
    offset: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Everything this stream committed was acknowledged, and no more will come."""

    stream: StreamId
    origin: int
    committed: int
    reason: EndReason


@dataclass(frozen=True, slots=True)
class ChunkEnded:
    """All of this chunk was acknowledged."""

    stream: StreamId
    origin: int
    chunk: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of a black box, told with every beat of a relay, and to all that do not know it."""

    incarnation: int
    entry: str
    """As a board has it (`run.agreements`)."""


@dataclass(frozen=True, slots=True)
class Bye:
    """A relay ends, having been told Done."""


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The replica of this stream, as its relay names it, or this chunk is `offset` bytes long."""

    stream: StreamId
    offset: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class EndedSeen:
    """The end marker of this stream is on disk; or this chunk is, and as its checksum says."""

    stream: StreamId
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BeatSeen:
    """The collector is alive."""

    vanished: str
    """Note on a host that vanished: it asks for the steps that ranks held back."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The collector takes no more of this stream, or of its chunks."""

    stream: StreamId
    reason: str
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """The collector takes nothing from this relay: it gathers another run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The run is finished."""

    is_quiet: bool
    """Nothing happened on any host: what ranks held back is not asked for."""


_FromRelay = (
    Hello | OpenStream | Frame | Sync | Ended | ChunkEnded | HostState | Happened | Stall | Bye
)
_FromCollector = StreamOffset | Synced | EndedSeen | BeatSeen | Refused | Rejected | Done
Message = _FromRelay | _FromCollector


def encode(message: Message) -> list[bytes]:
    """Return the parts of a message: a header, and the body of a frame."""
    verb, shape = _VERB_OF[type(message)], _SHAPES[_VERB_OF[type(message)]]
    header = [field.write(getattr(message, name)) for name, field in shape.fields.items()]
    packed = msgpack.packb([verb, *header])
    parts = [packed + zlib.crc32(packed).to_bytes(_CRC_BYTES, "little")]
    return [*parts, message.body] if isinstance(message, Frame) else parts


def decode(parts: Sequence[bytes]) -> Message:
    """Return the message these parts are; raise WireError for none, or a number out of range."""
    if not 1 <= len(parts) <= MOST_PARTS or not _CRC_BYTES < len(parts[0]) <= _LONGEST_HEADER:
        raise WireError(f"a message of {len(parts)} parts, expected a header and at most a body")
    verb, *fields = _unpack(parts[0])
    shape = _SHAPES.get(verb) if isinstance(verb, int) else None
    if shape is None or len(fields) != len(shape.fields):
        raise WireError(
            f"verb {verb!r} with {len(fields)} fields, unknown to protocol {PROTOCOL_VERSION}"
        )
    if (shape.kind is Frame) != (len(parts) == 2):
        raise WireError(f"verb {verb} with {len(parts)} parts")
    values: dict[str, Any] = {"body": parts[1]} if len(parts) == 2 else {}
    for (name, field), place in zip(shape.fields.items(), fields):
        values[name] = field.read(place)
    message = shape.kind(**values)
    if isinstance(message, (Frame, StreamOffset)):
        unit = 1 if message.chunk else CELL_BYTES
        _checked_multiple(message.offset, unit)
    if isinstance(message, Frame):
        _check_body(message)
    return message


def _unpack(part: bytes) -> list[object]:
    header, crc = part[:-_CRC_BYTES], part[-_CRC_BYTES:]
    if zlib.crc32(header).to_bytes(_CRC_BYTES, "little") != crc:
        raise WireError(
            "a header whose crc is wrong: damaged on its way, or of another version of rankscope"
        )
    try:
        unpacked = msgpack.unpackb(header, max_str_len=_LONGEST_HEADER, **_HEADER_LIMITS)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header of {len(header)} bytes that is not a msgpack array") from error
    if not isinstance(unpacked, list) or not unpacked:
        raise WireError("a header that is not an array")
    return unpacked


def _check_body(frame: Frame) -> None:
    body = frame.body
    if frame.chunk:
        if not 0 < len(body) <= CHUNK_FRAME_BYTES:
            raise WireError(f"{len(body)} bytes of a chunk: expected 1 to {CHUNK_FRAME_BYTES}")
    elif not body or len(body) % CELL_BYTES or len(body) > LONGEST_BODY:
        # The crc of no bytes is 0 and would pass: an empty frame is refused by its length.
        raise WireError(f"a frame of {len(body)} bytes: expected 1 to {MAX_RECORD_CELLS} cells")
    if zlib.crc32(body) != frame.crc:
        raise WireError(f"a frame of {frame.stream.name} at {frame.offset} whose crc is wrong")


@dataclass(frozen=True, slots=True)
class _Field:
    """One attribute of a message: how it is written into a header and read, checked, from it."""

    write: Callable[[Any], object]
    read: Callable[[object], object]


@dataclass(frozen=True, slots=True)
class _MessageShape:
    """One kind of message: its class, and its attributes in order, a frame's body left out."""

    kind: type[Message]
    fields: Mapping[str, _Field]


def _shape(kind: type[Message], *of: _Field) -> _MessageShape:
    names = [field.name for field in fields(kind) if field.name != "body"]
    return _MessageShape(kind, dict(zip(names, of, strict=True)))


def _checked(value: object, limit: int) -> int:
    # True is an int to Python, and no number that anybody sent on purpose
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise WireError(f"{value!r} is not a whole number below {limit}")
    return value


def _number(limit: int) -> _Field:
    return _Field(lambda value: value, lambda place: _checked(place, limit))


def _member(members: Sequence[object]) -> _Field:
    return _Field(
        lambda value: members.index(value), lambda place: members[_checked(place, len(members))]
    )


def _checked_multiple(offset: object, unit: int = CELL_BYTES) -> int:
    if (number := _checked(offset, _LARGEST_OFFSET)) % unit:
        raise WireError(f"offset {number} is not a multiple of a cell")
    return number


def _read_stream(place: object) -> StreamId:
    if not isinstance(place, list) or len(place) != 2:
        raise WireError(f"{place!r} is not a stream")
    rank, incarnation = _checked(place[0], MAX_RANKS), _checked(place[1], MAX_INCARNATIONS)
    return StreamId(rank=rank, incarnation=incarnation)


def _text(limit: int) -> _Field:

    def read(place: object) -> str:
        if not isinstance(place, str) or len(place) > limit:
            raise WireError(f"expected a text of at most {limit} characters")
        return place

    return _Field(lambda text: text[:limit], read)


_COUNT = _number(MAX_RANKS)
_TEXT, _ENTRY = _text(_LONGEST_TEXT), _text(_LONGEST_ENTRY)
_LIFE = _number(MAX_INCARNATIONS)
_STREAM = _Field(lambda stream: (stream.rank, stream.incarnation), _read_stream)
_ORIGIN = _number(1 << 64)
_OFFSET = _Field(lambda offset: offset, _checked_multiple)
_CHUNK, _SIZE = _number(1_000_000_000), _number(_LARGEST_OFFSET)
_TIME = _number(1 << 63)

_SHAPES: Mapping[int, _MessageShape] = {
    1: _shape(Hello, _number(1 << 16), _TEXT, _TEXT),
    2: _shape(OpenStream, _STREAM, _ORIGIN, _CHUNK),
    3: _shape(Frame, _STREAM, _ORIGIN, _SIZE, _number(1 << 32), _CHUNK),
    4: _shape(Ended, _STREAM, _ORIGIN, _OFFSET, _member(tuple(EndReason))),
    5: _shape(HostState, _COUNT, _COUNT, _member(tuple(JobState)), _COUNT, _COUNT),
    6: _shape(Bye),
    10: _shape(StreamOffset, _STREAM, _SIZE, _CHUNK),
    11: _shape(EndedSeen, _STREAM, _CHUNK),
    12: _shape(BeatSeen, _TEXT),
    13: _shape(Refused, _STREAM, _TEXT, _CHUNK),
    14: _shape(Done, _member((False, True))),
    15: _shape(Rejected, _TEXT),
    9: _shape(ChunkEnded, _STREAM, _ORIGIN, _CHUNK, _SIZE, _number(1 << 64)),
    19: _shape(Stall, _TIME, _TIME, _TIME, _member((False, True)), _TEXT, _TEXT),
    20: _shape(Sync, _STREAM, _ORIGIN),
    21: _shape(Synced, _STREAM, _OFFSET),
    22: _shape(Happened, _LIFE, _ENTRY),
}
"""Every message by its verb. Never renumber, nor use 7, 8 and 16 to 18 again."""
_VERB_OF: Mapping[type[object], int] = {shape.kind: verb for verb, shape in _SHAPES.items()}


_LOOK_S = 0.01
_FORGET_S = 2.0
"""How long libzmq may take to let go of what came over connections that were cut."""
_SAY_AGAIN_S = 60.0
_SLACK_BYTES = 64 << 20
_BYTES_A_PEER = 1 << 20
"""What an honest peer has on its way at most: a window."""


def receive_parts(source: zmq.Socket[bytes], limit: int) -> list[bytes]:
    """Return at most `limit` + 1 parts of the next message; raise zmq.Again without one."""
    parts = [source.recv(zmq.DONTWAIT)]
    # all parts are taken off, however many: what is left would be read as the next message
    while source.getsockopt(zmq.RCVMORE):
        part = source.recv(zmq.DONTWAIT)
        if len(parts) <= limit:
            parts.append(part)
    return parts


class MemoryBound:
    """Cuts the connections of some addresses while this process grows too large."""

    def __init__(self, addresses: Collection[str], peers: Callable[[], int]) -> None:
        """Watch addresses, as zmq names them, of so many peers; what is occupied now is granted."""
        self._paths = {a.removeprefix("ipc://") for a in addresses if a.startswith("ipc://")}
        self._ports = {int(a.rsplit(":", 1)[1]) for a in addresses if a.startswith("tcp://")}
        self._peers = peers
        self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._granted = self._occupied_bytes() + _SLACK_BYTES
        self._said_at = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory bound", daemon=True)
        self._thread.start()

    def _cut(self) -> None:
        """Shut down every connection by a descriptor of our own: libzmq may close its own."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                # a copy of the descriptor: by the time it is shut down libzmq may have closed its
                # own and opened another file
                with socket.fromfd(int(name), -1, -1, -1) as connection:
                    if self._is_connection(connection):
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()
        os.close(self._memory)

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if self._is_exceeded():
                self._free()

    def _is_exceeded(self) -> bool:
        return self._occupied_bytes() > self._granted + self._peers() * _BYTES_A_PEER

    def _occupied_bytes(self) -> int:
        # through a file that stays open: descriptors may be short
        return int(os.pread(self._memory, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _free(self) -> None:
        """Cut every connection; what is occupied all the same came from elsewhere: grant it."""
        now = time.monotonic()
        if now - self._said_at > _SAY_AGAIN_S:
            self._said_at = now
            occupied = self._occupied_bytes() >> 20
            log(f"{occupied} MiB are occupied, more than relays can have sent: cut off all of them")
        deadline = now + _FORGET_S
        while self._is_exceeded():
            if time.monotonic() > deadline:
                self._granted = self._occupied_bytes() + _SLACK_BYTES
                return
            self._cut()
            if self._stopped.wait(_LOOK_S):
                return
            with contextlib.suppress(AttributeError, OSError):  # not every C library has it
                ctypes.CDLL(None).malloc_trim(0)

    def _is_connection(self, candidate: socket.socket) -> bool:
        if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        ends = (candidate.getsockname(), candidate.getpeername())
        if candidate.family == socket.AF_UNIX:
            return any(os.fsdecode(end) in self._paths for end in ends)
        return any(end[1] in self._ports for end in ends)
