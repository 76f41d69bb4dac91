"""Opening traces whose collector is slow, and jobs that end meanwhile."""

from __future__ import annotations

import fcntl
import threading
import time

from rankscope.run.folders import (
    COLLECTOR_LOCK_NAME,
    SHARED,
    FolderLock,
    RunHeader,
    host_run_folder,
    spool_base,
    write_run_header,
)
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.tree.jobs import WEIGHT
from tests.tree.ranks_on_paper import PaperRank
from tests.tree.test_reader import out as out


def test_a_collector_that_is_finishing_is_waited_for(out):
    (out / "trace.json").rename(out / "later")
    lock = (out / "collector.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish():
        time.sleep(0.3)
        (out / "later").rename(out / "trace.json")

    writer = threading.Thread(target=finish)
    writer.start()
    assert not open_trace(out, wait_s=120).is_live
    writer.join()


def test_a_collector_that_takes_too_long_is_not_waited_for(out):
    (out / "trace.json").unlink()
    lock = (out / "collector.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert open_trace(out, wait_s=0.2).is_live


def test_the_ends_of_ranks_that_are_gone_are_waited_for_and_no_job_that_trains_on(tmp_path):
    """The records of a rank come before the word that it has ended."""
    spool, out, told = tmp_path / "spool", tmp_path / "trace", []
    run_folder = host_run_folder(spool_base(spool), "key")
    header = RunHeader(run_id="run-1", out=out, collector=SHARED, world_size=2)
    write_run_header(run_folder, header)
    here = PaperRank(run_folder, 0, 2, identity={"settings": {"spool": str(spool)}})
    elsewhere = PaperRank(tmp_path / "another-host", 1, 2)
    for rank in (here, elsewhere):
        with rank.call() as call:
            rank.value(call, "output", WEIGHT)
        rank.ship(out, marker=False)
    lock = FolderLock(out / COLLECTOR_LOCK_NAME, "collector")

    def progress(what, part):
        told.append(what)
        if what == "waiting for the collector" and not (out / "trace.json").exists():
            here.ship(out)
            build(out)
            lock.release()

    elsewhere.ship(out)
    assert open_trace(out, progress=progress).is_live  # one rank lives
    elsewhere.ship(out, marker=False).with_suffix(".json").unlink()
    here.writer.close()
    assert open_trace(out, progress=progress).is_live  # the other may
    assert "waiting for the collector" not in told
    elsewhere.ship(out)
    assert open_trace(out, progress=progress).is_written
    assert "waiting for the collector" in told
