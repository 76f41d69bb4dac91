"""Chunks of full tensors: readable by anybody, whatever happened while they were written."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from rankscope.errors import ChunkError, ChunkFullError
from rankscope.spool.chunks.chunkfiles import (
    chunk_folder,
    chunk_path,
    damaged_references,
    finish_chunks,
    parse_header,
    read_header,
)
from rankscope.spool.chunks.writing import HEADER_BYTES, ChunkWriter
from rankscope.spool.recordcolumns import StreamReader, records
from rankscope.spool.recordformat import RecordKind
from tests import forked
from tests.chunks.chunked import STREAM, Writing, assert_whole, content, read_plainly
from tests.waiting import wait_until

SHAPES = [(), (1,), (0, 4), (5,), (2, 3), (3, 1, 2), (40, 50), (70_000,)]
KINDS = ["float32", "bool", "uint8", "int64", "float16", "complex64", "uint16"]


def folder_of(writing: Writing) -> Path:
    return chunk_folder(writing.trace, STREAM)


def write_mixed(writing: Writing, count: int = 60) -> None:
    chosen = random.Random(5)
    for reference in range(1, count + 1):
        dtype = chosen.choice(KINDS)
        shape = chosen.choice(SHAPES)
        assert writing.add(reference, dtype, shape)


def test_a_finished_chunk_is_a_plain_safetensors_file(tmp_path):
    writing = Writing(tmp_path)
    write_mixed(writing)
    writing.writer.finish()
    found = read_plainly(folder_of(writing))
    assert sorted(found) == list(range(1, 61))
    for reference, (dtype, shape) in writing.shapes.items():
        assert (found[reference].dtype.name, found[reference].shape) == (dtype, shape)
        assert_whole(found, reference)
    (path,) = folder_of(writing).iterdir()
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    assert metadata.pop("xxh3") and metadata == {
        "format": "rankscope.tensors/1", "rank": "3", "incarnation": "0", "chunk": "1",
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    assert writing.writer.spent_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("limits", "chunks"),
    [
        ({"chunk_tensors": 7}, 9),
        ({"chunk_bytes": 100_000}, None),
        ({"header_bytes": 4096}, None),
        ({}, 1),
    ],
    ids=["tensors", "bytes", "header", "default"],
)
def test_a_chunk_ends_before_a_limit_is_passed(tmp_path, limits, chunks):
    writing = Writing(tmp_path, **limits)
    write_mixed(writing)
    writing.writer.finish()
    paths = sorted(folder_of(writing).iterdir())
    assert [path.name for path in paths] == [
        f"{number:06d}.safetensors" for number in range(1, len(paths) + 1)
    ]
    assert chunks is None or len(paths) == chunks
    assert (len(paths) > 1) == bool(limits)
    for path in paths:
        file, header = read_header(path)
        assert header is not None
        assert len(header.tensors) <= limits.get("chunk_tensors", 8192)
        data_bytes = path.stat().st_size - file.start
        assert data_bytes <= limits.get("chunk_bytes", 256 << 20) or len(header.tensors) == 1
        assert file.start == 8 + limits.get("header_bytes", HEADER_BYTES)
    found = read_plainly(folder_of(writing))
    for reference in range(1, 61):
        assert_whole(found, reference)
    assert writing.writer.spent_bytes == sum(path.stat().st_size for path in paths)


def test_an_unfinished_chunk_is_refused_by_readers_and_finished_to_the_same_bytes(tmp_path):
    writing = Writing(tmp_path / "killed", chunk_tensors=50)
    write_mixed(writing)
    # a rank killed in the middle of a tensor
    writing.writer.write(99, "uint8", (5000,), (np.ones(5000, np.uint8),))
    left = folder_of(writing)
    with pytest.raises(SafetensorError):
        safe_open(chunk_path(left, 2), "np").__enter__()
    shutil.copytree(tmp_path / "killed", tmp_path / "finished-later")
    writing.writer.finish()
    later = chunk_folder(tmp_path / "finished-later", STREAM)
    reports = finish_chunks(later, STREAM, writing.tensors, writing.definitions)
    assert [r.tensors for r in reports] == [50, 10]
    assert not reports[0].note and "unfinished with 10 whole tensors" in reports[1].note
    assert "5000 bytes of a tensor that never became whole were cut off" in reports[1].note
    for path in left.iterdir():
        assert path.read_bytes() == (later / path.name).read_bytes()
    again = finish_chunks(later, STREAM, writing.tensors, writing.definitions)
    assert all(r.tensors and not r.note for r in again)


def test_a_header_torn_while_it_was_written_is_written_again(tmp_path):
    writing = Writing(tmp_path)
    write_mixed(writing, 5)
    path = chunk_path(folder_of(writing), 1)
    whole = bytearray(path.read_bytes())
    writing.writer.finish()
    finished = path.read_bytes()
    for cut in (1, 2, 300, 5000):
        torn = bytearray(finished)
        torn[8] = 0  # written last
        torn[8 + cut : 8 + HEADER_BYTES] = bytes(HEADER_BYTES - cut)
        path.write_bytes(torn)
        (report,) = finish_chunks(folder_of(writing), STREAM, writing.tensors, writing.definitions)
        assert report.tensors == 5
        assert path.read_bytes() == finished
    assert len(whole) == len(finished)


def test_a_chunk_whose_rank_is_alive_is_left_alone(tmp_path):
    writing = Writing(tmp_path)
    write_mixed(writing, 3)
    before = chunk_path(folder_of(writing), 1).read_bytes()
    (report,) = finish_chunks(folder_of(writing), STREAM, writing.tensors, writing.definitions)
    assert "still writes it" in report.note
    assert chunk_path(folder_of(writing), 1).read_bytes() == before
    writing.add(4)
    writing.writer.finish()
    assert sorted(read_plainly(folder_of(writing))) == [1, 2, 3, 4]


def test_bit_rot_is_found_by_the_checksums_in_the_chunk_itself(tmp_path):
    writing = Writing(tmp_path)
    write_mixed(writing, 20)
    writing.writer.finish()
    path = chunk_path(folder_of(writing), 1)
    assert damaged_references(path) == []
    file, header = read_header(path)
    assert header is not None
    chosen = random.Random(1)
    for held in [held for held in header.tensors if held.end > held.begin]:
        data = bytearray(path.read_bytes())
        data[file.start + chosen.randrange(held.begin, held.end)] ^= 1 << chosen.randrange(8)
        path.write_bytes(data)
        assert damaged_references(path) == [held.reference]
        data = bytearray(path.read_bytes())
        bad = np.frombuffer(data, np.uint8)[file.start + held.begin : file.start + held.end]
        bad[:] = content(held.reference, len(bad))
        path.write_bytes(data)
    assert damaged_references(path) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"tensors/1", b"tensors/9"),
        lambda text: text.replace(b'"U8"', b'"U9"'),
        lambda text: text.replace(b'"shape":[7]', b'"shape":[8]'),
        lambda text: text.replace(b'"shape":[7]', b'"shape":[-7]'),
        lambda text: text.replace(b'"shape":[7]', b'"shape":7'),
        lambda text: text.replace(b"[7,14]", b"[8,15]"),
        lambda text: text.replace(b'"2":', b'"layers.0":'),
        lambda text: text.replace(b'"2":', '"٢":'.encode()),
        lambda text: text.replace(b'"rank":"3"', b'"rank":"99999999999"'),
        lambda text: text.replace(b'"rank":"3"', b'"rank":3.5'),
        lambda text: text[:50],
        lambda text: b"[" * 100_000,
        lambda text: b"null",
        lambda text: b"{}",
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, change):
    writing = Writing(tmp_path)
    for reference in (1, 2, 3):
        writing.add(reference)
    writing.writer.finish()
    raw = chunk_path(folder_of(writing), 1).read_bytes()
    text = raw[8 : 8 + HEADER_BYTES].rstrip()
    assert len(parse_header(text, 21).tensors) == 3
    with pytest.raises(ChunkError):
        parse_header(change(text), 21)
    with pytest.raises(ChunkError):
        parse_header(text, 22)


def test_a_tensor_beyond_the_budget_is_refused_and_a_smaller_one_still_fits(tmp_path):
    writing = Writing(tmp_path, limit_bytes=20_000, header_bytes=4096, chunk_bytes=5000)
    assert writing.add(1, "uint8", (4000,)) and writing.add(2, "uint8", (4000,))
    with pytest.raises(ChunkFullError, match="--rs-tensor-budget"):
        writing.add(3, "uint8", (4000,))
    assert writing.add(4, "uint8", (900,))
    assert writing.writer.spent_bytes <= 20_000 and writing.writer.is_open
    writing.writer.finish()
    assert sorted(read_plainly(folder_of(writing))) == [1, 2, 4]
    used = sum(path.stat().st_size for path in folder_of(writing).iterdir())
    assert used == writing.writer.spent_bytes


def test_nothing_is_made_for_a_rank_that_keeps_nothing(tmp_path):
    writer = ChunkWriter(tmp_path, STREAM, limit_bytes=1 << 30)
    writer.finish()
    assert list(tmp_path.iterdir()) == []
    assert writer.write(1, "uint8", (1,), (np.ones(1, np.uint8),)) is None


def test_a_forked_child_has_no_part_in_the_chunks(tmp_path):
    writing = Writing(tmp_path)
    writing.add(1)
    child = os.fork()
    if child == 0:
        wrote = writing.add(2) or writing.writer.is_open
        writing.writer.finish()
        os._exit(1 if wrote else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (
        "still writes"
        in finish_chunks(folder_of(writing), STREAM, writing.tensors, writing.definitions)[0].note
    )
    assert writing.add(3)
    writing.writer.finish()
    assert sorted(read_plainly(folder_of(writing))) == [1, 3]


# ------------------------------------------------------------------ full disks


FILL = """
import json, resource, sys
from pathlib import Path
from rankscope.errors import ChunkError
from tests.chunks.chunked import Writing
trace, chunk_bytes, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writing = Writing(trace, chunk_bytes=chunk_bytes, header_bytes=8192)
stored, error = [], ""
for reference in range(1, 400):
    try:
        if not writing.add(reference, "float32", (reference * 7 % 5000,)):
            break
        stored.append(reference)
    except ChunkError as raised:
        error = str(raised)
