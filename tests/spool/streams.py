"""Streams the spool's tests write: small records whose content tells their number."""

from __future__ import annotations

from pathlib import Path

import msgpack

from rankscope.record.ranks import EndReason
from rankscope.spool.recordcolumns import Records, StreamReader, records
from rankscope.spool.recordformat import (
    CELL_BYTES,
    ENTER,
    EXIT,
    SAMPLES,
    STEP,
    VALUE,
    RecordKind,
    StepEvent,
)
from rankscope.spool.replicas import SettledPrefix, free, read_replica, write_settled
from rankscope.spool.writer import SpoolWriter

SMALL = 1 << 20


def enter(number: int) -> bytes:
    """An ENTER whose sequence is `number`."""
    return ENTER.pack(number, 0, number, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0)


def value(number: int) -> bytes:
    """A VALUE with digest whose sequence is `number`."""
    return VALUE.pack(number, number, 1, 1, 0, 1, 0, 8, 9, 0, *range(17))


def samples(number: int, count: int) -> bytes:
    """SAMPLES with `count` sketches of 8."""
    head = SAMPLES.pack(number, 1, 0, 1, count, 8, 0, 0, 0, 0)
    return head + bytes(range(32)) * count


def step(number: int, event: StepEvent) -> bytes:
    """A STEP record."""
    return STEP.pack(number, number, 0, event, 0)


def rank_definition(rank: int = 0, pid: int = 1) -> bytes:
    """The definition a stream begins with."""
    who = {"rank": rank, "host": "h" * 200, "pid": pid}
    return msgpack.packb({"id": 1, "kind": "rank", "format": 1, **who})


def write_some(folder: Path, count: int = 40, *, limit_bytes: int = SMALL) -> bytes:
    """Write a closed stream of records of every size; return its bytes."""
    writer = SpoolWriter(folder, limit_bytes=limit_bytes)
    writer.define(rank_definition())
    for number in range(count):
        writer.write(RecordKind.ENTER, enter(number))
        writer.write(RecordKind.VALUE, value(number))
        if number % 5 == 0:
            writer.write(RecordKind.SAMPLES, samples(number, number % 7 + 1))
        writer.write(RecordKind.EXIT, EXIT.pack(number, number, 0, 0, 0))
    writer.close(EndReason.EXIT)
    return stream_bytes(folder)


def settled(whole: bytes, end: int, begin: int | None = None, late: int = 0) -> SettledPrefix:
    """What stands for a stream's bytes up to `end`: its definitions, and all from `begin` on."""
    begin = end if begin is None else begin
    found = records(whole[:begin])
    kept = found.cells_of(found.positions(RecordKind.DEFINITION)).tobytes()
    return SettledPrefix(end, kept + whole[begin:end], late)


def open_replica(path: Path) -> Records:
    """The committed records of a replica, as far as they are still there."""
    return records(read_replica(path)[0])


def settle(replica: Path, prefix: SettledPrefix) -> None:
    """Settle the begin of a replica, and let its bytes go."""
    write_settled(replica, prefix)
    if not free(replica, prefix.settled_to):  # a file system without holes reads zeros all the same
        size = replica.stat().st_size
        with replica.open("r+b") as file:
            first = (int.from_bytes(file.read(8)[6:8], "little") + 1) * CELL_BYTES
            file.seek(first)
            file.write(bytes(min(prefix.settled_to, size) - first))


def record_begins(whole: bytes, kind: RecordKind) -> list[int]:
    """Offsets of the records of a kind."""
    found = records(whole)
    return [int(at) * CELL_BYTES for at in found.start[found.positions(kind)]]


def stream_bytes(folder: Path) -> bytes:
    """Everything committed and not freed."""
    with StreamReader(folder) as reader:
        return b"".join(reader.chunks())
