"""Replicas grow at exactly their own end, and never through a link."""

import os

import pytest

from rankscope.errors import FolderError
from rankscope.gather.replica import (
    Replicas,
    StreamEnd,
    read_end,
    replica_path,
    replicated,
    write_end,
)
from rankscope.record.run import EndReason, StreamId
from tests.spool.streams import write_some

STREAM = StreamId(rank=3, incarnation=0)


def test_only_a_frame_at_the_end_is_written(tmp_path):
    replicas = Replicas(tmp_path / "out")
    assert replicas.length(STREAM) == 0
    assert replicas.append(STREAM, 0, b"a" * 128) == 128
    assert replicas.append(STREAM, 0, b"b" * 128) == 128
    assert replicas.append(STREAM, 64, b"b" * 128) == 128
    assert replicas.append(STREAM, 1 << 40, b"b" * 64) == 128
    assert replicas.append(STREAM, 128, b"c" * 64) == 192
    replicas.close()
    path = replica_path(tmp_path / "out", STREAM)
    assert path.name == "rank00003.0.cells"
    assert path.read_bytes() == b"a" * 128 + b"c" * 64
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_replica_is_cut_to_its_valid_prefix_and_the_cut_is_reported(tmp_path):
    whole = write_some(tmp_path / "s", 10)
    path = replica_path(tmp_path / "out", STREAM)
    for cut in range(len(whole) - 700, len(whole) + 1, 50):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[:cut])
        replicas = Replicas(tmp_path / "out")
        length = replicas.length(STREAM)
        assert length <= cut
        assert bool(replicas.reports) == (length != cut)
        assert replicas.append(STREAM, length, whole[length:]) == len(whole)
        replicas.close()
        assert path.read_bytes() == whole


def test_a_link_or_a_pipe_in_a_replicas_place_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = replica_path(tmp_path / "out", STREAM)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(FolderError, match="cannot be opened"):
        Replicas(tmp_path / "out").length(STREAM)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FolderError, match="no ordinary file"):
        Replicas(tmp_path / "out").length(STREAM)
    assert victim.read_text() == "precious"


def test_a_stream_beyond_its_quota_is_refused(tmp_path):
    replicas = Replicas(tmp_path / "out", quota_bytes=256)
    replicas.append(STREAM, 0, bytes(192))
    with pytest.raises(FolderError, match="quota"):
        replicas.append(STREAM, 192, bytes(128))
    assert replicas.append(STREAM, 192, bytes(64)) == 256
    replicas.close()


def test_more_streams_than_open_files_all_grow(tmp_path):
    replicas = Replicas(tmp_path / "out")
    ranks = [StreamId(rank=rank, incarnation=0) for rank in range(600)]
    for turn in range(3):
        for rank in ranks:
            assert replicas.append(rank, turn * 64, bytes([turn]) * 64) == turn * 64 + 64
    replicas.close()
    assert replicated(tmp_path / "out") == dict.fromkeys(ranks, 192)


def test_end_markers_are_read_back_and_broken_ones_are_none(tmp_path):
    Replicas(tmp_path).close()
    end = StreamEnd(committed=640, end=EndReason.LOST)
    write_end(tmp_path, STREAM, end)
    assert read_end(tmp_path, STREAM) == end
    path = tmp_path / "spool" / "rank00003.0.json"
    for text in ("", "[]", "{}", '{"committed": "x", "end": "exit"}', "\xff"):
        path.write_text(text)
        assert read_end(tmp_path, STREAM) is None
    assert read_end(tmp_path, StreamId(rank=4, incarnation=0)) is None


def test_other_files_in_the_folder_are_no_streams(tmp_path):
    Replicas(tmp_path).close()
    for name in (
        "x.cells",
        "rank3.0.cells",
        "rank00003.0.cells.bak",
        "rank99999999.0.cells",
        "host-1.json",
    ):
        (tmp_path / "spool" / name).write_text("x")
    assert replicated(tmp_path) == {}
