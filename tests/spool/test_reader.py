"""How far a stream is committed, whatever happened to its bytes."""

import os
import random
import time

import numpy as np
import pytest

from rankscope.errors import SpoolError
from rankscope.run.folders import segment_path
from rankscope.spool.recordcolumns import StreamReader, records
from rankscope.spool.recordformat import CELL_BYTES, RecordKind
from rankscope.spool.replicas import cell_crcs, valid_prefix
from rankscope.spool.writer import SpoolWriter
from tests.spool.streams import SMALL, enter, stream_bytes, value, write_some


def record_ends(whole: bytes) -> list[int]:
    found = records(whole)
    return [0, *((found.start + found.size) * CELL_BYTES).tolist()]


def test_crcs_of_many_cells_are_those_of_zlib_one_by_one():
    import zlib

    cells = np.random.default_rng(0).integers(0, 256, (5000, 64), dtype=np.uint8)
    expected = [zlib.crc32(cell[4:].tobytes()) for cell in cells]
    assert cell_crcs(cells).tolist() == expected


def test_a_stream_torn_at_any_byte_keeps_exactly_its_whole_records(tmp_path):
    whole = write_some(tmp_path / "s", 6)
    ends = record_ends(whole)
    assert ends[-1] == len(whole)
    for cut in range(len(whole) + 1):
        assert valid_prefix(whole[:cut]) == max(end for end in ends if end <= cut)


def test_a_torn_stream_followed_by_zeros_keeps_exactly_its_whole_records(tmp_path):
    whole = write_some(tmp_path / "s", 4)
    ends = record_ends(whole)
    for cut in range(0, len(whole), 7):
        last = max(end for end in ends if end <= cut)
        kept = valid_prefix(whole[:cut] + bytes(len(whole) - cut))
        # A tail of zeros that happens to be the record's own bytes makes the record whole.
        assert kept == last or whole[cut:kept] == bytes(kept - cut)


def test_any_bit_flip_cuts_the_stream_at_the_record_it_hits(tmp_path):
    whole = write_some(tmp_path / "s", 12)
    ends = record_ends(whole)
    chosen = random.Random(1)
    for _ in range(10_000):
        at = chosen.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chosen.randrange(8)
        assert valid_prefix(bytes(damaged)) == max(end for end in ends if end <= at)


def test_random_bytes_are_no_stream():
    chosen = random.Random(2)
    for _ in range(300):
        assert valid_prefix(chosen.randbytes(chosen.randrange(2000))) == 0


def test_cells_swapped_or_left_out_inside_a_record_cut_it(tmp_path):
    whole = write_some(tmp_path / "s", 3)
    found = records(whole)
    position = int(found.positions(RecordKind.VALUE)[0])
    start = int(found.start[position]) * CELL_BYTES
    second, third = start + 64, start + 128
    swapped = whole[:second] + whole[third : third + 64] + whole[second:third] + whole[third + 64 :]
    assert valid_prefix(swapped) == start
    assert valid_prefix(whole[:second] + whole[third:]) == start
    assert valid_prefix(whole[64:]) == 0


def test_a_file_is_judged_as_its_bytes_are(tmp_path):
    whole = write_some(tmp_path / "s", 30)
    path = tmp_path / "replica"
    path.write_bytes(whole + b"torn")
    assert valid_prefix(path) == len(whole)
    with pytest.raises(SpoolError, match="cannot be read"):
        valid_prefix(tmp_path / "missing")


def test_reading_in_small_pieces_gives_the_same_bytes(tmp_path):
    whole = write_some(tmp_path / "s", 2000)
    with StreamReader(tmp_path / "s") as reader:
        assert b"".join(reader.chunks(max_bytes=128)) == whole
        assert reader.committed() == len(whole)
        assert reader.segment_bytes == SMALL // 8
        ends = record_ends(whole)
        for offset in ends[:: len(ends) // 50]:
            piece = reader.read_from(offset, 1000)
            assert whole[offset:].startswith(piece)
            assert bool(piece) == (offset < len(whole))


def test_a_reader_follows_a_stream_that_is_being_written(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    with StreamReader(tmp_path / "s") as reader:
        at = 0
        for number in range(500):
            writer.write(RecordKind.VALUE, value(number))
            piece = reader.read_from(at, 1 << 16)
            assert len(records(piece)) == 1
            at += len(piece)
            assert reader.read_from(at, 1 << 16) == b""
    writer.close()


def test_freed_segments_are_skipped_and_the_newest_is_never_freed(tmp_path):
    whole = write_some(tmp_path / "s", 2000)
    with StreamReader(tmp_path / "s") as reader:
        size = reader.segment_bytes
        assert reader.free_below(2 * size + 1) == 2
        assert reader.lowest() == 2 * size
        assert stream_bytes(tmp_path / "s") == whole[2 * size :]
        with pytest.raises(SpoolError, match="freed"):
            StreamReader(tmp_path / "s").read_from(0, 100) or reader.read_from(0, 100)
        reader.free_below(1 << 40)
        assert reader.committed() == len(whole)


def test_a_folder_without_segments_is_an_empty_stream(tmp_path):
    with StreamReader(tmp_path / "none") as reader:
        assert reader.read_from(0, 100) == b""
        assert (reader.lowest(), reader.committed(), reader.segment_bytes) == (0, 0, 0)


def test_a_segment_that_is_a_link_is_not_followed(tmp_path):
    write_some(tmp_path / "s")
    path = segment_path(tmp_path / "s", 0)
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(SpoolError, match="cannot be opened"),
        StreamReader(tmp_path / "s") as reader,
    ):
        reader.read_from(0, 100)


def test_a_segment_of_an_impossible_size_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    segment_path(tmp_path / "s", 0).write_bytes(b"x" * 100)
    with pytest.raises(SpoolError, match="100 bytes are not a segment"):
        StreamReader(tmp_path / "s").read_from(0, 100)


def test_verifying_keeps_up_with_the_collector(tmp_path):
    """The bar is 5 million cells a second; a tenth of it here, of this thread's own time."""
    writer = SpoolWriter(tmp_path / "s", limit_bytes=64 << 20)
    for number in range(50_000):
        writer.write(RecordKind.ENTER, enter(number))
    writer.close()
    whole = stream_bytes(tmp_path / "s")
    valid_prefix(whole[:64])
    started = time.thread_time()
    assert valid_prefix(whole) == len(whole)
    assert len(whole) // CELL_BYTES / (time.thread_time() - started) > 500_000
