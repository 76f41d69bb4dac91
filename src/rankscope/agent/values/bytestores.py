"""Where kept tensors go: their bytes into chunks that others read, or into a scratch that only
this process does; or what a function makes of each of them into memory, and no bytes anywhere.

All find what is equal to something stored before, and store it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

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


class Store(Protocol):
    """Stores tensors. For one thread at a time; the caller sees to that."""

    refusal: str
    """Why the last tensor was not stored."""

    @property
    def closed_why(self) -> str:
        """Why nothing is stored any more, "" while something may be."""

    @property
    def limit_bytes(self) -> int:
        """What all of them may take on disk."""

    def store(
        self,
        reference: int,
        described: Described,
        whole: ByteArray | None,
        pieces: Iterable[ByteArray],
        live: torch.Tensor | None = None,
        stride: tuple[int, ...] = (),
    ) -> Stored | None:
        """Store bytes under a reference, or find the entry of equal ones; None where neither was
        possible, `refusal` says why.

        Args:
            reference: a number that no other tensor has.
            described: what they are.
            whole: all of them in one piece, None where they come in `pieces`.
            pieces: them in their order.
            live: the tensor on the host, whose own memory `whole` is; others may write into it
                meanwhile. None for what came from an accelerator.
            stride: its strides there, where it did not lie in row-major order.
        """

    def release(self, reference: int) -> None:
        """Let go of a tensor that nobody will ask for."""

    def finish(self) -> None:
        """Store no more.

        Raises:
            ChunkError: the disk refused what was left to do.
        """


class LocalChunkStore:
    """Stores tensors in chunks."""

    def __init__(self, writer: ChunkWriter, record: RecordTensor) -> None:
        """Prepare to store; nothing is made before the first tensor.

        Args:
            writer: where the bytes go, and how many may.
            record: commits what stands in the chunk.
        """
        self.refusal = ""
        self._writer = writer
        self._record = record
        self._stored: dict[tuple[int, str, tuple[int, ...]], ChunkEntry] = {}

    @property
    def closed_why(self) -> str:
        """As `Store.closed_why`."""
        return "" if self._writer.is_open else self._writer.trouble or _CLOSED

    @property
    def limit_bytes(self) -> int:
        """As `Store.limit_bytes`."""
        return self._writer.limit_bytes

    def store(
        self,
        reference: int,
        described: Described,
        whole: ByteArray | None,
        pieces: Iterable[ByteArray],
        live: torch.Tensor | None = None,
        stride: tuple[int, ...] = (),
    ) -> Stored | None:
        """As `Store.store`. What is written into `live` meanwhile makes the checksum that of
        something else, so it is asked for again.
        """
        meta, checksum = described.meta, None
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

    def release(self, reference: int) -> None:
        """Do nothing: what is in a chunk stays there."""

    def finish(self) -> None:
        """As `Store.finish`."""
        self._writer.finish()


class ScratchStore:
    """Stores tensors in a scratch."""

    def __init__(self, scratch: Scratch, record: RecordTensor) -> None:
        """Prepare to store.

        Args:
            scratch: takes the bytes.
            record: commits what stands in it.
        """
        self.refusal = ""
        self.closed_why = ""
        self._scratch = scratch
        self._record = record

    @property
    def limit_bytes(self) -> int:
        """As `Store.limit_bytes`."""
        return self._scratch.limit_bytes

    def store(
        self,
        reference: int,
        described: Described,
        whole: ByteArray | None,
        pieces: Iterable[ByteArray],
        live: torch.Tensor | None = None,
        stride: tuple[int, ...] = (),
    ) -> Stored | None:
        """As `Store.store`. What is written into `live` meanwhile is in the copy, or is not."""
        meta, scratch = described.meta, self._scratch
        found = None if whole is None else scratch.find(meta.dtype, meta.shape, whole)
        if found is not None:
            return found
        given = pieces if whole is None else (whole,)
        try:
            held = scratch.write(reference, meta.dtype, meta.shape, given)
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

    def finish(self) -> None:
        """Store no more; what is there stays as long as the scratch."""
        self.closed_why = _CLOSED


class GlanceStore:
    """Looks at tensors, and keeps what was made of them."""

    def __init__(self, look: Look, record: RecordTensor) -> None:
        """Prepare to look.

        Args:
            look: makes what is kept.
            record: commits that there is something under a reference.
        """
        self.refusal = ""
        self.closed_why = ""
        self._look = look
        self._record = record
        self._made: dict[int, Glance] = {}
        self._known: dict[object, Glance] = {}
        self._keys: dict[int, object] = {}
        self._count = 0

    @property
    def limit_bytes(self) -> int:
        """As `Store.limit_bytes`: it takes none."""
        return _NO_LIMIT

    def store(
        self,
        reference: int,
        described: Described,
        whole: ByteArray | None,
        pieces: Iterable[ByteArray],
        live: torch.Tensor | None = None,
        stride: tuple[int, ...] = (),
    ) -> Stored | None:
        """As `Store.store`. What is written into `live` meanwhile is in what is made of it, or is
        not. Tensors of the same bytes that lie otherwise in memory are looked at each for itself.
        """
        meta = described.meta
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

    def finish(self) -> None:
        """Make no more; what is there stays."""
        self.closed_why = _CLOSED


def _on_host(data: ByteArray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    of_type: torch.dtype = getattr(torch, dtype)
    if not data.size:
        return torch.empty(shape, dtype=of_type, device="cpu")
    return torch.from_numpy(np.array(data)).view(of_type).reshape(shape)
