"""The CRC-32 of many cells at once.

CRC-32 is linear over GF(2), which saves a Python loop over the cells of sound streams.

Whether cells are sound is asked of a block of them at a time. The crc of a whole block, stored crcs
included, is one call of zlib; what it has to be follows from the stored crcs alone. Let Z append 64
zero bytes to what a crc has seen, s_i be the stored crc of cell i, and d_i what it differs by from
the crc of 60 zero bytes. The block's crc then differs from that of a block of all-zero sound cells
by

    (Z + 1) (Z^(n-1) d_0 + Z^(n-2) d_1 + ... + d_(n-1))

and the sum in it takes one multiplication by a power of Z per cell, in halves: pairs, pairs of
pairs, and so on. Every cell counts: one damaged cell is always found, several are missed
with the 2^-32 that a single cell's own crc has. Which cells of a damaged block are wrong is asked
of each of its cells.
"""

from __future__ import annotations

import functools
import itertools
import zlib

import numpy as np
import numpy.typing as npt

from rankscope.spool.recordformat import CELL_BYTES

__all__ = ["CHECK_BLOCK", "BlockCheck", "cell_crcs"]

Words = npt.NDArray[np.uint32]
_COVERED = CELL_BYTES - 4
_REVERSED_POLYNOMIAL = 0xEDB88320
_LEVELS = 12
CHECK_BLOCK = 1 << _LEVELS
"""Cells worked on at a time: their bytes stay in the cache."""
_OF_ZEROS = zlib.crc32(bytes(_COVERED))
_SOUND_ZEROS = _OF_ZEROS.to_bytes(4, "little") + bytes(_COVERED)
"""A cell of zeros with the crc that belongs to it."""


def cell_crcs(cells: npt.NDArray[np.uint8]) -> Words:
    """Return the CRC-32 of bytes 4..64 of each cell: [N, 64] bytes to [N]."""
    covered = np.ascontiguousarray(cells[:, 4:]).tobytes()
    starts = range(0, len(covered), _COVERED)
    return np.array([zlib.crc32(covered[at : at + _COVERED]) for at in starts], np.uint32)


@functools.cache
def _sound_zeros() -> list[int]:
    """The crc of 0, 1, 2 ... CHECK_BLOCK all-zero sound cells behind each other."""
    cells = itertools.repeat(_SOUND_ZEROS, CHECK_BLOCK)
    return list(itertools.accumulate(cells, lambda crc, cell: zlib.crc32(cell, crc), initial=0))


@functools.cache
def _powers() -> Words:
    """Z, Z^2, Z^4 ... as tables of what each byte of a crc becomes: [levels, 4, 256]."""
    words = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(_REVERSED_POLYNOMIAL), byte >> 1)
    powers = np.empty((_LEVELS, 4, 256), np.uint32)
    for _ in range(CELL_BYTES):
        words = (words >> 8) ^ byte[words & 0xFF]
    powers[0] = words
    for level in range(1, _LEVELS):
        powers[level] = _times(powers[level - 1], powers[level - 1])
    return powers


def _times(power: Words, words: Words) -> Words:
    """Apply one of the powers of Z to each word."""
    octets = np.ascontiguousarray(words)[..., None].view(np.uint8)
    product: Words = power[0].take(octets[..., 0])
    for table, place in zip(power[1:], (1, 2, 3)):
        product ^= table.take(octets[..., place])
    return product


class BlockCheck:
    """Takes blocks of cells while they are in the cache, and says which blocks are sound."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._stored: list[Words] = []

    def add(self, block: npt.NDArray[np.uint8], stored: Words) -> None:
        """Take the next block, at most CHECK_BLOCK cells, and the crcs stored in them."""
        # a shorter block is taken for one that begins with all-zero cells: they contribute nothing
        crc = _sound_zeros()[CHECK_BLOCK - len(block)]
        self._found.append(zlib.crc32(np.ascontiguousarray(block).data, crc))
        self._stored.append(stored)

    def first_damaged(self) -> int | None:
        """Return the number of the first block with a wrong crc in it, None where there is none."""
        longest = max(map(len, self._stored), default=0)
        levels = max(longest - 1, 0).bit_length()
        sums = np.zeros((len(self._stored), 1 << levels), np.uint32)
        for row, stored in zip(sums, self._stored):
            np.bitwise_xor(stored, np.uint32(_OF_ZEROS), out=row[len(row) - len(stored) :])
        for power in _powers()[:levels]:
            sums = _times(power, sums[:, 0::2]) ^ sums[:, 1::2]
        expected = _times(_powers()[0], sums) ^ sums ^ np.uint32(_sound_zeros()[CHECK_BLOCK])
        wrong = np.flatnonzero(expected.reshape(-1) != np.array(self._found, np.uint32))
        return int(wrong[0]) if len(wrong) else None
