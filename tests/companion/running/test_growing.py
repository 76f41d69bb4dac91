"""A tree that grows while its job runs says what one says that is built at the end."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.diagnosis.check import check
from rankscope.record.call import Mode
from rankscope.record.ranks import EndReason
from rankscope.run.folders import REPLICA_FOLDER, TRACE_NAME
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.replicas import StreamEnd, replica_path, settled_to, write_end
from rankscope.tree.build import build, recover
from rankscope.tree.growingtree import GrowingTree, grown_steps
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests import forked
from tests.companion.running.growing import grown, keeper
from tests.companion.running.test_paper_jobs import STEPS, job
from tests.diagnosis.paper import module, numbers, setup
from tests.tree.jobs import grid_job
from tests.tree.ranks_on_paper import PaperRank


def said_of(trace: Trace) -> list[Any]:
    """Return all that a trace says of its nodes but where numbers lie."""
    found = []
    for group in (*trace.setup, *trace.steps):
        nodes = [
            (
                node.id, node.path, node.phase, node.micro_batch, node.ordinal, node.ranks,
                node.status, node.time,
                [
                    (
                        view.slot, view.dtype, view.ranks, view.layout(), view.combined,
                        *(sorted(each.items()) for each in (
                            view.per_rank(), view.samples(), view.shapes(), view.references()
                        )),
                    )
                    for view in node.slots
                ],
            )
            for node in group.walk()
        ]  # fmt: skip
        found.append((group.is_setup, group.mode, group.step, repr((group.notes, nodes))))  # NaN
    return found


def uneven_job(folder: Path, *, after: tuple[list[int], list[int]], steps: int = STEPS) -> Path:
    """Write 2 replicas of ranks that each evaluate a batch after some train steps of their own;
    return the trace folder, with the records alone."""
    out = folder / "trace"
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        setup(rank, {"a.weight": numbers(0)}, wrappers=("DDP",))
        evaluated = itertools.count()
        for step in range(steps):
            one_step(rank, step, "train")
            for _ in range(after[number].count(step)):
                one_step(rank, next(evaluated), "eval")
        rank.end()
        rank.ship(out)
    return out


def one_step(rank: PaperRank, step: int, mode: str) -> None:
    rank.step(StepEvent.BEGIN, step, mode)
    with rank.call(class_name="Model", step=step, mode=mode):
        module(rank, "a", numbers(1 + step), numbers(2 + step), step=step, mode=mode)
    rank.step(StepEvent.END, step, mode)


JOBS = {
    "right": lambda folder: job(folder),
    "evaluates unevenly": lambda folder: uneven_job(
        folder, after=([2, 2, 5, 5, 8, 8, 11, 11], [2, 5, 8, 11])
    ),
    "drifts": lambda folder: job(folder, drifts_at=5),
    "evaluates": lambda folder: job(folder, evaluates=True),
    "sharded, with samples": lambda folder: (
        grid_job(folder, folder / "trace", steps=9) and folder / "trace"
    ),
}


@pytest.mark.parametrize("kills", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("pieces", [1, pytest.param(9, marks=pytest.mark.lab), 40])
@pytest.mark.parametrize("which", JOBS)
def test_it_says_what_a_tree_says_that_is_built_at_the_end(
    tmp_path: Path, which: str, pieces: int, kills: bool
):
    out, work = JOBS[which](tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=pieces, kills=kills):
        pass
    written = GrowingTree(work).written
    assert written  # some steps were not left to the end
    assert max(settled_to(replica) for replica in (work / REPLICA_FOLDER).glob("*.cells"))
    build(work)
    build(out)
    assert not (work / REPLICA_FOLDER).exists()
    assert grown_steps(work) == written
    expected, found = open_trace(out), open_trace(work)
    assert found.is_complete and found.run == expected.run
    assert found.completeness == expected.completeness
    assert said_of(found) == said_of(expected)
    theirs, own = check(expected), check(found)
    assert own.origins == theirs.origins


@pytest.mark.parametrize("kills", [False, True], ids=["", "killed"])
def test_a_reader_sees_whole_steps_at_any_moment(tmp_path: Path, kills: bool):
    out, work = job(tmp_path), tmp_path / "work"
    expected = {(each[1], each[2]): each for each in said_of(open_trace(out)) if not each[0]}
    most = 0
    for folder in grown(out, work, pieces=30, kills=kills):
        if not any((folder / REPLICA_FOLDER).iterdir()):
            continue
        seen = [each for each in said_of(open_trace(folder)) if not each[0]]
        whole = [each for each in seen if each == expected[each[1], each[2]]]
        assert [each[2] for each in seen] == list(range(len(seen)))
        assert whole == seen[: len(whole)] and len(seen) - len(whole) <= 2  # those that run
        assert len(seen) >= most  # nothing goes
        most = len(seen)
    assert most == STEPS


def test_a_killed_job_is_recovered_whole(tmp_path: Path):
    out, work = job(tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9):
        pass
    recover([work], tmp_path / "recovered")
    assert said_of(open_trace(tmp_path / "recovered")) == said_of(open_trace(out))
    assert said_of(open_trace(work)) == said_of(open_trace(out))  # which lost nothing by that


@pytest.mark.parametrize("which", ["", "spool"])
def test_a_tree_that_was_built_without_all_records_is_recovered_whole(tmp_path: Path, which: str):
    """As when a relay died, and the host that it was on still holds the end of the records."""
    out, work = job(tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9):
        pass
    for replica in (work / REPLICA_FOLDER).glob("*.cells"):
        write_end(replica, StreamEnd(committed=1 << 40, end=EndReason.LOST))
    build(work)
    assert (work / TRACE_NAME).exists() and not open_trace(work).is_complete
    recover([work / which], tmp_path / "recovered")
    assert said_of(open_trace(tmp_path / "recovered")) == said_of(open_trace(out))
    assert not (tmp_path / "recovered/steps/index.jsonl").exists()


def test_without_its_index_a_tree_says_that_steps_are_gone(tmp_path: Path):
    out, work = job(tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9):
        pass
    (work / "steps/index.jsonl").unlink()
    recover([work], tmp_path / "recovered")
    for trace in (open_trace(work), open_trace(tmp_path / "recovered")):
        assert not trace.is_complete
        for rank in trace.completeness["ranks"]:
            (note,) = rank["notes"]
            assert "were freed when their steps were written" in note


def test_a_step_that_comes_long_after_it_was_written_is_counted(tmp_path: Path):
    """A rank evaluates for the first time long after another one did."""
    out, work = uneven_job(tmp_path, after=([1, 1, 1], [35]), steps=40), tmp_path / "work"
    for _ in grown(out, work, pieces=40):
        pass
    build(work)
    found = open_trace(work)
    step, *_ = (step for step in found.steps if step.mode is Mode.EVAL)
    assert {rank for node in step.walk() for rank in node.ranks} == {0}
    assert not found.is_complete
    (note,) = found.completeness["ranks"][1]["notes"]
    assert "came after their step was written" in note


def test_columns_of_a_trace_are_those_of_its_steps_behind_each_other(tmp_path: Path):
    out, work = job(tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9):
        pass
    build(work)
    files = {step["file"] for step in json.loads((work / TRACE_NAME).read_text())["steps"]}
    assert len(files) > 3
    trace = open_trace(work)
    steps = [step.columns() for step in (*trace.setup, *trace.steps)]
    every = trace.columns()
    assert {"values.hash", "calls.start_ns", "samples.sketch", "values.incarnation"} <= {*every}
    first_sample = 0
    for name in {*every} - {"values.sample_row", "values.incarnation"}:
        np.testing.assert_array_equal(every[name], np.concatenate([step[name] for step in steps]))
    for step, at in zip(steps, np.cumsum([len(step["values.rank"]) for step in steps])):
        rows = slice(at - len(step["values.rank"]), at)
        own = step["values.sample_row"]
        assert (every["values.incarnation"][rows] == step.head.incarnation).all()
        moved = np.where(own >= 0, own + first_sample, -1)
        np.testing.assert_array_equal(every["values.sample_row"][rows], moved)
        first_sample += len(step["samples.sketch"])
    assert first_sample == len(every["samples.sketch"])


class Pens:
    """Two ranks that write as they are told, and what keeps their steps."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "trace"
        self._ranks = [PaperRank(folder, number, 2) for number in range(2)]
        for rank in self._ranks:
            setup(rank, {"a.weight": numbers(0)}, wrappers=("DDP",))
        self._job, _ = keeper(self.out, 2)

    def step(self, step: int, *ranks: int, mode: str = "train", tensor: int = 0) -> None:
        """Some ranks run a step."""
        for number in ranks:
            rank = self._ranks[number]
            rank.step(StepEvent.BEGIN, step, mode)
            with rank.call(class_name="Model", step=step, mode=mode) as call:
                rank.value(call, "output", numbers(step), reference=tensor)
            rank.step(StepEvent.END, step, mode)

    def written(self) -> list[tuple[str, int]]:
        """Return the steps in the tree, once all is read that ranks have written."""
        for rank in self._ranks:
            data = b"".join(StreamReader(rank.folder).chunks())
            with replica_path(self.out, rank.stream).open("ab") as file:
                file.write(data[file.tell() :])
        for _ in range(20):
            self._job.look()
        return [(each["mode"], each["step"]) for each in GrowingTree(self.out).entries()]

    def end(self, number: int) -> None:
        self._ranks[number].end()


