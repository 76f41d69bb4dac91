"""What the live check tells of jobs whose records come piece by piece, and what it holds then."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.splitstream import SplitStream, StepKey
from rankscope.companion.running.stepjudge import FindingCommand, FindingsFile
from rankscope.diagnosis.check import check
from rankscope.record.finding import Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId
from rankscope.run.folders import FINDINGS_NAME
from rankscope.spool.recordcolumns import records
from rankscope.spool.recordformat import CELL_BYTES, RecordKind, StepEvent
from rankscope.spool.replicas import replica_path
from rankscope.tree.reader import open_trace
from tests.companion.running.replayed import JudgedJob, replayed, told
from tests.diagnosis.paper import event, module, numbers, setup
from tests.tree.ranks_on_paper import PaperRank
from tests.waiting import wait_until

STEPS = 12


def job(folder: Path, *, drifts_at: int = STEPS, evaluates: bool = False) -> Path:
    """Write 2 replicas whose parameters are alike until rank 1 changes one of its own; return the
    trace folder, with the records alone."""
    out = folder / "trace"
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        setup(rank, {"a.weight": numbers(0), "b.weight": numbers(1)}, wrappers=("DDP",))
        for step in range(STEPS):
            rank.step(StepEvent.BEGIN, step)
            with rank.call(class_name="Model", step=step):
                for place, path in enumerate("ab"):
                    seed = 100 * (1 + number) + step
                    module(rank, path, numbers(10 + seed), numbers(20 + seed + place), step=step)
            grads = {"a.weight": numbers(500 + step), "b.weight": numbers(600 + step)}
            event(rank, Phase.GRADS, "grad", grads, step=step)
            held = {"a.weight": numbers(700 + step), "b.weight": numbers(800 + step)}
            if step >= drifts_at and number == 1:
                held["b.weight"] = numbers(900 + step)
            event(rank, Phase.PARAMS, "param", held, step=step)
            rank.step(StepEvent.END, step)
            if evaluates and number == 0:
                rank.step(StepEvent.BEGIN, step, "eval")
                with rank.call(class_name="Model", step=step, mode="eval"):
                    module(rank, "a", numbers(1), numbers(2), step=step, mode="eval")
                rank.step(StepEvent.END, step, "eval")
        rank.end()
        rank.ship(out)
    return out


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("pieces", [1, 7, 40])
def test_a_fault_is_told_once_in_the_step_in_which_it_began(
    tmp_path: Path, work: Path, pieces: int
):
    (line,) = replayed(job(tmp_path, drifts_at=5), work, pieces=pieces)
    assert (line["kind"], line["path"], line["slot"]) == ("replica-mismatch", "b", "param:weight")
    assert (line["mode"], line["step"]) == ("train", 5)
    assert line["text"].startswith("train step 5: replica-mismatch at b param:weight, rank")
    assert line["step_ended"] is not None and line["severity"] == "fault"


@pytest.mark.parametrize("pieces", [1, 7, 40])
def test_nothing_is_told_of_a_job_that_is_right(tmp_path: Path, work: Path, pieces: int):
    assert replayed(job(tmp_path, evaluates=True), work, pieces=pieces) == []


def test_it_says_what_check_says_of_the_whole_trace(tmp_path: Path, work: Path):
    out = job(tmp_path, drifts_at=5)
    (line,) = replayed(out, work)
    report = check(open_trace(out))
    (origin,) = (f for f in report.origins if f.severity is Severity.FAULT)
    found = origin.kind.value, origin.path, origin.slot, origin.step, list(origin.ranks)
    assert found == tuple(line[name] for name in ("kind", "path", "slot", "step", "ranks"))


def test_one_that_was_killed_and_started_again_tells_nothing_twice(tmp_path: Path, work: Path):
    out = job(tmp_path, drifts_at=5)
    (spool := work / "spool").mkdir()
    for replica in (out / "spool").glob("*.cells"):
        (spool / replica.name).write_bytes(replica.read_bytes())
    for _ in range(2):
        watch = JudgedJob(work, 2)
        while watch.look():
            pass
        assert len(told(work)) == 1


def test_every_record_belongs_to_one_step_or_to_the_whole_job(tmp_path: Path):
    out = job(tmp_path, evaluates=True)
    stream = SplitStream(out, StreamId(rank=0, incarnation=0), {})
    while stream.read(1 << 20):
        pass
    assert stream.late_records == 0
    assert set(stream.held) >= {StepKey(0, step) for step in range(STEPS)}
    whole = records(replica_path(out, stream.stream).read_bytes())
    wanted = len(whole.cells) - int(whole.size[whole.positions(RecordKind.FILLER)].sum())
    parted = stream.cells(set(stream.held)).reshape(-1, CELL_BYTES)
    assert len(parted) == wanted
    assert {bytes(cell) for cell in parted} <= {bytes(cell) for cell in whole.cells}
    assert len(records(parted)) == len(whole) - len(whole.positions(RecordKind.FILLER))


def test_the_trace_of_some_steps_is_that_part_of_the_whole(tmp_path: Path):
    out = job(tmp_path)
    running = RunningJob(out, traced_ranks=2)
    while running.read(lambda: False):
        pass
    assert running.finished() == [StepKey(0, step) for step in range(STEPS)]
    part = running.trace([StepKey(0, 3), StepKey(0, 4)])()
    whole = open_trace(out)
    assert [step.step for step in part.steps] == [3, 4]
    wanted = [node for step in whole.steps[3:5] for node in step.walk()]
    found = [node for step in part.steps for node in step.walk()]
    assert [n.key for n in found] == [n.key for n in wanted]
    for mine, theirs in zip(found, wanted):
        assert [v.per_rank() for v in mine.slots] == [v.per_rank() for v in theirs.slots]


def test_what_is_held_does_not_grow_with_the_steps(tmp_path: Path, work: Path):
    """Records of a step go two steps later; those of the job stay."""
    out = job(tmp_path)
    (spool := work / "spool").mkdir()
    watch = JudgedJob(work, 2)
    held = []
    replicas = sorted((out / "spool").glob("*.cells"))
    for part in range(1, 31):
        for replica in replicas:
            data = replica.read_bytes()
            end = len(data) * part // 30
            (spool / replica.name).write_bytes(data[: end - end % CELL_BYTES])
        while watch.look():
            pass
        held.append(watch.held_bytes)
    of_a_step = sum(r.stat().st_size for r in replicas) / STEPS
    assert max(held) < 5 * of_a_step


def test_a_step_that_some_rank_has_not_ended_is_not_judged(tmp_path: Path, work: Path):
    out = job(tmp_path, drifts_at=0)
    (spool := work / "spool").mkdir()
    first, second = sorted((out / "spool").glob("*.cells"))
    (spool / first.name).write_bytes(first.read_bytes())
    half = second.read_bytes()
    ends = records(half).columns(RecordKind.STEP)[1]
    assert ends["event"][1] == int(StepEvent.END)
    at = records(half).start[records(half).positions(RecordKind.STEP)[1]] * CELL_BYTES
    watch = JudgedJob(work, 2)
    (spool / second.name).write_bytes(half[:at])
    for _ in range(4):
        watch.look()
    assert told(work) == []
    (spool / second.name).write_bytes(half[: at + CELL_BYTES])
    while watch.look():
        pass
    assert [line["step"] for line in told(work)] == [0]


def test_damage_in_a_replica_is_said_and_the_rest_is_left_alone(tmp_path: Path, work: Path):
    out = job(tmp_path)
    (spool := work / "spool").mkdir()
    for number, replica in enumerate(sorted((out / "spool").glob("*.cells"))):
        data = bytearray(replica.read_bytes())
        if number:
            data[:] = data[: 40 * CELL_BYTES] + bytes(8 << 20)
        (spool / replica.name).write_bytes(data)
    watch = JudgedJob(work, 2)
    for _ in range(5):
        watch.look()
    (line,) = told(work)
    assert line["notice"].startswith("the records of rank 1 are not judged")


def test_the_command_is_given_each_finding_one_at_a_time(tmp_path: Path):
    said: list[str] = []
    command = FindingCommand("cat >> given; sleep 0.2; echo done >> given", tmp_path, said.append)
    command.add(['{"kind": "a"}', '{"kind": "b"}'])
    given = tmp_path / "given"

    def is_done() -> bool:
        command.look()
        assert said == []
        return given.exists() and given.read_text().count("done") == 2

    assert wait_until(is_done)
    assert given.read_text() == '{"kind": "a"}\ndone\n{"kind": "b"}\ndone\n'


def test_a_command_that_fails_is_said(tmp_path: Path):
    said: list[str] = []
    command = FindingCommand("exit 7", tmp_path, said.append)
    command.add(["{}"])
    assert wait_until(lambda: command.look() or said)
    assert said[-1] == "--rs-on-finding: the command ended with 7"


def test_several_places_of_one_kind_are_one_line(tmp_path: Path, work: Path):
    out = tmp_path / "trace"
    for number in range(2):
        rank = PaperRank(tmp_path, number, 2)
        setup(rank, {name: numbers(0) for name in ("a.weight", "b.weight")}, wrappers=("DDP",))
        rank.step(StepEvent.BEGIN, 0)
        with rank.call(class_name="Model"):
            for path in "ab":
                module(rank, path, numbers(10 + number), np.full((4, 6), np.nan, np.float32))
        rank.step(StepEvent.END, 0)
        rank.end()
        rank.ship(out)
    lines = replayed(out, work)
    assert lines and all(line["kind"] == "nonfinite-origin" for line in lines)
    assert len(lines) <= 2
    assert json.dumps(lines[0]["others"]).count("path") == len(lines[0]["others"])


def test_what_a_full_disk_does_not_take_is_told_once_there_is_room(tmp_path: Path) -> None:
    file = FindingsFile(tmp_path)
    file.say("before: there is room")
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        size = (tmp_path / FINDINGS_NAME).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # a part of a line fits
        file.say("first: no room")
        file.say("second: no room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    file.say("after: room again")
    told = []
    for line in (tmp_path / FINDINGS_NAME).read_text().splitlines():
        with contextlib.suppress(ValueError):  # the part that fitted
            told.append(json.loads(line)["notice"].partition(":")[0])
    assert told == ["before", "first", "second", "after"]
