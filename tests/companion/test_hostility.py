"""A collector in front of senders that break the protocol in every way it names."""

import random
import zlib

import pytest
import zmq

from rankscope.companion.protocol import (
    PROTOCOL_VERSION,
    Bye,
    Ended,
    EndedSeen,
    Frame,
    Hello,
    OpenStream,
    Refused,
    Rejected,
    StreamOffset,
    decode,
    encode,
)
from rankscope.record.ranks import EndReason, StreamId
from rankscope.spool.replicas import read_end, replica_path
from tests.companion.test_protocol import BROKEN, pack
from tests.spool.streams import write_some
from tests.waiting import wait_until

STREAM = StreamId(rank=0, incarnation=0)
ORIGIN = 7


@pytest.fixture
def sender(hosts):
    """A dealer before a real collector, and its host."""
    host = hosts()
    host.collector(drain_seconds=60.0)
    assert wait_until(host.is_listened_to)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, b"relay-hostile")
    socket.connect(host.address)
    socket.send_multipart(encode(Hello(PROTOCOL_VERSION, "hostile", "test")))
    yield host, socket
    socket.close()
    context.term()


def ask(socket, message):
    """Send one message and return the answer."""
    socket.send_multipart(encode(message))
    assert socket.poll(20000), "the collector does not answer any more"
    return decode(socket.recv_multipart())


def frame(offset, body):
    return Frame(STREAM, ORIGIN, offset, zlib.crc32(body), body)


def test_nothing_broken_reaches_a_replica_or_stops_the_collector(sender, tmp_path):
    host, socket = sender
    whole = write_some(tmp_path / "s", 20)
    socket.send_multipart(encode(frame(0, whole)))  # nobody opened it
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, 0)
    chosen = random.Random(5)
    for parts in BROKEN.values():
        if parts:
            socket.send_multipart(parts)
    for _ in range(300):
        socket.send_multipart(
            [chosen.randbytes(chosen.randrange(80)) for _ in range(chosen.randrange(1, 4))]
        )
    assert ask(socket, frame(64, whole[64:])) == StreamOffset(STREAM, 0)
    assert ask(socket, frame(1 << 40, whole)) == StreamOffset(STREAM, 0)
    socket.send_multipart([pack(3, [0, 0], ORIGIN, 0, zlib.crc32(whole) ^ 1, 0), whole])
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, 0)
    assert replica_path(host.out, STREAM).read_bytes() == b""
    assert ask(socket, frame(0, whole)) == StreamOffset(STREAM, len(whole))
    assert ask(socket, frame(0, whole)) == StreamOffset(STREAM, len(whole))
    assert replica_path(host.out, STREAM).read_bytes() == whole
    names = {path.name for path in (host.out / "spool").iterdir()}
    assert names == {"rank00000.0.cells", "rank00000.0.origin", "run-id"}


def test_a_stranger_is_not_told_the_id_of_the_run(hosts):
    """Who knows the id is taken for a relay of the run, so no answer may hold it."""
    host = hosts(run_id="id-of-the-run")
    host.collector(drain_seconds=60.0)
    assert wait_until(host.is_listened_to)
    context, heard = zmq.Context(), []

    def dealer(name):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, name)
        socket.connect(host.address)
        return socket

    known, stranger = dealer(b"known"), dealer(b"stranger")
    known.send_multipart(encode(Hello(PROTOCOL_VERSION, "host", "id-of-the-run")))
    assert ask(known, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, 0)
    for run_id, version in (("guessed", PROTOCOL_VERSION), ("", PROTOCOL_VERSION), ("x", 99)):
        for message in (OpenStream(STREAM, ORIGIN), frame(0, b"x" * 64), Bye()):  # none is answered
            stranger.send_multipart(encode(message))
        stranger.send_multipart(encode(Hello(version, "elsewhere", run_id)))
        assert stranger.poll(20000), "it is told that it is turned away"
        heard.append(stranger.recv_multipart())
    assert not stranger.poll(0)
    assert all(isinstance(decode(parts), Rejected) for parts in heard)
    assert b"id-of-the-run" not in b"".join(part for parts in heard for part in parts)
    assert str(host.out).encode() not in b"".join(part for parts in heard for part in parts)
    assert "gathers run id-of-the-run" in host.log("collector")
    known.close()
    stranger.close()
    context.term()


