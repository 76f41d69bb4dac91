"""Records as columns, and definitions that need not be what they should."""

import math
import struct

import msgpack
import numpy as np

from rankscope.record.ranks import EndReason
from rankscope.spool.recordcolumns import read_ending, records
from rankscope.spool.recordformat import (
    DEFINITION_LENGTH,
    VALUE_HEAD,
    RecordKind,
)
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.assembly.rankstreams import _samples
from tests.spool.streams import (
    SMALL,
    enter,
    open_replica,
    rank_definition,
    samples,
    stream_bytes,
    value,
    write_some,
)


def test_every_record_comes_back_in_order_with_its_fields(tmp_path):
    found = records(write_some(tmp_path / "s", 40))
    positions, enters = found.columns(RecordKind.ENTER)
    assert enters["sequence"].tolist() == list(range(40))
    assert np.all(np.diff(positions) > 0)
    _, exits = found.columns(RecordKind.EXIT)
    assert exits["time_ns"].tolist() == list(range(40))
    at, values = found.values()
    assert values.has_digest.all()
    assert values["sequence"].tolist() == list(range(40))
    assert (at == positions + 1).all()
    assert values["sketch"][3].tolist() == [9.0, 10, 11, 12, 13, 14, 15, 16]
    assert read_ending(found).reason is EndReason.EXIT


def test_a_value_without_digest_stands_beside_one_with_it(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    writer.write(RecordKind.VALUE, value(1))
    writer.write(RecordKind.VALUE, VALUE_HEAD.pack(2, 0, 3, 4, 5, 6, 7, 8, 9, 10))
    writer.write(RecordKind.VALUE, value(3))
    writer.close()
    _, rows = records(stream_bytes(tmp_path / "s")).values()
    assert rows["sequence"].tolist() == [1, 2, 3]
    assert rows.has_digest.tolist() == [True, False, True]
    assert rows["hash"][1] == 9
    assert rows["l2"].tolist()[1:] == [0, 8.0]


def test_samples_come_back_with_their_shape(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    for count in (0, 1, 2, 64):
        writer.write(RecordKind.SAMPLES, samples(count, count))
    writer.write(RecordKind.SAMPLES, samples(9, 70)[:100])
    writer.close()
    found, wrong = _samples(records(stream_bytes(tmp_path / "s")))
    assert found.heads["sequence"].tolist() == [0, 1, 2, 64]
    assert found.heads["count"].tolist() == [0, 1, 2, 64] and found.rows.shape == (67, 8)
    assert all(row.tobytes() == bytes(range(32)) for row in found.rows)
    assert wrong.total() == 1


def test_definitions_decode_and_broken_ones_are_left_out(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    writer.define(rank_definition())
    bad = [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"id": 0, "kind": "slot"}),
        msgpack.packb({"id": True, "kind": "slot"}),
        msgpack.packb({"id": 5}),
        msgpack.packb({1: 2}),
        msgpack.packb({"id": 3, "kind": "slot", "x": msgpack.ExtType(3, b"y")}),
        b"\xdd\xff\xff\xff\xff",
        b"\x81" * 900,
        msgpack.packb({"id": 1, "kind": "slot"}) + b"trailing",
    ]
    for packed in bad:
        writer.define(packed)
    writer.write(RecordKind.DEFINITION, DEFINITION_LENGTH.pack(1 << 31) + b"x")
    writer.define(msgpack.packb({"id": 2, "kind": "slot", "name": "Ω" * 100}))
    writer.close()
    definitions = records(stream_bytes(tmp_path / "s")).definitions()
    assert [entry["id"] for entry in definitions] == [1, 2]
    assert definitions[1]["name"] == "Ω" * 100


def test_an_empty_or_torn_replica_opens(tmp_path):
    path = tmp_path / "replica.cells"
    path.write_bytes(b"")
    assert len(open_replica(path)) == 0
    whole = write_some(tmp_path / "s", 5)
    path.write_bytes(whole[:-10])
    found = open_replica(path)
    assert found.committed_bytes == len(whole) - 64
    assert read_ending(found).reason is None


def test_floats_survive_bit_for_bit(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    bits = struct.pack("<d", math.nan)
    packed = value(1)
    writer.write(RecordKind.VALUE, packed[:88] + bits + packed[96:])
    writer.close()
    _, rows = records(stream_bytes(tmp_path / "s")).values()
    assert rows["min"].tobytes() == bits


def test_a_verified_buffer_is_indexed_without_its_crcs(tmp_path):
    whole = bytearray(write_some(tmp_path / "s", 5))
    assert len(records(whole, is_verified=True)) == len(records(bytes(whole)))
    writer_free = enter(1)
    assert len(writer_free) == 56
