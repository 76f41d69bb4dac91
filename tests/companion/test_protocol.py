"""Messages survive the wire; anything else is refused and changes nothing."""

import random
import zlib

import msgpack
import pytest

from rankscope.companion.protocol import (
    CHUNK_FRAME_BYTES,
    BeatSeen,
    Bye,
    ChunkEnded,
    Done,
    Ended,
    EndedSeen,
    Frame,
    Happened,
    Hello,
    OpenStream,
    Refused,
    Rejected,
    StreamOffset,
    decode,
    encode,
)
from rankscope.companion.waitingrule import HostState, JobState
from rankscope.errors import WireError
from rankscope.record.ranks import EndReason, StreamId

STREAM = StreamId(rank=3, incarnation=1)
BODY = bytes(range(64)) * 3
MESSAGES = [
    Hello(3, "host", "run"),
    OpenStream(STREAM, 7),
    Frame(STREAM, (1 << 64) - 1, 640, zlib.crc32(BODY), BODY),
    Ended(STREAM, 7, 6400, EndReason.LOST),
    HostState(alive=2, held=3, job=JobState.LAUNCHED, max_restarts=4, quiet=5),
    Bye(),
    StreamOffset(STREAM, 1 << 40),
    EndedSeen(STREAM),
    BeatSeen("a host is gone"),
    Refused(STREAM, "no"),
    Rejected("another run"),
    Done(False),
    Happened(1, "nonfinite train 3 rank 0: é"),
    OpenStream(STREAM, 5, 1),
    Frame(STREAM, (1 << 64) - 1, 17, zlib.crc32(BODY[:7]), BODY[:7], 999_999_999),
    ChunkEnded(STREAM, 5, 1, (1 << 48) - 1, (1 << 64) - 1),
    StreamOffset(STREAM, 12345, 1),
    EndedSeen(STREAM, 1),
    Refused(STREAM, "no", 1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message):
    assert decode(encode(message)) == message


def sealed(header: bytes) -> bytes:
    """A header with its right crc."""
    return header + zlib.crc32(header).to_bytes(4, "little")


def pack(*fields: object) -> bytes:
    return sealed(msgpack.packb(fields))


BROKEN = {
    "no parts": [],
    "an empty header": [b""],
    "three parts": [pack(6), b"x", b"y"],
    "no msgpack": [sealed(b"\xc1")],
    "a map": [sealed(msgpack.packb({"a": 1}))],
    "a header without its crc": [msgpack.packb([6])],
    "an empty array": [pack()],
    "an unknown verb": [pack(99)],
    "a verb that is a text": [pack("3")],
    "too many fields": [pack(*range(20))],
    "a missing field": [pack(2, [3, 0])],
    "a stream that is a number": [pack(2, 3, 7, 0)],
    "an extension type": [sealed(msgpack.packb([2, [3, 0], msgpack.ExtType(1, b"x"), 0]))],
    "a negative rank": [pack(2, [-1, 0], 7, 0)],
    "a rank out of range": [pack(2, [1 << 24, 0], 7, 0)],
    "an incarnation out of range": [pack(2, [0, 1 << 16], 7, 0)],
    "a rank that is a bool": [pack(2, [True, 0], 7, 0)],
    "a rank that is a float": [pack(2, [1.0, 0], 7, 0)],
    "a negative origin": [pack(2, [0, 0], -1, 0)],
    "an offset between cells": [pack(3, [0, 0], 7, 63, zlib.crc32(BODY), 0), BODY],
    "a huge offset": [pack(3, [0, 0], 7, 1 << 60, zlib.crc32(BODY), 0), BODY],
    "a wrong crc": [pack(3, [0, 0], 7, 0, zlib.crc32(BODY) ^ 1, 0), BODY],
    "an empty frame, whose crc is right": [pack(3, [0, 0], 7, 0, 0, 0), b""],
    "a frame that is not whole cells": [pack(3, [0, 0], 7, 0, zlib.crc32(BODY[:-1]), 0), BODY[:-1]],
    "a frame larger than any record": [
        pack(3, [0, 0], 7, 0, zlib.crc32(bytes(5 << 20)), 0),
        bytes(5 << 20),
    ],
    "a frame without a body": [pack(3, [0, 0], 7, 0, 0, 0)],
    "a body nobody asked for": [pack(2, [0, 0], 7, 0), BODY],
    "an empty piece of a chunk": [pack(3, [0, 0], 7, 0, 0, 1), b""],
    "a piece of a chunk with a wrong crc": [pack(3, [0, 0], 7, 0, zlib.crc32(BODY) ^ 1, 1), BODY],
    "a piece of a chunk that is too long": [
        pack(3, [0, 0], 7, 0, zlib.crc32(bytes(CHUNK_FRAME_BYTES + 1)), 1),
        bytes(CHUNK_FRAME_BYTES + 1),
    ],
    "a chunk whose number is not a file name": [pack(2, [0, 0], 7, 1_000_000_000)],
    "a checksum out of range": [pack(9, [0, 0], 5, 1, 1, -1)],
    "an unknown reason": [pack(4, [0, 0], 7, 64, 17)],
    "a long header": [pack(15, "x" * 5000)],
    "a long text": [pack(13, [0, 0], "x" * 300, 0)],
    "a header that claims 4 billion fields": [sealed(b"\xdd\xff\xff\xff\xff")],
    "nesting": [sealed(b"\x91" * 1000)],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_message_is_refused(name):
    with pytest.raises(WireError):
        decode(BROKEN[name])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_bit_of_a_message_can_flip_unseen(message):
    parts = encode(message)
    for which, part in enumerate(parts):
        for bit in range(8 * len(part)):
            flipped = bytearray(part)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                decode([*parts[:which], bytes(flipped), *parts[which + 1 :]])


def test_mutated_messages_decode_to_messages_in_range_or_not_at_all():
    chosen = random.Random(4)
    for _ in range(5000):
        parts = [bytearray(part) for part in encode(chosen.choice(MESSAGES))]
        for _ in range(chosen.randrange(1, 4)):
            part = chosen.choice(parts)
            part[chosen.randrange(len(part))] = chosen.randrange(256)
        try:
            message = decode([sealed(bytes(parts[0][:-4])), *(bytes(part) for part in parts[1:])])
        except WireError:
            continue
        assert decode(encode(message)) == message
