"""What counts as a step and as a stall, in traces and spools of rarer kinds."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

from rankscope.companion.hostwatch import StallMonitor
from rankscope.companion.links import FolderLink
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import JobState
from rankscope.record.call import Mode
from rankscope.record.ranks import StreamId
from rankscope.run.folders import (
    SHARED,
    mark_job_over,
    read_run_header,
)
from rankscope.run.jobstatus import stalls_in
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.companion.test_stallmonitor import (
    SOON,
    Hosts,
    Pen,
    inside,
    noted,
    stuck,
    told,
    watched,
)
from tests.companion.test_stallmonitor import writer as writer
from tests.spool.streams import value
from tests.waiting import wait_until


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_ranks_that_are_killed_while_they_stand_are_said_to_have_ended(hosts: Hosts):
    host = hosts(settings=SOON)
    collector, relay = host.collector(drain_seconds=1.0), host.relay()
    rank = stuck(host, 0)
    assert wait_until(lambda: noted(host)), host.log("relay")
    rank.kill()
    assert wait_until(lambda: noted(host)[0].over_ns), host.log("relay")
    assert noted(host)[0].is_by_end
    mark_job_over(host.folder)
    assert collector.wait(120) == relay.wait(120) == 0
    (only,) = noted(host)
    assert only.is_by_end
    assert not host.folder.exists()


def test_ranks_that_say_why_they_end_have_not_gone_on(hosts: Hosts):
    """As those that Ctrl-C ends: they write that they raised, and are gone a moment later."""
    host = hosts(settings=SOON)
    host.collector(drain_seconds=30.0)
    host.relay()
    ranks = [stuck(host, rank) for rank in range(2)]
    assert wait_until(lambda: noted(host)), host.log("relay")
    for rank in ranks:
        told(rank)
        assert rank.stdout is not None and rank.stdout.readline() == "gone on\n"
        rank.kill()
    assert wait_until(lambda: noted(host)[0].over_ns), host.log("relay")
    assert noted(host)[0].is_by_end


def test_nothing_is_noted_where_it_is_switched_off_or_while_one_rank_moves(
    tmp_path: Path, hosts: Hosts
):
    """By a clock that is handed in: twice the limit goes by, then the other rank stands too."""
    host = hosts(address=SHARED, settings={"stall-seconds": "3"})
    header = read_run_header(host.folder)
    switched_off = dataclasses.replace(header, settings={"stall-seconds": "0"})
    watching, off = tmp_path / "watching", tmp_path / "off"
    for folder in (watching, off):
        folder.mkdir()
    monitors = [StallMonitor(watching, header, "0a"), StallMonitor(off, switched_off, "0a")]
    moving = host.rank(1, batches=20_000, pause_ms=20)
    stuck(host, 0)
    assert wait_until(lambda: host.confirmed(1))
    shipments = {
        stream: Shipment(host.folder, stream)
        for stream in (StreamId(rank=0, incarnation=0), StreamId(rank=1, incarnation=0))
    }
    link = FolderLink(header, "0a")
    now = time.monotonic()

    def look() -> None:
        """Once all has been sent that was there before: one rank never stops to write."""
        nonlocal now
        there = {each: one.reader.committed(one.acked) for each, one in shipments.items()}

        def has_sent() -> bool:
            link.exchange(shipments, now, JobState.LAUNCHED)
            return all(one.acked >= there[each] > 0 for each, one in shipments.items())

        assert wait_until(has_sent)
        now += 1.0
        for monitor in monitors:
            monitor.look(shipments, now)

    for _ in range(7):
        before = host.confirmed(1)
        assert wait_until(lambda before=before: host.confirmed(1) > before)
        look()
    assert moving.poll() is None
    assert stalls_in(watching) == stalls_in(off) == noted(host) == []

    moving.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(moving.pid))
    for _ in range(4):
        look()
    (stall,) = stalls_in(watching)
    assert "in a call of train step 0" in stall.where
    assert stalls_in(off) == []
    link.close()
    for shipment in shipments.values():
        shipment.reader.close()


def test_a_step_whose_begin_was_freed_counts_all_the_same(tmp_path: Path, writer: SpoolWriter):
    pen = Pen(writer)
    pen.begin()
    with StreamReader(tmp_path / "rank00000.0") as reader:
        while reader.lowest() == 0:
            for _ in range(500):
                call = pen.call()
                writer.write(RecordKind.VALUE, value(call))
                pen.leave(call)
            reader.free_below(reader.committed())
    assert inside(tmp_path) == "train step 0, before its optimizer"


def test_an_evaluation_counts_only_while_a_call_is_open(tmp_path: Path, writer: SpoolWriter):
    pen = Pen(writer)
    pen.begin(Mode.EVAL)
    call = pen.call(mode=Mode.EVAL)
    assert inside(tmp_path) == "a call of eval step 0"
    pen.leave(call)
    assert inside(tmp_path) == ""


def test_a_rank_of_which_records_wait_does_not_count_for_its_spool_may_be_full(
    tmp_path: Path, writer: SpoolWriter
):
    standing, shipments = watched(tmp_path, writer, is_sent=False, stall_seconds="4")
    begin = time.monotonic()
    for second in range(6):
        standing.look(shipments, begin + second)
    assert standing.latest is None
    writer.close()


def test_a_relay_that_was_away_has_seen_nobody_stand(tmp_path: Path, writer: SpoolWriter):
    standing, shipments = watched(tmp_path, writer, stall_seconds="20")
    begin = time.monotonic()
    standing.look(shipments, begin)
    standing.look(shipments, begin + 30)
    assert standing.latest is None
    for second in range(21):
        standing.look(shipments, begin + 30 + second)
    assert standing.latest is not None
    writer.close()
