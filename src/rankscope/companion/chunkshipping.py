"""Full tensors on their way: the finished chunks of one stream, one after another. No sockets.

Where a host does not see the trace folder its ranks keep their chunks in the run folder. A chunk is
sent once it is finished, and removed here once it is there. One that a dead rank left unfinished is
sent as it is, and finished where the tree is built. As with records, the other side's offset is all
that is believed.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

from rankscope.chunks.chunkheader import chunk_folder, chunk_numbers, chunk_path
from rankscope.chunks.safetensors import LENGTH_BYTES, checksum_of
from rankscope.companion.log import log
from rankscope.companion.protocol import (
    CHUNK_FRAME_BYTES,
    CHUNK_WINDOW_BYTES,
    ChunkEnded,
    EndedSeen,
    Frame,
    Message,
    OpenStream,
    Refused,
    StreamOffset,
)
from rankscope.errors import ChunkError
from rankscope.record.streams import StreamId
from rankscope.spool.origin import UNKNOWN

__all__ = ["GO_BACK_S", "ChunkShipment"]

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
        """Of the chunk that is sent now, 0 for none."""
        self._descriptor = -1
        self._size = self._acked = self._sent = 0
        self._is_open = False
        self._end: ChunkEnded | None = None
        self._asked_at = self._progress_at = self._looked_at = float("-inf")
        self.is_done = False
        self.is_delivered = False
        """Every chunk is over there: they may be removed here."""

    def next_message(self, now: float, *, is_over: bool) -> Message | None:
        """Return what to send now, None for nothing.

        Args:
            now: monotonic seconds.
            is_over: the rank has ended: what it left unfinished is sent too.
        """
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
        """What the other side says of a chunk."""
        if isinstance(answer, Refused):
            self._give_up(f"refused: {answer.reason}")
        elif answer.chunk != self._number:
            return
        elif isinstance(answer, EndedSeen):
            if self._end is None:
                return  # nobody was told that all of it was sent
            chunk_path(self._folder, self._number).unlink(missing_ok=True)
            self.close()
        elif not self._is_open or (self._end is not None and answer.offset < self._size):
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
                checksum = checksum_of(self._descriptor)
                self._end = ChunkEnded(
                    self._stream, self.origin, self._number, self._size, checksum
                )
                self._asked_at = float("-inf")
            return self._ask(now, self._end)
        if self._sent == self._size or self._sent - self._acked >= CHUNK_WINDOW_BYTES:
            return None
        body = os.pread(self._descriptor, CHUNK_FRAME_BYTES, self._sent)
        if not body:
            raise ChunkError(f"{chunk_path(self._folder, self._number)}: became shorter")
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