quiet = all(not writing.add(reference) for reference in range(1000, 1010))
writing.writer.finish()
print(json.dumps([stored, error, quiet, writing.writer.trouble]))
"""


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one MB; skipped where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = forked.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(trace: Path, chunk_bytes: int, limit: int = 0) -> tuple[list[int], str, bool, str]:
    done = forked.run(
        [sys.executable, "-c", FILL, str(trace), str(chunk_bytes), str(limit)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    stored, error, quiet, trouble = json.loads(done.stdout)
    return stored, error, quiet, trouble


@pytest.mark.parametrize("chunk_bytes", [50_000, 1 << 28], ids=["many", "one"])
def test_on_a_full_disk_all_that_was_stored_stays_readable(small_disk, chunk_bytes):
    stored, error, quiet, trouble = fill(small_disk, chunk_bytes)
    assert os.strerror(errno.ENOSPC) in error and os.strerror(errno.ENOSPC) in trouble and quiet
    found = read_plainly(chunk_folder(small_disk, STREAM))
    assert len(stored) > 50 and sorted(found) == stored
    for reference in stored:
        assert_whole(found, reference)


# ------------------------------------------------------------------ kills


KEEP_FOR_EVER = """
import random, sys
from pathlib import Path
import msgpack
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.chunks.chunked import STREAM, content, pack
from rankscope.spool.chunks.writing import HEADER_BYTES, ChunkWriter
trace, chosen = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
spool = SpoolWriter(trace / "spool", limit_bytes=64 << 20)
writer = ChunkWriter(trace, STREAM, limit_bytes=1 << 40, chunk_bytes=3_000_000, chunk_tensors=60)
reference = 0
while True:
    reference += 1
    if reference == 6:
        (trace / "started").touch()
    size = chosen.choice((10, 4000, 65536, 1_000_000))
    if reference <= 4:
        spool.define(msgpack.packb(
            {"id": reference, "kind": "meta", "dtype": "uint8",
             "shape": [(10, 4000, 65536, 1_000_000)[reference - 1]]}))
    entry = writer.write(reference, "uint8", (size,), (content(reference, size),))
    writer.commit(entry)
    spool.write(RecordKind.TENSOR, pack(entry, 1 + (10, 4000, 65536, 1_000_000).index(size)))
