"""What a peer may make at most, also one that knows the run: relays, streams, files, disk."""

from __future__ import annotations

import zlib

import pytest
import zmq

from rankscope.companion.collector import ReceivedChunks
from rankscope.companion.protocol import (
    PROTOCOL_VERSION,
    Frame,
    Hello,
    OpenStream,
    Refused,
    StreamOffset,
    decode,
    encode,
)
from rankscope.companion.replica import MOST_LIVES, ReplicaFiles
from rankscope.errors import FolderError
from rankscope.record.ranks import StreamId
from rankscope.run.jobstatus import Stall
from rankscope.spool.chunks.chunkfiles import chunk_folder
from tests.spool.streams import write_some
from tests.waiting import wait_until

STREAM = StreamId(rank=0, incarnation=0)


@pytest.fixture
def collecting(hosts):
    """A host with a collector, and a way to make peers before it."""
    host = hosts()
    host.collector(live_check=False)
    assert wait_until(host.is_listened_to)
    with zmq.Context() as context:
        made = []

        def peer(name: str) -> zmq.Socket:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, name.encode())
            socket.connect(host.address)
            made.append(socket)
            return socket

        yield host, peer
        for socket in made:
            socket.close()


def ask(socket: zmq.Socket, message):
    socket.send_multipart(encode(message))
    assert socket.poll(20000), "the collector does not answer any more"
    return decode(socket.recv_multipart())


def test_a_peer_cannot_fill_the_folder_with_lives_of_a_rank(collecting):
    host, peer = collecting
    socket = peer("relay-many")
    socket.send_multipart(encode(Hello(PROTOCOL_VERSION, "many", "test")))
    for origin in range(1, MOST_LIVES + 1):
        assert ask(socket, OpenStream(STREAM, origin)) == StreamOffset(STREAM, 0)
    for life in range(0, 1 << 16, 1 << 9):
        answer = ask(socket, OpenStream(StreamId(rank=0, incarnation=life), 1 << 40 | life))
        assert isinstance(answer, Refused)
        assert "no more are taken" in answer.reason
    assert ask(socket, OpenStream(STREAM, 5)) == StreamOffset(STREAM, 0), "known ones go on"
    other = StreamId(rank=1, incarnation=0)
    assert ask(socket, OpenStream(other, 1)) == StreamOffset(other, 0)
    replicas = list((host.out / "spool").glob("*.cells"))
    assert len(replicas) == MOST_LIVES + 1
    assert host.log("collector").count("\n") < 1000


def test_names_of_peers_are_bounded_and_what_they_leave_with_them(collecting):
    host, peer = collecting
    first = peer("relay-true")
    first.send_multipart(encode(Hello(PROTOCOL_VERSION, "true", "test")))
    assert ask(first, OpenStream(STREAM, 7)) == StreamOffset(STREAM, 0)
    for number in range(300):
        stranger = peer(f"relay-\x1b[2J{number}")
        stranger.send_multipart(encode(Hello(PROTOCOL_VERSION, "\x1b]0;owned\x07", "test")))
        stall = Stall(since_ns=1, noticed_ns=2 + number, host="x")
        stranger.send_multipart(encode(stall))
    assert wait_until(lambda: "is not heard" in host.log("collector"), 60)
    assert ask(first, OpenStream(STREAM, 7)) == StreamOffset(STREAM, 0)
    assert len(list((host.out / "stalls").iterdir())) <= 64
    assert "\x1b" not in host.log("collector")
    assert host.log("collector").count("\n") < 300


def test_the_lives_of_a_rank_share_one_quota_also_after_a_restart(tmp_path):
    whole = write_some(tmp_path / "s", 20)
    most = 3 * len(whole)
    first = ReplicaFiles(tmp_path / "out", quota_bytes=most)
    lives = [StreamId(rank=0, incarnation=life) for life in range(4)]
    for number, life in enumerate(lives[:2]):
        place = first.place(life, number + 1)
        assert first.append(place, 0, whole) == len(whole)
    first.close()
    again = ReplicaFiles(tmp_path / "out", quota_bytes=most)
    third, fourth = (again.place(life, 3 + number) for number, life in enumerate(lives[2:]))
    assert again.append(third, 0, whole) == len(whole)
    with pytest.raises(FolderError, match=f"{most} bytes, the quota of one rank"):
        again.append(fourth, 0, whole)
    other = again.place(StreamId(rank=1, incarnation=0), 9)
    assert again.append(other, 0, whole) == len(whole), "another rank has its own"
    again.close()


def test_a_stream_has_one_chunk_that_is_not_whole(tmp_path):
    store = ReceivedChunks(tmp_path)
    for chunk in range(1, 50):
        store.answer(OpenStream(STREAM, 1, chunk))
    body = b"x" * 100
    store.answer(Frame(STREAM, 1, 0, zlib.crc32(body), body, 7))
    folder = chunk_folder(tmp_path, STREAM)
    assert [path.name for path in folder.iterdir()] == ["000007.part"]
    store.close()
