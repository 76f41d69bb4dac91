"""Where kept tensors go: their bytes into chunks that others read, or into a scratch that only
this process does; or what a function makes of each of them into memory, and no bytes anywhere.

All find what is equal to something stored before, and store it once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from rankscope.capture.describe import Described
from rankscope.capture.invisible import invisible_operations
from rankscope.capture.keeping import byte_pieces
from rankscope.chunks.scratch import HeldBytes, Scratch
from rankscope.chunks.writing import ByteArray, ChunkEntry, ChunkWriter
from rankscope.errors import ChunkError, ChunkFullError

_MOST_STORED: Final = 1 << 16
"""Stored tensors remembered, so that equal ones are found; the oldest are forgotten first."""
_CLOSED: Final = "the trace is closed"
_BUDGET_SPENT: Final = "the disk budget is used up (--rs-tensor-budget)"
_SPOOL_FULL: Final = "the spool is full (--rs-spool-bytes)"
_xxh3: Final[Any] = xxhash.xxh3_64_intdigest
_NO_LIMIT: Final = 1 << 62


class Glance(NamedTuple):
    """What was made of one tensor."""

    reference: int
    index: int  # type: ignore[assignment]  # nobody looks for one as in a tuple
    """Its number among all that were ever made."""
    made: object
    checksum: int
    """Of the bytes in row-major order: tensors of the same dtype and shape are equal by it."""
    begin: int = 0
    nbytes: int = 0
    chunk: int = 0
    """None: chunks are numbered from 1."""


Stored = ChunkEntry | HeldBytes | Glance
Look = Callable[[torch.Tensor, tuple[int, ...]], object]
"""Makes something of a tensor on the host that does not hold its memory. The tensor is the
program's own, or a copy of what an accelerator held, in row-major order: then the strides that it
had are told, else ()."""
RecordTensor = Callable[[int, Stored, Described], bool]
"""Commits a TENSOR record: reference, where the bytes are, what they are; False where the spool
had no room for it."""


class TensorBytes(NamedTuple):
    """The bytes of one tensor."""

    whole: ByteArray | None
    """All of them in one piece, None where they come in `pieces`."""
    pieces: Iterable[ByteArray]
    """Them in their order."""
    live: torch.Tensor | None = None
    """The tensor on the host, whose own memory `whole` is; others may write into it meanwhile. None
    for what came from an accelerator."""
    stride: tuple[int, ...] = ()
    """Its strides there, where it did not lie in row-major order."""


class Store(ABC):
    """Stores tensors. For one thread at a time; the caller sees to that."""

    def __init__(self, record: RecordTensor, limit_bytes: int) -> None:
        """Prepare to store.

        Args:
            record: commits what was stored.
            limit_bytes: what all tensors may take on disk.
        """
        self.refusal = ""
        """Why the last tensor was not stored."""
        self.limit_bytes = limit_bytes
        self._record = record
        self._is_finished = False

    @property
    def closed_why(self) -> str:
        """Why nothing is stored any more, "" while something may be."""
        return _CLOSED if self._is_finished else ""

    @abstractmethod
    def store(self, reference: int, described: Described, given: TensorBytes) -> Stored | None:
        """Store bytes under a reference that no other tensor has, or find the entry of equal ones;
        None where neither was possible, `refusal` says why.
        """

    def release(self, reference: int) -> None:  # noqa: B027  # what is in a chunk stays there
        """Let go of a tensor that nobody will ask for."""

    def finish(self) -> None:
        """Store no more; what is there stays.

        Raises:
            ChunkError: the disk refused what was left to do.
        """
        self._is_finished = True


class LocalChunkStore(Store):
    """Stores tensors in chunks."""

    def __init__(self, writer: ChunkWriter, record: RecordTensor) -> None:
        """Prepare to store in what `writer` makes; nothing is made before the first tensor."""
        super().__init__(record, writer.limit_bytes)
        self._writer = writer
        self._stored: dict[tuple[int, str, tuple[int, ...]], ChunkEntry] = {}

    @property
    def closed_why(self) -> str:
        """As `Store.closed_why`."""
        return "" if self._writer.is_open else self._writer.trouble or _CLOSED

    def store(self, reference: int, described: Described, given: TensorBytes) -> Stored | None:
        """As `Store.store`. What is written into `live` meanwhile makes the checksum that of
        something else, so it is asked for again.
        """
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
            self.refusal = _BUDGET_SPENT
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
            self.refusal = _SPOOL_FULL
            return None
        if len(self._stored) >= _MOST_STORED:
            del self._stored[next(iter(self._stored))]
        self._stored[key] = entry
        return entry

    def finish(self) -> None:
        """As `Store.finish`."""
        self._writer.finish()


class ScratchStore(Store):
    """Stores tensors in a scratch."""

    def __init__(self, scratch: Scratch, record: RecordTensor) -> None:
        """Prepare to store in `scratch`."""
        super().__init__(record, scratch.limit_bytes)
        self._scratch = scratch

    def store(self, reference: int, described: Described, given: TensorBytes) -> Stored | None:
        """As `Store.store`. What is written into `live` meanwhile is in the copy, or is not."""
        meta, scratch = described.meta, self._scratch
        whole = given.whole
        found = None if whole is None else scratch.find(meta.dtype, meta.shape, whole)
        if found is not None:
            return found
        pieces = given.pieces if whole is None else (whole,)
        try:
            held = scratch.write(reference, meta.dtype, meta.shape, pieces)
        except OSError as error:
            self.refusal = f"they cannot be written: {error.strerror or error}"
            return None
        if held is None:
            self.refusal = _BUDGET_SPENT
            return None
        found = scratch.find_equal(held) if whole is None else None
        if found is None:
            if self._record(reference, held, described):
                scratch.commit(held)
                return held
            self.refusal = _SPOOL_FULL
        scratch.withdraw(held)
        return found

    def release(self, reference: int) -> None:
        """Let go of a tensor: its place is used again."""
        self._scratch.release(reference)


class GlanceStore(Store):
    """Looks at tensors, and keeps what was made of them."""

    def __init__(self, look: Look, record: RecordTensor) -> None:
        """Prepare to keep what `look` makes of tensors."""
        super().__init__(record, _NO_LIMIT)
        self._look = look
        self._made: dict[int, Glance] = {}
        self._known: dict[object, Glance] = {}
        self._keys: dict[int, object] = {}
        self._count = 0

    def store(self, reference: int, described: Described, given: TensorBytes) -> Stored | None:
        """As `Store.store`. What is written into `live` meanwhile is in what is made of it, or is
        not. Tensors of the same bytes that lie otherwise in memory are looked at each for itself.
        """
        meta = described.meta
        whole, pieces, live, stride = given
        if whole is not None:
            checksum = int(_xxh3(whole))
        else:
            stream = xxhash.xxh3_64()
            for piece in pieces:
                stream.update(piece.data)
            checksum = stream.intdigest()
            stride = stride if live is None else tuple(live.stride())
        key = checksum, meta.dtype, meta.shape, stride
        known = self._known.get(key)
        if known is not None:
            return known
        with invisible_operations():
            if live is None and whole is not None:
                made = self._look(_on_host(whole, meta.dtype, meta.shape), stride)
            elif live is not None:
                made = self._look(live.detach(), ())
            else:
                self.refusal = "its bytes came in pieces"
                return None
        self._count += 1
        found = Glance(reference, self._count, made, checksum)
        if not self._record(reference, found, described):
            self.refusal = _SPOOL_FULL
            return None
        self._made[reference] = self._known[key] = found
        self._keys[reference] = key
        return found

    def release(self, reference: int) -> None:
        """Let go of what was made of a tensor."""
        if self._made.pop(reference, None) is not None:
            self._known.pop(self._keys.pop(reference), None)

    def made(self) -> dict[int, Glance]:
        """Return what was made, by reference."""
        return self._made.copy()  # at once: another thread may be adding to it


def _on_host(data: ByteArray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    of_type: torch.dtype = getattr(torch, dtype)
    if not data.size:
        return torch.empty(shape, dtype=of_type, device="cpu")
    return torch.from_numpy(np.array(data)).view(of_type).reshape(shape)
