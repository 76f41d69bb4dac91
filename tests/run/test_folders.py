"""The spool folder of a host."""

import json
import os
import threading
from pathlib import Path

import pytest

from rankscope.errors import FolderBusyError, SpoolError
from rankscope.record.ranks import StreamId
from rankscope.run.folders import (
    FolderLock,
    RunHeader,
    check_free_space,
    host_run_folder,
    is_held,
    mark_job_over,
    read_run_header,
    run_key,
    spool_base,
    stream_folder,
    stream_named,
    streams,
    write_run_header,
)
from tests.spool.streams import write_some

HEADER = RunHeader(
    run_id="job/1", out=Path("/out"), collector="ipc:///x", world_size=4, settings={"steps": "0-2"}
)


def test_the_run_header_comes_back_as_it_was_written(tmp_path):
    write_run_header(tmp_path, HEADER)
    assert read_run_header(tmp_path) == HEADER
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["run.json"]


GOOD = {
    "format": "rankscope.run/1",
    "run_id": "a",
    "out": "/",
    "collector": "",
    "world_size": 1,
    "settings": {},
}
DAMAGED = [
    "",
    "[]",
    "nonsense",
    "[" * 100_000,
    *(json.dumps({**GOOD, name: None}) for name in GOOD),
    json.dumps({**GOOD, "format": "rankscope.run/2"}),
    json.dumps({**GOOD, "world_size": True}),
    json.dumps({**GOOD, "world_size": 0}),
    json.dumps({**GOOD, "collector": 1}),
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_run_header_is_one_error_that_names_it(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(SpoolError):
        read_run_header(tmp_path)


def test_a_run_folder_belongs_to_its_user_alone(tmp_path):
    base = spool_base(tmp_path)
    folder = host_run_folder(base, run_key("../../etc"))
    assert folder.parent == base
    assert folder.stat().st_mode & 0o777 == 0o700
    base.chmod(0o755)
    with pytest.raises(SpoolError, match="open to others"):
        host_run_folder(base, run_key("x"))
    base.chmod(0o700)
    with pytest.raises(SpoolError, match="not a file name"):
        host_run_folder(base, "../x")
    (base / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(SpoolError, match="is a link"):
        host_run_folder(base, "elsewhere")


def test_streams_are_folders_named_from_integers_that_hold_a_segment(tmp_path):
    for rank, incarnation in ((0, 0), (12, 1), (123456, 0)):
        write_some(stream_folder(tmp_path, StreamId(rank=rank, incarnation=incarnation)), 1)
    (tmp_path / "rank00007.0").mkdir()
    (tmp_path / "companion.log").write_text("")
    found = [stream.name for stream in streams(tmp_path)]
    assert found == ["rank00000.0", "rank00012.1", "rank123456.0"]
    for name in (
        "rank1.0",
        "rank00001",
        "rank00001.00",
        "rank00001.70000",
        "x/rank00001.0",
        "rank-0001.0",
    ):
        assert stream_named(name) is None


def test_a_folder_lock_is_held_by_one_at_a_time(tmp_path):
    lock = FolderLock(tmp_path / "companion.lock", "relay")
    with pytest.raises(FolderBusyError, match="another relay is at work there"):
        FolderLock(tmp_path / "companion.lock", "relay")
    lock.release()
    lock.release()
    FolderLock(tmp_path / "companion.lock", "relay").release()


def test_a_removed_lock_file_never_lets_two_in(tmp_path):
    """Threads open the file at the very moment in which its holder removes it."""
    path, inside, most, turns = tmp_path / "collector.lock", [], [0], [0] * 3

    def take(me: int) -> None:
        while turns[me] < 200:
            try:
                lock = FolderLock(path, "collector")
            except FolderBusyError:
                continue
            inside.append(me)
            most[0] = max(most[0], len(inside))
            inside.remove(me)
            lock.remove()
            turns[me] += 1

    threads = [threading.Thread(target=take, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most[0], turns) == (1, [200] * 3)
    assert not path.exists() and not is_held(path) and not path.exists()


def test_too_little_disk_is_told_with_what_is_needed_and_free(tmp_path):
    check_free_space(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(SpoolError, match=r"needs \d+ MiB .* MiB are free; choose"):
        check_free_space(tmp_path, 1 << 60)


def test_the_marker_that_no_incarnation_will_follow(tmp_path):
    mark_job_over(tmp_path)
    assert (tmp_path / "job-over").exists()
