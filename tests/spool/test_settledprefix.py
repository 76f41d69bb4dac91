"""What stands for the begin of a replica, and the hole that may be in its place at any moment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rankscope.errors import SpoolError
from rankscope.record.ranks import StreamId
from rankscope.spool.recordcolumns import records
from rankscope.spool.replicas import (
    NOTHING_SETTLED,
    SettledPrefix,
    free,
    read_settled,
    replica_path,
    settled_to,
    valid_prefix,
    write_settled,
)
from rankscope.tree.assembly.sources import find_streams
from tests.spool.streams import open_replica, settle, settled, write_some
from tests.spool.test_reader import record_ends

STREAM = StreamId(rank=0, incarnation=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_some(tmp_path_factory.mktemp("written") / "s", 1000)


@pytest.fixture
def replica(tmp_path: Path, whole: bytes) -> Path:
    path = replica_path(tmp_path, STREAM)
    path.parent.mkdir()
    path.write_bytes(whole)
    return path


@pytest.fixture
def makes_holes(replica: Path, whole: bytes) -> None:
    other = replica_path(replica.parents[1], StreamId(rank=1, incarnation=0))
    other.write_bytes(whole)
    write_settled(other, settled(whole, record_ends(whole)[-10]))
    if not free(other, len(whole)):
        pytest.skip("the file system of the temporary folder makes no holes in files")
    for path in (other, other.with_suffix(".settled")):
        path.unlink()


def test_what_is_settled_is_read_back_and_is_nothing_at_first(replica: Path, whole: bytes):
    assert (read_settled(replica), settled_to(replica)) == (NOTHING_SETTLED, 0)
    first, second = record_ends(whole)[100], record_ends(whole)[200]
    for prefix in (settled(whole, first), settled(whole, second, first, late=7)):
        write_settled(replica, prefix)
        assert (read_settled(replica), settled_to(replica)) == (prefix, prefix.settled_to)
    with pytest.raises(ValueError, match=f"{second} bytes are settled, not {first}"):
        write_settled(replica, settled(whole, first))
    assert settled_to(replica) == second
    names = {path.name for path in replica.parent.iterdir()}
    assert names == {"rank00000.0.cells", "rank00000.0.settled"}


@pytest.mark.parametrize(
    "of", [(64, b""), (0, b"x" * 64), (63, b""), (128, b"x"), (64, b"x" * 128)]
)
def test_what_cannot_stand_for_a_prefix_is_refused(of: tuple[int, bytes]):
    with pytest.raises(ValueError, match="bytes"):
        SettledPrefix(*of)


def test_a_file_that_is_damaged_anywhere_is_an_error_that_names_it(replica: Path, whole: bytes):
    ends = record_ends(whole)
    write_settled(replica, settled(whole, ends[9], ends[5], late=1))
    path = replica.with_suffix(".settled")
    good = path.read_bytes()
    chosen = random.Random(3)
    flipped = [chosen.randrange(len(good)) for _ in range(300)]
    for at in (*range(48), *flipped):
        damaged = bytearray(good)
        damaged[at] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(SpoolError, match=r"rank00000.0.settled: is damaged"):
            read_settled(replica)
    for size in (0, 1, 43, 44, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(SpoolError, match=r"rank00000.0.settled: is damaged"):
            read_settled(replica)
        (found,) = find_streams([replica.parents[1]])  # the streams of other ranks are read
        assert not len(found.data)
        assert "rank00000.0.settled: is damaged" in " ".join(found.notes)
    path.write_bytes(b"")
    for reads in (settled_to, valid_prefix, open_replica):
        with pytest.raises(SpoolError, match="is damaged"):
            reads(replica)


@pytest.mark.usefixtures("makes_holes")
def test_freed_bytes_are_the_disks_again_and_nothing_else_changes(replica: Path, whole: bytes):
    end = record_ends(whole)[-300]
    before = replica.stat()
    assert free(replica, len(whole)), "nothing is settled, so there is nothing to free"
    assert replica.read_bytes() == whole
    write_settled(replica, settled(whole, end))
    assert free(replica, len(whole)), "more than is settled is never freed"
    after = replica.stat()
    assert after.st_size == before.st_size == len(whole)
    assert after.st_blocks * 512 <= before.st_blocks * 512 - (end - 4 * 4096)
    left = replica.read_bytes()
    assert left[end:] == whole[end:]
    first = record_ends(whole)[1]
    assert left[:first] == whole[:first]
    assert not any(left[8192 : end - 8192])


def test_records_of_a_settled_replica_are_those_kept_and_those_behind(replica: Path, whole: bytes):
    ends = record_ends(whole)
    settle(replica, settled(whole, ends[500], ends[480]))
    found = open_replica(replica)
    expected = records(settled(whole, ends[500], ends[480]).payload + whole[ends[500] :])
    assert found.cells.tobytes() == expected.cells.tobytes()
    assert [one["kind"] for one in found.definitions()] == ["rank"]
    assert valid_prefix(replica) == len(whole)


def test_a_tail_torn_at_any_byte_is_valid_up_to_its_last_record_and_never_ends_at_the_hole(
    replica: Path, whole: bytes
):
    ends = record_ends(whole)
    settle(replica, settled(whole, ends[-9]))
    punched = replica.read_bytes()
    for cut in range(ends[-9], len(whole) + 1, 5):
        replica.write_bytes(punched[:cut])
        assert valid_prefix(replica) == max(end for end in ends if end <= cut)
    replica.write_bytes(punched[:100])  # a crash of the host took what was never synced
    assert valid_prefix(replica) == ends[-9]
