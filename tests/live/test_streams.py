"""The state kept of a stream does not depend on how its bytes come in, nor what it costs on how
long it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from rankscope.live.jobwatch import JobWatch
from rankscope.live.streamfollower import StreamFollower
from rankscope.live.streamtail import StreamTail
from rankscope.record.phases import Phase
from rankscope.record.streams import EndReason, StreamId
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
from rankscope.spool.replication import replica_path
from rankscope.spool.writer import SpoolWriter
from tests.gather.jobs import Host
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
    tail.take(records(stream))
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
    whole.take(records(stream))
    at = 0
    while at < len(stream):
        found = records(stream[at : at + 64 * cells])
        if not found.committed_bytes:  # a longer record
            found = records(stream[at : at + 64 * (cells + 40)])
        pieces.take(found)
        at += found.committed_bytes
    assert state(pieces) == state(whole)


def test_a_follower_that_comes_late_reads_the_end_and_still_knows_the_names(
    tmp_path: Path,
) -> None:
    write_job(tmp_path / "own", steps=MANY)
    data = stream_bytes(tmp_path / "own")
    one = StreamId(rank=0, incarnation=0)
    replica = replica_path(tmp_path, one)
    replica.parent.mkdir()
    replica.write_bytes(data)
    assert len(data) > 20 << 20
    watch = JobWatch(tmp_path)
    watch.look()
    (status,) = watch.ranks()
    assert watch.has_skipped and status.place.path == "layers.0" and status.step == MANY - 1
    assert status.place.op == "all_reduce" and status.place.members == (0, 1)
    assert status.ended[-1].grad_norm == 5.0 and len(status.ended) == 32
    follower = StreamFollower(tmp_path, one)
    follower.look(1 << 20)
    assert follower.taken_bytes <= 2 << 20 and follower.read_bytes == len(data)
    taken = follower.taken_bytes
    follower.look(1 << 20)
    assert follower.taken_bytes == taken, "nothing is read twice"
    whole = StreamFollower(tmp_path, one, skips=False)
    while whole.read_bytes < len(data):
        whole.look(1 << 20)
    assert not whole.has_skipped and whole.tail.steps_ended == MANY - 1
    assert [*whole.tail.ended] == [*status.ended]
    assert [c.module for c in whole.tail.open.values()] == [
        c.module for c in follower.tail.open.values()
    ]


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


def inside(follower: StreamFollower) -> list[tuple[int, int, int]]:
    return [(call.phase, call.step, call.module) for call in follower.tail.open.values()]


def test_a_follower_that_begins_on_a_settled_replica_knows_names_and_what_the_rank_is_in(
    tmp_path: Path, replica: Path
) -> None:
    write_job(tmp_path / "own", steps=40)
    data = stream_bytes(tmp_path / "own")
    begins = steps_of(data)
    whole = StreamTail(has_values=True)
    whole.take(records(data))
    # nothing of the running step settled; half of it; all there is
    for begin, end in (
        (begins[39], begins[39]),
        (begins[30], max(end for end in record_ends(data) if end <= begins[39] + 640)),
        (begins[30], None),
    ):
        replica.with_suffix(".settled").unlink(missing_ok=True)
        replica.write_bytes(data)
        settle(replica, settled(data, end or len(data), begin))
        for skips, most in ((True, 1 << 20), (False, 1 << 20), (True, 8192)):
            follower = StreamFollower(tmp_path, StreamId(rank=0, incarnation=0), skips=skips)
            follower.look(most)
            assert follower.has_skipped and follower.read_bytes == len(data)
            assert follower.tail.definitions == whole.definitions
            assert follower.tail.open == whole.open or most == 8192
            assert follower.tail.running == (0, 39) or most == 8192
            assert follower.tail.steps_ended == (39 - 30 if begin == begins[30] else 0)
            taken = follower.taken_bytes
            follower.look(most)
            assert follower.taken_bytes == taken, "nothing is read twice"
    watch = JobWatch(tmp_path)
    watch.look()
    (status,) = watch.ranks()
    assert watch.has_skipped and status.place.op == "all_reduce" and status.step == 39
    assert [each.step for each in status.ended] == [*range(30, 39)]
    watch.close()


@pytest.mark.parametrize("skips", [True, False])
def test_a_follower_that_is_overtaken_by_what_is_settled_goes_on_behind_it(
    tmp_path: Path, replica: Path, skips: bool
) -> None:
    write_job(tmp_path / "own", steps=60)
    data = stream_bytes(tmp_path / "own")
    begins = steps_of(data)
    whole = StreamTail(has_values=True)
    whole.take(records(data))
    follower = StreamFollower(tmp_path, StreamId(rank=0, incarnation=0), skips=skips)
    replica.write_bytes(data[: begins[10] + 640])
    follower.look(1 << 20)
    assert not follower.has_skipped and follower.tail.steps_ended == 10
    # settled behind it: it has read that, and need not know
    settle(replica, settled(data, begins[8]))
    follower.look(1 << 20)
    assert not follower.has_skipped
    inside_59 = max(end for end in record_ends(data) if end <= begins[59] + 640)
    # far beyond it, where the steps from the 9th on are kept: of these it has counted one
    replica.write_bytes(data)
    settle(replica, settled(data, inside_59, begins[9]))
    follower.look(1 << 20)
    assert follower.has_skipped and follower.read_bytes == len(data)
    assert follower.tail.open == whole.open and follower.tail.definitions == whole.definitions
    assert follower.tail.steps_ended == 59, "no step is counted twice"
    assert [each.step for each in follower.tail.ended] == [*range(59 - 32, 59)]
    assert follower.tail.records == len(records(data)) - 9 * step_records(data)
    follower.look(1 << 20)
    assert follower.tail.steps_ended == 59


def step_records(data: bytes) -> int:
    first, second = steps_of(data)[:2]
    return len(records(data[first:second]))


def test_definitions_that_were_passed_over_and_then_settled_are_still_known(
    tmp_path: Path, replica: Path
) -> None:
    """A follower that came late went on at the end; what it would define next is a hole by then."""
    write_job(tmp_path / "own", steps=400, values=200)
    data = stream_bytes(tmp_path / "own")
    begins = steps_of(data)
    late = msgpack.packb({"id": 99, "kind": "module", "root": 2, "path": "late", "class": "Late"})
    writer = SpoolWriter(tmp_path / "other", limit_bytes=1 << 20)
    writer.define(late)
    definition = stream_bytes(tmp_path / "other")
    writer.close()
    data = data[: begins[300]] + definition + data[begins[300] :]
    replica.write_bytes(data)
    follower = StreamFollower(tmp_path, StreamId(rank=0, incarnation=0))
    follower.look(16 << 10)
    assert 99 not in follower.tail.definitions
    settle(replica, settled(data, begins[350] + len(definition)))
    follower.define(16 << 10)  # without a look in between
    assert 99 not in follower.tail.definitions
    follower.look(16 << 10)
    assert follower.tail.definitions[99]["path"] == "late"
    assert inside(follower)[-1:] == [(Phase.COLLECTIVE, 399, 3)]
    assert follower.read_bytes == len(data)


def test_a_follower_that_is_overtaken_again_and_again_always_comes_to_the_end(
    tmp_path: Path, replica: Path
) -> None:
    write_job(tmp_path / "own", steps=120)
    data = stream_bytes(tmp_path / "own")
    begins = [*steps_of(data), len(data)]
    quick = StreamFollower(tmp_path, StreamId(rank=0, incarnation=0))
    slow = StreamFollower(tmp_path, StreamId(rank=0, incarnation=0), skips=False)
    for number in range(5, 120):
        with replica.open("r+b" if replica.exists() else "w+b") as file:
            file.seek(begins[number - 1] if number > 5 else 0)
            file.write(data[file.tell() : begins[number]])
        quick.look(1 << 20)
        slow.look(4096)
        settle(replica, settled(data, begins[number - 2], begins[number - 3]))
    replica.write_bytes(replica.read_bytes()[: begins[119]] + data[begins[119] :])
    for follower in (quick, slow):
        for _ in range(100):
            follower.look(4096 if follower is slow else 1 << 20)
        assert follower.read_bytes == len(data)
        assert inside(follower)[-1:] == [(Phase.COLLECTIVE, 119, 3)]
    assert not quick.has_skipped and quick.tail.steps_ended == 119
    assert slow.has_skipped and slow.tail.steps_ended <= 119


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
    watch = JobWatch(host.out)

    def ends(*wanted: EndReason) -> bool:
        watch.look()
        return [s.place.end for s in watch.ranks()] == [end.value for end in wanted]

    assert wait_until(lambda: ends(EndReason.EXIT, EndReason.RUNNING), 60)
    killed.kill()
    assert wait_until(lambda: ends(EndReason.EXIT, EndReason.LOST), 60)
    assert [len(s.ended) for s in watch.ranks()] == [5, 5]
    watch.close()
