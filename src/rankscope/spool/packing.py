"""Cells into a mapped segment: the innermost writing, with everything computed beforehand.

CRC-32 goes on from where the header left it, so the crc of each possible header is computed once; a
cell is then one crc over its payload and one packing into the map. The first cell is written last.
"""

from __future__ import annotations

import struct
from binascii import crc32
from typing import Final

from rankscope.spool.mappedsegment import Segment
from rankscope.spool.recordformat import CELL_BYTES, FIRST, PAYLOAD_BYTES, RecordKind

_CELL: Final = struct.Struct("<I4s56s")
_HEAD: Final = struct.Struct("<BBH")
QUAD: Final = struct.Struct("<56s56s56s56s")
pack_cell = _CELL.pack_into
_pack_three = struct.Struct("<I4s56sI4s56sI4s56s").pack_into


def _head(kind: int, count: int, number: int) -> tuple[bytes, int]:
    head = _HEAD.pack(kind, FIRST if number == 0 else 0, count - 1 - number)
    return head, crc32(head)


_SLOW: Final = (RecordKind.STEP, RecordKind.GAP, RecordKind.END, RecordKind.FILLER)
SINGLE: Final = tuple(
    None if kind == 0 or kind in _SLOW else _head(kind, 1, 0) for kind in range(max(RecordKind) + 1)
)
FOUR: Final = tuple(
    tuple(_head(kind, 4, number) for number in range(4)) for kind in range(max(RecordKind) + 1)
)
_HEADS: Final[dict[tuple[int, int], list[tuple[bytes, int]]]] = {}
_HEADS_KEPT: Final = 256  # the record sizes seen most


class Closed:
    """Stands for the segment of a closed stream: every write goes the slow way and is refused."""

    at = 0
    data_end = 0
    end = 0
    map = bytearray()


CLOSED: Final = Closed()


def put_four(
    segment: Segment | Closed, at: int, heads: tuple[tuple[bytes, int], ...], payload: bytes
) -> None:
    """As `put` for a record with a whole digest, the second hottest: unrolled."""
    first, second, third, fourth = QUAD.unpack(payload)
    (head0, crc0), (head1, crc1), (head2, crc2), (head3, crc3) = heads
    mapped = segment.map
    _pack_three(
        mapped,
        at + CELL_BYTES,
        crc32(second, crc1), head1, second,
        crc32(third, crc2), head2, third,
        crc32(fourth, crc3), head3, fourth,
    )  # fmt: skip
    pack_cell(mapped, at, crc32(first, crc0), head0, first)
    segment.at = at + 4 * CELL_BYTES


def put(segment: Segment | Closed, kind: int, payload: bytes) -> None:
    """Write a record that fits: its following cells, then its first one; then move the end."""
    count = -(-len(payload) // PAYLOAD_BYTES) or 1
    heads = _HEADS.get((kind, count))
    if heads is None:
        heads = [_head(kind, count, number) for number in range(count)]
        if count <= 64 and len(_HEADS) < _HEADS_KEPT:
            _HEADS[kind, count] = heads
    mapped, start = segment.map, segment.at
    if len(payload) < count * PAYLOAD_BYTES:
        payload = payload.ljust(count * PAYLOAD_BYTES, b"\0")
    at, cut = start + CELL_BYTES, PAYLOAD_BYTES
    for head, crc in heads[1:]:
        part = payload[cut : cut + PAYLOAD_BYTES]
        pack_cell(mapped, at, crc32(part, crc), head, part)
        at += CELL_BYTES
        cut += PAYLOAD_BYTES
    head, crc = heads[0]
    part = payload[:PAYLOAD_BYTES]
    pack_cell(mapped, start, crc32(part, crc), head, part)
    segment.at = at


def whole_record(segment: Segment | Closed) -> int:
    """Return the number of cells of the record that lies whole at the committed end, 0 for none."""
    at, mapped = segment.at, segment.map
    if at >= segment.end:
        return 0
    stored, head, _ = _CELL.unpack_from(mapped, at)
    kind, flags, left = _HEAD.unpack(head)
    if kind == 0 or flags != FIRST or at + (left + 1) * CELL_BYTES > segment.end:
        return 0
    for number in range(left + 1):
        stored, head, payload = _CELL.unpack_from(mapped, at + number * CELL_BYTES)
        expected, crc = _head(kind, left + 1, number)
        if head != expected or stored != crc32(payload, crc):
            return 0
    return int(left) + 1
