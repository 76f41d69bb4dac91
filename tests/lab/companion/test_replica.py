"""Replicas on disks that refuse, with few descriptors, and behind crashes of the host."""

import os
import resource
import shutil

import pytest

from rankscope.companion.replica import ReplicaFiles
from rankscope.errors import FolderError, SpoolError
from rankscope.record.ranks import StreamId
from rankscope.spool.replicas import replica_path, replicated
from tests.companion.test_replica import STREAM
from tests.lab.soak.disks import Disk
from tests.spool.streams import write_some
from tests.spool.test_reader import record_ends


def test_a_disk_that_refuses_is_reported_once_and_what_it_refused_is_taken_later(tmp_path, capfd):
    replicas = ReplicaFiles(tmp_path / "out")
    replicas.append(STREAM, 0, bytes(1024))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048 + 17, hard))
    try:
        for _ in range(5):
            assert replicas.append(STREAM, 1024, bytes(4096)) == 1024
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in replicas.trouble
    assert capfd.readouterr().err.count("cannot be written") == 1
    assert replica_path(tmp_path / "out", STREAM).stat().st_size == 1024
    assert replicas.append(STREAM, 1024, bytes(4096)) == 5120
    assert replicas.trouble == ""
    replicas.close()


def test_with_few_descriptors_left_others_are_closed_for_a_stream(tmp_path):
    """Otherwise a stream that found none would have been refused for good."""
    replicas = ReplicaFiles(tmp_path / "out")
    ranks = [StreamId(rank=rank, incarnation=0) for rank in range(64)]
    for rank in ranks[:32]:
        replicas.append(rank, 0, bytes(64))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        for rank in ranks:
            assert replicas.append(rank, replicas.length(rank), bytes(64)) in (64, 128)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    replicas.close()
    assert len(replicated(tmp_path / "out")) == 64


def test_more_streams_than_open_files_all_grow(tmp_path):
    replicas = ReplicaFiles(tmp_path / "out")
    ranks = [StreamId(rank=rank, incarnation=0) for rank in range(600)]
    for turn in range(3):
        for rank in ranks:
            assert replicas.append(rank, turn * 64, bytes([turn]) * 64) == turn * 64 + 64
    replicas.close()
    assert replicated(tmp_path / "out") == dict.fromkeys(ranks, 192)


def test_a_name_of_which_a_crash_of_the_host_left_nothing_is_written_again(tmp_path):
    """A file system may keep a file's name and lose its bytes."""
    first = ReplicaFiles(tmp_path / "out")
    first.claim("run-1")
    first.close()
    (tmp_path / "out/spool/run-id").write_text("")
    again = ReplicaFiles(tmp_path / "out")
    again.claim("run-1")
    again.close()
    assert (tmp_path / "out/spool/run-id").read_text() == "run-1"
    with pytest.raises(FolderError, match="gathers run run-1"):
        ReplicaFiles(tmp_path / "out").claim("run-2")


@pytest.fixture
def disk(tmp_path):
    """A file system that fails when told to; skipped where none may be mounted."""
    if os.getuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("only root may mount a disk, and mkfs.ext4 makes it")
    try:
        disk = Disk(tmp_path / "disk", "ext4", 16)
    except OSError as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield disk
    disk.remove()


@pytest.mark.parametrize("how", ["fail", "forbid_writing"])
def test_a_replica_whose_disk_fails_goes_on_once_it_is_back(tmp_path, disk, how):
    whole = write_some(tmp_path / "s", 40)
    half = record_ends(whole)[30]
    out = disk.place / "out"
    replicas = ReplicaFiles(out)
    assert replicas.append(STREAM, 0, whole[:half]) == half
    replicas.to_sync(STREAM).put_on_disk()
    getattr(disk, how)()
    assert replicas.append(STREAM, half, whole[half:]) == half
    with pytest.raises(SpoolError):
        replicas.length(STREAM)
    assert replicas.trouble
    disk.replace()
    assert replicas.length(STREAM) == half
    assert replicas.append(STREAM, half, whole[half:]) == len(whole)
    replicas.close()
    assert replica_path(out, STREAM).read_bytes() == whole
