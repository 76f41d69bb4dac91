"""Chunks of full tensors that arrive from hosts which do not see the trace folder.

A chunk grows as `<out>/tensors/rank00003/000001.part`, only at exactly its own end; its length is
all there is to know, also after a kill. When all of it is here and its checksum is the sender's it
takes its name. Paths are built from integers only and never followed through links.
"""

from __future__ import annotations

import os
from pathlib import Path

from rankscope.companion.log import log
from rankscope.companion.protocol import (
    ChunkEnded,
    EndedSeen,
    Frame,
    OpenStream,
    Refused,
    StreamOffset,
)
from rankscope.record.ranks import StreamId
from rankscope.run.files import sync_by_name
from rankscope.spool.chunks.chunkfiles import chunk_folder, chunk_numbers, chunk_path
from rankscope.spool.chunks.safetensors import checksum_of, write_all

DEFAULT_QUOTA_BYTES = 1 << 40
_PART_SUFFIX = ".part"
MOST_CHUNKS = 100_000
"""Of one stream."""
_MOST_OPEN = 256
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
Question = OpenStream | Frame | ChunkEnded
Answer = StreamOffset | EndedSeen | Refused


class ReceivedChunks:
    """Writes the chunks of one trace folder; one file is open for each stream that sends."""

    def __init__(self, out: Path, *, quota_bytes: int = DEFAULT_QUOTA_BYTES) -> None:
        self._out, self._quota_bytes = out, quota_bytes
        self._open: dict[StreamId, tuple[int, int]] = {}
        self._whole: dict[StreamId, int] = {}

    def answer(self, message: Question, place: StreamId | None = None) -> tuple[Answer, bool]:
        """Do what a relay asks for; return the answer, and whether anything new is here. `place` is
        the life whose chunks these are here, where another process was the same rank before."""
        asked, stream, chunk = message.stream, place or message.stream, message.chunk
        try:
            if self._is_whole(stream, chunk):
                if isinstance(message, ChunkEnded):
                    return EndedSeen(asked, chunk), False
                size = self._path(stream, chunk).stat().st_size
                return StreamOffset(asked, size, chunk), False
            descriptor = self._descriptor(stream, chunk)
            length = os.fstat(descriptor).st_size
            if isinstance(message, Frame):
                grown = self._append(stream, descriptor, length, message)
                return StreamOffset(asked, grown, chunk), grown > length
            if isinstance(message, OpenStream):
                return StreamOffset(asked, length, chunk), False
            if self._finish(stream, descriptor, length, message):
                return EndedSeen(asked, chunk), True
            return StreamOffset(asked, 0, chunk), True
        except OSError as error:
            self._forget(stream)
            log(f"chunk {chunk} of {stream.name}: {error.strerror}; no more of them are taken")
            return Refused(asked, str(error.strerror), chunk), False

    def close(self) -> None:
        """Close every file."""
        for stream in [*self._open]:
            self._forget(stream)

    def _append(self, stream: StreamId, descriptor: int, length: int, frame: Frame) -> int:
        if frame.offset != length:
            return length
        if self._whole_bytes(stream) + length + len(frame.body) > self._quota_bytes:
            raise OSError(0, f"more than {self._quota_bytes} bytes, the quota of one stream")
        try:
            write_all(descriptor, frame.body, length)
        except OSError:
            os.ftruncate(descriptor, length)
            raise
        return length + len(frame.body)

    def _finish(self, stream: StreamId, descriptor: int, length: int, ended: ChunkEnded) -> bool:
        """Give a chunk its name; where it is not what was sent, empty it and return False."""
        chunk = ended.chunk
        if length != ended.size or checksum_of(descriptor) != ended.checksum:
            log(f"chunk {chunk} of {stream.name} is not what was sent: it is taken again")
            os.ftruncate(descriptor, 0)
            return False
        os.fsync(descriptor)  # the relay removes its own once it is told
        os.replace(self._part(stream, chunk), self._path(stream, chunk))
        sync_by_name(self._path(stream, chunk).parent)
        self._whole[stream] = self._whole_bytes(stream) + length
        self._forget(stream)
        return True

    def _is_whole(self, stream: StreamId, chunk: int) -> bool:
        held = self._open.get(stream)
        return (held is None or held[0] != chunk) and self._path(stream, chunk).exists()

    def _descriptor(self, stream: StreamId, chunk: int) -> int:
        held = self._open.get(stream)
        if held is not None and held[0] == chunk:
            return held[1]
        self._forget(stream)
        part = self._part(stream, chunk)
        part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(part)
        descriptor = os.open(part, _FLAGS, 0o600)
        self._open[stream] = chunk, descriptor
        return descriptor

    def _make_room(self, part: Path) -> None:
        """See that a stream has no more than one chunk that is not whole, and few open files."""
        names = os.listdir(part.parent)
        if len(names) > MOST_CHUNKS:
            raise OSError(0, f"more than {MOST_CHUNKS} chunks of one stream")
        for name in names:
            if name.endswith(_PART_SUFFIX) and name != part.name:
                (part.parent / name).unlink(missing_ok=True)  # a relay sends one after another
        while len(self._open) >= _MOST_OPEN:
            self._forget(next(iter(self._open)))

    def _whole_bytes(self, stream: StreamId) -> int:
        if stream not in self._whole:
            folder = chunk_folder(self._out, stream)
            sizes = (chunk_path(folder, number).stat().st_size for number in chunk_numbers(folder))
            self._whole[stream] = sum(sizes)
        return self._whole[stream]

    def _forget(self, stream: StreamId) -> None:
        held = self._open.pop(stream, None)
        if held is not None:
            os.close(held[1])

    def _path(self, stream: StreamId, chunk: int) -> Path:
        return chunk_path(chunk_folder(self._out, stream), chunk)

    def _part(self, stream: StreamId, chunk: int) -> Path:
        return self._path(stream, chunk).with_suffix(_PART_SUFFIX)
