"""The crcs of many cells at once: as zlib has them, and none that is wrong goes by."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from rankscope.spool.recordformat import FIRST, RecordKind
from rankscope.spool.replicas import CHECK_BLOCK, BlockCheck, cell_crcs, committed_heads


def sound_cells(count, seed=0):
    """Records of one cell each, of random bytes."""
    cells = np.random.default_rng(seed).integers(0, 256, (count, 64), np.uint8)
    cells[:, 4:8] = RecordKind.ENTER, FIRST, 0, 0
    cells[:, :4] = cell_crcs(cells).astype("<u4").view(np.uint8).reshape(-1, 4)
    return cells


def is_sound(block):
    check = BlockCheck()
    check.add(block, np.ascontiguousarray(block[:, :4]).view("<u4").reshape(-1))
    return check.first_damaged() is None


def test_crcs_are_those_of_zlib():
    cells = sound_cells(300)
    assert cell_crcs(cells).tolist() == [zlib.crc32(cell[4:].tobytes()) for cell in cells]


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 1000, CHECK_BLOCK])
def test_a_block_of_sound_cells_is_sound_and_none_with_a_flipped_bit_is(count):
    block = sound_cells(count)
    assert is_sound(block)
    chosen = np.random.default_rng(count)
    for _ in range(50):
        cell, bit = chosen.integers(count), chosen.integers(512)
        block[cell, bit // 8] ^= 1 << bit % 8
        assert not is_sound(block)
        block[cell, bit // 8] ^= 1 << bit % 8


def test_the_same_damage_in_two_cells_does_not_cancel_out():
    block = sound_cells(256)
    for other in range(1, 256):
        damaged = block.copy()
        damaged[[0, other], 20] ^= 1
        assert not is_sound(damaged)


def test_two_cells_that_changed_crcs_are_damaged():
    block = sound_cells(100)
    block[[3, 80], :4] = block[[80, 3], :4]
    assert not is_sound(block)


def test_a_cell_of_zeros_is_damaged():
    block = sound_cells(10)
    block[4] = 0
    assert not is_sound(block)


@pytest.mark.parametrize("at", [0, 1, CHECK_BLOCK - 1, CHECK_BLOCK, 2 * CHECK_BLOCK + 5])
def test_committed_ends_at_the_first_damaged_cell_of_several_blocks(at):
    cells = sound_cells(2 * CHECK_BLOCK + 6)
    assert len(committed_heads(cells)) == len(cells)
    cells[at:, 30] ^= 0x80  # and everything behind it, in the same place
    assert len(committed_heads(cells)) == at
