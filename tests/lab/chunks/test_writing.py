"""Chunks of full tensors: headers that fill, holes, lives, interrupts and files of the program."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rankscope.errors import ChunkError
from rankscope.record.ranks import StreamId
from rankscope.spool.chunks.chunkfiles import (
    chunk_folder,
    chunk_path,
    finish_chunks,
    stream_of_folder,
)
from rankscope.spool.chunks.writing import HEADER_BYTES, ChunkWriter
from tests.chunks.chunked import STREAM, Writing, assert_whole, read_plainly
from tests.chunks.test_writing import fill, folder_of, write_mixed
from tests.interrupts import interrupting


def test_shapes_of_many_dims_fill_a_header_and_one_that_never_fits_is_refused(tmp_path):
    writing = Writing(tmp_path, header_bytes=4096)
    for reference in range(1, 40):
        writing.add(reference, "uint8", (1,) * 63 + (reference,))
    with pytest.raises(ValueError, match="5000 dims"):
        writing.add(10, "uint8", (1,) * 5000)
    assert writing.add(41)
    writing.writer.finish()
    found = read_plainly(folder_of(writing))
    assert sorted(found) == [*range(1, 40), 41]
    assert len(list(folder_of(writing).iterdir())) > 2


def test_eight_thousand_tensors_fit_in_the_header_of_one_chunk(tmp_path):
    writer = ChunkWriter(tmp_path, STREAM, limit_bytes=1 << 40)
    data = np.arange(12, dtype=np.uint8)
    for reference in range(10**9, 10**9 + 8193):
        entry = writer.write(reference, "float32", (1, 3), (data,), checksum=5)
        assert entry is not None
        writer.commit(entry)
    writer.finish()
    counts = []
    for number in (1, 2):
        with safe_open(chunk_path(chunk_folder(tmp_path, STREAM), number), "np") as file:
            counts.append(len(list(file.keys())))
    assert counts == [8192, 1]


def killed_copy(writing: Writing, to: Path) -> Path:
    """What a rank killed now would leave (a copy: the lock is on the original)."""
    shutil.copytree(writing.trace, to)
    return chunk_folder(to, STREAM)


def test_bytes_without_a_record_become_a_named_hole(tmp_path):
    writing = Writing(tmp_path / "a")
    write_mixed(writing, 9)
    folder = killed_copy(writing, tmp_path / "b")
    chosen = [0, 3, 4, 8]
    (report,) = finish_chunks(folder, STREAM, writing.tensors[chosen], writing.definitions)
    assert report.tensors == 4 and not report.lost
    found = read_plainly(folder)
    assert sorted(found) == [1, 4, 5, 9]
    for reference in found:
        assert_whole(found, reference)
    with safe_open(chunk_path(folder, 1), "np") as file:
        assert any(key.startswith("unrecorded.") for key in file.keys())  # noqa: SIM118  # no mapping


def test_a_recorded_tensor_that_did_not_reach_the_disk_is_lost_and_said(tmp_path):
    writing = Writing(tmp_path / "a")
    for reference in range(1, 6):
        writing.add(reference, "uint8", (1000,))
    folder = killed_copy(writing, tmp_path / "b")
    path = chunk_path(folder, 1)
    with path.open("r+b") as file:
        file.seek(8 + HEADER_BYTES + 1500)
        file.write(bytes(100))
        file.truncate(8 + HEADER_BYTES + 4400)
    (report,) = finish_chunks(folder, STREAM, writing.tensors, writing.definitions)
    assert report.lost == (2, 5) and "2 recorded tensors" in report.note
    found = read_plainly(folder)
    assert sorted(found) == [1, 3, 4]
    for reference in found:
        assert_whole(found, reference)


def test_chunks_that_are_missing_empty_or_unknown_are_reported_and_none_is_thrown_away(tmp_path):
    writing = Writing(tmp_path / "a", chunk_tensors=2)
    write_mixed(writing, 6)
    writing.writer.finish()
    folder = folder_of(writing)
    chunk_path(folder, 2).unlink()
    chunk_path(folder, 7).touch()
    chunk_path(folder, 8).write_bytes(struct.pack("<Q", 4096) + bytes(4096))
    chunk_path(folder, 9).write_bytes(struct.pack("<Q", 4096) + bytes(4096) + b"what is this")
    chunk_path(folder, 10).write_bytes(b"\xff" * 500)
    chunk_path(folder, 11).write_bytes(struct.pack("<Q", 4096) + bytes(100))
    (folder / "notes.txt").write_text("not ours")
    reports = finish_chunks(folder, STREAM, writing.tensors, writing.definitions)
    said = {report.path.name[:6]: report.note for report in reports}
    assert "is not there; the records name 2" in said["000002"]
    assert not said["000007"] and not said["000008"] and not said["000011"]
    assert "before its first tensor was whole" in said["000009"]
    assert "header of" in said["000010"]
    assert {path.name for path in folder.iterdir()} == {
        "000001.safetensors", "000003.safetensors", "000009.unfinished", "000010.safetensors",
        "notes.txt",
    }  # fmt: skip


def test_what_is_withdrawn_leaves_its_place_to_the_next(tmp_path):
    writing = Writing(tmp_path)
    writing.add(1)
    entry = writing.writer.write(2, "uint8", (100_000,), (np.ones(100_000, np.uint8),))
    assert entry is not None
    writing.writer.commit(entry)
    writing.writer.withdraw(entry)
    writing.writer.withdraw(entry)
    writing.add(3)
    writing.writer.finish()
    found = read_plainly(folder_of(writing))
    assert sorted(found) == [1, 3]
    assert_whole(found, 1)
    assert_whole(found, 3)


def test_each_life_of_a_rank_has_a_folder_of_its_own(tmp_path):
    for incarnation, name in ((0, "rank00003"), (1, "rank00003.1"), (12, "rank00003.12")):
        stream = StreamId(rank=3, incarnation=incarnation)
        writing = Writing(tmp_path, stream)
        writing.add(1)
        writing.writer.finish()
        folder = tmp_path / "tensors" / name
        assert sorted(read_plainly(folder)) == [1]
        assert stream_of_folder(folder) == stream
    for name in ("rank3", "rank00003.0", "rank00003.01", "rank99999999", "x", "rank00003.70000"):
        assert stream_of_folder(Path(name)) is None


def test_a_storm_of_keyboard_interrupts_never_mixes_up_what_is_committed(tmp_path):
    writing = Writing(tmp_path, chunk_tensors=40, header_bytes=8192)
    chosen = random.Random(2)
    confirmed, references, interrupts = [], itertools.count(1), 0

    def add():
        for reference in itertools.islice(references, 40):
            writing.add(reference, "uint8", (chosen.choice((100, 30_000)),))
            confirmed.append(reference)

    deadline = time.monotonic() + 60
    with interrupting(chosen, 1e-4, 4e-3) as is_interrupted:
        while interrupts < 150 and time.monotonic() < deadline:
            interrupts += is_interrupted(add)
    assert interrupts > 50
    writing.writer.finish()
    finish_chunks(folder_of(writing), STREAM, writing.tensors, writing.definitions)
    found = read_plainly(folder_of(writing))
    missing = set(confirmed) - set(found)
    assert not missing
    for kept in confirmed:
        assert_whole(found, kept)


def test_beyond_the_file_size_limit_all_that_was_stored_stays_readable(tmp_path):
    stored, error, quiet, trouble = fill(tmp_path, 1 << 28, 700_001)
    assert os.strerror(errno.EFBIG) in error and os.strerror(errno.EFBIG) in trouble and quiet
    found = read_plainly(chunk_folder(tmp_path, STREAM))
    assert len(stored) > 50 and sorted(found) == stored
    for reference in stored:
        assert_whole(found, reference)


def test_a_folder_that_cannot_be_made_is_one_defined_error_and_then_silence(tmp_path):
    (tmp_path / "tensors").write_text("a file stands here")
    writing = Writing(tmp_path)
    with pytest.raises(ChunkError, match="tensors"):
        writing.add(1)
    assert not writing.add(2) and writing.writer.trouble
    writing.writer.finish()


def test_a_file_of_the_program_under_the_number_of_a_chunk_is_left_alone(tmp_path):
    writing = Writing(tmp_path)
    write_mixed(writing, 20)
    number = writing.writer._file.number
    os.close(number)
    own = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    try:
        assert own == number
        with pytest.raises(ChunkError, match="the program has closed it"):
            writing.add(21)
        writing.writer.finish()
        assert os.fstat(own).st_size == 0
    finally:
        os.close(own)
    finish_chunks(folder_of(writing), STREAM, writing.tensors, writing.definitions)
    found = read_plainly(folder_of(writing))
    assert sorted(found) == list(range(1, 21))
