"""Blocks reserved ahead of a chunk: never beyond the budget, gone when the chunk is finished."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rankscope.record.ranks import StreamId
from rankscope.run import files
from rankscope.run.files import reserve
from rankscope.spool.chunks import writing
from rankscope.spool.chunks.writing import ChunkWriter

STREAM = StreamId(rank=0, incarnation=0)
MIB = 1 << 20


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def write(writer: ChunkWriter, reference: int, nbytes: int) -> None:
    data = np.full(nbytes, reference % 256, np.uint8)
    entry = writer.write(reference, "uint8", (nbytes,), (data,))
    assert entry is not None
    writer.commit(entry)


@pytest.fixture
def can_reserve(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    try:
        if not reserve(descriptor, 0, MIB):
            pytest.skip("this file system reserves nothing")
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("can_reserve")
def test_reserving_makes_no_file_longer_and_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, b"x" * 5000, 0)
    assert reserve(descriptor, 5000, 4 * MIB)
    assert path.stat().st_size == 5000 and on_disk(path) > 3 * MIB
    os.ftruncate(descriptor, 5000)
    os.close(descriptor)
    assert path.read_bytes() == b"x" * 5000 and on_disk(path) < MIB


@pytest.mark.usefixtures("can_reserve")
def test_a_chunk_has_blocks_ahead_until_it_is_finished(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, STREAM, limit_bytes=1 << 40)
    write(writer, 1, MIB)
    (path,) = (tmp_path / "tensors" / "rank00000").iterdir()
    assert path.stat().st_size == 2 * MIB and on_disk(path) > 8 * MIB
    for reference in range(2, 30):
        write(writer, reference, MIB)
    writer.finish()
    assert path.stat().st_size == 30 * MIB and on_disk(path) < 31 * MIB


def test_nothing_is_reserved_beyond_the_budget(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, STREAM, limit_bytes=4 * MIB)
    for reference in (1, 2, 3):
        write(writer, reference, MIB)
        (path,) = (tmp_path / "tensors" / "rank00000").iterdir()
        assert on_disk(path) <= 4 * MIB + 65536
    writer.finish()


def test_where_nothing_can_be_reserved_chunks_are_written_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(descriptor: int, start: int, nbytes: int) -> bool:
        asked.append(start)
        return reserve(-1, start, nbytes)  # what a file system without it says: false

    monkeypatch.setattr(writing, "reserve", refuse)
    writer = ChunkWriter(tmp_path, STREAM, limit_bytes=1 << 40, chunk_tensors=2)
    for reference in range(1, 6):
        write(writer, reference, MIB)
    writer.finish()
    assert asked == [MIB] * 3  # once a chunk
    sizes = [p.stat().st_size for p in sorted((tmp_path / "tensors" / "rank00000").iterdir())]
    assert sizes == [3 * MIB, 3 * MIB, 2 * MIB]


def test_of_a_disk_that_is_nearly_full_nothing_is_taken_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path)
    monkeypatch.setattr(files, "_LEAST_FREE_BYTES", 2 * free.f_bavail * free.f_frsize)
    writer = ChunkWriter(tmp_path, STREAM, limit_bytes=1 << 40)
    write(writer, 1, MIB)
    (path,) = (tmp_path / "tensors" / "rank00000").iterdir()
    assert on_disk(path) <= 2 * MIB + 65536
    writer.finish()
