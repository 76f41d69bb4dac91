"""A host of which no rank moves is noticed by its relay, whichever way that sends, and whoever of
them is killed meanwhile."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from rankscope.companion.links import FolderLink
from rankscope.companion.relay import StallMonitor
from rankscope.companion.running.splitstream import activity_of
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import JobState
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId
from rankscope.run.folders import (
    SHARED,
    RunHeader,
    mark_job_over,
    read_run_header,
    stream_folder,
)
from rankscope.run.jobstatus import Stall, carry_stalls, stalls_in
from rankscope.spool.recordformat import ENTER, EXIT, STEP, RecordKind, StepEvent
from rankscope.spool.streamreader import StreamReader
from rankscope.spool.writer import SpoolWriter
from tests import forked
from tests.companion.jobs import Host, environment
from tests.spool.streams import SMALL, rank_definition, value
from tests.waiting import wait_until

STUCK = """
import os, sys, time
from pathlib import Path
from rankscope.record.ranks import EndReason
from rankscope.spool.writer import SpoolWriter
from tests.companion.test_stallmonitor import Pen
from tests.spool.streams import rank_definition
writer = SpoolWriter(Path(sys.argv[1]), limit_bytes=64 << 20)
writer.define(rank_definition(int(sys.argv[2]), pid=os.getpid()))
pen = Pen(writer)
pen.begin()
call = pen.call()
print("written", flush=True)
sys.stdin.readline()
pen.leave(call)
pen.end()
print("gone on", flush=True)
sys.stdin.readline()
writer.close(EndReason.EXIT)
"""


class Pen:
    """Writes the records of one step as a session does, with the time it is."""

    def __init__(self, writer: SpoolWriter) -> None:
        self._writer = writer
        self._sequence = 0

    def begin(self, mode: Mode = Mode.TRAIN, step: int = 0) -> None:
        self._step(StepEvent.BEGIN, mode, step)

    def end(self, mode: Mode = Mode.TRAIN, step: int = 0) -> None:
        self._step(StepEvent.END, mode, step)

    def _step(self, event: StepEvent, mode: Mode, step: int) -> None:
        record = STEP.pack(time.monotonic_ns(), step, mode, event, 0)
        self._writer.write(RecordKind.STEP, record)

    def call(
        self, phase: Phase = Phase.FORWARD, mode: Mode = Mode.TRAIN, step: int = 0, kind: int = 0
    ) -> int:
        self._sequence += 1
        now = time.monotonic_ns()
        kind = kind if phase is Phase.COLLECTIVE else 0
        fields = (self._sequence, 0, now, 1, step, 0, 0, phase, mode, 1, 1, kind, 0)
        self._writer.write(RecordKind.ENTER, ENTER.pack(*fields))
        return self._sequence

    def leave(self, sequence: int) -> None:
        self._writer.write(RecordKind.EXIT, EXIT.pack(sequence, time.monotonic_ns(), 0, 0, 0))


def stuck(host: Host, rank: int) -> subprocess.Popen[str]:
    folder = stream_folder(host.folder, StreamId(rank=rank, incarnation=0))
    process = forked.Popen(
        [sys.executable, "-c", STUCK, str(folder), str(rank)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    host.processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def told(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def noted(host: Host) -> list[Stall]:
    return stalls_in(host.out)


Hosts = Callable[..., Host]
SOON = {"stall-seconds": "1"}


@pytest.mark.parametrize("address", ["", SHARED], ids=["socket", "shared"])
def test_a_stall_is_noted_once_and_outlives_the_relay_that_noticed_it(address: str, hosts: Hosts):
    host = hosts(address=address, settings=SOON)
    before_ns = time.time_ns()
    ranks = [stuck(host, rank) for rank in range(2)]
    written_ns = time.time_ns()
    host.collector(drain_seconds=30.0)
    relay = host.relay()
    assert wait_until(lambda: noted(host)), host.log("relay")
    (first,) = noted(host)
    assert first.where == "ranks 0-1 in a call of train step 0"
    assert before_ns <= first.since_ns <= written_ns
    assert first.noticed_ns - first.since_ns >= 1e9
    assert first.over_ns == 0
    assert all(rank.poll() is None for rank in ranks)

    relay.kill()
    relay.wait()
    host.relay()
    time.sleep(2.5)
    assert noted(host) == [first]
    told(ranks[1])
    assert wait_until(lambda: noted(host)[0].over_ns), host.log("relay")
    (over,) = noted(host)
    assert not over.is_by_end
    assert over.over_ns > first.noticed_ns
    assert host.log("relay").count("has moved since") == 1


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


def test_what_is_noted_is_carried_along_by_recover(tmp_path: Path, hosts: Hosts):
    host = hosts(settings=SOON, address=SHARED)
    host.relay()
    stuck(host, 0)
    assert wait_until(lambda: noted(host)), host.log("relay")
    (tmp_path / "new").mkdir()
    carry_stalls([host.folder, host.out], tmp_path / "new")
    assert len(stalls_in(tmp_path / "new")) == 1


# ---- what a quiet rank is inside of --------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> SpoolWriter:
    made = SpoolWriter(tmp_path / "rank00000.0", limit_bytes=SMALL)
    made.define(rank_definition())
    return made


def inside(tmp_path: Path, *, counts_steps: bool = True) -> str:
    with StreamReader(tmp_path / "rank00000.0") as reader:
        return activity_of(reader, counts_steps=counts_steps).inside


def test_a_train_step_counts_until_its_optimizer_steps_where_that_is_known(
    tmp_path: Path, writer: SpoolWriter
):
    pen = Pen(writer)
    assert inside(tmp_path) == ""
    pen.begin()
    pen.leave(pen.call())
    assert inside(tmp_path) == "train step 0, before its optimizer"
    assert inside(tmp_path, counts_steps=False) == ""
    pen.leave(pen.call(Phase.GRADS))
    assert inside(tmp_path) == ""
    pen.end()
    assert inside(tmp_path) == ""


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


def test_a_collective_counts_where_the_program_waits_for_it(tmp_path: Path, writer: SpoolWriter):
    for number, is_async in ((7, True), (8, False)):
        fields = {"id": number, "kind": "collective", "op": "all_reduce", "async": is_async}
        of_whom = {"group": "0", "members": [0, 1], "issuer": "call"}
        writer.define(msgpack.packb({**fields, **of_whom}))
    pen = Pen(writer)
    pen.begin()
    pen.leave(pen.call(Phase.PARAMS))
    pen.call(Phase.COLLECTIVE, kind=7)
    assert inside(tmp_path) == ""
    pen.call(Phase.COLLECTIVE, kind=8)
    assert inside(tmp_path) == "a collective of train step 0"
    pen.end()
    assert inside(tmp_path) == "", "what a step left open is closed with it"


def watched(
    tmp_path: Path,
    writer: SpoolWriter,
    *,
    is_sent: bool = True,
    world_size: int = 2,
    **settings: str,
) -> tuple[StallMonitor, dict[StreamId, Shipment]]:
    """A rank inside a train step, and what watches it."""
    pen = Pen(writer)
    pen.begin()
    pen.leave(pen.call())
    header = RunHeader(
        run_id="test",
        out=tmp_path,
        collector="",
        world_size=world_size,
        settings={name.replace("_", "-"): text for name, text in settings.items()},
    )
    shipment = Shipment(tmp_path, StreamId(rank=0, incarnation=0))
    shipment.take_offset(shipment.reader.committed() if is_sent else 0, time.monotonic())
    return StallMonitor(tmp_path, header, "0a"), {shipment.stream: shipment}


@pytest.mark.parametrize(
    ("world_size", "phases", "is_noted"),
    [(2, "forward,grads", True), (2, "forward,collective", False), (1, "forward,grads", False)],
)
def test_a_step_without_a_word_of_its_optimizer_is_noted_where_such_a_word_was_to_come(
    world_size: int, phases: str, is_noted: bool, tmp_path: Path, writer: SpoolWriter
):
    standing, shipments = watched(
        tmp_path, writer, world_size=world_size, phases=phases, stall_seconds="4"
    )
    begin = time.monotonic()
    for second in range(6):
        standing.look(shipments, begin + second)
    assert (standing.latest is not None) == is_noted
    assert bool(stalls_in(tmp_path)) == is_noted
    writer.close()


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
