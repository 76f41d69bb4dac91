"""Chunks on their way to a trace folder their host does not see: whole there, whatever is lost."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rankscope.companion.collector import ReceivedChunks
from rankscope.companion.protocol import (
    CHUNK_FRAME_BYTES,
    CHUNK_WINDOW_BYTES,
    ChunkEnded,
    Frame,
    Refused,
    decode,
    encode,
)
from rankscope.companion.shipping import GO_BACK_S, ChunkShipment
from rankscope.record.ranks import StreamId

STREAM = StreamId(rank=3, incarnation=1)
FOLDER = "tensors/rank00003.1"
LEFT = b"\0"
FINISHED = b"{"


def chunk(run: Path, number: int, size: int, first: bytes = FINISHED) -> bytes:
    """Write a chunk whose header region begins with this byte; return its bytes."""
    content = random.Random(number).randbytes(max(size, 9))
    content = content[:8] + first + content[9:]
    path = run / FOLDER / f"{number:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


class Way:
    """One sender, one receiver, and messages that get lost between them."""

    def __init__(self, run: Path, out: Path, seed: int = 0, loss: float = 0.0) -> None:
        self.run, self.out = run, out
        self.chosen = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.sender, self.store = ChunkShipment(run, STREAM), ReceivedChunks(out)
        self.kinds: list[type] = []
        self.most_in_flight = 0

    def turn(self, *, is_over: bool) -> None:
        """Let the sender speak until it has nothing to say, then hear the answers."""
        answers, in_flight = [], 0
        while (message := self.sender.next_message(self.now, is_over=is_over)) is not None:
            message = decode(encode(message))
            self.kinds.append(type(message))
            if isinstance(message, Frame):
                in_flight += len(message.body)
            if self.chosen.random() >= self.loss:
                answers.append(self.store.answer(message)[0])
        self.most_in_flight = max(self.most_in_flight, in_flight)
        for answer in answers:
            if self.chosen.random() >= self.loss:
                self.sender.take_answer(decode(encode(answer)), self.now)
        self.now += GO_BACK_S * self.chosen.random()

    def until_done(self) -> None:
        for _ in range(2000):
            self.turn(is_over=True)
            if self.sender.is_done:
                return
        raise AssertionError("never done")

    def there(self) -> dict[str, bytes]:
        folder = self.out / FOLDER
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("seed", range(3))
def test_chunks_arrive_whole_through_losses_and_restarts_of_both_sides(tmp_path, seed):
    run, out = tmp_path / "run", tmp_path / "out"
    sizes = [9, CHUNK_FRAME_BYTES, 3 * CHUNK_WINDOW_BYTES + 17, CHUNK_WINDOW_BYTES]
    wanted = {f"{n:06d}.safetensors": chunk(run, n, size) for n, size in enumerate(sizes, 1)}
    wanted["000005.safetensors"] = chunk(run, 5, 2 * CHUNK_FRAME_BYTES + 1, LEFT)
    way = Way(run, out, seed, loss=0.2)
    for turn in range(40):
        way.turn(is_over=False)
        if turn % 7 == 3:
            way.store.close()
            way.store = ReceivedChunks(out)
        if turn % 11 == 5:
            way.sender.close()
            way.sender = ChunkShipment(run, STREAM)
    assert not way.sender.is_done
    assert (run / FOLDER / "000005.safetensors").exists()
    way.until_done()
    assert way.there() == wanted
    assert way.sender.is_delivered
    assert way.most_in_flight <= CHUNK_WINDOW_BYTES + CHUNK_FRAME_BYTES
    assert not (run / FOLDER).exists()


def test_nothing_is_sent_of_a_chunk_that_is_still_written(tmp_path):
    chunk(tmp_path / "run", 1, 5000, LEFT)
    way = Way(tmp_path / "run", tmp_path / "out")
    for _ in range(5):
        way.turn(is_over=False)
    assert way.kinds == []
    whole = chunk(tmp_path / "run", 1, 6000)
    for _ in range(5):
        way.turn(is_over=False)
    assert way.there() == {"000001.safetensors": whole}
    assert not way.sender.is_done


def test_a_chunk_that_is_not_what_was_sent_is_taken_again(tmp_path):
    """Its disk changed it: the checksum of the whole file says so."""
    wanted = chunk(tmp_path / "run", 1, 3000)
    way = Way(tmp_path / "run", tmp_path / "out")
    while Frame not in way.kinds:
        way.turn(is_over=True)
    (tmp_path / "out" / FOLDER / "000001.part").write_bytes(bytes(3000))
    way.until_done()
    assert way.there() == {"000001.safetensors": wanted}
    assert way.kinds.count(Frame) == 2 and way.kinds.count(ChunkEnded) == 2


def test_what_the_other_side_refuses_stays_here(tmp_path):
    whole = chunk(tmp_path / "run", 1, 3000)
    way = Way(tmp_path / "run", tmp_path / "out")
    way.store = ReceivedChunks(tmp_path / "out", quota_bytes=1000)
    way.until_done()
    assert not way.sender.is_delivered
    assert (tmp_path / "run" / FOLDER / "000001.safetensors").read_bytes() == whole
    answer, is_new = way.store.answer(Frame(STREAM, 5, 0, 0, bytes(2000), 2))
    assert (type(answer), is_new) == (Refused, False)


def test_links_are_not_followed(tmp_path):
    chunk(tmp_path / "run", 1, 3000)
    (tmp_path / "out" / FOLDER).mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", tmp_path / "out" / FOLDER / "000001.part")
    way = Way(tmp_path / "run", tmp_path / "out")
    way.until_done()
    assert not way.sender.is_delivered
    assert not (tmp_path / "elsewhere").exists()


def test_chunks_of_a_node_that_was_replaced_go_to_a_life_of_their_own(tmp_path):
    """Another process of the same rank and life: its chunk of the same number is another one."""
    first, second = tmp_path / "a", tmp_path / "b"
    kept = [chunk(first, 1, 5000), chunk(second, 1, CHUNK_FRAME_BYTES + 1)]
    chunk(second, 2, 7000)
    store, life = ReceivedChunks(tmp_path / "out"), StreamId(rank=3, incarnation=4)
    for run, place in ((first, STREAM), (second, life)):
        sender = ChunkShipment(run, STREAM)
        sender.origin = 7 + place.incarnation
        for turn in range(200):
            while (message := sender.next_message(turn, is_over=True)) is not None:
                assert message.origin == sender.origin
                sender.take_answer(decode(encode(store.answer(message, place)[0])), turn)
        assert sender.is_delivered
    found = {path.parent.name: path.read_bytes() for path in tmp_path.rglob("out/**/000001.*")}
    assert found == {"rank00003.1": kept[0], "rank00003.4": kept[1]}
    assert not [*first.rglob("*.safetensors"), *second.rglob("*.safetensors")]
