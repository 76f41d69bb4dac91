"""`diff` of runs whose optimizer steps are cut at other passes, and of ranks with rows, counts and
balance losses of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Kind, Report, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

STEPS, ROWS = 5, 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(iteration: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(iteration))


def trains(parts: int, left_out: tuple[tuple[int, int], ...], spare: bool, out: str) -> None:
    """Train on micro-batches; (rank, iteration) in `left_out` leave out the optimizer's step."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    with rankscope.trace(out=out, steps="all"):
        model: nn.Module = net()
        spared = DDP(model) if world > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for iteration in range(STEPS):
            if not spare:
                optimizer.zero_grad()
            for part in rows(iteration).chunk(world)[rank].chunk(parts):
                (spared(part).pow(2).mean() / parts).backward()
            if (rank, iteration) not in left_out:
                optimizer.step()
                optimizer.zero_grad()


def compared(
    ranks: RankPool, folder: Path, ref: tuple[object, ...], test: tuple[object, ...], world: int = 1
) -> Report:
    first = traced(ranks, trains, *ref, folder=folder / "ref", world=1)
    return diff(first, traced(ranks, trains, *test, folder=folder / "test", world=world))


@pytest.mark.parametrize(("ref", "test"), [(1, 2), (2, 4), (4, 2)])
def test_the_same_samples_in_other_micro_batches_are_the_same_step(
    ranks: RankPool, tmp_path: Path, ref: int, test: int
) -> None:
    report = compared(ranks, tmp_path, (ref, (), False), (test, (), False))
    assert (report.verdict, report.findings) == (Verdict.CLEAN, ())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_all_ranks_leave_out_is_said_and_later_steps_meet_their_own_samples(
    ranks: RankPool, tmp_path: Path, parts: int, world: int
) -> None:
    left_out = tuple((rank, 1) for rank in range(world))
    report = compared(ranks, tmp_path, (1, (), False), (parts, left_out, False), world)
    (first,) = [f for f in report.findings if f.is_origin]
    assert (first.kind, first.step, first.phase) == (Kind.STRUCTURE, 1, Phase.FORWARD)
    assert "train step 1 went through the samples of the reference's train steps 1-2" in (
        first.message
    )
    assert not any("samples are" in line.text for line in report.preflight)  # all have partners


def test_a_reference_that_left_out_a_step_is_said_too(ranks: RankPool, tmp_path: Path) -> None:
    report = compared(ranks, tmp_path, (1, ((0, 1),), True), (1, (), True))
    (first,) = [f for f in report.findings if f.is_origin]
    assert first.kind is Kind.STRUCTURE
    assert "train steps 1-2 went through the samples of the reference's train step 1" in (
        first.message
    )


def test_behind_a_step_that_one_rank_leaves_out_nothing_is_compared(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = compared(ranks, tmp_path, (1, (), False), (1, ((1, 1),), False), 2)
    (first,) = [f for f in report.findings if f.is_origin]
    assert (first.kind, first.step) == (Kind.STRUCTURE, 1)
    assert "rank 0 went through 1 pass, rank 1 went through 2 passes" in first.message
    assert any("train steps behind train step 1 were not compared" in n for n in report.notes)


# ---- rows, counts and losses of a rank's own -----------------------------------------------------


class Counting(nn.Module):
    """A model with experts that counts its tokens, in all and by expert."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 2)
        self.register_buffer("num_tokens", torch.zeros((), dtype=dtype))
        self.register_buffer("by_expert", torch.zeros(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        chances = self.gate(hidden).softmax(-1)
        chosen = chances.argmax(-1)
        counts = torch.bincount(chosen, minlength=4)
        self.num_tokens += len(x)
        self.by_expert += counts.to(self.by_expert.dtype)
        self.balance = 4 * (chances.mean(0) * counts / len(x)).sum()
        return self.leave(hidden * chances.gather(1, chosen[:, None]))


def counts(sizes: tuple[int, ...], dtype: str, weight: float, mistake: str, out: str) -> None:
    """Train on so many rows a rank, each of the same weight, with a balance loss on each rank."""
    world, rank = len(sizes), dist.get_rank() if len(sizes) > 1 else 0
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        inner = Counting(getattr(torch, dtype))
        model = DDP(inner, broadcast_buffers=False) if world > 1 else inner
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for iteration in range(3):
            optimizer.zero_grad()
            y = model(rows(iteration).split(sizes)[rank])
            loss = y.pow(2).mean() * (sizes[rank] * world / ROWS)
            (loss + weight * inner.balance).backward()
            if mistake == "counted twice" and rank and iteration == 1:
                inner.num_tokens += 1
            if mistake == "scaled" and world > 1:
                inner.gate.weight.grad *= 2
            optimizer.step()


def counted(ranks: RankPool, folder: Path, sizes: tuple[int, ...], *how: object) -> Report:
    ref = traced(ranks, counts, (ROWS,), *how, folder=folder / "ref", world=1)
    test = traced(ranks, counts, sizes, *how, folder=folder / "test", world=len(sizes))
    return diff(ref, test)


@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("sizes", [(4, 4), (6, 2)])
def test_ranks_that_count_their_own_rows_are_right(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...], dtype: str
) -> None:
    report = counted(ranks, tmp_path, sizes, dtype, 0.0, "")
    assert (report.verdict, report.findings) == (Verdict.CLEAN, ())
    assert any("counted by each rank" in skip.reason for skip in report.skipped)
    alone = rankscope.check(tmp_path / "test" / "trace")
    assert (alone.verdict, alone.findings) == (Verdict.CLEAN, ())


def test_a_rank_that_counts_a_row_twice_is_found(ranks: RankPool, tmp_path: Path) -> None:
    report = counted(ranks, tmp_path, (4, 4), "int64", 0.0, "counted twice")
    (first,) = [f for f in report.findings if f.is_origin]
    assert (first.slot, first.step) == ("buffer:num_tokens", 1)


@pytest.mark.parametrize("sizes", [(4, 4), (6, 2)])
def test_a_balance_of_each_ranks_own_rows_that_no_module_hands_out_is_found_and_said_to_be_one(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    report = counted(ranks, tmp_path, sizes, "int64", 0.1, "")
    (first,) = [f for f in report.findings if f.is_origin]
    assert (first.path, first.slot) == ("gate", "grad_output")
    assert "balances the tokens of each rank's own batch, which may be meant" in first.advice


def test_a_routers_gradient_that_is_scaled_is_found(ranks: RankPool, tmp_path: Path) -> None:
    report = counted(ranks, tmp_path, (4, 4), "int64", 0.0, "scaled")
    (first,) = [f for f in report.findings if f.is_origin]
    assert (first.kind, first.path, first.slot) == (Kind.SCALE, "gate", "grad:weight")