"""


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 20))]
)
def test_a_writer_killed_at_any_moment_loses_no_recorded_tensor(tmp_path, seed):
    process = forked.Popen([sys.executable, "-c", KEEP_FOR_EVER, str(tmp_path), str(seed)])
    try:
        assert wait_until((tmp_path / "started").exists)
        time.sleep(0.02 + random.Random(seed).uniform(0.0, 0.4))
    finally:
        process.kill()
        process.wait()
    with StreamReader(tmp_path / "spool") as reader:
        found = records(b"".join(reader.chunks()))
    _, tensors = found.columns(RecordKind.TENSOR)
    definitions = {d["id"]: d for d in found.definitions()}
    assert len(tensors) > 0
    folder = chunk_folder(tmp_path, STREAM)
    unfinished = [path for path in folder.glob("*.safetensors") if not whole(path)]
    reports = finish_chunks(folder, STREAM, tensors, definitions)
    assert not any(report.lost for report in reports)
    assert len(unfinished) <= 1
    assert [r.path for r in reports if r.note or not r.tensors] == unfinished
    plain = read_plainly(folder)
    assert {*tensors["reference"].tolist()} <= {*plain}
    # at most the one whose record was about to be written
    assert len(plain) <= len(tensors) + 1
    for reference in tensors["reference"].tolist():
        assert_whole(plain, reference)


def whole(path: Path) -> bool:
    try:
        return read_header(path)[1] is not None
    except ChunkError:
        return False