@pytest.fixture
def pens(tmp_path: Path) -> Pens:
    (tmp_path / "trace" / REPLICA_FOLDER).mkdir(parents=True)
    return Pens(tmp_path)


def test_a_step_waits_until_every_rank_is_two_steps_further(pens: Pens):
    pens.step(0, 0, 1)
    assert pens.written() == []
    for step in range(1, 9):
        pens.step(step, 0)
    pens.step(1, 1)
    assert pens.written() == []  # rank 1 may have more to say of step 0
    pens.step(2, 1)
    assert pens.written() == [("train", 0)]


def test_a_rank_that_ended_is_not_waited_for(pens: Pens):
    for step in range(4):
        pens.step(step, 0, 1)
    pens.end(1)
    for step in range(4, 9):
        pens.step(step, 0)
    assert pens.written() == [("train", step) for step in range(7)]


def test_evaluation_on_one_rank_is_written_once_the_others_have_trained_on(pens: Pens):
    pens.step(0, 0, 1)
    pens.step(0, 0, mode="eval")
    pens.step(1, 0)
    pens.step(1, 1)
    pens.step(2, 0)
    assert ("eval", 0) not in pens.written()  # rank 1 may come to it yet
    pens.step(2, 1)
    assert pens.written() == [("train", 0), ("eval", 0)]


def test_a_step_with_full_tensors_stays_until_the_end(pens: Pens):
    for step in range(8):
        pens.step(step, 0, 1, tensor=77 if step == 3 else 0)
    assert pens.written() == [("train", step) for step in (0, 1, 2, 4, 5)]
    assert [step.step for step in open_trace(pens.out).steps] == [*range(8)]


def test_two_processes_do_not_write_one_tree(tmp_path: Path):
    (tmp_path / "steps").mkdir()
    first = GrowingTree.to_write(tmp_path)
    assert first is not None and GrowingTree.to_write(tmp_path) is None
    first.close()
    second = GrowingTree.to_write(tmp_path)
    assert second is not None
    second.close()


def test_the_process_ends_where_its_collector_was_gone_before_it_began(tmp_path: Path):
    gone = forked.Popen([sys.executable, "-c", "pass"])
    gone.wait(60)
    command = [sys.executable, "-m", "rankscope.companion.running", "--run-folder"]
    done = forked.run([*command, str(tmp_path), "--parent", str(gone.pid)], timeout=60)
    assert done.returncode == 1
