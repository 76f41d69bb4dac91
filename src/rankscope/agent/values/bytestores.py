"""Where kept tensors go: chunks, or what a tracer keeps itself. Equal tensors are stored once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
import xxhash

from rankscope.capture.describe import Described
from rankscope.capture.keeping import byte_pieces
from rankscope.errors import ChunkError, ChunkFullError
from rankscope.spool.chunks.writing import ByteArray, ChunkEntry, ChunkWriter

_MOST_STORED: Final = 1 << 16
_CLOSED: Final = "the trace is closed"
BUDGET_SPENT: Final = "the disk budget is used up (--rs-tensor-budget)"
SPOOL_FULL: Final = "the spool is full (--rs-spool-bytes)"
_xxh3: Final[Any] = xxhash.xxh3_64_intdigest


RecordTensor = Callable[[int, ChunkEntry, Described], bool]
"""Commits a TENSOR record: reference, place, description; False where there was no room."""


class TensorBytes(NamedTuple):
    """The bytes of one tensor."""

    whole: ByteArray | None
    pieces: Iterable[ByteArray]
    live: torch.Tensor | None = None
    """The tensor on the host whose memory `whole` is: others may write into it meanwhile."""
    stride: tuple[int, ...] = ()


class Store(ABC):
    """Stores tensors. For one thread at a time; the caller sees to that."""

    def __init__(self, record: RecordTensor) -> None:
        self.refusal = ""
        self._record = record
        self._is_finished = False

    @property
    def closed_why(self) -> str:
        """Why nothing is stored any more, "" while something may be."""
        return _CLOSED if self._is_finished else ""

    @abstractmethod
    def store(self, reference: int, described: Described, given: TensorBytes) -> ChunkEntry | None:
        """Store bytes under a new reference, or find equal ones; None where `refusal` says why."""

    def finish(self) -> None:
        """Store no more; what is there stays.

        Raises:
            ChunkError: the disk refused what was left to do.
        """
        self._is_finished = True


class LocalChunkStore(Store):
    """Stores tensors in chunks."""

    def __init__(self, writer: ChunkWriter, record: RecordTensor) -> None:
        super().__init__(record)
        self._writer = writer
        self._stored: dict[tuple[int, str, tuple[int, ...]], ChunkEntry] = {}

    @property
    def closed_why(self) -> str:
        """As `Store.closed_why`."""
        return "" if self._writer.is_open else self._writer.trouble or _CLOSED

    def store(self, reference: int, described: Described, given: TensorBytes) -> ChunkEntry | None:
        """As `Store.store`; a write into `live` meanwhile makes the checksum a wrong one."""
        meta, checksum = described.meta, None
        whole, pieces, live, _ = given
        if whole is not None:
            checksum, pieces = int(_xxh3(whole)), (whole,)
            known = self._stored.get((checksum, meta.dtype, meta.shape))
            if known is not None:
                return known
        self.refusal = self._writer.trouble or _CLOSED
        try:
            entry = self._writer.write(reference, meta.dtype, meta.shape, pieces, checksum=checksum)
            if live is not None and whole is not None and _xxh3(whole) != checksum:
                copies = byte_pieces(live)
                entry = self._writer.write(reference, meta.dtype, meta.shape, copies)
        except ChunkFullError:
            self.refusal = BUDGET_SPENT
            return None
        except ChunkError:
            self.refusal = self._writer.trouble
            return None
        if entry is None:
            return None
        key = (entry.checksum, meta.dtype, meta.shape)
        known = self._stored.get(key)
        if known is not None:
            return known  # what was just written is not committed: its place is used again
        self._writer.commit(entry)
        if not self._record(reference, entry, described):
            self._writer.withdraw(entry)
            self.refusal = SPOOL_FULL
            return None
        if len(self._stored) >= _MOST_STORED:
            del self._stored[next(iter(self._stored))]
        self._stored[key] = entry
        return entry

    def finish(self) -> None:
        """As `Store.finish`."""
        self._writer.finish()
