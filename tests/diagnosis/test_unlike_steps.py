"""Ranks that take unlike many steps between two collectives: which of them belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.diagnosis.check import check
from rankscope.record.finding import Kind, Report, Verdict
from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankFailure, RankPool

_OF_THE_PAIRING = (Kind.COLLECTIVE, Kind.GROUP, Kind.HANG)


def averages(way: str, steps: str, rounds: int, fault: str, out: str) -> None:
    """Federated averaging: in each round a rank trains for two or three steps of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points = [p.detach().clone() for p in model.parameters()]
    sent: list[tuple[dist.Work, torch.Tensor]] = []
    outer = torch.optim.SGD(points, lr=0.7, momentum=0.9, nesterov=True)
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps=steps):
        if way == "warm-up" and rank == 1:
            train(model, optimizer)
        if way == "greeted" and rank < 2:  # torch counts it in the group, and not on all ranks
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
        for number in range(rounds):
            if steps.startswith("at:") and rank == 0 and number == 1:
                Path(steps[3:]).touch()
            for _ in range(2 if way in ("eval", "warm-up", "like", "greeted") else 2 + rank % 2):
                train(model, optimizer)
            if way == "eval":
                evaluate(model, 1 + rank)
            if fault == "crash" and number == rounds - 1:
                raise RuntimeError("out of data")
            with torch.no_grad():
                if way == "outer":
                    step_outside(model, points, outer)
                elif way == "overlapped":
                    average_later(model, sent)
                elif way == "group":
                    exchange("each", model, pairs[rank // 2], "")
                else:
                    exchange(way, model, None, fault if rank == 1 == number else "")
        if fault == "skips" and rank == 1:
            dist.all_reduce(torch.zeros(6))  # the others wait for it


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: nn.Module, batches: int) -> None:
    model.eval()
    with torch.no_grad():
        losses = [model(torch.randn(4, 1)).square().mean() for _ in range(batches)]
        dist.all_reduce(torch.stack(losses).mean())
    model.train()


def step_outside(
    model: nn.Module, points: list[torch.Tensor], outer: torch.optim.Optimizer
) -> None:
    """One step of an outer optimizer with how far the ranks went, as DiLoCo does."""
    for point, parameter in zip(points, model.parameters()):
        point.grad = point - parameter
        dist.all_reduce(point.grad)
        point.grad /= dist.get_world_size()
    outer.step()
    for point, parameter in zip(points, model.parameters()):
        parameter.copy_(point)


def average_later(model: nn.Module, sent: list[tuple[dist.Work, torch.Tensor]]) -> None:
    """Take the average of the last round, and have that of this round on its way meanwhile."""
    for (work, average), parameter in zip(sent, model.parameters()):
        work.wait()
        parameter.lerp_(average / dist.get_world_size(), 0.5)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    sent[:] = [(dist.all_reduce(each, async_op=True), each) for each in averages]


def exchange(way: str, model: nn.Module, group: dist.ProcessGroup | None, fault: str) -> None:
    """Average the parameters."""
    size, parameters = dist.get_world_size(group), [*model.parameters()]
    if way == "flat":
        flat = torch.cat([p.flatten() for p in parameters])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / size, parameters)
    elif way == "asynchronous":
        left_out = 1 if fault == "skips" else None
        works = [
            dist.all_reduce(each, operation(fault, number), async_op=True)
            for number, each in enumerate(parameters)
            if number != left_out
        ]
        for work in works:
            work.wait()
    elif way == "weighted":
        for each in parameters:
            each *= (1 + dist.get_rank()) / (size * (size + 1) / 2)
            dist.all_reduce(each)
    for number, each in enumerate(parameters):
        if way == "broadcast":
            dist.reduce(each, 0)
            dist.broadcast(each.div_(size), 0)
        elif way == "sent":
            by_messages(each)
        elif way in ("each", "eval", "warm-up", "like", "greeted") and (fault, number) != (
            "skips",
            1,
        ):
            dist.all_reduce(each, operation(fault, number), group=group)
            each /= size
        elif way == "asynchronous":
            each /= size


def operation(fault: str, number: int) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if (fault, number) == ("other", 1) else dist.ReduceOp.SUM


def by_messages(parameter: torch.Tensor) -> None:
    """Rank 0 adds up what it receives, and sends the average back."""
    if dist.get_rank():
        dist.send(parameter, 0)
        dist.recv(parameter, 0)
        return
    others = range(1, dist.get_world_size())
    for peer in others:
        received = torch.empty_like(parameter)
        dist.recv(received, peer)
        parameter += received
    parameter /= dist.get_world_size()
    for peer in others:
        dist.send(parameter, peer)


