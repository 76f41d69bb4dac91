"""Replicas grow at exactly their own end, and never through a link."""

import os
import random

import pytest

from rankscope.companion.replica import ReplicaFiles
from rankscope.errors import FolderError
from rankscope.record.ranks import StreamId
from rankscope.spool.replicas import free, replica_path, write_settled
from rankscope.tree.assembly.sources import find_streams
from tests.spool.streams import settle, settled, write_some
from tests.spool.test_reader import record_ends

STREAM = StreamId(rank=3, incarnation=0)


def test_only_a_frame_at_the_end_is_written(tmp_path):
    replicas = ReplicaFiles(tmp_path / "out")
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


def test_a_replica_torn_at_any_byte_is_cut_to_its_valid_prefix_and_grows_on(tmp_path, capfd):
    whole = write_some(tmp_path / "s", 3)
    ends = record_ends(whole)
    path = replica_path(tmp_path / "out", STREAM)
    path.parent.mkdir(parents=True)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        replicas = ReplicaFiles(tmp_path / "out")
        length = replicas.length(STREAM)
        assert length == max(end for end in ends if end <= cut) == path.stat().st_size
        assert bool(capfd.readouterr().err) == (length != cut)
        assert replicas.append(STREAM, length, whole[length:]) == len(whole)
        replicas.close()
        assert path.read_bytes() == whole


def test_a_bit_flipped_in_a_replica_cuts_it_there_and_it_grows_on(tmp_path):
    whole = write_some(tmp_path / "s", 6)
    ends = record_ends(whole)
    path = replica_path(tmp_path / "out", STREAM)
    path.parent.mkdir(parents=True)
    chosen = random.Random(6)
    for _ in range(1000):
        at = chosen.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        replicas = ReplicaFiles(tmp_path / "out")
        length = replicas.length(STREAM)
        assert length == max(end for end in ends if end <= at)
        assert replicas.append(STREAM, length, whole[length:]) == len(whole)
        replicas.close()
        assert path.read_bytes() == whole


def test_a_settled_replica_is_opened_behind_its_hole_and_grows_on(tmp_path, capfd):
    whole = write_some(tmp_path / "s", 300)
    ends = record_ends(whole)
    path = replica_path(tmp_path / "out", STREAM)
    path.parent.mkdir(parents=True)
    for end, cut in (
        *((ends[1], len(whole)), (ends[200], len(whole)), (ends[500], ends[600])),
        *((ends[700], ends[701] - at) for at in range(1, 64)),
        *((ends[800], ends[800]), (ends[800], 4096)),  # the last: a crash of the host took the rest
    ):
        path.with_suffix(".settled").unlink(missing_ok=True)
        path.write_bytes(whole[:cut])
        settle(path, settled(whole, end))
        os.truncate(path, cut)
        replicas = ReplicaFiles(tmp_path / "out")
        length = replicas.length(STREAM)
        assert length == max(end, *(one for one in ends if one <= cut)) == path.stat().st_size
        assert bool(capfd.readouterr().err) == (length != cut)
        assert replicas.append(STREAM, length, whole[length:]) == len(whole)
        replicas.close()
        assert path.read_bytes()[end:] == whole[end:]
        (found,) = find_streams([tmp_path / "out"])
        assert len(found.data) + found.hidden_bytes == len(whole)


def test_a_replica_whose_settled_begin_is_damaged_is_not_cut(tmp_path):
    whole = write_some(tmp_path / "s", 300)
    path = replica_path(tmp_path / "out", STREAM)
    path.parent.mkdir(parents=True)
    path.write_bytes(whole)
    settle(path, settled(whole, record_ends(whole)[500]))
    path.with_suffix(".settled").write_bytes(b"x")
    for _ in range(3):
        with pytest.raises(FolderError, match=r"rank00003.0.settled: is damaged"):
            ReplicaFiles(tmp_path / "out").length(STREAM)
    assert path.stat().st_size == len(whole)


def test_the_quota_of_a_stream_is_what_its_replica_takes_of_the_disk(tmp_path):
    whole = write_some(tmp_path / "s", 1000)
    end = record_ends(whole)[-20]
    replicas = ReplicaFiles(tmp_path / "out", quota_bytes=len(whole) + 64)
    replicas.append(STREAM, 0, whole)
    with pytest.raises(FolderError, match="quota"):
        replicas.append(STREAM, len(whole), whole)
    path = replica_path(tmp_path / "out", STREAM)
    write_settled(path, settled(whole, end))
    if not free(path, end):
        pytest.skip("the file system of the temporary folder makes no holes in files")
    assert replicas.append(STREAM, len(whole), whole[: end // 2]) == len(whole) + end // 2
    with pytest.raises(FolderError, match="quota"):
        replicas.append(STREAM, len(whole) + end // 2, whole)
    replicas.close()


def test_a_folder_holds_records_of_the_run_that_claimed_it_first_also_after_a_restart(tmp_path):
    first = ReplicaFiles(tmp_path / "out")
    first.claim("one")
    first.claim("one")
    first.close()
    again = ReplicaFiles(tmp_path / "out")
    with pytest.raises(FolderError, match="gathers run one, and takes nothing of run two"):
        again.claim("two")
    again.claim("one")
    names = [path.name for path in (tmp_path / "out/spool").iterdir()]
    assert names == ["run-id"]


def test_a_link_or_a_pipe_in_a_replicas_place_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = replica_path(tmp_path / "out", STREAM)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(FolderError, match="cannot be opened"):
        ReplicaFiles(tmp_path / "out").length(STREAM)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FolderError, match="not an ordinary file"):
        ReplicaFiles(tmp_path / "out").length(STREAM)
    assert victim.read_text() == "precious"


def test_a_stream_beyond_its_quota_is_refused(tmp_path):
    replicas = ReplicaFiles(tmp_path / "out", quota_bytes=256)
    replicas.append(STREAM, 0, bytes(192))
    with pytest.raises(FolderError, match="quota"):
        replicas.append(STREAM, 192, bytes(128))
    assert replicas.append(STREAM, 192, bytes(64)) == 256
    replicas.close()
