"""`at:FILE` and orders, where ranks are late, apart, asleep or without a file."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.agent.steps.chosen import LEAD, TouchedFile
from rankscope.record.call import Mode
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.agent.test_touchedfile import Job, OrderedJob
from tests.models import Two
from tests.noted import remarks


def test_ranks_far_ahead_put_the_step_off_instead_of_missing_it(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for _ in range(50):
        job.step(0)  # 50 steps ahead, as on a queue of kernels
    job.touch()
    job.step(1)  # rank 1 sees it at its step 0 and proposes step 0 + LEAD
    for _ in range(10):
        job.step(0)
    for _ in range(60):
        job.step(1)
    job.close()
    assert job.traced == [[50 + LEAD]] * 2 and job.missed == [[], []]


def test_a_rank_that_comes_too_late_says_which_step_it_missed(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for _ in range(20):
        job.step(0)
    job.touch()
    for _ in range(10):
        job.step(1)  # traces step 2 while rank 0 hangs behind its step 19
    job.step(0)
    job.close()
    assert job.traced == [[], [LEAD]] and job.missed == [[LEAD], []]


def test_a_rank_that_slept_through_a_touch_learns_of_it_from_the_next(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.step(0)
    job.touch()
    job.step(0)  # step 1 sees the first touch: step 3
    job.touch()
    for _ in range(6):
        job.step(1)  # sees the second alone
    for _ in range(6):
        job.step(0)
    job.close()
    assert job.traced[0] == job.traced[1] and len(job.traced[0]) == 2 and job.missed == [[], []]


def test_a_rank_that_begins_later_counts_from_where_the_first_began(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.touch()
    job.traced.append([]), job.missed.append([]), job.steps.append(0)
    job.ranks.append(job.rank(1))
    for _ in range(6):
        for number in (0, 1):
            job.step(number)
    job.close()
    assert job.traced == [[LEAD]] * 2


def test_eval_steps_answer_a_touch_only_where_nothing_was_trained_yet(tmp_path: Path) -> None:
    file = tmp_path / "now"
    said: list[object] = []
    trigger = TouchedFile(file, None, missed=lambda *words: said.append(words), failed=said.append)
    file.touch()
    assert trigger.begins(Mode.EVAL, 0), "a rank that is alone traces the very step"
    assert not trigger.begins(Mode.TRAIN, 0)
    os.utime(file, ns=(0, 1))
    assert not trigger.begins(Mode.EVAL, 1) and trigger.begins(Mode.TRAIN, 1)
    trigger.close()
    assert not said


def test_ranks_that_cannot_agree_say_it_once_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    trigger = TouchedFile(
        tmp_path / "now", tmp_path / "file", missed=lambda *_: None, failed=said.append
    )
    for step in range(30):
        (tmp_path / "now").touch()
        assert not trigger.begins(Mode.TRAIN, step)
    trigger.close()
    assert len(said) == 1 and "not answered on this rank" in said[0]


def test_a_step_without_a_touch_costs_one_look_at_the_file(tmp_path: Path) -> None:
    trigger = TouchedFile(
        tmp_path / "now", tmp_path / "meeting", missed=lambda *_: None, failed=lambda _: None
    )
    called: list[str] = []

    def profile(frame: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__module__", "") in {"posix", "io"}:
            called.append(function.__name__)  # type: ignore[attr-defined]

    sys.setprofile(profile)
    try:
        for step in range(10):
            trigger.begins(Mode.TRAIN, step)
    finally:
        sys.setprofile(None)
    assert called == ["stat"] * 10


def test_a_late_rank_traces_what_is_left_of_an_order(tmp_path: Path):
    job = OrderedJob(tmp_path, 2)
    for _ in range(10):
        job.step(0)
    job.order(20)
    for _ in range(30):
        job.step(1)  # takes it at step 0: from 2 on
    for _ in range(30):
        job.step(0)
    job.close()
    assert job.traced[1] == [*range(LEAD, LEAD + 20)]
    assert job.missed[0] == [*range(LEAD, 10)] and job.traced[0] == [*range(10, LEAD + 20)]


def test_an_order_made_before_the_first_step_counts_and_ends_with_the_life_that_took_it(
    tmp_path: Path,
):
    early = OrderedJob(tmp_path, 0)
    early.order(1)
    job = OrderedJob(tmp_path, 2)
    for _ in range(3):
        job.step(0), job.step(1)
    assert job.traced == [[LEAD]] * 2, "the job is killed in this step"
    again = OrderedJob(tmp_path, 2, life=1)
    for _ in range(9):
        again.step(0), again.step(1)
    assert again.traced == [[], []]
    again.times = itertools.count(2 * 10**18)
    again.order(1)
    for _ in range(9):
        again.step(0), again.step(1)
    again.close()
    assert again.traced == [[9 + LEAD]] * 2 and again.missed == [[], []]


def test_a_step_without_an_order_costs_one_look(tmp_path: Path):
    job = OrderedJob(tmp_path, 2)
    called: list[str] = []

    def profile(frame: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__module__", "") in {"posix", "io"}:
            called.append(function.__name__)  # type: ignore[attr-defined]

    sys.setprofile(profile)
    try:
        for _ in range(10):
            job.step(0)
    finally:
        sys.setprofile(None)
    assert called == ["stat"] * 10


def train(file: str, out: str, touches: dict[int, list[int]], steps: int) -> list[float]:
    """A loop whose ranks lag in turn; rank r touches the file in the middle of its steps."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DistributedDataParallel(Two(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with rankscope.trace(out=out, steps=f"0,every:20,at:{file}", paths="first,second"):
        for step in range(steps):
            time.sleep(0.01 if (step + rank) % 4 == 0 else 0)
            loss = model(torch.randn(3, 4)).square().mean()
            if step in touches.get(rank, []):
                Path(file).touch()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return losses