def test_a_rank_outside_the_world_is_refused(sender):
    host, socket = sender
    answer = ask(socket, OpenStream(StreamId(rank=2, incarnation=0), ORIGIN))
    assert isinstance(answer, Refused)
    assert "rank 2 in a world of 2" in answer.reason
    assert {path.name for path in (host.out / "spool").iterdir()} == {"run-id"}


def test_an_end_before_what_was_received_is_refused_and_the_true_one_taken(sender, tmp_path):
    host, socket = sender
    whole = write_some(tmp_path / "s", 5)
    ask(socket, OpenStream(STREAM, ORIGIN))
    ask(socket, frame(0, whole))
    socket.send_multipart(encode(Ended(STREAM, ORIGIN, 64, EndReason.EXIT)))
    socket.send_multipart(encode(Ended(STREAM, ORIGIN, len(whole), EndReason.RUNNING)))
    socket.send_multipart(encode(Ended(StreamId(rank=1, incarnation=0), ORIGIN, 0, EndReason.EXIT)))
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, len(whole))
    assert read_end(replica_path(host.out, STREAM)) is None
    assert ask(socket, Ended(STREAM, ORIGIN, len(whole), EndReason.EXIT)) == EndedSeen(STREAM)
    assert read_end(replica_path(host.out, STREAM)).end is EndReason.EXIT
    assert ask(socket, Ended(STREAM, ORIGIN, len(whole), EndReason.LOST)) == EndedSeen(STREAM)
    assert read_end(replica_path(host.out, STREAM)).end is EndReason.EXIT


def test_a_message_longer_than_any_frame_is_cut_off_and_others_go_on(sender):
    host, socket = sender
    ask(socket, OpenStream(STREAM, ORIGIN))
    context = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.setsockopt(zmq.LINGER, 0)
    other.connect(host.address)
    other.send_multipart([pack(3, [0, 0], ORIGIN, 0, 0, 0), bytes(64 << 20)])
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, 0)
    other.close()
    context.term()
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, 0)


def test_what_another_process_says_of_the_same_rank_and_life_goes_to_the_next(sender, tmp_path):
    """A node that was replaced knows nothing of the first; neither its records nor its end may be
    taken for that one's, nor after the collector was started again.
    """
    host, socket = sender
    whole, other = write_some(tmp_path / "s", 5), write_some(tmp_path / "t", 9)
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, 0)
    assert ask(socket, frame(0, whole)) == StreamOffset(STREAM, len(whole))
    assert ask(socket, Ended(STREAM, ORIGIN, len(whole), EndReason.LOST)) == EndedSeen(STREAM)
    socket.send_multipart(encode(Frame(STREAM, 8, len(whole), zlib.crc32(other), other)))
    socket.send_multipart(encode(Ended(STREAM, 8, 10 * len(whole), EndReason.EXIT)))
    assert ask(socket, OpenStream(STREAM, 8)) == StreamOffset(STREAM, 0)
    assert ask(socket, Frame(STREAM, 8, 0, zlib.crc32(other), other)) == StreamOffset(
        STREAM, len(other)
    )
    assert ask(socket, OpenStream(STREAM, ORIGIN)) == StreamOffset(STREAM, len(whole))
    next_life = StreamId(rank=0, incarnation=1)
    collector = host.processes[-1]
    collector.kill()
    collector.wait()
    host.collector(drain_seconds=60.0)
    socket.send_multipart(encode(Hello(PROTOCOL_VERSION, "hostile", "test")))
    assert ask(socket, Ended(STREAM, 8, len(other), EndReason.EXIT)) == EndedSeen(STREAM)
    assert read_end(replica_path(host.out, STREAM)).end is EndReason.LOST
    assert read_end(replica_path(host.out, next_life)).end is EndReason.EXIT
    assert replica_path(host.out, STREAM).read_bytes() == whole
    assert replica_path(host.out, next_life).read_bytes() == other
