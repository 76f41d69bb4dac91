"""What relay and collector say to each other of chunks of full tensors (see `protocol`)."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.record.streams import StreamId

__all__ = ["ChunkAt", "ChunkEnded", "ChunkFrame", "ChunkOpen", "ChunkSeen", "ChunksRefused"]


@dataclass(frozen=True, slots=True)
class ChunkOpen:
    """How much of this chunk of full tensors do you hold?"""

    stream: StreamId
    origin: int
    """Which process wrote it (`spool.origin`), as with records."""
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """Bytes of a chunk, from `offset` on."""

    stream: StreamId
    origin: int
    chunk: int
    offset: int
    crc: int
    """CRC-32 of the body."""
    body: bytes


@dataclass(frozen=True, slots=True)
class ChunkEnded:
    """All of this chunk was acknowledged."""

    stream: StreamId
    origin: int
    chunk: int
    size: int
    checksum: int
    """xxh3_64 of the file."""


@dataclass(frozen=True, slots=True)
class ChunkAt:
    """So much of this chunk is here."""

    stream: StreamId
    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkSeen:
    """The whole chunk is here, as its checksum says."""

    stream: StreamId
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunksRefused:
    """The collector takes no more chunks of this stream."""

    stream: StreamId
    reason: str
