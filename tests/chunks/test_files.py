"""Kept tensors, found in a trace folder whatever became of their rank."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from rankscope.errors import TraceError
from rankscope.record.ranks import StreamId
from rankscope.spool.chunks.chunkfiles import chunk_folder, chunk_path
from rankscope.spool.chunks.tensorfiles import TensorFiles, standing_references
from rankscope.spool.recordformat import TENSOR_DTYPE
from tests.chunks.chunked import STREAM, Writing, content

SECOND_LIFE = StreamId(rank=3, incarnation=1)
OTHER = StreamId(rank=12, incarnation=0)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, dict[StreamId, Writing]]:
    """Three streams: one whole, one whole in a second life, one left in the middle of a tensor."""
    trace = tmp_path_factory.mktemp("job") / "writing"
    writings = {}
    for stream in (STREAM, SECOND_LIFE, OTHER):
        writing = writings[stream] = Writing(trace, stream, chunk_tensors=4)
        chosen = random.Random(stream.rank)
        for reference in range(1, 11):
            dtype = chosen.choice(["float32", "bfloat16", "float8_e5m2", "bool", "complex64"])
            assert writing.add(reference, dtype, chosen.choice([(), (3,), (0, 2), (40, 5)]))
        if stream is OTHER:
            writing.writer.write(11, "uint8", (333,), (content(11, 333),))
            # a copy: what a kill leaves, and no lock on it
            shutil.copytree(trace, trace.with_name("trace"))
        else:
            writing.writer.finish()
    return trace.with_name("trace"), writings


def records_of(writings: dict[StreamId, Writing]) -> dict:
    return {stream: (w.tensors, w.definitions) for stream, w in writings.items()}


def test_a_tensor_is_found_by_rank_life_and_reference(job):
    trace, writings = job
    files = TensorFiles(trace, records_of(writings))
    assert files.streams() == [STREAM, SECOND_LIFE, OTHER]
    order = [(stream, reference) for stream in writings for reference in range(1, 11)]
    random.Random(0).shuffle(order)
    for stream, reference in order:
        found = files.find(stream.rank, stream.incarnation, reference)
        assert (found.dtype, found.shape) == writings[stream].shapes[reference]
        assert found.data.tobytes() == content(reference, found.data.nbytes).tobytes()
        assert found.is_intact and not found.data.flags.writeable
    for stream in writings:
        assert [reference for reference, _ in files.tensors(stream)] == list(range(1, 11))


def test_what_numpy_knows_is_an_array_over_the_mapped_bytes(job):
    trace, writings = job
    files = TensorFiles(trace)
    seen = set()
    for reference in range(1, 11):
        dtype, shape = writings[STREAM].shapes[reference]
        found = files.find(3, 0, reference)
        seen.add(dtype)
        if dtype in ("bfloat16", "float8_e5m2"):
            with pytest.raises(TraceError, match=f"numpy has no {dtype}"):
                found.array()
            continue
        array = found.array()
        assert (array.dtype.name, array.shape) == (dtype, shape)
        assert array.nbytes == 0 or np.shares_memory(array, found.data)
    assert len(seen) > 2 and "bfloat16" in seen


def test_an_unfinished_chunk_is_reported_and_read_from_the_records(job):
    trace, writings = job
    (problem,) = TensorFiles(trace, records_of(writings)).problems()
    assert "rank00012/000003" in problem and "2 tensors are readable" in problem
    assert "333 bytes behind them never became a whole tensor" in problem
    without = TensorFiles(trace)
    assert without.find(12, 0, 8).is_intact  # in a chunk that was finished
    with pytest.raises(TraceError, match=r"is unfinished.*rankscope recover"):
        without.find(12, 0, 9)


def test_what_is_not_there_is_said(job):
    trace, writings = job
    files = TensorFiles(trace, records_of(writings))
    with pytest.raises(TraceError, match=r"tensor 99 of rank 3 is not there.*none of the 3 chunks"):
        files.find(3, 0, 99)
    with pytest.raises(TraceError, match=r"there is no .*copy it"):
        files.find(7, 0, 1)
    assert TensorFiles(trace / "nowhere").streams() == []
    assert TensorFiles(trace / "nowhere").problems() == []


def test_chunks_are_opened_one_by_one_as_they_are_asked_for(job, tmp_path):
    shutil.copytree(job[0], tmp_path / "trace")
    folder = chunk_folder(tmp_path / "trace", STREAM)
    chunk_path(folder, 3).write_bytes(b"nonsense")
    files = TensorFiles(tmp_path / "trace")
    assert files.find(3, 0, 2).is_intact and files.find(3, 0, 5).is_intact
    chunk_path(folder, 1).unlink()  # mapped: still there
    chunk_path(folder, 2).unlink()
    assert files.find(3, 0, 1).is_intact
    with pytest.raises(TraceError, match="000003"):
        files.find(3, 0, 9)
    assert any("000003" in problem for problem in files.problems())


def test_a_chunk_under_another_name_is_not_taken_for_what_it_is_not(job, tmp_path):
    shutil.copytree(job[0], tmp_path / "trace")
    theirs = chunk_path(chunk_folder(tmp_path / "trace", SECOND_LIFE), 1)
    ours = chunk_path(chunk_folder(tmp_path / "trace", STREAM), 1)
    shutil.copy(theirs, ours)
    with pytest.raises(TraceError, match=r"says it is chunk 1 of rank00003\.1"):
        TensorFiles(tmp_path / "trace").find(3, 0, 1)


def test_bit_rot_shows_in_the_tensor_it_hit(job, tmp_path):
    shutil.copytree(job[0], tmp_path / "trace")
    path = chunk_path(chunk_folder(tmp_path / "trace", STREAM), 1)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 16]))
    files = TensorFiles(tmp_path / "trace")
    bad = [reference for reference, found in files.tensors(STREAM) if not found.is_intact]
    sizes = {reference: found.data.nbytes for reference, found in files.tensors(STREAM)}
    assert bad == [max(reference for reference in range(1, 5) if sizes[reference])]


def test_references_become_the_keys_under_which_their_bytes_lie():
    rows = [(5, 1, 0), (3, 1, 1), (9, 1, 0), (2, 2, 0), (8, 1, 1), (1 << 40, 2, 0)]
    tensors = np.zeros(len(rows), TENSOR_DTYPE)
    for name, column in zip(("reference", "chunk", "index"), zip(*rows)):
        tensors[name] = column
    asked = np.array([0, 5, 9, 3, 8, 2, 1 << 40, 7, 4, (1 << 64) - 1], np.uint64)
    assert standing_references(asked, tensors).tolist() == [0, 5, 5, 3, 3, 2, 2, 0, 0, 0]
    assert standing_references(asked, tensors[:0]).tolist() == [0] * 10
    assert standing_references(asked[:0], tensors).tolist() == []