def judged(
    ranks: RankPool, folder: Path, way: str, steps: str = "all", fault: str = "", world: int = 2
) -> Report:
    return report_of(ranks, averages, way, steps, 3, fault, folder=folder, world=world)


_WAYS = (
    "each", "flat", "weighted", "asynchronous", "overlapped", "broadcast", "sent", "outer", "eval",
    "warm-up",
)  # fmt: skip


@pytest.mark.parametrize("way", _WAYS)
def test_averages_after_unlike_many_steps_are_no_fault(ranks: RankPool, tmp_path: Path, way: str):
    report = judged(ranks, tmp_path, way)
    assert report.verdict is Verdict.CLEAN, report.findings
    assert not report.findings


@pytest.mark.parametrize("way", ["each", "group", "outer"])
def test_nor_are_they_on_more_ranks_and_in_groups(ranks: RankPool, tmp_path: Path, way: str):
    report = judged(ranks, tmp_path, way, world=4)
    assert report.verdict is Verdict.CLEAN, report.findings


@pytest.mark.parametrize("steps", ["0-3", "4-7", "3,5,6"])
@pytest.mark.parametrize("way", ["each", "eval"])
def test_steps_that_are_not_traced_do_not_make_two_averages_one(
    ranks: RankPool, tmp_path: Path, way: str, steps: str
):
    report = judged(ranks, tmp_path, way, steps)
    assert not [each for each in report.findings if each.kind in _OF_THE_PAIRING]


@pytest.mark.parametrize("steps", ["2-3", "3,5,6", "4-7"])
@pytest.mark.parametrize("way", ["asynchronous", "overlapped", "outer", "sent"])
def test_steps_in_the_middle_of_such_a_run_are_no_fault(
    ranks: RankPool, tmp_path: Path, way: str, steps: str
):
    report = judged(ranks, tmp_path, way, steps)
    assert report.verdict is Verdict.CLEAN, report.findings
    assert all("no traced step averages" in each.message for each in report.findings)
    assert len(report.findings) <= 1


def test_nor_is_the_step_that_a_touched_file_asks_for(ranks: RankPool, tmp_path: Path):
    steps = f"at:{tmp_path / 'now'}"
    report = judged(ranks, tmp_path / "job", "asynchronous", steps, world=4)
    assert report.verdict is Verdict.CLEAN, report.findings


@pytest.mark.parametrize("fault", ["other", "skips"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_wrong_asynchronous_average_is_named_in_the_middle_of_such_a_run(
    ranks: RankPool, tmp_path: Path, fault: str, world: int
):
    report = judged(ranks, tmp_path, "asynchronous", "3-8", fault, world)
    assert report.verdict is Verdict.FAULT
    found = [each for each in report.findings if each.kind is Kind.COLLECTIVE]
    assert {(each.step, each.slot) for each in found} == {(5, "collective.1")}
    assert "of group 0, counted over the run" in found[0].message


@pytest.mark.parametrize("fault", ["", "other"])
def test_messages_that_not_all_ranks_sent_do_not_shift_collectives(
    ranks: RankPool, tmp_path: Path, fault: str
):
    report = judged(ranks, tmp_path, "greeted", "2-5", fault, world=4)
    named = [(each.kind, each.step, each.slot) for each in report.findings]
    assert named == ([(Kind.COLLECTIVE, 3, "collective.1")] if fault else [])


def test_nor_does_a_job_that_breaks_off(ranks: RankPool, tmp_path: Path):
    with pytest.raises(RankFailure, match="out of data"):
        judged(ranks, tmp_path, "each", fault="crash")
    (run_folder,) = (tmp_path / "spool").glob("*/*")
    recover([run_folder], tmp_path / "recovered")
    report = check(open_trace(tmp_path / "recovered"))
    assert not report.findings


def test_an_average_by_another_operation_on_one_rank_is_named(ranks: RankPool, tmp_path: Path):
    report = judged(ranks, tmp_path, "each", fault="other")
    (finding,) = report.findings
    assert (finding.kind, finding.step, finding.slot) == (Kind.COLLECTIVE, 5, "collective.1")
    assert "ranks disagree on collective 4 of group 0, counted over the run" in finding.message
    assert "rank 0: op=all_reduce reduce=sum" in finding.message


@pytest.mark.parametrize(("way", "steps"), [("each", "all"), ("like", "all"), ("like", "2-5")])
def test_a_parameter_that_one_rank_leaves_out_is_named(
    ranks: RankPool, tmp_path: Path, way: str, steps: str
):
    report = judged(ranks, tmp_path, way, steps, fault="skips")
    finding = next(each for each in report.findings if each.kind is Kind.COLLECTIVE)
    assert (finding.step, finding.slot) == ((5 if way == "each" else 3), "collective.1")
    if way == "each":
        assert "ranks disagree on collective" in finding.message