def apart(file: str, out: str, steps: int) -> None:
    """Ranks that never wait for each other, one much faster than the rest."""
    rank = dist.get_rank()
    model = Two(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    with rankscope.trace(out=out, steps=f"at:{file}", paths="first"):
        for step in range(steps):
            time.sleep(0.001 if rank == 0 else 0.004)
            if (rank, step) in {(1, 10), (2, 30)}:
                Path(file).touch()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()


def steps_by_rank(trace: Trace) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for step in trace.steps:
        for node in step.walk():
            for rank in node.ranks:
                found.setdefault(rank, set()).add(step.step)
    return found


def test_every_rank_of_a_real_job_traces_the_same_steps(ranks, tmp_path: Path) -> None:
    file, out = tmp_path / "now", tmp_path / "trace"
    file.touch()
    ranks.run(train, str(file), str(out), {0: [5], 3: [11], 2: [23]}, 34)
    trace = open_trace(out)
    assert trace.is_complete
    found = steps_by_rank(trace)
    asked = found[0] - {0, 20}
    assert len(asked) == 3 and all(steps == found[0] for steps in found.values()), found
    for touched, traced in zip((5, 11, 23), sorted(asked), strict=True):
        assert touched < traced <= touched + 1 + LEAD, "soon after"
    assert not any(remarks(step) for step in trace.steps)


def test_real_ranks_that_never_wait_trace_the_same_steps_or_say_which_they_missed(
    ranks, tmp_path: Path
) -> None:
    file, out = tmp_path / "now", tmp_path / "trace"
    ranks.run(apart, str(file), str(out), 120, world_size=3)
    trace = open_trace(out)
    found = steps_by_rank(trace)
    assert found
    for step in trace.steps:
        lacking = {0, 1, 2} - {rank for rank in found if step.step in found[rank]}
        noted = "".join(str(note) for note in remarks(step))
        assert not lacking or "not traced on this rank" in noted, (step.step, lacking, noted)
