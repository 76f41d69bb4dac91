"""Sound files that are damaged: the records of golden jobs, and the trees made of them."""

from __future__ import annotations

import functools
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack

from rankscope.run.folders import REPLICA_FOLDER
from rankscope.run.jobstatus import Stall, keep_stall
from rankscope.spool.recordcolumns import records
from rankscope.spool.recordformat import DEFINITION_LENGTH, FIRST, PAYLOAD_BYTES, RecordKind
from rankscope.tree.assembly.sources import find_streams
from rankscope.tree.build import build, recover
from rankscope.tree.goldenfile import write_golden
from rankscope.tree.reader import open_trace
from tests.companion.running.growing import grown
from tests.tree.record_golden import unpacked

DEFINITIONS: tuple[dict[str, Any], ...] = (
    {"kind": "inside", "root": 2, "in": 4, "path": "encoder"},
    {
        "kind": "mark",
        "module": 3,
        "name": "weight",
        "axis": "tp",
        "placement": "Shard(0)",
        "members": [0, 1],
        "activation": True,
    },
    {"kind": "raised", "error": "ValueError: no", "causes": ["KeyError"], "where": "train.py:3"},
    {"kind": "not_kept", "reason": "budget", "text": "3 tensors were not kept"},
    {"kind": "text", "text": "a step", "fact": {"kind": "no_step_begun", "steps": "40000"}},
)
"""Of kinds that the golden jobs have none of."""


@functools.cache
def scratch() -> Path:
    """A folder of this process, in memory where the host has such a place."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="rs-fuzz-", dir=shared if shared.is_dir() else None))


def clear() -> None:
    """Remove the folder."""
    if scratch.cache_info().currsize:
        shutil.rmtree(scratch(), ignore_errors=True)
        for each in (scratch, job, tree, compact_tree, growing_tree, golden):
            each.cache_clear()


@functools.cache
def job(name: str) -> Path:
    """The records of a golden job."""
    folder = scratch() / f"records-{name}"
    folder.mkdir()
    return unpacked(name, folder)


@functools.cache
def tree(name: str) -> Path:
    """The trace of a golden job, with a stall of its host."""
    out = scratch() / f"tree-{name}"
    recover([job(name)], out)
    stall = Stall(host="h", since_ns=1, noticed_ns=2, over_ns=3, is_by_end=False, where="layers.0")
    keep_stall(out, "0" * 16, stall)
    return out


@functools.cache
def compact_tree(name: str) -> Path:
    """The same without tree.json."""
    out = scratch() / f"compact-{name}"
    out.mkdir()
    unpacked(name, out)
    build(out, tree_mode="never")
    return out


@functools.cache
def growing_tree(name: str) -> Path:
    """A trace folder of a golden job that still runs, as far as one can see: steps are written."""
    out = scratch() / f"growing-{name}"
    for _ in grown(job(name), out, pieces=4):
        pass
    return out


@functools.cache
def golden(name: str) -> Path:
    """The golden file of a golden job's trace."""
    path = scratch() / f"golden-{name}.xz"
    write_golden(open_trace(tree(name)), path, has_samples=True)
    return path


def replicas(name: str) -> list[Path]:
    """The replicas of a golden job."""
    return sorted((job(name) / REPLICA_FOLDER).glob("*.cells"))


def definitions() -> Iterator[dict[str, Any]]:
    """Yield the definitions of golden jobs, and one of each other kind."""
    yield from ({"id": 9, **fields} for fields in DEFINITIONS)
    for name in ("by_hand", "fsdp2_tp"):
        for source in find_streams([job(name)]):
            yield from records(bytes(source.data)).definitions()


def small_stream() -> bytes:
    """A few whole records of every kind a rank writes, its definitions before them."""
    (source,) = find_streams([job("by_hand")])[:1]
    found = records(bytes(source.data))
    chosen: list[int] = []
    for kind in RecordKind:
        most = 80 if kind is RecordKind.DEFINITION else 6
        chosen += found.positions(kind)[:most].tolist()
    last = found.positions(RecordKind.END)[-1:].tolist()
    places = sorted({*chosen, *last})
    return b"".join(
        found.cells[found.start[at] : found.start[at] + found.size[at]].tobytes() for at in places
    )


def redefined(stream: bytes, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> bytes:
    """A stream whose definitions are changed, with crcs that are right.

    Args:
        stream: whole records.
        change: returns another definition, or None to leave it as it is.
    """
    found = records(stream)
    pieces = []
    for at in range(len(found)):
        cells = found.cells[found.start[at] : found.start[at] + found.size[at]].tobytes()
        if found.kind[at] == RecordKind.DEFINITION:
            payload = found.payload(at)
            length = int.from_bytes(payload[:4], "little")
            other = change(msgpack.unpackb(payload[4 : 4 + length]))
            if other is not None:
                text = packed(other)
                cells = record(RecordKind.DEFINITION, DEFINITION_LENGTH.pack(len(text)) + text)
        pieces.append(cells)
    return b"".join(pieces)


def record(kind: RecordKind, payload: bytes) -> bytes:
    """The cells of one record."""
    count = -(-len(payload) // PAYLOAD_BYTES) or 1
    cells = []
    for number in range(count):
        part = payload[number * PAYLOAD_BYTES : (number + 1) * PAYLOAD_BYTES]
        head = struct.pack("<BBH", kind, FIRST if number == 0 else 0, count - 1 - number)
        body = head + part.ljust(PAYLOAD_BYTES, b"\0")
        cells.append(zlib.crc32(body).to_bytes(4, "little") + body)
    return b"".join(cells)


def packed(fields: dict[str, Any]) -> bytes:
    """A definition as msgpack; what msgpack cannot hold is held as text."""
    try:
        return msgpack.packb(fields, unicode_errors="backslashreplace")
    except (OverflowError, ValueError, TypeError):
        return msgpack.packb(repr(fields)[:1000], unicode_errors="backslashreplace")
