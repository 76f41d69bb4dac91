"""What a relay believes of what it is told, and when it frees what its ranks wrote."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import zmq

from rankscope.companion.collector import Intake
from rankscope.companion.protocol import (
    PROTOCOL_VERSION,
    Done,
    Ended,
    EndedSeen,
    Frame,
    Hello,
    OpenStream,
    StreamOffset,
    Sync,
    Synced,
    decode,
    encode,
)
from rankscope.companion.shipping import GO_BACK_S, ChunkShipment, Shipment
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import segment_indexes, stream_folder
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.spool.streams import enter, rank_definition, write_some
from tests.waiting import wait_until

STREAM = StreamId(rank=0, incarnation=0)
WINDOW = 1 << 20
LIMIT = 256 << 10


@pytest.fixture
def writer(tmp_path: Path):
    """A living rank with a spool of some full segments."""
    writer = SpoolWriter(stream_folder(tmp_path, STREAM), limit_bytes=LIMIT)
    writer.define(rank_definition())
    number = 0
    while len(segment_indexes(writer.folder)) < 4:
        number += 1
        writer.write(RecordKind.ENTER, enter(number))
    yield writer
    writer.close()


def opened(tmp_path: Path, offset: int = 0) -> Shipment:
    shipment = Shipment(tmp_path, STREAM)
    assert isinstance(shipment.next_message(0.0, WINDOW), OpenStream)
    shipment.take_offset(offset, 0.0)
    return shipment


@pytest.mark.parametrize("past", [64, LIMIT, 1 << 40])
def test_an_acknowledgement_beyond_what_was_sent_is_not_believed(writer, tmp_path, past):
    shipment = opened(tmp_path)
    frame = shipment.next_message(0.0, WINDOW)
    assert isinstance(frame, Frame)
    shipment.take_offset(len(frame.body) + past, 0.0)
    assert shipment.acked == 0
    assert isinstance(shipment.next_message(1.0, WINDOW), OpenStream), "it asks what is there"
    shipment.take_offset(0, 1.0)
    again = shipment.next_message(1.0, WINDOW)
    assert isinstance(again, Frame)
    assert (again.offset, again.body) == (frame.offset, frame.body)
    shipment.take_synced(1 << 40)
    assert segment_indexes(writer.folder)[0] == 0


@pytest.mark.parametrize("offset", [1 << 20, 1 << 40, -64])
def test_an_offset_at_which_no_record_of_the_spool_ends_is_asked_for_again(
    writer, tmp_path, offset
):
    shipment = Shipment(tmp_path, STREAM)
    assert isinstance(shipment.next_message(0.0, WINDOW), OpenStream)
    wrong = writer.committed_bytes + offset if offset > 0 else 128
    if offset < 0:  # inside a record of several cells
        frame = opened(tmp_path).next_message(0.0, WINDOW)
        assert isinstance(frame, Frame)
        assert frame.body[6] > 0, "the first record has one cell only"
        wrong = 64
    shipment.take_offset(wrong, 0.0)
    assert shipment.next_message(0.1, WINDOW) is None
    assert isinstance(shipment.next_message(GO_BACK_S + 0.1, WINDOW), OpenStream)
    shipment.take_synced(wrong)
    assert segment_indexes(writer.folder)[0] == 0


def test_of_a_dead_rank_whose_spool_lost_records_the_end_is_told_and_nothing_removed(
    writer, tmp_path
):
    """As a host leaves it that crashed: the collector holds more than what came to its disk."""
    more = writer.committed_bytes + 6400
    writer._lock.release()  # as the kernel does when the process ends
    shipment = Shipment(tmp_path, STREAM)
    message = None
    for turn in range(10):
        message = shipment.next_message(turn * 2 * GO_BACK_S, WINDOW)
        if not isinstance(message, OpenStream):
            break
        shipment.take_offset(more, turn * 2 * GO_BACK_S)
    assert message == Ended(STREAM, shipment.origin, more, EndReason.LOST)
    shipment.take_end_seen()
    assert shipment.is_done
    assert not shipment.is_delivered()


def test_a_chunk_that_was_not_sent_whole_is_not_removed(tmp_path):
    folder = tmp_path / "tensors" / STREAM.name
    shipment = ChunkShipment(tmp_path, STREAM)
    folder = shipment._folder
    folder.mkdir(parents=True)
    chunk = folder / "000001.safetensors"
    chunk.write_bytes(b"\x08" + bytes(7) + b"{}      " + bytes(1000))
    assert isinstance(shipment.next_message(0.0, is_over=True), OpenStream)
    shipment.take_answer(EndedSeen(STREAM, 1), 0.0)
    assert chunk.exists()


def test_a_segment_stays_until_its_records_are_on_disk_where_they_went(hosts):
    """A false collector acknowledges everything, and says only later that it is on disk."""
    host = hosts(world_size=1)
    rank = host.rank(0, batches=20, pause_ms=20, limit_bytes=4 << 20, hangs=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "written\n"
    folder = stream_folder(host.folder, STREAM)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as collector:
        collector.setsockopt(zmq.LINGER, 0)
        collector.bind(host.address)
        host.relay()
        held, asked = 0, 0

        def answer(*, is_synced: bool) -> None:
            nonlocal held, asked
            if not collector.poll(50):
                return
            name, *parts = collector.recv_multipart()
            match decode(parts):
                case OpenStream(stream):
                    collector.send_multipart([name, *encode(StreamOffset(stream, held))])
                case Frame(stream, _, offset, _, body) if offset == held:
                    held += len(body)
                    collector.send_multipart([name, *encode(StreamOffset(stream, held))])
                case Sync(stream):
                    asked += 1
                    if is_synced:
                        collector.send_multipart([name, *encode(Synced(stream, held))])

        def is_still_here_when_asked() -> bool:
            answer(is_synced=False)
            return asked >= 3

        def is_freed() -> bool:
            answer(is_synced=True)
            return segment_indexes(folder)[0] > 0

        assert wait_until(is_still_here_when_asked, 60)
        assert segment_indexes(folder)[0] == 0
        assert held > 1 << 19
        assert wait_until(is_freed, 60)


@pytest.mark.parametrize("how", ["", "now", "before", "unlisted"])
def test_done_is_said_only_where_all_records_are_on_disk(tmp_path, capfd, how):
    """Told so a relay removes its spools: they would be the last copy of what the disk lost."""
    whole = write_some(tmp_path / "s", 20)
    replica = tmp_path / "out" / "spool" / f"{STREAM.name}.cells"
    address = f"ipc://{tmp_path}/socket"
    intake = Intake(tmp_path / "out", [address], world_size=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(address)
        for message in (
            Hello(PROTOCOL_VERSION, "here", "test"),
            OpenStream(STREAM, 1),
            Frame(STREAM, 1, 0, zlib.crc32(whole), whole),
        ):
            peer.send_multipart(encode(message))

        def is_taken() -> bool:
            intake.work(0.01)
            return replica.exists() and replica.stat().st_size == len(whole)

        assert wait_until(is_taken, 20)
        if how == "now":  # as a disk that failed: what was written cannot be reached any more
            replica.rename(tmp_path / "gone")
            replica.symlink_to(tmp_path / "gone")
        if how == "before":  # the kernel tells a disk's error once, to whoever asked first
            intake._sync._lost.add(STREAM)
        if how == "unlisted":
            replica.parent.rename(tmp_path / "gone")
            replica.parent.touch()
        intake.farewell(is_quiet=False)
        told = []
        while peer.poll(200):
            told.append(decode(peer.recv_multipart()))
        intake.close()
    assert (Done(False) in told) == (not how)
    assert ("hosts keep their records" in capfd.readouterr().err) == bool(how)
