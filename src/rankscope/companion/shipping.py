"""One stream on its way: what was sent, what was acknowledged, when to go back. No sockets.

A shipment asks for the offset the other side holds, sends whole records from there with a bounded
amount in flight, and asks again after a time without progress. It believes the acknowledged offset
alone, where it fits what was sent or lies here: a lost or damaged message, a restarted collector or
relay costs time only. A segment is freed once its records are on disk over there.

Full tensors of a host that does not see the trace folder are sent chunk by chunk in the same way,
each once it is finished, and removed here once it is there. A chunk that a dead rank left
unfinished is sent as it is, and finished where the tree is built.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from pathlib import Path

from rankscope.companion.protocol import (
    CHUNK_FRAME_BYTES,
    CHUNK_WINDOW_BYTES,
    FRAME_BYTES,
    ChunkEnded,
    Ended,
    EndedSeen,
    Frame,
    Message,
    OpenStream,
    Refused,
    StreamOffset,
    Sync,
    Synced,
)
from rankscope.errors import ChunkError, SpoolError
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.files import Place, Reach, Removable, may_remove
from rankscope.run.folders import stream_folder
from rankscope.run.messages import log
from rankscope.run.processes import is_alive
from rankscope.spool.chunks.chunkfiles import chunk_folder, chunk_numbers, chunk_path
from rankscope.spool.chunks.safetensors import LENGTH_BYTES, checksum_of
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import UNKNOWN

_MOST_DISBELIEVED = 3
"""Impossible offsets that the shipment of a dead rank refuses before it gives way."""


GO_BACK_S = 0.5
_LOOK_S = 0.1


class ChunkShipment:
    """The sending side of one stream's chunks."""

    def __init__(self, run_folder: Path, stream: StreamId) -> None:
        self._folder = chunk_folder(run_folder, stream)
        self._stream = stream
        self.origin = UNKNOWN
        """Which process wrote them: set before the first is sent."""
        self._number = 0
        self._descriptor = -1
        self._size = self._acked = self._sent = 0
        self._is_open = False
        self._end: ChunkEnded | None = None
        self._asked_at = self._progress_at = self._looked_at = float("-inf")
        self.is_done = False
        self.is_delivered = False

    def next_message(self, now: float, *, is_over: bool) -> Message | None:
        """Return what to send now; once `is_over`, what the rank left unfinished too."""
        if self.is_done:
            return None
        try:
            if not self._number and not self._begin_next(now, is_over=is_over):
                return None
            return self._next_of_chunk(now)
        except (ChunkError, OSError) as error:
            self._give_up(str(error))
            return None

    def take_answer(self, answer: StreamOffset | EndedSeen | Refused, now: float) -> None:
        """Take the answer of the other side about a chunk."""
        if isinstance(answer, Refused):
            self._give_up(f"refused: {answer.reason}")
        elif answer.chunk != self._number:
            return
        elif isinstance(answer, EndedSeen):
            if self._end is None:
                return  # nobody was told that all of it was sent
            # whole, on disk and with the right checksum over there: the one place where a chunk is
            # removed here
            chunk_path(self._folder, self._number).unlink(missing_ok=True)
            self.close()
        elif not self._is_open or (self._end is not None and answer.offset < self._size):
            # the offset over there is believed: the chunk may have been emptied and begun once more
            self._is_open, self._end = True, None
            self._acked = self._sent = min(answer.offset, self._size)
            self._asked_at, self._progress_at = float("-inf"), now
        elif self._acked < answer.offset <= self._size:
            self._acked = answer.offset
            self._sent = max(self._sent, answer.offset)
            self._progress_at = now

    def take_back(self, frame: Frame) -> None:
        """This frame could not be sent just now."""
        if frame.chunk == self._number:
            self._sent = frame.offset

    def _begin_next(self, now: float, *, is_over: bool) -> bool:
        if not is_over and now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        for number in chunk_numbers(self._folder):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(chunk_path(self._folder, number), flags)
            # a zero where the header begins: its rank still writes it
            if not is_over and os.pread(descriptor, 1, LENGTH_BYTES) in (b"", b"\0"):
                os.close(descriptor)
                return False  # chunks are finished one after another
            self._number, self._descriptor = number, descriptor
            self._size = os.fstat(descriptor).st_size
            return True
        if is_over:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            self.is_done = self.is_delivered = True
        return False

    def _next_of_chunk(self, now: float) -> Message | None:
        if not self._is_open or (self._sent > self._acked and now - self._progress_at > GO_BACK_S):
            self._is_open = False
            return self._ask(now, OpenStream(self._stream, self.origin, self._number))
        if self._acked == self._size:
            if self._end is None:
                size, checksum = self._size, checksum_of(self._descriptor)
                self._end = ChunkEnded(self._stream, self.origin, self._number, size, checksum)
                self._asked_at = float("-inf")
            return self._ask(now, self._end)
        if self._sent == self._size or self._sent - self._acked >= CHUNK_WINDOW_BYTES:
            return None
        body = os.pread(self._descriptor, CHUNK_FRAME_BYTES, self._sent)
        if not body:
            raise ChunkError(f"{chunk_path(self._folder, self._number)}: became shorter")
        # the wait for an answer begins with the first frame on its way: a chunk that lay idle has
        # made no progress for long, and would be sent once more at once
        if self._sent == self._acked:
            self._progress_at = now
        crc = zlib.crc32(body)
        frame = Frame(self._stream, self.origin, self._sent, crc, body, self._number)
        self._sent += len(body)
        return frame

    def _ask(self, now: float, question: Message) -> Message | None:
        if now - self._asked_at < GO_BACK_S:
            return None
        self._asked_at = now
        return question

    def close(self) -> None:
        """Let go of the chunk that is on its way."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._number, self._descriptor = 0, -1
        self._size = self._acked = self._sent = 0
        self._is_open, self._end = False, None
        self._asked_at = self._looked_at = float("-inf")

    def _give_up(self, reason: str) -> None:
        log(f"full tensors of {self._stream.name} stay in {self._folder}: {reason}")
        self.close()
        self.is_done = True


class Shipment:
    """The sending side of one stream."""

    def __init__(self, run_folder: Path, stream: StreamId, *, has_own_chunks: bool = False) -> None:
        """Begin at nothing; `has_own_chunks`: full tensors are sent before the end is told."""
        self.stream = stream
        self.chunks = ChunkShipment(run_folder, stream) if has_own_chunks else None
        self.folder = stream_folder(run_folder, stream)
        self.reader = StreamReader(self.folder)
        self.acked = self.sent = 0
        self._most_sent = self._synced = self._lowest = self._disbelieved = 0
        self.is_open = False
        self.is_done = False
        """Nothing more will be sent: its end is known to the other side, or it was refused."""
        self.is_refused = self._is_delivered = False
        self.is_alive = True
        self.origin = UNKNOWN
        """Whose records these are: asked before the first is sent."""
        self._is_broken = self._is_over = False
        self._end: Ended | None = None
        self._asked_at = self._progress_at = self._sync_asked_at = float("-inf")

    @property
    def in_flight(self) -> int:
        """Bytes sent and not acknowledged."""
        return self.sent - self.acked

    @property
    def definitions(self) -> StreamReader | None:
        """None: they stand among the other records."""
        return None

    def has_sent(self, end: int) -> bool:
        """True where every record up to `end` is over there; a full spool lets no rank write."""
        return self.acked == end

    def is_delivered(self) -> bool:
        """True where all of it and its end are over there; a rank called lost may still write."""
        if not self._is_delivered or self._end is None:
            return False
        if self._end.reason is EndReason.LOST and is_alive(self.folder):
            return False
        try:
            return self.reader.committed(self.acked) == self.acked
        except SpoolError:
            return False
        finally:
            self.reader.close()

    def next_message(self, now: float, window_bytes: int) -> Message | None:
        """Return what to send now, None for nothing; `window_bytes` may be added in flight."""
        if self.is_done:
            return None
        if not self.is_open and not self._knows_writer():
            return None
        if not self.is_open or (self.in_flight and now - self._progress_at > GO_BACK_S):
            self.is_open = False
            return self._ask(now, OpenStream(self.stream, self.origin))
        if self._end is not None:
            return self._ask(now, self._end)
        if self._has_to_free() and now - self._sync_asked_at > GO_BACK_S:
            self._sync_asked_at = now
            return Sync(self.stream, self.origin)
        try:
            message = self._next_frame(now, window_bytes)
        except SpoolError as error:
            if not _is_short_of_files(error):
                self._give_up(error)
            return None
        # records go first: a chunk is large, and a spool that fills meanwhile costs whole steps
        if message is not None or self.chunks is None:
            return message
        self.chunks.origin = self.origin
        return self.chunks.next_message(now, is_over=self._is_over)

    def take(self, answer: StreamOffset | Synced | EndedSeen | Refused, now: float) -> None:
        """Take the answer of the other side about this stream or its chunks."""
        if isinstance(answer, Synced):
            self.take_synced(answer.offset)
        elif answer.chunk:
            if self.chunks is not None:
                self.chunks.take_answer(answer, now)
        elif isinstance(answer, StreamOffset):
            self.take_offset(answer.offset, now)
        elif isinstance(answer, EndedSeen):
            self.take_end_seen()
        else:
            self.take_refusal(answer.reason)

    def take_offset(self, offset: int, now: float) -> None:
        """The other side holds `offset` bytes; an offset that cannot be is not believed."""
        if not self.is_open:
            if not self._can_be(offset):
                return
            self.is_open = True
            self.acked = self.sent = offset
            self._most_sent = max(self._most_sent, offset)
            self._lowest = self.reader.lowest()
            self._asked_at = float("-inf")
        # more than was ever sent: of a collector that was replaced, or damage
        elif offset > self._most_sent:
            self.is_open = False  # out of step: asked again
            return
        elif offset > self.acked:
            self.acked = offset
            self.sent = max(self.sent, offset)
        else:
            return
        self._progress_at = now

    def take_synced(self, offset: int) -> None:
        """The first `offset` bytes are on disk over there: their segments may be freed here."""
        # never beyond what was acknowledged: the two answers may overtake each other
        self._synced = max(self._synced, min(offset, self.acked))
        self._sync_asked_at = float("-inf")
        self._free()

    def take_back(self, frame: Frame) -> None:
        """This frame could not be sent just now."""
        if not frame.chunk:
            self.sent = frame.offset
        elif self.chunks is not None:
            self.chunks.take_back(frame)

    def take_end_seen(self) -> None:
        """The end marker is on disk over there."""
        self.is_done = self._end is not None
        has_chunks = self.chunks is None or self.chunks.is_delivered
        self._is_delivered = self.is_done and not self._is_broken and has_chunks
        if self.is_done:
            self.reader.close()

    def take_refusal(self, reason: str) -> None:
        """The other side wants no more of it."""
        log(f"{self.stream.name} was refused: {reason}")
        self.is_done = self.is_refused = True
        self.reader.close()

    def _can_be(self, offset: int) -> bool:
        """True where the other side may hold this much: a record ends there here. After a crash of
        its host a dead rank's replica may have more than its spool."""
        try:
            if self.reader.ends_record(offset):
                self._disbelieved = 0
                return True
            committed = self.reader.committed()
        except SpoolError as error:
            return not _is_short_of_files(error)  # the next read says what is wrong
        self._disbelieved += 1
        if self._disbelieved == 1:
            log(f"{self.stream.name}: {offset} bytes are said to be there, {committed} lie here")
        if self._disbelieved >= _MOST_DISBELIEVED and not is_alive(self.folder):
            self._is_broken, self.is_open, self.is_alive = True, True, False
            end = max(offset, committed)
            self._end = Ended(self.stream, self.origin, end, EndReason.LOST)
            self._asked_at = float("-inf")
        return False

    def _has_to_free(self) -> bool:
        size = self.reader.segment_bytes
        if not size or self.acked // size <= self._lowest // size:
            return False
        if self._synced // size > self._lowest // size:
            self._free()  # nothing followed the segment when that was said
            return False
        return True

    def _free(self) -> None:
        size = self.reader.segment_bytes
        first_end = (self._lowest // size + 1) * size if size else 0
        reach = Reach.DURABLE if first_end <= self._synced else Reach.ACKNOWLEDGED
        place = Place(reach=reach, has_writer=self.is_alive)
        if size and may_remove(Removable.SEGMENT, place) and self.reader.free_below(self._synced):
            self._lowest = self.reader.lowest()

    def _knows_writer(self) -> bool:
        """True once it is known who wrote this stream, or that nobody ever will."""
        if self.origin != UNKNOWN or not self.is_alive:
            return True
        was_alive = is_alive(self.folder)  # asked first: what is gone by then writes no more
        try:
            self.origin = self.reader.origin()
        except SpoolError as error:
            if not _is_short_of_files(error):
                self.take_refusal(str(error))
            return False
        self.is_alive = was_alive
        return self.origin != UNKNOWN or not was_alive

    def _ask(self, now: float, question: OpenStream | Ended) -> Message | None:
        if now - self._asked_at < GO_BACK_S:
            return None
        self._asked_at = now
        return question

    def _next_frame(self, now: float, window_bytes: int) -> Message | None:
        if window_bytes < FRAME_BYTES:
            return None
        # asked before the records: a rank that dies in between has written them, and is found dead
        # next time
        was_alive = not self.in_flight and is_alive(self.folder)
        body = self.reader.read_from(self.sent, FRAME_BYTES)
        if body:
            if not self.in_flight:
                self._progress_at = now
            frame = Frame(self.stream, self.origin, self.sent, zlib.crc32(body), body)
            self.sent += len(body)
            self._most_sent = max(self._most_sent, self.sent)
            return frame
        if self.in_flight:
            return None
        self.is_alive = was_alive
        # Liveness was asked before the read: a rank that is gone by then cannot have written since.
        reason = self.reader.end_reason(self.acked) or (None if was_alive else EndReason.LOST)
        if reason is None:
            return None
        self.is_alive, self._is_over = False, True
        if self.chunks is not None and not self.chunks.is_done:
            return None
        self._end = Ended(self.stream, self.origin, self.acked, reason)
        self._asked_at = float("-inf")
        return self._ask(now, self._end)

    def _give_up(self, error: SpoolError) -> None:
        """The other side lacks what was freed here: tell the end, so that the gap is seen."""
        if not self._is_broken:
            log(f"{self.stream.name}: {error}")
        self._is_broken = True
        self.is_alive = is_alive(self.folder)
        if not self.is_alive:
            committed = max(self.acked, self.reader.committed())
            self._end = Ended(self.stream, self.origin, committed, EndReason.LOST)


def _is_short_of_files(error: SpoolError) -> bool:
    """True where the file is fine and this process has too many open: try again."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)
