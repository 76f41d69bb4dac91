"""Replicas are found by name, and the markers beside them say how their streams ended."""

from pathlib import Path

import pytest

from rankscope.record.ranks import EndReason, StreamId
from rankscope.spool.replicas import StreamEnd, read_end, replica_path, replicated, write_end

STREAM = StreamId(rank=3, incarnation=0)


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    path = replica_path(tmp_path, STREAM)
    path.parent.mkdir()
    return path


def test_end_markers_are_read_back_and_broken_ones_are_none(replica: Path):
    end = StreamEnd(committed=640, end=EndReason.LOST)
    assert write_end(replica, end)
    assert read_end(replica) == end
    path = replica.with_name("rank00003.0.json")
    for text in ("", "[]", "{}", '{"committed": "x", "end": "exit"}', "\xff"):
        path.write_text(text)
        assert read_end(replica) is None
    assert read_end(replica.with_name("rank00004.0.cells")) is None


def test_a_marker_gives_way_only_to_one_that_knows_of_more_bytes(replica: Path):
    """A relay that was started again tells again how a stream ended, by what it sees then."""
    first = StreamEnd(committed=640, end=EndReason.EXIT)
    write_end(replica, first)
    for committed in (0, 640):
        assert not write_end(replica, StreamEnd(committed=committed, end=EndReason.LOST))
    assert read_end(replica) == first
    more = StreamEnd(committed=704, end=EndReason.LOST)
    assert write_end(replica, more)
    assert read_end(replica) == more


def test_other_files_in_the_folder_are_no_streams(replica: Path):
    for name in (
        "x.cells",
        "rank3.0.cells",
        "rank00003.0.cells.bak",
        "rank99999999.0.cells",
        "host-1.json",
    ):
        replica.with_name(name).write_text("x")
    assert replicated(replica.parents[1]) == {}
    replica.write_bytes(b"x" * 64)
    assert replicated(replica.parents[1]) == {STREAM: 64}
