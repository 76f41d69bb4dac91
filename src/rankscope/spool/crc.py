"""The CRC-32 of many cells at once.

CRC-32 is linear over GF(2): the crc of 60 bytes is the exclusive or of what each byte contributes
from its place, and of the crc of 60 zero bytes. One table of 256 numbers per place turns N cells
into 60 gathers of N numbers, without a Python loop over cells.
"""

from __future__ import annotations

import functools
import zlib

import numpy as np
import numpy.typing as npt

from rankscope.spool.cells import CELL_BYTES

__all__ = ["cell_crcs"]

_COVERED = CELL_BYTES - 4
_REVERSED_POLYNOMIAL = 0xEDB88320
_BLOCK = 4096
"""Cells worked on at a time: their transposed bytes and results stay in the cache."""


@functools.cache
def _place_tables() -> npt.NDArray[np.uint32]:
    """What byte value v at place p of the covered bytes contributes: [60, 256]."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, (last >> 1) ^ np.uint32(_REVERSED_POLYNOMIAL), last >> 1)
    tables = np.empty((_COVERED, 256), np.uint32)
    tables[-1] = last
    for place in range(_COVERED - 2, -1, -1):
        after = tables[place + 1]
        tables[place] = (after >> 8) ^ last[after & 0xFF]
    return tables


def cell_crcs(cells: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of bytes 4..64 of each cell: [N, 64] bytes to [N]."""
    tables = _place_tables()
    crcs = np.empty(len(cells), np.uint32)
    of_zeros = np.uint32(zlib.crc32(bytes(_COVERED)))
    for start in range(0, len(cells), _BLOCK):
        places = np.ascontiguousarray(cells[start : start + _BLOCK, 4:].T)
        total = np.full(places.shape[1], of_zeros, np.uint32)
        for table, values in zip(tables, places):
            total ^= table.take(values)
        crcs[start : start + _BLOCK] = total
    return crcs
