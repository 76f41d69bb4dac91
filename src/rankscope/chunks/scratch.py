"""Full tensors in a file without a name, for a trace that the same process reads at its end.

To keep a tensor costs one copy, into the page cache: nothing is hashed (equal ones are told by
their bytes) and nothing has to be finished. They are read where they lie, through one mapping. The
place of what is let go is used again, so that a forward of which the first and the last layer are
wanted takes the room of a few. The file is gone with the process, however that ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.chunks.safetensors import write_all
from rankscope.chunks.writing import ByteArray
from rankscope.record.dtypes import STORED_TYPES
from rankscope.run.diskspace import reserve
from rankscope.run.ownfile import OwnFile, above_standard_streams, leave_mapping, map_file

_LINE: Final = 64
_PAGE: Final = 4096
"""Tensors begin at multiples of it, those that are smaller at multiples of a line."""
_AHEAD_BYTES: Final = 8 << 20
"""Reserved on disk beyond what is written."""
_EDGE: Final = 16
"""Bytes at either end by which tensors are told apart before they are compared."""
_MOST_ALIKE: Final = 4
"""Tensors compared that are alike at their ends: of many, the latest."""
_WORD: Final = 8
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_Key = tuple[str, tuple[int, ...], bytes]


class HeldBytes(NamedTuple):
    """One tensor, and where its bytes are."""

    reference: int
    index: int  # type: ignore[assignment]  # nobody looks for one as in a tuple
    """Its number among all that were ever written."""
    begin: int
    nbytes: int
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    chunk: int = 0
    """None: chunks are numbered from 1."""
    checksum: int = 0
    """None was made."""


class Scratch:
    """Holds tensors of one rank. For one thread at a time; the caller sees to that."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Make the file and map it; disk is taken as it is filled.

        Raises:
            OSError: the folder takes no such file, or it cannot be mapped, or the limit is 0.
        """
        if limit_bytes <= 0:
            raise OSError(errno.ENOSPC, "there is no room")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as made:
            self._file = OwnFile(above_standard_streams(os.dup(made.fileno())))
        # private: what a reader writes into it, which torch wants to be able to, is its own
        flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            os.ftruncate(self._file.number, limit_bytes)
            mapped: Any = map_file(self._file.number, limit_bytes, flags=flags, prot=access)
        except OSError:
            self._file.close()
            raise
        self.limit_bytes = limit_bytes
        self._memory: ByteArray = np.frombuffer(mapped, np.uint8)
        self._let_go = weakref.finalize(self, _let_go, self._file, mapped)
        self._top = 0
        """Where what was never used begins."""
        self._reserved = 0
        self._free: dict[int, list[int]] = {}
        """Size -> where places of it begin."""
        self._held: dict[int, HeldBytes] = {}
        self._alike: dict[_Key, list[HeldBytes]] = {}
        self._count = 0

    def find(self, dtype: str, shape: Sequence[int], data: ByteArray) -> HeldBytes | None:
        """Return a tensor that is held and has these bytes."""
        for held in reversed(self._alike.get(_key(dtype, shape, data), ())):
            if _are_equal(data, self._bytes(held)):
                return held
        return None

    def find_equal(self, held: HeldBytes) -> HeldBytes | None:
        """Return a tensor that is held and has the bytes of one just written."""
        return self.find(held.dtype, held.shape, self._bytes(held))

    def write(
        self, reference: int, dtype: str, shape: Sequence[int], pieces: Iterable[ByteArray]
    ) -> HeldBytes | None:
        """Copy the bytes of one tensor; it is held once committed. None where the limit leaves no
        room, and then no piece was asked for.

        Args:
            reference: its key, from 1.
            dtype: torch's name; one of `STORED_TYPES`.
            shape: what this rank holds.
            pieces: its bytes in row-major order.

        Raises:
            OSError: the disk refused it.
        """
        nbytes = STORED_TYPES[dtype].nbytes(shape)
        number = self._file.check()
        begin = self._place(nbytes)
        if begin is None:
            return None
        is_whole = False
        try:
            written = self._put(number, pieces, begin)
            is_whole = written == nbytes
        finally:
            if not is_whole:
                self._give_back(begin, nbytes)
        if not is_whole:
            raise ValueError(f"{dtype} {list(shape)} takes {nbytes} bytes, {written} were given")
        self._count += 1
        return HeldBytes(reference, self._count, begin, nbytes, dtype, tuple(shape))

    def _put(self, number: int, pieces: Iterable[ByteArray], begin: int) -> int:
        at = begin
        for piece in pieces:
            write_all(number, piece.data, at)
            at += len(piece)
        return at - begin

    def commit(self, held: HeldBytes) -> None:
        """Hold what was just written."""
        self._held[held.reference] = held
        alike = self._alike.setdefault(self._key_of(held), [])
        alike.append(held)
        del alike[:-_MOST_ALIKE]

    def withdraw(self, held: HeldBytes) -> None:
        """Do not hold what was just written: its place is used again."""
        self._give_back(held.begin, held.nbytes)

    def release(self, reference: int) -> None:
        """Let a tensor go: its place is used again. Nothing for one that is not held."""
        held = self._held.pop(reference, None)
        if held is None:
            return
        key = self._key_of(held)
        left = [each for each in self._alike.get(key, ()) if each is not held]
        if left:
            self._alike[key] = left
        else:
            self._alike.pop(key, None)
        self.withdraw(held)

    def held(self) -> dict[int, tuple[HeldBytes, ByteArray]]:
        """Return what is held by its reference, with its bytes where they lie: they stay there as
        long as they are used, and nothing is written or released meanwhile."""
        held = self._held.copy().items()  # at once: another thread may be writing
        return {reference: (each, self._bytes(each)) for reference, each in held}

    def close(self) -> None:
        """Give up file and mapping; bytes that somebody still uses stay until he does not."""
        self._held.clear()
        self._alike.clear()
        self._free.clear()
        self._memory = np.empty(0, np.uint8)
        self._let_go()

    def _place(self, nbytes: int) -> int | None:
        size = _room(nbytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        begin = self._top
        if size >= _PAGE:
            begin += -begin % _PAGE
        end = begin + size
        if end > len(self._memory):
            return None
        if end > self._reserved:
            ahead = min(end + _AHEAD_BYTES, len(self._memory))
            reserve(self._file.number, self._reserved, ahead - self._reserved)
            self._reserved = ahead
        self._top = end
        return begin

    def _give_back(self, begin: int, nbytes: int) -> None:
        if begin + _room(nbytes) == self._top:
            self._top = begin
        else:
            self._free.setdefault(_room(nbytes), []).append(begin)

    def _bytes(self, held: HeldBytes) -> ByteArray:
        return self._memory[held.begin : held.begin + held.nbytes]

    def _key_of(self, held: HeldBytes) -> _Key:
        return _key(held.dtype, held.shape, self._bytes(held))


def _let_go(file: OwnFile, mapped: mmap.mmap) -> None:
    leave_mapping(mapped, file.identity, but=file.number)
    file.close()


def _room(nbytes: int) -> int:
    return nbytes + -nbytes % _LINE


def _key(dtype: str, shape: Sequence[int], data: ByteArray) -> _Key:
    return dtype, tuple(shape), data[:_EDGE].tobytes() + data[-_EDGE:].tobytes()


def _are_equal(one: ByteArray, other: ByteArray) -> bool:
    if len(one) % _WORD == 0:
        return bool((one.view(np.uint64) == other.view(np.uint64)).all())
    return bool((one == other).all())
