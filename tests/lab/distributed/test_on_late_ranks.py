"""From the hook to the verdict on two ranks of an accelerator whose work is late."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rankscope import open_trace
from rankscope.capture.digest import Digester
from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from rankscope.tree.views import Node, Trace, Value
from tests import forked
from tests.diagnosis.traced import traced, traced_with_answers
from tests.distributed.pool import RankPool
from tests.lab.distributed import late_job as job
from tests.lab.lateaccelerator import why_not
from tests.lab.lateaccelerator.streams import Synchronization

KINDS = ("ddp", "tp", "fsdp")


class Jobs(NamedTuple):
    """One kind of training, on both devices."""

    late: Trace
    cpu: Trace
    answers: list[Any]
    """What `late_job.run` returned on the late ranks."""


@pytest.fixture(scope="module", params=KINDS)
def jobs(
    late_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Jobs:
    folder = tmp_path_factory.mktemp(request.param)
    (cpu, _), (late, answers) = (
        traced_with_answers(
            late_ranks, job.run, request.param, device, "*", folder=folder / device, world=2
        )
        for device in ("cpu", "late")
    )
    return Jobs(open_trace(late), open_trace(cpu), answers)


def assert_unforced(waits: list[Synchronization], traced_waits: list[Synchronization]) -> None:
    """Fail where tracing made the host wait for the device."""
    assert [wait for wait in traced_waits if wait.is_of_rankscope] == []
    assert [wait.what for wait in traced_waits] == [wait.what for wait in waits]


def values(trace: Trace) -> Iterator[tuple[tuple[object, ...], Node, Value]]:
    for step in (*trace.setup, *trace.steps):
        for node in step.walk():
            for view in node.slots:
                value = node.value(view.slot)
                if value is not None:
                    key = (step.step, node.phase, node.path, node.ordinal, node.micro_batch)
                    yield (*key, view.slot), node, value


def test_tracing_makes_nobody_wait_and_changes_no_bit(jobs: Jobs) -> None:
    for found, waits, traced_waits in jobs.answers:
        assert found == []
        assert_unforced(waits, traced_waits)


def test_the_tree_is_that_of_the_cpu_to_rounding(jobs: Jobs) -> None:
    """But for calls of the process group: that of the device is a class of Python, whose own
    methods are not torch's, and a collective is seen where torch's is called.
    """
    late, cpu = (
        {key: value for key, node, value in values(trace) if node.phase is not Phase.COLLECTIVE}
        for trace in (jobs.late, jobs.cpu)
    )
    assert late.keys() == cpu.keys() and len(late) > 50
    compared = 0
    for key, value in late.items():
        expected = cpu[key].per_rank
        assert value.per_rank.keys() == expected.keys(), key
        for rank, digest in value.per_rank.items():
            other = expected[rank]
            assert (digest is None) is (other is None), key
            if digest is None or other is None:
                continue
            compared += 1
            assert digest.count == other.count, key
            near = 1e-5 * other.l2 + 1e-6
            assert math.isclose(digest.l2, other.l2, abs_tol=near), key
            assert all(
                math.isclose(a, b, abs_tol=near)
                for a, b in zip(digest.sketch, other.sketch, strict=True)
            ), key
    assert compared > 100
    report = diff(jobs.cpu, jobs.late)
    assert report.verdict is Verdict.CLEAN, report.findings


def test_the_trace_is_complete_and_clean(jobs: Jobs) -> None:
    assert jobs.late.is_complete
    assert not [node.errors for node in jobs.late.walk() if node.errors]
    report = check(jobs.late)
    assert report.verdict is Verdict.CLEAN, report.findings
    unseen = len([*values(jobs.cpu)]) - len([*values(jobs.late)])
    assert report.compared == check(jobs.cpu).compared - unseen
    flags = [
        fold.flags
        for node in jobs.late.walk()
        for view in node.slots
        for fold in view.folds
        if fold.digest is not None
    ]
    assert flags and all("mix64" in each for each in flags)


def test_full_tensors_are_what_was_digested(jobs: Jobs) -> None:
    cpu = {key: value for key, _, value in values(jobs.cpu)}
    kept = assert_kept_is_digested(jobs.late)
    assert len(kept) > 100
    for key, rank, tensor in kept:
        expected = cpu[key].local(rank).double()
        assert torch.allclose(tensor.double(), expected, rtol=1e-4, atol=1e-6), key


def assert_kept_is_digested(trace: Trace) -> list[tuple[tuple[object, ...], int, torch.Tensor]]:
    """Fail where the numbers of a value are not those of its bytes; return the bytes."""
    kept = []
    for key, node, value in values(trace):
        if node.phase is Phase.ACCUMULATED:
            continue  # its bytes are those of the optimizer's gradient, or gone by now
        for rank, digest in value.per_rank.items():
            if digest is None:
                continue
            tensor = value.local(rank)
            reading = Digester().read(tensor, None, samples=False)
            assert reading.l2 == pytest.approx(digest.l2, rel=1e-6, abs=1e-9), key
            near = 1e-7 * digest.l2 + 1e-9
            assert reading.mean == pytest.approx(digest.mean, rel=1e-5, abs=near, nan_ok=True), key
            kept.append((key, rank, tensor))
    return kept


def test_streams_collectives_in_flight_and_checkpoints_make_nobody_wait(
    late_ranks: RankPool, tmp_path: Path
) -> None:
    """What is read beside the main stream, or while a collective writes, is right as well: replicas
    agree, what is recomputed is what was computed, and every kept tensor has its digest's numbers.
    """
    out, answers = traced_with_answers(
        late_ranks, job.run, "wide", "late", "*", folder=tmp_path, world=2
    )
    for found, waits, traced_waits in answers:
        assert found == []
        assert waits == [], "the program itself waits for nothing in its steps"
        assert_unforced(waits, traced_waits)
    trace = open_trace(out)
    assert trace.is_complete and not [node.errors for node in trace.walk() if node.errors]
    report = check(trace)
    assert report.verdict is Verdict.CLEAN, report.findings
    phases = {node.phase for _, node, _ in values(trace)}
    assert phases >= {Phase.RECOMPUTE, Phase.COLLECTIVE, Phase.BACKWARD}
    assert len(assert_kept_is_digested(trace)) > 150


def test_a_fault_is_found_where_it_is(late_ranks: RankPool, tmp_path: Path) -> None:
    out = traced(late_ranks, job.run_faulty, "ddp", "late", folder=tmp_path, world=2)
    report = check(open_trace(out))
    assert report.verdict is Verdict.FAULT
    first = report.findings[0]
    assert (first.kind, first.path, first.step) == (Kind.REPLICA, "head", 1)


def test_a_device_that_fails_costs_the_values_on_their_way_alone(
    late_ranks: RankPool, tmp_path: Path
) -> None:
    (told,) = late_ranks.run(job.run_broken, str(tmp_path / "trace"), world_size=1)
    assert told.startswith("the device is in error: ")
    trace = open_trace(tmp_path / "trace")
    (rank,) = trace.completeness["ranks"]
    assert rank["end"] == "closed"
    assert [n for n in trace.error_notes[0] if "no digest came back from late:0" in str(n)]
    digested: dict[object, set[bool]] = {0: set(), 1: set()}
    for (step, phase, *_), _, value in values(trace):
        if phase is not Phase.SETUP:
            digested[step] |= {digest is not None for digest in value.per_rank.values()}
    assert digested == {0: {True}, 1: {False}}


def item(local: torch.Tensor) -> object:
    return local.sum().item()


def blocking_copy(local: torch.Tensor) -> object:
    return local.detach().cpu()


def branch(local: torch.Tensor) -> object:
    return "zero" if bool((local == 0).all()) else "not"


@pytest.mark.parametrize("wrong", [item, blocking_copy, branch])
def test_a_digest_that_waits_is_caught(
    late_ranks: RankPool, tmp_path: Path, wrong: Callable[[torch.Tensor], object]
) -> None:
    out = str(tmp_path / "trace")
    ((_, waits, traced_waits),) = late_ranks.run(job.run_wrong, wrong, out, world_size=1)
    with pytest.raises(AssertionError):
        assert_unforced(waits, traced_waits)
    assert any(wrong.__name__ in wait.origin for wait in traced_waits)


@pytest.mark.launch
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_command_traces_an_accelerator_job_from_its_start(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    command = [Path(sys.executable).with_name("rankscope")]
    options = ["--rs-out", out, "--rs-tensors", "head", "--nproc-per-node", 2]
    command = [*command, "run", *options, job.__file__, "tp", "late"]
    done = forked.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    trace = open_trace(out)
    assert trace.is_complete and len(trace.steps) == job.STEPS
    assert check(trace).verdict is Verdict.CLEAN
    node = next(n for n in trace.find(path="head", phase=Phase.FORWARD))
    assert node.value("output").local(1).shape == (2, 5, job.WORDS)
