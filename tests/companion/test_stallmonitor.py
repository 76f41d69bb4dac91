"""A host of which no rank moves is noticed by its relay, whichever way that sends, and whoever of
them is killed meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from rankscope.companion.hostwatch import StallMonitor
from rankscope.companion.running.splitstream import activity_of
from rankscope.companion.shipping import Shipment
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId
from rankscope.run.folders import (
    SHARED,
    RunHeader,
    stream_folder,
)
from rankscope.run.jobstatus import Stall, carry_stalls, stalls_in
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import ENTER, EXIT, STEP, RecordKind, StepEvent
from rankscope.spool.writer import SpoolWriter
from tests import forked
from tests.companion.jobs import Host, environment
from tests.spool.streams import SMALL, rank_definition
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


def noted(host: Host) -> list[Stall]:
    return stalls_in(host.out)


Hosts = Callable[..., Host]
SOON = {"stall-seconds": "1"}


@pytest.mark.parametrize(
    "address", [pytest.param("", marks=pytest.mark.lab), SHARED], ids=["socket", "shared"]
)
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
