"""The state kept of a stream does not depend on how its bytes come in, and status.json has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from rankscope.companion.running.rankstatuses import StatusWriter
from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.splitstream import StreamTail
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import STATUS_NAME
from rankscope.run.jobstatus import EndedStep, JobStatus, read_status, write_status
from rankscope.spool.recordcolumns import records
from rankscope.spool.recordformat import (
    ENTER,
    EXIT,
    NO_MICRO_BATCH,
    NO_SEQUENCE,
    STEP,
    VALUE,
    RecordKind,
    StepEvent,
)
from rankscope.spool.replicas import replica_path
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.assembly.rankstreams import definitions_in
from tests.companion.jobs import Host
from tests.spool.streams import (
    settle,
    settled,
    stream_bytes,
)
from tests.spool.test_reader import record_ends
from tests.waiting import wait_until

MS = 1_000_000
MANY = 4000


def write_job(folder: Path, *, steps: int, values: int = 20, rank: int = 0) -> None:
    """Write the stream of a rank whose steps take 10 ms, 4 of them in an all-reduce; it stays in
    the all-reduce of the last one."""
    writer = SpoolWriter(folder, limit_bytes=256 << 20)
    for number, fields in enumerate(
        (
            {"kind": "rank", "format": 1, "rank": rank, "world_size": 2, "run_id": "r"},
            {"kind": "root", "class": "Net", "parameters": 9},
            {"kind": "module", "root": 2, "path": "layers.0", "class": "Linear"},
            {"kind": "slot", "name": "output"},
            {"kind": "slot", "name": "grad:weight"},
            {"kind": "meta", "dtype": "float32", "shape": [1]},
            {"kind": "module", "root": 2, "path": "", "class": "Net"},
            {
                "kind": "collective",
                "op": "all_reduce",
                "group": "0",
                "members": [0, 1],
                "async": False,
                "issuer": "forward",
            },
        ),
        1,
    ):
        writer.define(msgpack.packb({"id": number, **fields}))
    count = itertools.count()

    def enter(at: int, step: int, module: int, phase: Phase, parent: int = NO_SEQUENCE) -> int:
        number = next(count)
        kind = 8 if phase is Phase.COLLECTIVE else 0
        packed = ENTER.pack(
            number, parent, at, module, step, NO_MICRO_BATCH, 0, phase, 0, 1, 2, kind, 0
        )
        writer.write(RecordKind.ENTER, packed)
        return number

    def value(at: int, sequence: int, slot: int, phase: Phase, number: float, count: int) -> None:
        # digest: nan, posinf, neginf, zero, min, max, mean, std, l2, then the sketch
        numbers = (0, 0, 0, 0, number, number, number, 0.0, number, *([0.0] * 8))
        head = (sequence, at, slot, 6, 0, phase, 0, count, 9, 0)
        writer.write(RecordKind.VALUE, VALUE.pack(*head, *numbers))

    for step in range(steps):
        at = step * 100 * MS
        writer.write(RecordKind.STEP, STEP.pack(at, step, 0, StepEvent.BEGIN, 0))
        root = enter(at, step, 7, Phase.FORWARD)
        inner = enter(at, step, 3, Phase.FORWARD, root)
        for _ in range(values):
            value(at, inner, 4, Phase.FORWARD, 1.0, 8)
        sum_ = enter(at + 2 * MS, step, 3, Phase.COLLECTIVE, inner)
        if step == steps - 1:
            break
        for sequence in (sum_, inner, root):
            writer.write(RecordKind.EXIT, EXIT.pack(sequence, at + 6 * MS, 0, 0, 0))
        value(at + 6 * MS, root, 4, Phase.FORWARD, 0.5 + step, 1)
        grads = enter(at + 8 * MS, step, 7, Phase.GRADS)
        for number in (3.0, 4.0):
            value(at + 8 * MS, grads, 5, Phase.GRADS, number, 8)
        writer.write(RecordKind.EXIT, EXIT.pack(grads, at + 9 * MS, 0, 0, 0))
        writer.write(RecordKind.STEP, STEP.pack(at + 10 * MS, step, 0, StepEvent.END, 0))
    writer._lock.release()  # the bytes are what is tested: the process goes on


def take(tail: StreamTail, data: bytes) -> int:
    """Have it take the whole records of some bytes; return how many bytes these are."""
    found = records(data)
    tail.take(found, definitions_in(found, {})[0])
    return found.committed_bytes


def state(tail: StreamTail) -> tuple[object, ...]:
    return (
        tail.records,
        [*tail.open.values()],
        tail.latest,
        tail.issued,
        tail.running,
        [*tail.ended],
        tail.written_ns,
        tail.step_before_optimizer,
        tail.definitions,
    )


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("short") / "rank00000.0"
    write_job(folder, steps=6)
    return stream_bytes(folder)


def test_a_stream_says_what_its_rank_is_in_and_what_its_steps_took(stream: bytes) -> None:
    tail = StreamTail(has_values=True)
    take(tail, stream)
    assert [(c.phase, c.step) for c in tail.open.values()] == [
        *((Phase.FORWARD, 5), (Phase.FORWARD, 5), (Phase.COLLECTIVE, 5)),
    ]
    assert tail.running == (0, 5) and tail.step_before_optimizer == 5 and tail.steps_ended == 5
    for number, step in enumerate(tail.ended):
        assert (step.step, step.loss, step.grad_norm) == (number, 0.5 + number, 5.0)
        assert step.seconds == pytest.approx(0.010) and step.waited_s == pytest.approx(0.004)


@pytest.mark.parametrize("cells", [1, 3, 7, 40])
def test_pieces_of_any_size_give_the_same(stream: bytes, cells: int) -> None:
    whole, pieces = StreamTail(has_values=True), StreamTail(has_values=True)
    take(whole, stream)
    at = 0
    while at < len(stream):
        taken = take(pieces, stream[at : at + 64 * cells])
        at += taken or take(pieces, stream[at : at + 64 * (cells + 40)])  # a longer record
    assert state(pieces) == state(whole)


def read(job: RunningJob) -> RunningJob:
    while job.look():
        pass
    return job


def test_the_status_of_a_long_stream_says_where_it_is_and_what_its_last_steps_took(
    tmp_path: Path, replica: Path
) -> None:
    write_job(tmp_path / "own", steps=MANY)
    data = stream_bytes(tmp_path / "own")
    replica.write_bytes(data)
    assert len(data) > 20 << 20
    job = read(RunningJob(tmp_path, traced_ranks=2))
    status = StatusWriter(job, tmp_path).status()
    (rank,) = status.ranks
    assert rank.place.path == "layers.0" and rank.step == MANY - 1 and not rank.is_step_over
    assert rank.place.op == "all_reduce" and rank.place.members == (0, 1)
    assert rank.ended[-1].grad_norm == 5.0 and len(rank.ended) == 32
    assert rank.step_s == pytest.approx(0.010) and rank.own_s == pytest.approx(0.006)
    assert status.run["id"] == "r" and status.world_size == 2
    totals = status.totals
    assert totals.received_bytes == len(data) and totals.unread_bytes == 0
    fillers = len(records(data).positions(RecordKind.FILLER))
    assert totals.steps_ended == MANY - 1 and totals.records == len(records(data)) - fillers


def test_a_status_that_is_read_is_the_one_that_was_written(tmp_path: Path, replica: Path) -> None:
    write_job(tmp_path / "own", steps=6)
    replica.write_bytes(stream_bytes(tmp_path / "own"))
    job = RunningJob(tmp_path, traced_ranks=1)
    job.listeners.append(StatusWriter(job, tmp_path))
    read(job)
    found = read_status(tmp_path)
    (rank,) = found.ranks
    assert rank.place.phase is Phase.COLLECTIVE and rank.waits_for == ()
    assert len(rank.ended) == 5 and found.written_ns > 0
    odd = EndedStep(step=7, seconds=1.0, waited_s=0.5, loss=float("inf"), grad_norm=None)
    changed = replace(
        found, ranks=(replace(rank, ended=(odd,), missed=((Mode.EVAL, 3),), waits_for=(1, 2, 5)),)
    )
    write_status(tmp_path, changed)
    assert "Infinity" not in (replica.parent / STATUS_NAME).read_text(), "that is not JSON"
    assert read_status(tmp_path) == changed
    for broken in ("", "{", "[]", '{"format": "rankscope.status/1"}', '{"format": "other/1"}'):
        (replica.parent / STATUS_NAME).write_text(broken)
        assert read_status(tmp_path) == JobStatus()


def test_records_that_are_read_again_are_counted_once(tmp_path: Path, replica: Path) -> None:
    write_job(tmp_path / "own", steps=60)
    data = stream_bytes(tmp_path / "own")
    begins = steps_of(data)
    whole = StreamTail(has_values=True)
    take(whole, data)
    job = RunningJob(tmp_path, traced_ranks=1)
    replica.write_bytes(data[: begins[30] + 640])
    assert job.look() and not job.held(), "nobody listens: nothing is held"
    job.read_again()
    replica.write_bytes(data)
    while job.read(lambda: False):
        pass
    (stream,) = job.streams
    assert {key.step for key in job.held()} == {*range(60)}
    assert stream.tail.open == whole.open and stream.tail.definitions == whole.definitions
    assert stream.tail.steps_ended == 59 and stream.tail.records == whole.records
    assert [*stream.tail.ended] == [*whole.ended]


def steps_of(data: bytes) -> list[int]:
    """Return where the steps of `write_job` begin."""
    found = records(data)
    positions, rows = found.columns(RecordKind.STEP)
    return [int(at) * 64 for at in found.start[positions[rows["event"] == int(StepEvent.BEGIN)]]]


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    path = replica_path(tmp_path, StreamId(rank=0, incarnation=0))
    path.parent.mkdir()
    return path


def test_a_reader_that_begins_on_a_settled_replica_knows_names_and_what_the_rank_is_in(
    tmp_path: Path, replica: Path
) -> None:
    write_job(tmp_path / "own", steps=40)
    data = stream_bytes(tmp_path / "own")
    begins = steps_of(data)
    whole = StreamTail(has_values=True)
    take(whole, data)
    # nothing of the running step settled; half of it; all there is
    for begin, end in (
        (begins[39], begins[39]),
        (begins[30], max(end for end in record_ends(data) if end <= begins[39] + 640)),
        (begins[30], None),
    ):
        replica.with_suffix(".settled").unlink(missing_ok=True)
        replica.write_bytes(data)
        settle(replica, settled(data, end or len(data), begin))
        job = read(RunningJob(tmp_path, traced_ranks=1))
        (stream,) = job.streams
        assert stream.offset == len(data) and stream.tail.definitions == whole.definitions
        assert stream.tail.open == whole.open and stream.tail.running == (0, 39)
        assert stream.tail.steps_ended == (39 - 30 if begin == begins[30] else 0)
        (status,) = StatusWriter(job, tmp_path).status().ranks
        assert status.place.op == "all_reduce" and status.step == 39


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make() -> Host:
        made.append(Host(tmp_path / "host", tmp_path / "out"))
        return made[-1]

    yield make
    for host in made:
        host.stop()


def test_a_killed_rank_is_lost_and_one_that_ended_has_ended(hosts: Callable[..., Host]) -> None:
    host = hosts()
    host.collector()
    host.relay()
    host.rank(0, batches=5)
    killed = host.rank(1, batches=5, hangs=True)
    assert killed.stdout is not None and killed.stdout.readline() == "written\n"
    job = RunningJob(host.out, traced_ranks=2)
    writer = StatusWriter(job, host.out)

    def ends(*wanted: EndReason) -> bool:
        job.look()
        return [s.place.end for s in writer.status().ranks] == [end.value for end in wanted]

    assert wait_until(lambda: ends(EndReason.EXIT, EndReason.RUNNING), 60)
    killed.kill()
    assert wait_until(lambda: ends(EndReason.EXIT, EndReason.LOST), 60)
    assert [len(s.ended) for s in writer.status().ranks] == [5, 5]
